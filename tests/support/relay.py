"""A TCP relay whose connections a test can cut, as a network does."""

import contextlib
import selectors
import socket
import threading
from typing import Self


class Relay:
    """Listens on `port`, and passes on what comes to `to`. `connections`: how many were made so far."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._stopped = self._cut = False
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

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._stopped:
                for key, _ in selector.select(0.05):
                    if key.fileobj is self._listener:
                        self._take(selector)
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._pairs:
                        self._pass_on(selector, key.fileobj)
                if self._cut:
                    self._cut = False
                    for end in list(self._pairs):
                        self._close(selector, end)
            for end in list(self._pairs):
                self._close(selector, end)

    def _take(self, selector: selectors.BaseSelector) -> None:
        near, _ = self._listener.accept()
        try:
            far = socket.create_connection(("127.0.0.1", self._to), timeout=5)
        except OSError:
            near.close()
            return
        self.connections += 1
        self._pairs |= {near: far, far: near}
        for end in (near, far):
            selector.register(end, selectors.EVENT_READ)

    def _pass_on(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            self._pairs[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            self._close(selector, end)

    def _close(self, selector: selectors.BaseSelector, end: socket.socket) -> None:
        other = self._pairs.pop(end, None)
        if other is None:
            return
        self._pairs.pop(other, None)
        for each in (end, other):
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(each)
            each.close()
