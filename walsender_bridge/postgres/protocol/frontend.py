"""What a PostgreSQL client sends to a server, without I/O: bytes in, packets out, nothing believed.

Source: PostgreSQL documentation, "Message Formats" and "Message Flow". The first packets of a connection have
no kind: a request for TLS or GSSAPI, a cancel request, or the startup packet; after it every message has one.

Invariant: at most one packet's limit and what was fed at one time is kept, whatever the client announces. A
length that is too large, or too small to be one, is refused when it has been read, before any of its bytes are
waited for. Work is in proportion to the bytes that came.
"""

import struct
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from walsender_bridge.errors import MalformedMessageError

#: Bytes of a packet before the startup is complete (as PostgreSQL has it), and of a message afterwards. The
#: longest that a reader of WAL has reason to send is a command with two names in it.
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
        """The next packet; None until all of it is there. Raises `MalformedMessageError`."""
        return self._message() if self._started else self._startup()

    def _startup(self) -> Packet | None:
        if len(self._buffer) < 4:
            return None
        size = int.from_bytes(self._buffer[:4], "big")
        if not _STARTUP.size <= size <= STARTUP_LIMIT:
            raise MalformedMessageError(f"a startup packet of {size} bytes", where="client")
        if len(self._buffer) < size:
            return None
        body = self._take(size)
        _, code = _STARTUP.unpack_from(body)
        if code in {_SSL, _GSS}:
            if size != _STARTUP.size:
                raise MalformedMessageError("a request for encryption is too long", where="client")
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
            raise MalformedMessageError(f"a message of kind {kind:#04x}", where="client")
        if not 4 <= size <= MESSAGE_LIMIT:
            raise MalformedMessageError(f"a message {letter} of {size} bytes", where="client")
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
        raise MalformedMessageError("a string without its end", where="client")
    return _decode(body[:-1])


def _parameters(body: bytes) -> dict[str, str]:
    """Names and values in turn, each ended by a NUL, and one more NUL."""
    if not body.endswith(b"\0"):
        raise MalformedMessageError("a startup packet without its end", where="client")
    parts = body[:-1].split(b"\0")
    if parts.pop() != b"" or len(parts) % 2:
        raise MalformedMessageError("a startup packet with half a parameter", where="client")
    names, values = parts[::2], parts[1::2]
    if not all(names):
        raise MalformedMessageError("a startup packet goes on behind its end", where="client")
    return dict(zip(map(_decode, names), map(_decode, values), strict=True))


def _decode(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise MalformedMessageError("a text that is not UTF-8", where="client") from None
