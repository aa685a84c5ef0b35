"""An HTTP server that limits the number of connections and the time that each may take.

Each connection has one thread and one request. A client that sends a byte now and then never reaches the timeout of a
single read, so the connection itself has a deadline, at which its socket is shut down and its thread ends.

At the limit, the server closes the oldest connection whose request is incomplete. So slow clients cannot lock out others,
since a client that sends its request at once is the newest. If all requests are complete, it closes the new connection.

With `tls` a connection begins with a handshake, in its own thread and time.
"""

import contextlib
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from walsender_bridge.runtime import logs
from walsender_bridge.runtime.tls_context import TlsContext

#: Concurrent connections: some scrapers, some probes, and room for clients that hang.
CONNECTIONS: Final = 32
#: Maximum duration of a connection in seconds, including the answer.
CONNECTION_SECONDS: Final = 30.0
#: Seconds within which a connection that was closed to make room ends its thread.
LEAVE_SECONDS: Final = 1.0
#: Seconds between two log lines about too many connections.
_LOG_SECONDS: Final = 30.0

_log = logs.logger()


class BoundedServer(ThreadingHTTPServer):
    """Listens on `(host, port)`, IPv4 or IPv6; see `server_address`."""

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
        tls: TlsContext | None = None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(connections)
        self._seconds = seconds
        self.tls = tls
        #: The deadline of each connection, in monotonic seconds.
        self._until: dict[socket.socket, float] = {}
        #: Connections whose request is incomplete, the oldest first; guarded by `_lock`.
        self._incomplete: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        self._logged_at = -_LOG_SECONDS
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind. Unlike the base class, do not ask a name server for this machine's name, which can take long."""
        socket_address = self.server_address
        if self.allow_reuse_address:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(socket_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. Its handshake waits for its thread: nothing here waits for a client."""
        connected, address = super().get_request()
        if self.tls is None:
            return connected, address
        context = self.tls.current()
        wrapped = context.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        return wrapped, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give the connection a thread, if one is free or another connection can be closed."""
        if not self._free.acquire(blocking=False) and not self._made_room():
            self._warn("too many connections: closing the new one", client_address)
            self.shutdown_request(request)
            return
        self._until[request] = time.monotonic() + self._seconds
        with self._lock:
            self._incomplete[request] = None
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._end(request)
            raise

    def _made_room(self) -> bool:
        """Close the oldest connection without a request; whether its thread became free."""
        with self._lock:
            oldest = next(iter(self._incomplete), None)
            if oldest is None:
                return False
            del self._incomplete[oldest]
            _shut_down(oldest)
        self._warn("too many connections: closing the oldest without a request", None)
        return self._free.acquire(timeout=LEAVE_SECONDS)

    @property
    def waiting(self) -> int:
        """Number of connections whose request is incomplete."""
        return len(self._incomplete)

    def request_arrived(self, request: socket.socket) -> None:
        """Its request is complete: it will be answered, and is not closed to make room."""
        with self._lock:
            self._incomplete.pop(request, None)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer the request, and free the thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def service_actions(self) -> None:
        """Shut down connections past their deadline; `serve_forever` calls this twice per second."""
        now = time.monotonic()
        for request in [each for each, until in [*self._until.items()] if until < now]:
            _shut_down(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A disconnected client does not deserve a traceback."""
        del request
        _log.debug("request failed", client=client_address)

    def _end(self, request: socket.socket) -> None:
        self.request_arrived(request)
        del self._until[request]
        self._free.release()

    def _warn(self, what: str, client: Any) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            _log.warning(what, client=client)


class BoundedHandler(BaseHTTPRequestHandler):
    """Notifies its `BoundedServer` when the request is complete."""

    server: BoundedServer

    def setup(self) -> None:
        """Shake hands, if there is TLS. Raises `OSError`, which ends the connection."""
        if isinstance(self.request, ssl.SSLSocket):
            self.request.settimeout(self.timeout)
            self.request.do_handshake()
        super().setup()

    def parse_request(self) -> bool:
        """Read the request's head."""
        parsed = super().parse_request()
        self.server.request_arrived(self.request)
        return parsed


def _shut_down(request: socket.socket) -> None:
    # The thread of a connection that is closed already is about to end.
    with contextlib.suppress(OSError):
        # Not `SSLSocket.shutdown`, after which its thread would go on without TLS.
        socket.socket.shutdown(request, socket.SHUT_RDWR)
