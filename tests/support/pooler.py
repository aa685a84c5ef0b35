"""A connection pooler as PgBouncer is to a session that begins: it refuses startup parameters, or drops them without a word."""

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.fork_server import ROOT

#: Requests for encryption, of SSL and of GSSAPI.
_ENCRYPTION = {80877103, 80877104}


@contextmanager
def pooler(port: int, *, refuses: bool) -> Iterator[int]:
    """A pooler before the server at `port`; its own port. A process: libpq connects without a pause for other threads of its own."""
    command = [sys.executable, "-m", __name__, str(port), "refuses" if refuses else "ignores"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Pooler:
    """Passes sessions on to the server at `port`, except for their `options`, which it `refuses` or ignores."""

    def __init__(self, port: int, *, refuses: bool) -> None:
        self._to = port
        self._refuses = refuses

    def serve(self) -> None:
        """Print the port, and answer for ever."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(listener.getsockname()[1], flush=True)
            while True:
                near, _ = listener.accept()
                threading.Thread(target=self._session, args=(near,), daemon=True).start()

    def _session(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            while True:
                length, code = struct.unpack("!II", _exactly(near, 8))
                if code not in _ENCRYPTION:
                    break
                near.sendall(b"N")
            given = _exactly(near, length - 8).split(b"\0")
            pairs = [*zip(given[::2], given[1::2], strict=False)]
            kept = [(name, value) for name, value in pairs if name and name != b"options"]
            if self._refuses and len(kept) < sum(bool(name) for name, _ in pairs):
                said = b"SFATAL\0C08P01\0Munsupported startup parameter: options\0\0"
                near.sendall(b"E" + struct.pack("!I", len(said) + 4) + said)
                return
            sent = b"".join(name + b"\0" + value + b"\0" for name, value in kept) + b"\0"
            with socket.create_connection(("127.0.0.1", self._to)) as far:
                far.sendall(struct.pack("!II", len(sent) + 8, code) + sent)
                back = threading.Thread(target=_pass, args=(far, near), daemon=True)
                back.start()
                _pass(near, far)
                back.join()


def _pass(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while content := source.recv(1 << 16):
            to.sendall(content)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_WR)


def _exactly(source: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = source.recv(count - len(found))
        if not more:
            raise ConnectionResetError
        found += more
    return found


if __name__ == "__main__":
    Pooler(int(sys.argv[1]), refuses=sys.argv[2] == "refuses").serve()
