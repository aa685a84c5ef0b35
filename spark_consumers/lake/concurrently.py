"""Several tables at a time: their commits wait for the disk and the JVM more than they compute."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

#: Tables that are committed at the same time.
_THREADS = 4

_In = TypeVar("_In")
_Out = TypeVar("_Out")


def each(work: Iterable[tuple[str, _In]], function: Callable[[str, _In], _Out]) -> list[_Out]:
    """Call the function for each; all are waited for before an error is raised."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="table") as pool:
        futures = [pool.submit(function, name, value) for name, value in work]
    return [future.result() for future in futures]
