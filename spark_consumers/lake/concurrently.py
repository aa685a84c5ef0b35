"""Several tables at a time: their commits wait for the disk and the JVM more than they compute. And what is said meanwhile."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from walsender_bridge.runtime import logs

#: Tables that are committed at the same time.
_THREADS = 4

log = logs.logger()

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def each(work: Iterable[tuple[str, _In]], function: Callable[[str, _In], _Out]) -> list[_Out]:
    """Call the function for each; all are waited for before an error is raised."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="table") as pool:
        futures = [pool.submit(function, name, value) for name, value in work]
    return [future.result() for future in futures]


@contextmanager
def repeated(function: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call the function every so many seconds while the block runs, in a thread of its own. The block does not wait for it, nor for its errors."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(seconds):
            try:
                function()
            except Exception as error:
                log.warning("could not report progress", error=str(error)[:500])

    threading.Thread(target=run, name="progress", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
