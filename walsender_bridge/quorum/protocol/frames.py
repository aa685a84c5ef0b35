"""The bytes of the safekeeper protocol, version 2.

Every message is a frame: a header of 40 bytes (big-endian), and `length` bytes behind it.

    u8 kind | u8 version | u16 0 | u32 length | u64 term | u64 | u64 | u64

The last three fields are the LSNs of streaming messages; in other messages they are 0, and the fields follow the header.
The header of `Append`, `Fetched` and `CatchUpWal` is followed by raw WAL bytes only, so a driver sends header and WAL
with one `sendmsg` and receives into a buffer of its own, without copying.

Invariant: `decode` accepts exactly what `encode` produces, field by field and to the last byte; anything else is a
`MalformedMessageError`, another version a `NotSupportedError`. No length above its limit is accepted, so a reader never
needs more than `MAX_WAL_BYTES` or `MAX_BODY_BYTES` for one frame.
"""

import struct
from enum import IntEnum

from walsender_bridge.errors import MalformedMessageError, NotSupportedError
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.bodies import Reader, Writer
from walsender_bridge.quorum.protocol.terms import MAX_TERM
from walsender_bridge.quorum.protocol.value import value

VERSION = 2
#: The most WAL bytes in one frame: written and synced at once, and the most memory that a peer can claim.
MAX_WAL_BYTES = 1 << 20
#: The longest body of any other message: fits a history of `MAX_ENTRIES` and two memberships.
MAX_BODY_BYTES = 64 << 10

_HEADER = struct.Struct(">BBHIQQQQ")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    """The first byte of a frame: letters, as in PostgreSQL's own protocol."""

    PROPOSER_GREETING = ord("G")
    SAFEKEEPER_GREETING = ord("g")
    VOTE = ord("V")
    RESUME = ord("R")
    VOTE_REPLY = ord("v")
    ELECTED = ord("E")
    APPEND = ord("A")
    APPEND_ACK = ord("a")
    FETCH = ord("F")
    FETCHED = ord("f")
    CATCH_UP = ord("O")
    HELD = ord("h")
    CONFIGURE = ord("C")
    CONFIGURED = ord("c")
    REFUSED = ord("r")


_KINDS: dict[int, FrameKind] = {int(kind): kind for kind in FrameKind}
#: Frames whose term must not exceed `MAX_TERM`. Terms of safekeepers are checked by the proposer, which reports them.
_TO_SAFEKEEPER = frozenset(
    {
        FrameKind.PROPOSER_GREETING,
        FrameKind.VOTE,
        FrameKind.RESUME,
        FrameKind.ELECTED,
        FrameKind.APPEND,
        FrameKind.FETCH,
        FrameKind.CATCH_UP,
        FrameKind.CONFIGURE,
    }
)
_CARRIES_WAL = frozenset({FrameKind.APPEND, FrameKind.FETCHED, FrameKind.CATCH_UP})


@value
class Header:
    """The first 40 bytes of a frame. `length` counts what follows."""

    kind: FrameKind
    length: int
    term: int
    first: int
    second: int
    third: int

    @property
    def carries_wal(self) -> bool:
        """The body is WAL, which does not go through `decode`."""
        return self.kind in _CARRIES_WAL


def decode_header(data: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """The header at `offset`. Raises `MalformedMessageError` or `NotSupportedError`."""
    if len(data) - offset < HEADER_BYTES:
        raise MalformedMessageError(f"incomplete frame header of {len(data) - offset} bytes")
    number, version, reserved, length, term, first, second, third = _HEADER.unpack_from(
        data, offset
    )
    kind = _KINDS.get(number)
    if kind is None or reserved:
        raise MalformedMessageError(f"unknown frame kind {number:#x} in the safekeeper protocol")
    if version != VERSION:
        raise NotSupportedError(
            f"unsupported version {version} of the safekeeper protocol (this is {VERSION})",
            repair="run the same version of Tuskline on all machines",
        )
    if term > MAX_TERM and kind in _TO_SAFEKEEPER:
        raise MalformedMessageError(f"proposer's term {term} is out of range")
    if length > (MAX_WAL_BYTES if kind in _CARRIES_WAL else MAX_BODY_BYTES):
        raise MalformedMessageError(f"length {length} exceeds the limit of {kind.name}")
    return Header(kind, length, term, first, second, third)


def encode(message: m.Message) -> bytes:
    """The frame of a message; for `Append`, `Fetched` and `CatchUpWal` its header alone, the WAL follows."""
    match message:
        case m.Append():
            return _frame(
                FrameKind.APPEND,
                message.length,
                message.term,
                message.begin_lsn,
                message.commit_lsn,
                message.restart_lsn,
            )
        case m.Fetched():
            return _frame(FrameKind.FETCHED, message.length, message.term, message.begin_lsn)
        case m.AppendAck():
            body = Writer()
            if message.feedback is not None:
                body.feedback(message.feedback)
            return (
                _frame(
                    FrameKind.APPEND_ACK,
                    len(body.data),
                    message.term,
                    message.flush_lsn,
                    message.commit_lsn,
                )
                + body.data
            )
        case m.Fetch():
            return _frame(FrameKind.FETCH, 0, message.term, message.begin_lsn, message.end_lsn)
        case m.CatchUpWal():
            first, second = message.begin_lsn, message.timeline
            return _frame(FrameKind.CATCH_UP, message.length, message.term, first, second)
        case m.Held():
            lsns = message.begin_lsn, message.wanted_lsn, message.next_lsn
            return _frame(FrameKind.HELD, 0, message.term, *lsns)
        case m.Configured():
            return _frame(FrameKind.CONFIGURED, 0, message.term, message.generation)
        case _:
            return _encode_body(message)


def _frame(
    kind: FrameKind, length: int, term: int, first: int = 0, second: int = 0, third: int = 0
) -> bytes:
    limit = MAX_WAL_BYTES if kind in _CARRIES_WAL else MAX_BODY_BYTES
    assert length <= limit, (kind, length)
    return _HEADER.pack(kind, VERSION, 0, length, term, first, second, third)


def _encode_body(message: m.Message) -> bytes:
    body = Writer()
    match message:
        case m.ProposerGreeting():
            kind, term = FrameKind.PROPOSER_GREETING, 0
            body.server(message.server).identity(message.proposer).identity(message.quorum)
        case m.SafekeeperGreeting():
            kind, term = FrameKind.SAFEKEEPER_GREETING, message.node_id.term
            body.identity(message.safekeeper).server(message.server)
            body.identity(message.node_id.proposer).configuration(message.configuration)
            body.u64(message.flush_lsn).u64(message.commit_lsn)
            body.u32(message.timeline).u32(message.fenced_timeline)
        case m.Vote():
            kind, term = FrameKind.VOTE, message.node_id.term
            body.identity(message.node_id.proposer).u8(message.purpose)
            body.u32(message.timeline).configuration(message.configuration)
        case m.Resume():
            kind, term = FrameKind.RESUME, message.node_id.term
            body.identity(message.node_id.proposer)
        case m.VoteReply():
            kind, term = FrameKind.VOTE_REPLY, message.node_id.term
            body.identity(message.node_id.proposer)
            body.u64(message.flush_lsn).u64(message.commit_lsn)
            body.u64(message.restart_lsn).u64(message.begin_lsn)
            body.history(message.history).configuration(message.configuration)
        case m.Elected():
            kind, term = FrameKind.ELECTED, message.term
            body.u64(message.start_lsn).u64(message.commit_lsn).u8(message.rebuild)
            body.history(message.history).configuration(message.configuration)
            body.ancestors(message.ancestors)
        case m.Configure():
            kind, term = FrameKind.CONFIGURE, message.term
            body.configuration(message.configuration)
        case m.Refused():
            kind, term = FrameKind.REFUSED, message.node_id.term
            body.u8(message.reason).identity(message.node_id.proposer).text(message.detail)
        case _:
            raise AssertionError(message)
    return _frame(kind, len(body.data), term) + body.data


def decode(header: Header, body: bytes | bytearray | memoryview = b"") -> m.Message:
    """The message of a header and its body (empty, for those that carry WAL).

    Raises `MalformedMessageError`.
    """
    term, first, second = header.term, header.first, header.second
    if header.kind is FrameKind.APPEND:
        return m.Append(term, first, second, header.third, header.length)
    if (
        header.kind is FrameKind.APPEND_ACK
        and not header.length
        and not header.third
        and not len(body)
    ):
        return m.AppendAck(term, first, second)
    if len(body) != (0 if header.carries_wal else header.length):
        raise MalformedMessageError(
            f"{header.kind.name} with {len(body)} bytes for {header.length}"
        )
    if header.kind is FrameKind.HELD and not header.length:
        return m.Held(term, first, second, header.third)
    reader = Reader(body)
    message: m.Message
    match header.kind:
        case FrameKind.FETCHED:
            message = m.Fetched(term, first, header.length)
            second_used = False
        case FrameKind.APPEND_ACK:
            message = m.AppendAck(term, first, second, reader.feedback() if body else None)
            second_used = True
        case FrameKind.FETCH:
            message, second_used = m.Fetch(term, first, second), True
        case FrameKind.CATCH_UP:
            message, second_used = m.CatchUpWal(term, first, second, header.length), True
        case FrameKind.CONFIGURED:
            message, second_used = m.Configured(term, first), False
        case _:
            message, second_used = _decode_body(header, reader), False
            if first:
                raise MalformedMessageError(f"{header.kind.name} with an LSN in its header")
    if header.third or (second and not second_used):
        raise MalformedMessageError(f"{header.kind.name} with an unexpected LSN in its header")
    reader.end()
    return message


def _decode_body(header: Header, reader: Reader) -> m.Message:
    term = header.term
    match header.kind:
        case FrameKind.PROPOSER_GREETING:
            if term:
                raise MalformedMessageError("proposer's greeting with a term")
            return m.ProposerGreeting(reader.server(), reader.identity(), reader.identity())
        case FrameKind.SAFEKEEPER_GREETING:
            safekeeper, server = reader.identity(), reader.server()
            node_id = m.NodeId(term, reader.identity())
            return m.SafekeeperGreeting(
                safekeeper,
                server,
                node_id,
                reader.configuration(),
                flush_lsn=reader.u64(),
                commit_lsn=reader.u64(),
                timeline=reader.u32(),
                fenced_timeline=reader.u32(),
            )
        case FrameKind.VOTE:
            node_id = m.NodeId(term, reader.identity())
            purpose = reader.member(m.Purpose)
            return m.Vote(node_id, purpose, reader.u32(), reader.configuration())
        case FrameKind.RESUME:
            return m.Resume(m.NodeId(term, reader.identity()))
        case FrameKind.VOTE_REPLY:
            return m.VoteReply(
                m.NodeId(term, reader.identity()),
                flush_lsn=reader.u64(),
                commit_lsn=reader.u64(),
                restart_lsn=reader.u64(),
                begin_lsn=reader.u64(),
                history=reader.history(),
                configuration=reader.configuration(),
            )
        case FrameKind.ELECTED:
            return m.Elected(
                term,
                start_lsn=reader.u64(),
                commit_lsn=reader.u64(),
                rebuild=reader.boolean(),
                history=reader.history(),
                configuration=reader.configuration(),
                ancestors=reader.ancestors(),
            )
        case FrameKind.CONFIGURE:
            return m.Configure(term, reader.configuration())
        case _:
            reason = reader.member(m.Refusal)
            return m.Refused(reason, m.NodeId(term, reader.identity()), reader.text())
