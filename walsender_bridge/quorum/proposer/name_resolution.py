"""Resolves the safekeepers' host names without ever waiting for a name server.

A lookup may take as long as the resolver's timeout, 10 s and more when name servers do not answer, and cannot be
interrupted. So each lookup runs on a thread of its own, and the loop that commits wait for only checks whether it has
finished.

Invariant: `find` never blocks. A name has at most one lookup under way; what it found is used until a newer answer is
there, so a name server that falls silent takes nothing away. Numeric addresses need no lookup.
"""

import socket
import threading
from collections.abc import Callable
from typing import Any

#: Seconds after which a name that is dialled is resolved again; and for which a failed lookup is not retried.
FRESH_SECONDS = 30.0
RETRY_SECONDS = 2.0
#: Seconds until a lookup without an answer is reported as a fault.
SILENT_SECONDS = 2.0

#: (family, socket address), in the order of attempts.
Found = list[tuple[int, tuple[Any, ...]]]
Lookup = Callable[[str, int], Found]


def resolve(host: str, port: int, flags: int = 0) -> Found:
    """Query the system's resolver; blocks. Raises `OSError`, and `UnicodeError` for an invalid name."""
    found: Found = []
    for family, _, _, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=flags
    ):
        found.append((family, address))
    return found


class _Name:
    def __init__(self) -> None:
        self.found: Found = []
        self.fault = ""
        #: When the lookup under way began; None: there is none.
        self.asked_at: float | None = None
        self.again_at = 0.0
        self.answer: Found | str | None = None


class Names:
    """See the module. `now` is on one monotonic clock."""

    def __init__(self, lookup: Lookup = resolve) -> None:
        self._lookup = lookup
        self._names: dict[tuple[str, int], _Name] = {}

    def find(self, host: str, port: int, now: float) -> Found:
        """The addresses; empty: unknown, or not known yet (see `fault`)."""
        name = self._names.get((host, port))
        if name is None:
            name = self._names[host, port] = _Name()
            try:
                name.found = resolve(host, port, socket.AI_NUMERICHOST)
                name.again_at = float("inf")
            except (OSError, UnicodeError):
                name.found = []
        self._take(name, now)
        if name.asked_at is None and now >= name.again_at:
            name.asked_at = now
            thread = threading.Thread(target=self._run, args=(name, host, port), daemon=True)
            thread.name = f"resolve {host}"
            thread.start()
        return name.found

    def fault(self, host: str, port: int, now: float) -> str:
        """The last error of a name's resolution; empty: none is known."""
        name = self._names.get((host, port))
        if name is None:
            return ""
        if name.asked_at is not None and now - name.asked_at > SILENT_SECONDS:
            return f"could not resolve host name {host}: the name server does not answer"
        return name.fault

    def _run(self, name: _Name, host: str, port: int) -> None:
        try:
            name.answer = self._lookup(host, port)
        except (OSError, UnicodeError) as error:
            name.answer = f"could not resolve host name {host}: {error}"

    def _take(self, name: _Name, now: float) -> None:
        answer, name.answer = name.answer, None
        if answer is None:
            return
        name.asked_at = None
        if isinstance(answer, str):
            name.fault, name.again_at = answer, now + RETRY_SECONDS
        else:
            name.found, name.fault, name.again_at = answer, "", now + FRESH_SECONDS
