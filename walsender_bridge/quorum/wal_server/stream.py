"""One reader's stream of WAL, as a function of positions, messages and time. No I/O, no clock.

Invariant: a byte is sent only if it lies below `served_lsn` = min(flush_lsn, commit_lsn), and on the reader's
timeline only as far as that timeline belongs to the safekeeper's history. Positions may go back (WAL without a quorum is
replaced; a restarted safekeeper has a commit_lsn of some seconds ago): then nothing is sent until they have advanced
again. What was sent beyond a switch point is part of a record that was never complete; the reader replays complete
records only.

When the reader's timeline has ended and all of it is sent, the stream ends with CopyDone; when the reader has ended it
too, a result set names the next timeline and its start. A reader that starts exactly at its timeline's switch point gets
only that result set, without a stream.

Times are seconds of one monotonic clock. A reader that is silent for `timeout` is disconnected; after half of it, a reply
is requested. Source: PostgreSQL documentation, "Streaming Replication Protocol" and `wal_sender_timeout`.
"""

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol import backend
from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.quorum.protocol.positions import Positions

#: Seconds of silence after which a reader is disconnected: PostgreSQL's default of `wal_sender_timeout`.
TIMEOUT: Final = 60.0

_STATUS = struct.Struct(">QQQqB")
_FEEDBACK = struct.Struct(">qIIII")


@dataclass(frozen=True, slots=True)
class SendRange:
    """WAL from `begin` up to `end` may be sent, in pieces of any size; report progress with `sent`."""

    begin: Lsn
    end: Lsn


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes to send: a keepalive, CopyDone."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    """The stream has ended; `data` answers the command. The connection proceeds to the next command."""

    data: bytes


@dataclass(frozen=True, slots=True)
class WaitForPositions:
    """Wait for a message, a change of the positions, or `until`."""

    until: float


Action: TypeAlias = SendRange | Write | Finish | WaitForPositions


class ReaderStream:
    """A reader's stream from `lsn` on `timeline` (0: the current one).

    Raises `SqlErrorReply` for a timeline that is not in the history, or ended before `lsn`.
    """

    def __init__(
        self,
        positions: Positions,
        lsn: Lsn,
        timeline: int,
        *,
        now: float,
        timeout: float = TIMEOUT,
    ) -> None:
        self.timeline = timeline or positions.timeline
        self.sent_lsn = lsn
        self.flush_lsn = 0
        self.feedback = HotStandbyFeedback()
        self._timeout = timeout
        self._heard = now
        self._asked = False
        self._answer = False
        self._done_sending = self._done_receiving = False
        left = _left_at(self.timeline, positions.history)
        if left is not None and lsn > left:
            raise SqlErrorReply(
                "XX000",
                f"requested starting point {format_lsn(lsn)} on timeline {self.timeline} is not in"
                " this server's history",
                detail=f"This server's history forked from timeline {self.timeline} at {format_lsn(left)}.",
            )
        #: Whether there is anything to stream: then CopyBothResponse is sent first.
        self.opens = left is None or lsn < left

    def check_start(self, positions: Positions) -> None:
        """Raises `SqlErrorReply` if the start lies in the future. After CopyBothResponse, as in PostgreSQL."""
        if self.sent_lsn > positions.served_lsn:
            raise SqlErrorReply(
                "XX000",
                f"requested starting point {format_lsn(self.sent_lsn)} is ahead of the WAL flush"
                f" position of this server {format_lsn(positions.served_lsn)}",
            )

    def received(self, kind: str, body: bytes, now: float) -> bool:
        """A message of the reader; returns whether it was the last one (it terminates).

        Raises `MalformedMessageError`.
        """
        if kind == "X":
            return True
        if self._done_receiving:
            raise MalformedMessageError(f"unexpected message {kind} after CopyDone", where="client")
        self._heard, self._asked = now, False
        if kind == "c":
            self._done_receiving = True
        elif kind == "d":
            self._copy_data(body)
        else:
            raise MalformedMessageError(
                f"unexpected message {kind} while streaming", where="client"
            )
        return False

    def check_heard(self, now: float) -> None:
        """Raises `SqlErrorReply` when the reader has been silent for too long."""
        if now - self._heard >= self._timeout:
            raise SqlErrorReply(
                "08006", "terminating walsender process due to replication timeout", fatal=True
            )

    def next(self, positions: Positions, now: float, now_us: int) -> Action:
        """The next action. Raises `SqlErrorReply` when the reader has been silent for too long."""
        self.check_heard(now)
        if self._answer:
            self._answer = False
            return Write(backend.keepalive(self.sent_lsn, now_us, reply=False))
        if self._done_sending and self._done_receiving:
            return Finish(self.result(positions))
        left = _left_at(self.timeline, positions.history)
        ended = left is not None and self.sent_lsn >= left
        if not self._done_sending and (ended or self._done_receiving):
            self._done_sending = True
            return Write(backend.COPY_DONE)
        half = self._heard + self._timeout / 2
        if now >= half and not self._asked:
            self._asked = True
            return Write(backend.keepalive(self.sent_lsn, now_us, reply=True))
        end = positions.served_lsn if left is None else min(positions.served_lsn, left)
        if not self._done_sending and self.sent_lsn < end:
            return SendRange(self.sent_lsn, end)
        return WaitForPositions(self._heard + self._timeout if self._asked else half)

    def sent(self, lsn: Lsn) -> None:
        """Record that WAL was sent up to `lsn`."""
        assert lsn > self.sent_lsn
        self.sent_lsn = lsn

    def result(self, positions: Positions) -> bytes:
        """The answer after the stream: the next timeline if this one has ended, and the completion.

        Completion is sent twice, as PostgreSQL does: a walreceiver that ends the stream itself reads two.
        """
        left = _left_at(self.timeline, positions.history)
        rows = b""
        if left is not None:
            rows = backend.row(
                [("next_tli", backend.INT8), ("next_tli_startpos", backend.TEXT)],
                [_next_timeline(self.timeline, positions.history), format_lsn(left)],
            )
        done = backend.complete("START_STREAMING") + backend.complete("START_REPLICATION")
        return rows + done + backend.READY

    def _copy_data(self, body: bytes) -> None:
        kind, rest = body[:1], body[1:]
        if kind == b"r" and len(rest) == _STATUS.size:
            _, flush, _, _, reply = _STATUS.unpack(rest)
            self.flush_lsn = max(self.flush_lsn, min(flush, self.sent_lsn))
            self._answer = self._answer or bool(reply)
        elif kind == b"h" and len(rest) == _FEEDBACK.size:
            _, xmin, epoch, catalog_xmin, catalog_epoch = _FEEDBACK.unpack(rest)
            self.feedback = HotStandbyFeedback(xmin, epoch, catalog_xmin, catalog_epoch)
        else:
            raise MalformedMessageError(
                f"unexpected standby message of {len(body)} bytes: {body[:1].hex() or 'empty'}",
                where="client",
            )


def _left_at(timeline: int, history: ServerTimelines) -> Lsn | None:
    """The switch point of `timeline`; None: it is the current one. Raises `SqlErrorReply` for a foreign one."""
    if timeline == history.timeline:
        return None
    end = history.end_of(timeline)
    if end is None:
        raise SqlErrorReply(
            "XX000", f"requested timeline {timeline} is not in this server's history"
        )
    return end


def _next_timeline(timeline: int, history: ServerTimelines) -> int:
    lineage = [*(left.timeline for left in history.ancestors), history.timeline]
    return lineage[lineage.index(timeline) + 1]
