"""An HTTP server that limits the number of connections and the time that each may take.

Each connection has one thread and one request. A client that sends a byte now and then never reaches the timeout of a
single read, so the connection itself has a deadline, at which its socket is shut down and its thread ends.
Connections beyond the limit are closed at once, without a thread.
"""

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

_log = structlog.get_logger(__name__)


class BoundedServer(ThreadingHTTPServer):
    """Listens at `(host, port)`, IPv4 or IPv6. `server_address` says where."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        *,
        connections: int = CONNECTIONS,
        seconds: float = CONNECTION_SECONDS,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(connections)
        self._seconds = seconds
        #: Until when each connection lasts, in monotonic seconds.
        self._until: dict[socket.socket, float] = {}
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
        """Give the connection a thread if there is one left."""
        if not self._free.acquire(blocking=False):
            _log.warning("too many connections; one is closed", client=client_address)
            self.shutdown_request(request)
            return
        self._until[request] = time.monotonic() + self._seconds
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._end(request)
            raise

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
            try:
                request.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is closed already, and its thread about to end

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is not worth a trace."""
        del request
        _log.debug("request failed", client=client_address)

    def _end(self, request: socket.socket) -> None:
        del self._until[request]
        self._free.release()
