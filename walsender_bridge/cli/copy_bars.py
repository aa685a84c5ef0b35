"""A bar on stderr for each table that is being copied."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from walsender_bridge.runtime.printable import printable


class CopyBars:
    """Shows what `show` is told for as long as the block lasts; nothing, unless `shown`."""

    def __init__(self, *, shown: bool, console: Console | None = None) -> None:
        self._shown = shown
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[told]}", markup=False),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
            disable=not shown,
        )

    def show(self, copying: Mapping[str, Mapping[str, Any]]) -> None:
        """How far each table is, as `initial_copy.Progress` tells it; a table that is gone is done."""
        if not self._shown:
            return
        for name in set(self._tasks) - set(copying):
            self._bars.remove_task(self._tasks.pop(name))
        for name, copy in copying.items():
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(printable(name), told="")
            told = (
                f"{copy['rows']:,} rows  {decimal(int(copy['bytes']))}  "
                f"{decimal(int(copy['bytes_per_second']))}/s"
            )
            # Without a total a bar only moves: the table waits for its turn.
            self._bars.update(
                self._tasks[name],
                total=copy["pieces"] or None,
                completed=copy["pieces_done"],
                told=told,
            )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()
