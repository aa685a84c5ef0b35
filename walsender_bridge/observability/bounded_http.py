"""An HTTP server that limits the number of connections and the time that each may take.

Each connection has one thread and one request. A client that sends a byte now and then never reaches the timeout of a
single read, so the connection itself has a deadline, at which its socket is shut down and its thread ends.

At the limit the oldest connection whose request has not arrived whole makes room: clients that are slow to ask keep
nobody out, since whoever asks at once is the newest. Where all have asked, the new connection is closed.
"""

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import structlog

#: Connections at a time: some scrapers, some probes, and room for those that hang.
CONNECTIONS: Final = 32
#: Seconds that a connection lasts at most, the answer included.
CONNECTION_SECONDS: Final = 30.0
#: Seconds that a connection which makes room may take to end its thread.
LEAVE_SECONDS: Final = 1.0
#: Seconds between two lines of log about too many connections.
_SAY_SECONDS: Final = 30.0

_log = structlog.get_logger(__name__)


class BoundedServer(ThreadingHTTPServer):
    """Listens at `(host, port)`, IPv4 or IPv6. `server_address` says where."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: "type[BoundedHandler]",
        *,
        connections: int = CONNECTIONS,
        seconds: float = CONNECTION_SECONDS,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(connections)
        self._seconds = seconds
        #: Until when each connection lasts, in monotonic seconds.
        self._until: dict[socket.socket, float] = {}
        #: Those whose request has not arrived whole, the oldest first; with its lock.
        self._unasked: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._said_at = -_SAY_SECONDS
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind. The base class asks a name server for this machine's name, which may take long."""
        socket_address = self.server_address
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(socket_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread if there is one left, or another connection makes room."""
        if not self._free.acquire(blocking=False) and not self._made_room():
            self._say("too many connections; one is closed", client_address)
            self.shutdown_request(request)
            return
        self._until[request] = time.monotonic() + self._seconds
        with self._lock:
            self._unasked[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._end(request)
            raise

    def _made_room(self) -> bool:
        """Whether the oldest that has not asked has left its thread."""
        with self._lock:
            oldest = next(iter(self._unasked), None)
            if oldest is None:
                return False
            del self._unasked[oldest]
            _shut_down(oldest)
        self._say("too many connections; the oldest without a request is closed", None)
        return self._free.acquire(timeout=LEAVE_SECONDS)

    @property
    def waiting(self) -> int:
        """How many connections have not asked yet."""
        return len(self._unasked)

    def has_asked(self, request: socket.socket) -> None:
        """Its request has arrived: it is answered, whoever comes."""
        with self._lock:
            self._unasked.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and give the thread back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def service_actions(self) -> None:
        """Shut down what has lasted too long; `serve_forever` calls this twice a second."""
        now = time.monotonic()
        for request in [each for each, until in [*self._until.items()] if until < now]:
            _shut_down(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a trace."""
        del request
        _log.debug("request failed", client=client_address)

    def _end(self, request: socket.socket) -> None:
        self.has_asked(request)
        del self._until[request]
        self._free.release()

    def _say(self, what: str, client: Any) -> None:
        now = time.monotonic()
        if now - self._said_at >= _SAY_SECONDS:
            self._said_at = now
            _log.warning(what, client=client)


class BoundedHandler(BaseHTTPRequestHandler):
    """Tells its `BoundedServer` when the request is there."""

    server: BoundedServer

    def parse_request(self) -> bool:
        """Read the request's head."""
        parsed = super().parse_request()
        self.server.has_asked(self.request)
        return parsed


def _shut_down(request: socket.socket) -> None:
    # One that is closed already has a thread that is about to end.
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
