"""The demo's live view: a small table on standard error, or a line every few seconds if that is not a terminal."""

import time
from dataclasses import dataclass, field
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

_LINE_EVERY = 5.0


@dataclass(slots=True)
class Progress:
    """The figures of the view. Sizes in bytes, times in seconds."""

    phase: str = "starting"
    transactions: int = 0
    version: int = 0
    lag: dict[str, int] = field(default_factory=dict)
    epoch: int = 0
    epochs: int = 0
    tables: int = 0
    freshness: float | None = None
    rows: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    #: The text of `commit` and of each safekeeper; empty without safekeepers.
    quorum: dict[str, str] = field(default_factory=dict)

    def figures(self) -> list[tuple[str, str]]:
        """Name and text of each figure, in display order."""
        lag = ", ".join(f"{name} {size / 1024:,.0f} KiB" for name, size in self.lag.items())
        rows = [
            ("phase", self.phase),
            ("transactions", f"{self.transactions:,}"),
            ("log version", f"{self.version:,}"),
            ("LSN lag of the log", lag or "-"),
            ("epoch", f"{self.epoch:,} ({self.epochs:,} published)"),
            ("freshness", "-" if self.freshness is None else f"{self.freshness:.1f} s"),
            ("in the lake", f"{self.tables} tables, {self.rows:,} rows"),
        ]
        if self.quorum:
            rows.append(("quorum", ", ".join(f"{k} {n}" for k, n in self.quorum.items())))
        if self.kills:
            rows.append(("killed", ", ".join(f"{k} {n}" for k, n in self.kills.items())))
        return rows


class View:
    """Shows a `Progress` while the block runs; `tick` is called often, and draws when due."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def tick(self) -> None:
        """Draw if it is time."""
        if self._live is not None:
            table = Table(show_header=False, title="tuskline demo")
            for name, text in self._progress.figures():
                table.add_row(name, text)
            self._live.update(table)
        elif time.monotonic() - self._last_line >= _LINE_EVERY:
            self._last_line = time.monotonic()
            line = " | ".join(f"{name}: {text}" for name, text in self._progress.figures())
            self._console.print(line, markup=False, highlight=False)
