"""Progress bars on standard error, one for each table that is being copied."""

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from walsender_bridge.runtime.printable import printable

if TYPE_CHECKING:
    from spark_consumers.lake.status import CopyStatus


class CopyBars:
    """Draws the progress passed to `show` while the block runs; nothing unless `shown`."""

    def __init__(self, *, shown: bool, console: Console | None = None) -> None:
        self._shown = shown
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            transient=True,
            disable=not shown,
        )

    def show(self, copying: "Mapping[str, CopyStatus]") -> None:
        """Update the bars from the status of each copy. A table that is missing has been copied."""
        if not self._shown:
            return
        for name in set(self._tasks) - set(copying):
            self._bars.remove_task(self._tasks.pop(name))
        for name, copy in copying.items():
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(printable(name), figures="")
            figures = (
                f"{copy.rows:,} rows  {decimal(copy.bytes)}  "
                f"{decimal(int(copy.bytes_per_second))}/s"
            )
            # Without a total the bar is indeterminate: the table waits for its turn.
            self._bars.update(
                self._tasks[name],
                total=copy.pieces or None,
                completed=copy.pieces_done,
                figures=figures,
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
