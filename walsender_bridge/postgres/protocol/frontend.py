"""Parses the messages that a PostgreSQL client sends to a server, treating them as untrusted. No I/O.

Source: PostgreSQL documentation, "Message Formats" and "Message Flow". The first packets of a connection have
no kind: a request for TLS or GSSAPI, a cancel request, or the startup packet; after it every message has one.

Invariant: at most one packet of the maximum length plus the data of one `feed` is buffered, whatever length the client
declares. An invalid length is rejected as soon as it has been read, before its bytes
are awaited. Work is proportional to the bytes received.
"""

import struct
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from walsender_bridge.errors import MalformedMessageError

#: Bytes of a packet before the startup is complete (PostgreSQL's limit), and of a message afterwards. The
#: longest message that a reader of WAL needs is a command with two names.
STARTUP_LIMIT: Final = 10_000
MESSAGE_LIMIT: Final = 16_384

_SSL, _GSS, _CANCEL = 80_877_103, 80_877_104, 80_877_102
_HEAD = struct.Struct(">BI")
_STARTUP = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class EncryptionRequest:
    """`SSLRequest`, or (`gss`) `GSSENCRequest`. The answer is one byte: N for no."""

    gss: bool


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """A request to cancel another connection's command. It has no answer."""


@dataclass(frozen=True, slots=True)
class Startup:
    """The startup packet: protocol version and parameters such as `user` and `replication`."""

    major: int
    minor: int
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Message:
    """A message of the open connection. `kind` is its letter: Q, p, d, c, f, X."""

    kind: str
    body: bytes


Packet: TypeAlias = EncryptionRequest | CancelRequest | Startup | Message


class FrontendParser:
    """Takes bytes with `feed`, gives packets with `next`."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._started = False

    @property
    def buffered(self) -> int:
        """Bytes that are not part of a packet yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """More bytes from the client."""
        self._buffer += data

    def next(self) -> Packet | None:
        """Return the next packet; None until it is complete. Raises `MalformedMessageError`."""
        return self._message() if self._started else self._startup()

    def _startup(self) -> Packet | None:
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if not _STARTUP.size <= size <= STARTUP_LIMIT:
            raise MalformedMessageError(f"invalid length of startup packet: {size}", where="client")
        if len(self._buffer) < size:
            return None
        body = self._take(size)
        _, code = _STARTUP.unpack_from(body)
        if code in {_SSL, _GSS}:
            if size != _STARTUP.size:
                raise MalformedMessageError("encryption request is too long", where="client")
            return EncryptionRequest(gss=code == _GSS)
        if code == _CANCEL:
            return CancelRequest()
        self._started = True
        return Startup(code >> 16, code & 0xFFFF, _parameters(body[_STARTUP.size :]))

    def _message(self) -> Packet | None:
        if len(self._buffer) < _HEAD.size:
            return None
        kind, size = _HEAD.unpack_from(self._buffer)
        letter = chr(kind)
        if letter not in "QpdcfXHS":
            raise MalformedMessageError(f"invalid message type {kind:#04x}", where="client")
        if not 4 <= size <= MESSAGE_LIMIT:
            raise MalformedMessageError(
                f"invalid length of message {letter}: {size}", where="client"
            )
        if len(self._buffer) < size + 1:
            return None
        return Message(letter, self._take(size + 1)[_HEAD.size :])

    def _take(self, size: int) -> bytes:
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken


def text_of(body: bytes) -> str:
    """A message's only string. Raises `MalformedMessageError` unless it ends with the one NUL, and is UTF-8."""
    if not body.endswith(b"\0") or b"\0" in body[:-1]:
        raise MalformedMessageError("unterminated string", where="client")
    return _decode(body[:-1])


def _parameters(body: bytes) -> dict[str, str]:
    """Parse alternating names and values, each terminated by a NUL, followed by another NUL."""
    if not body.endswith(b"\0"):
        raise MalformedMessageError("startup packet has no terminator", where="client")
    parts = body[:-1].split(b"\0")
    if parts.pop() != b"" or len(parts) % 2:
        raise MalformedMessageError(
            "startup packet has a parameter without a value", where="client"
        )
    names, values = parts[::2], parts[1::2]
    if not all(names):
        raise MalformedMessageError("startup packet has data after its terminator", where="client")
    return dict(zip(map(_decode, names), map(_decode, values), strict=True))


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise MalformedMessageError("string is not valid UTF-8", where="client") from None
