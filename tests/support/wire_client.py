"""A client of the wire protocol that may send anything: what libpq never would."""

import socket
import struct
from typing import Self

from scramp import ScramClient

from tests.support.wal_server import PASSWORD, USER


def message(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


def startup(parameters: dict[str, str], version: int = 3 << 16) -> bytes:
    pairs = "".join(f"{k}\0{v}\0" for k, v in parameters.items())
    body = struct.pack(">I", version) + pairs.encode() + b"\0"
    return struct.pack(">I", len(body) + 4) + body


class RawClient:
    """A plain connection. Messages are (kind, body)."""

    def __init__(self, port: int, *, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(30)
        self.socket.connect(("127.0.0.1", port))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            part = self.socket.recv(size - len(got))
            if not part:
                raise EOFError(got)
            got += part
        return got

    def receive(self) -> tuple[str, bytes]:
        head = self.exactly(5)
        return chr(head[0]), self.exactly(int.from_bytes(head[1:], "big") - 4)

    def until(self, kind: str) -> list[tuple[str, bytes]]:
        """All messages up to the first of that kind."""
        found: list[tuple[str, bytes]] = []
        while not found or found[-1][0] != kind:
            found.append(self.receive())
        return found

    def error(self) -> dict[str, str]:
        """The next ErrorResponse, by its fields."""
        body = self.until("E")[-1][1]
        return {f[:1].decode(): f[1:].decode() for f in body.split(b"\0") if f}

    def log_in(self, user: str = USER, password: str = PASSWORD, **parameters: str) -> None:
        given = {"user": user, "replication": "true"} | parameters
        self.send(startup(given))
        kind, body = self.receive()
        assert (kind, body[:4]) == ("R", b"\0\0\0\x0a"), (kind, body)
        client = ScramClient(["SCRAM-SHA-256"], user, password)
        first = client.get_client_first().encode()
        self.send(message(b"p", b"SCRAM-SHA-256\0" + struct.pack(">I", len(first)) + first))
        client.set_server_first(self._authentication(11))
        self.send(message(b"p", client.get_client_final().encode()))
        client.set_server_final(self._authentication(12))
        self.until("Z")

    def _authentication(self, code: int) -> str:
        kind, body = self.receive()
        assert kind == "R", (kind, body)
        assert int.from_bytes(body[:4], "big") == code
        return body[4:].decode()

    def query(self, text: str) -> None:
        self.send(message(b"Q", text.encode() + b"\0"))
