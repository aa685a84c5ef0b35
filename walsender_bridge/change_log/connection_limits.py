"""Which connections of a Flight service are ended, so that no client takes its memory, threads or files from the others. Pure.

Flight takes a message whole before a handler sees its length, and has no limit for connections. So the bytes that each
connection has received are compared with what its calls have taken (`ConnectionLimits.step`):

- Bytes that belong to no call are a message that grows, or junk. They are at most `PENDING_BYTES` of a connection, and
  `ALL_PENDING_BYTES` of all; where an append is open, those of the greatest batch.
- Beyond the greatest number of connections, the oldest idle one of the holder that has the most is ended. Connections that
  never made a call are one holder's: a stranger's thousand connections end each other, and a reader's its own.
- A client reads its answer in time.
- A call that is begun and sends no request costs its client a few bytes, and the process a thousand times as much memory, and a
  thread when the call ends. Flight does not report such calls. So when the process grows, the connections are ended whose bytes
  may be the headers of very many calls.

A client whose connection was ended makes another one with its next call.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from walsender_bridge.change_log.protocol import MAX_BATCH_BYTES

#: Connections of a service: those of a large Spark cluster that read at once.
MOST_CONNECTIONS: Final = 512
#: Bytes of a connection that no call has taken: some requests of the greatest length at once.
PENDING_BYTES: Final = 16 << 20
#: Such bytes of all connections without an append.
ALL_PENDING_BYTES: Final = 256 << 20
#: Bytes of a call beside its request, and of a connection before its first call: headers and handshake.
_CALL_BYTES: Final = 4 << 10
#: Bytes of a connection that no call has taken, and that may be headers of calls: of two thousand, with 16 bytes each.
HEAD_BYTES: Final = 32 << 10
#: Such bytes of all connections: a crowd begins as many calls as one connection with more bytes.
ALL_HEAD_BYTES: Final = 128 << 10
#: What the process may grow by while there are such connections: bytes, and threads.
GROWN_BYTES: Final = 64 << 20
GROWN_THREADS: Final = 512
#: A part of what was sent or taken comes back or is added as acknowledgements and frames.
_OVERHEAD: Final = 50


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection: the inode of its socket, its peer's place, and the bytes that it has received and sent since it began."""

    inode: int
    peer: str
    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class ProcessSize:
    """The memory that the process uses, in bytes, and its threads, not later than the connections' bytes."""

    memory: int = 0
    threads: int = 0

    def has_grown_since(self, earlier: "ProcessSize") -> bool:
        """Whether it has grown by more than a few calls take."""
        memory, threads = self.memory - earlier.memory, self.threads - earlier.threads
        return memory > GROWN_BYTES or threads > GROWN_THREADS


@dataclass(slots=True)
class PeerCalls:
    """The calls of one peer.

    `holder`: of its certificate. `begun`: their number. `taken`: the bytes of their requests and batches that have arrived.
    `ended_at`: when the last one ended. `answers_due`: when the client has to have read each answer. `unwanted`: why the
    connection has to end.
    """

    holder: bytes
    begun: int = 0
    open: int = 0
    appends: int = 0
    taken: int = 0
    ended_at: float = 0.0
    unwanted: str = ""
    answers_due: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Known:
    """What a connection had at the last step. `since`: when it was first seen."""

    since: float
    pending: int = 0
    received: int = 0
    sent: int = 0
    begun: int = 0
    taken: int = 0


_NO_CALLS: Final = PeerCalls(b"")


class ConnectionLimits:
    """See the module. `most`: connections."""

    def __init__(self, most: int = MOST_CONNECTIONS) -> None:
        self._most = most
        self._known: dict[int, _Known] = {}
        #: Of the process when there last were no connections with many bytes that no call had taken.
        self._size = ProcessSize()

    def step(
        self,
        now: float,
        found: Sequence[Connection],
        calls: Mapping[str, PeerCalls],
        size: ProcessSize = ProcessSize(),
    ) -> dict[int, str]:
        """The sockets to shut down, with the reason of each. `calls`: by peer, read after `found` was. `size`: now."""
        self._known = {
            each.inode: self._known.get(each.inode) or _Known(since=now) for each in found
        }
        ended: dict[int, str] = {}
        pending: dict[int, int] = {}
        for each in found:
            its = calls.get(each.peer, _NO_CALLS)
            waiting = _count(self._known[each.inode], each, its)
            if its.unwanted:
                ended[each.inode] = its.unwanted
            elif min(its.answers_due.values(), default=now) < now:
                ended[each.inode] = "it does not read its answer"
            elif waiting > PENDING_BYTES + (MAX_BATCH_BYTES if its.appends else 0):
                ended[each.inode] = "it sends more than a request has"
            elif not its.appends:
                pending[each.inode] = waiting
        beyond = _largest(pending, ALL_PENDING_BYTES)
        ended |= dict.fromkeys(beyond, "all connections together send more than requests have")
        ended |= self._begin_calls(pending, size)
        ended |= self._crowded([each for each in found if each.inode not in ended], calls)
        return ended

    def _begin_calls(self, pending: Mapping[int, int], size: ProcessSize) -> dict[int, str]:
        """The connections whose bytes may be those of calls that never send a request, if the process has grown by them."""
        few = {inode: waiting for inode, waiting in pending.items() if waiting <= HEAD_BYTES}
        suspects = [*(pending.keys() - few.keys()), *_largest(few, ALL_HEAD_BYTES)]
        if not suspects:
            self._size = size
        elif size.has_grown_since(self._size):
            return dict.fromkeys(suspects, "it begins calls and sends no requests")
        return {}

    def _crowded(
        self, found: Sequence[Connection], calls: Mapping[str, PeerCalls]
    ) -> dict[int, str]:
        """The oldest idle connections of those who have the most, as far as there are too many."""
        if len(found) <= self._most:
            return {}
        shares: defaultdict[bytes, list[tuple[bool, float, int]]] = defaultdict(list)
        for each in found:
            its = calls.get(each.peer, _NO_CALLS)
            since = self._known[each.inode].since
            idle_since = since if its.open else max(since, its.ended_at)
            shares[its.holder].append((its.open > 0, idle_since, each.inode))
        for share in shares.values():
            share.sort(reverse=True)
        ended = {}
        for _ in range(len(found) - self._most):
            *_, inode = max(shares.values(), key=len).pop()
            ended[inode] = "there are too many connections"
        return ended


def _count(known: _Known, seen: Connection, its: PeerCalls) -> int:
    """The bytes that the connection has received and no call has taken."""
    received, sent = seen.received - known.received, seen.sent - known.sent
    taken, begun = max(0, its.taken - known.taken), max(0, its.begun - known.begun)
    allowed = taken + (taken + sent) // _OVERHEAD + begun * _CALL_BYTES
    # What was allowed and not sent is no credit for later.
    known.pending = max(0, known.pending + received - allowed)
    known.received, known.sent = seen.received, seen.sent
    known.taken, known.begun = its.taken, its.begun
    return known.pending


def _largest(pending: Mapping[int, int], most: int) -> list[int]:
    """The connections that wait with the most bytes, until the others have no more than `most` of them."""
    total, found = sum(pending.values()), []
    for inode in sorted(pending, key=lambda each: pending[each], reverse=True):
        if total <= most:
            break
        total -= pending[inode]
        found.append(inode)
    return found
