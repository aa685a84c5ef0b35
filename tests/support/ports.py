"""Ports of their own for each worker of pytest-xdist, in which its tests' servers listen.

A server that a test kills and starts again needs its port: another worker, to which that port looks free, must not draw it
meanwhile.
"""

from collections.abc import MutableMapping

_FIRST, _STOP = 12_000, 32_000  # below the range of ephemeral ports


def share(environ: MutableMapping[str, str]) -> None:
    """Set `TUSKLINE_PORTS` to this worker's part of the range, unless the caller has set it."""
    worker = environ.get("PYTEST_XDIST_WORKER", "")
    if not worker.removeprefix("gw").isdecimal():
        return
    count = int(environ["PYTEST_XDIST_WORKER_COUNT"])
    width, number = (_STOP - _FIRST) // count, int(worker.removeprefix("gw"))
    first = _FIRST + number * width
    environ.setdefault("TUSKLINE_PORTS", f"{first}-{first + width - 1}")
