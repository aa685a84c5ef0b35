"""A TCP relay whose connections a test can cut, as a network does, and one that holds certain messages back."""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from walsender_bridge.quorum.protocol.frames import HEADER_BYTES, decode, decode_header
from walsender_bridge.quorum.protocol.messages import Message


class Relay:
    """Listens on `port`, and passes on what comes to `to`. `connections`: how many were made so far."""

    def __init__(self, to: int, listen: int = 0) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", listen))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._stopped = self._cut = self._frozen = False
        self._still = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join(10)

    def cut(self) -> None:
        """Break every connection, soon. New ones are taken again."""
        self._cut = True

    def freeze(self) -> None:
        """Pass nothing on any more, and close nothing: neither end hears that the other has gone."""
        self._still.clear()
        self._frozen = True
        assert self._still.wait(10)

    def thaw(self) -> None:
        """Pass on again, also what came meanwhile: connections that both ends kept go on."""
        self._frozen = False

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stopped:
                if self._frozen:
                    self._still.set()
                    time.sleep(0.05)
                    continue
                for key, _ in selector.select(0.05):
                    if key.fileobj is self._listener:
                        self._take(selector)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs:
                        self._pass_on(selector, key.fileobj)
                self._turn()
                if self._cut:
                    self._cut = False
                    for end in list(self._pairs):
                        self._close(selector, end)
            for end in list(self._pairs):
                self._close(selector, end)

    def _turn(self) -> None:
        """What is to be done now and then."""

    def _take(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        try:
            far = self._connect()
        except OSError:
            near.close()
            return
        self.connections += 1
        self._pairs |= {near: far, far: near}
        for end in (near, far):
            selector.register(end, selectors.EVENT_READ)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._to), timeout=5)

    def _pass_on(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            self._forward(end, data)
        except OSError:
            data = b""
        if not data:
            self._close(selector, end)

    def _forward(self, end: socket.socket, data: bytes) -> None:
        self._pairs[end].sendall(data)

    def _close(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        other = self._pairs.pop(end, None)
        if other is None:
            return
        self._pairs.pop(other, None)
        for each in (end, other):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(each)
            each.close()


class Gate(Relay):
    """In front of a safekeeper: from the first message on that `holds`, what its proposer sends waits for `open`."""

    def __init__(self, to: int, holds: Callable[[Message], bool]) -> None:
        super().__init__(to)
        self._holds = holds
        self._opened = False
        self.holding = False
        #: What was sent and not passed on, by the proposer's end.
        self._held: dict[socket.socket, bytearray] = {}

    def open(self) -> None:
        """Pass everything on, soon."""
        self._opened = True

    def _forward(self, end: socket.socket, data: bytes) -> None:
        far = self._pairs[end]
        if far.getpeername()[1] != self._to:  # a safekeeper's answer
            super()._forward(end, data)
            return
        self._held.setdefault(end, bytearray()).extend(data)
        self._let_through(end)

    def _turn(self) -> None:
        for end in [end for end in self._held if end in self._pairs]:
            with contextlib.suppress(OSError):
                self._let_through(end)

    def _let_through(self, end: socket.socket) -> None:
        held, at = self._held[end], 0
        while not (self.holding and not self._opened) and len(held) - at >= HEADER_BYTES:
            header = decode_header(held, at)
            stop = at + HEADER_BYTES + header.length
            if stop > len(held):
                break
            body = b"" if header.carries_wal else bytes(held[at + HEADER_BYTES : stop])
            if not self._opened and self._holds(decode(header, body)):
                self.holding = True
                break
            at = stop
        if at:
            self._pairs[end].sendall(held[:at])
            del held[:at]
