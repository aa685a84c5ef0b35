"""An HTTP server in a thread of a test."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import HTTPServer


@contextlib.contextmanager
def served(server: HTTPServer) -> Iterator[None]:
    """A block in which the server answers; its socket stays open behind it."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
