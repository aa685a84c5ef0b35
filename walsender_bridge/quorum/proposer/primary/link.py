"""The synchronous standby's end of the primary's stream: polling, status updates, timeout."""

import select
import time

from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.replication import hot_standby_feedback, status_update
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.primary.shutdown_watch import ShutdownWatch
from walsender_bridge.quorum.proposer.primary.wal_source import WalSource
from walsender_bridge.quorum.proposer.primary.wal_stream import WalStream
from walsender_bridge.quorum.proposer.wal_queue import WalQueue
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.runtime.closing import Closing

#: Seconds between two reports to the primary when nothing changes.
REPORT_SECONDS = 1.0
#: Seconds of silence after which the primary is asked to reply, and after which it counts as disconnected.
ASK_SECONDS = 10.0
SILENT_SECONDS = 30.0


class PrimaryLink(Closing):
    """See the module. It streams after `start`, and reports `commit_lsn`."""

    def __init__(self, connection: WalSource, poll: select.epoll) -> None:
        self.where = connection.where
        self.commit_lsn = 0
        self._connection = connection
        self._poll = poll
        self._stream: WalStream | None = None
        self._polled = select.EPOLLIN
        self._paused = False
        self._heard_at = self._reported_at = 0.0
        self._shutdown = ShutdownWatch()

    def start(self, lsn: Lsn, timeline: int, last: int) -> None:
        """Start streaming at `lsn`, over `timeline` and the later ones up to `last`. Raises `ConnectionFailedError`."""
        assert isinstance(self._connection, PrimaryStream), "there is a primary"
        self._stream = WalStream(self._connection, lsn, timeline, last)
        self._heard_at = time.monotonic()
        self._poll.register(self._stream, self._polled)

    def fileno(self) -> int:
        """The descriptor to poll; -1 before `start`."""
        return -1 if self._stream is None else self._stream.fileno()

    def take(self, events: int, queue: WalQueue) -> None:
        """Append the WAL that has arrived, and send a status update if the primary requests a reply.

        Raises what `pieces` raises, and `ConnectionFailedError` when the primary's shutdown waits in vain.
        """
        stream = self._stream
        assert stream is not None
        if events & ~select.EPOLLOUT:
            for piece in stream.pieces():
                queue.append(piece)
            self._heard_at = time.monotonic()
        if stream.asked:
            stream.asked = False
            self._shutdown.asked(time.monotonic(), self.commit_lsn, self.where)
            self.report()

    def report(self, *, ask: bool = False) -> None:
        """Send a status update with commit_lsn at once; `ask`: request a reply."""
        if self._stream is None:
            return
        now = time.time_ns()
        self._reported_at = time.monotonic()
        lsn = self.commit_lsn
        self._stream.send(
            status_update(write=lsn, flush=lsn, apply=0, now_us=now // 1000, reply=ask)
        )

    def pass_feedback(self, feedback: HotStandbyFeedback) -> None:
        """Send the hot standby feedback of the safekeepers' readers."""
        if self._stream is not None:
            message = hot_standby_feedback(
                xmin=feedback.xmin,
                xmin_epoch=feedback.xmin_epoch,
                catalog_xmin=feedback.catalog_xmin,
                catalog_xmin_epoch=feedback.catalog_xmin_epoch,
                now_us=time.time_ns() // 1000,
            )
            self._stream.send(message)

    def pause(self, paused: bool) -> None:
        """Pause or resume reading; and send what the socket did not take. Cheap when nothing changes."""
        if self._stream is None:
            return
        self._paused = paused
        events = 0 if paused else select.EPOLLIN
        if not self._stream.flush():
            events |= select.EPOLLOUT
        if events != self._polled:
            self._polled = events
            self._poll.modify(self._stream, events)

    def tick(self, now: float) -> None:
        """Send periodic status updates. Raises `ConnectionFailedError` when the primary has been silent for too long."""
        if self._stream is None:
            return
        if self._paused:
            self._heard_at = now
        if now - self._heard_at > SILENT_SECONDS:
            raise ConnectionFailedError(
                f"no message from the primary for {SILENT_SECONDS:.0f} s",
                where=self.where,
                repair="check whether the server is stopped, and the network; the connection is retried",
            )
        if now >= self._reported_at + REPORT_SECONDS:
            self.report(ask=now - self._heard_at > ASK_SECONDS)

    def close(self) -> None:
        """Close the connection."""
        if self._stream is not None:
            self._stream.close()
        self._connection.close()
