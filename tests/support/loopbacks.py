"""Machines, each with its own loopback: network namespaces, joined by relays that a test can cut.

Each service has the same port on all machines, so every machine reaches it on loopback, without certificates.
"""

import contextlib
import ctypes
import os
import selectors
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from tests.support.relay import Relay

_CLONE_NEWNET: Final = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
#: The folder of the named namespaces, and the namespace of this thread.
_NAMED: Final = Path("/run/netns")
_OWN: Final = Path("/proc/thread-self/ns/net")


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Within the block, sockets that this thread opens are in this network namespace; empty: in its own."""
    if not name:
        yield
        return
    with _OWN.open() as own, (_NAMED / name).open() as other:
        _enter(other.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "could not enter a network namespace")


class Link(Relay):
    """Makes a port of namespace `far` reachable in namespace `near`; while it is `down`, it accepts no connection."""

    def __init__(self, port: int, near: str, far: str) -> None:
        self._near, self._far = near, far
        self.down = False
        with entered(near):
            super().__init__(port, listen=port)

    def _connect(self) -> socket.socket:
        with entered(self._far):
            return super()._connect()

    def _take(self, selector: selectors.BaseSelector) -> None:
        if not self.down:
            super()._take(selector)
            return
        near, _ = self._listener.accept()
        near.close()

    def cut_off(self) -> None:
        """End the connections, and accept none until `heal`."""
        self.down = True
        self.cut()

    def heal(self) -> None:
        """Accept connections again."""
        self.down = False


class Loopbacks:
    """`count` machines, which exist within a `with` block."""

    def __init__(self, count: int) -> None:
        self.names = [f"tkl{os.getpid()}-{number}" for number in range(count)]
        #: By the numbers of the machines that they join, from and to; None: this one.
        self.links: dict[tuple[int | None, int | None], list[Link]] = {}
        self._ends = ExitStack()

    def __enter__(self) -> Self:
        for name in self.names:
            _ip("netns", "add", name)
            self._ends.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.close()

    def inside(self, number: int) -> list[str]:
        """The beginning of a command line, to run a command on this machine."""
        return ["ip", "netns", "exec", self.names[number]]

    def publish(self, port: int, at: int | None) -> None:
        """Make the port of machine `at` (None: of this one) reachable on all the others, too."""
        for each in (None, *range(len(self.names))):
            if each != at:
                link = Link(port, self._name(each), self._name(at))
                self.links.setdefault((each, at), []).append(self._ends.enter_context(link))

    def _name(self, number: int | None) -> str:
        return "" if number is None else self.names[number]

    def between(self, one: int, others: Iterable[int | None]) -> list[Link]:
        """The links that join a machine with these, in both directions."""
        pairs = [pair for each in others for pair in ((one, each), (each, one))]
        return [link for pair in pairs for link in self.links.get(pair, ())]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
