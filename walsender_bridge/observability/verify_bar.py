"""A progress bar for commands that verify files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from walsender_bridge.runtime.output import Output


@contextmanager
def verify_bar(output: Output) -> Iterator[Callable[[str, int, int], None]]:
    """Draws the progress passed to the yielded function: what is verified, how much is done, how much there is."""
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        console=output.progress,
        transient=True,
        disable=not output.progress.is_terminal,
    ) as bars:
        task = bars.add_task("")

        def update(what: str, done: int, whole: int) -> None:
            bars.update(task, description=what, completed=done, total=max(whole, 1))

        yield update
