"""Session setup: decides whether the slot continues the log, and which uncommitted tail is cut off.

The log may end with transactions that are durable but not committed: the commit gate held them back, or the session
broke. No consumer has seen them. If the server that took over lacks them, they are cut off: they existed only on the
failed server. *Committed* transactions are never cut: if the server lacks some of them, or has skipped some, the stream
has diverged and is left as it is.

Cutting is safe because nothing can commit the tail in the meantime. The new writer has fenced the previous one; it sends
the replica a gate position of 0, so no report offers the tail, also after a crash of the log server; and a barrier returns
once every report that was asked for earlier has been answered, and every commit that was issued for it or before has
arrived. The replica then removes the tail from its disk in one durable step. The slot was confirmed to no more than was
committed, so the server sends again those transactions that it has.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from walsender_bridge.capture import core, source
from walsender_bridge.capture.overlap import Overlap, utc
from walsender_bridge.capture.publication import reattach
from walsender_bridge.capture.source import CaptureSource, Fork, LogPosition
from walsender_bridge.capture.spool.core import Streams
from walsender_bridge.change_log.client import LogClient, ReplicaClient, StreamWriter
from walsender_bridge.errors import DivergedError, UnavailableError
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn
from walsender_bridge.postgres.protocol.replication import ServerTimelines, SystemIdentity
from walsender_bridge.runtime import logs

#: Seconds that the log server has to answer a request.
ANSWER_SECONDS = 120.0
#: Transactions that a `DivergedError` lists.
LISTED = 20

_log = logs.logger()


def settle(writer: StreamWriter, log: LogClient, seconds: float) -> None:
    """Stop commits of the stream and wait for those in transit, so that its tail may be cut off.

    Raises `UnavailableError` if the log server does not answer within `seconds`, `DeadlineError` if the repository does not.
    """
    writer.send([], gate_lsn=0)
    if writer.next_ack(seconds) is None:
        raise UnavailableError("the log server does not answer", where=writer.address)
    log.barrier({}, seconds)


@dataclass(frozen=True, slots=True)
class Joined:
    """The start of a session: its writer (to be closed by the caller), its state, and the server that it streams from."""

    writer: StreamWriter
    state: core.CaptureState
    identity: SystemIdentity


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """The inputs of session setup.

    `check` is called while a slot is being created, which it can abort by raising. `failed`: the log servers at which the
    previous session failed, and then this one (`LogClient.open_writer`).
    """

    source: CaptureSource
    walsender: ReplicationConnection
    log: LogClient
    replica: ReplicaClient
    check: Callable[[], object]
    failed: set[str]

    def join(
        self, slot_confirmed: Lsn | None, *, spool_limit: int, max_uncommitted_bytes: int
    ) -> Joined:
        """Become the writer and continue from the slot; for a new stream, create the slot.

        Raises `DivergedError` when the slot does not continue the log.
        """
        identity = self.walsender.identify()
        history = self.walsender.history(identity.timeline)
        writer = self._writer()
        try:
            fork = self._fork(writer, slot_confirmed, identity, history)
            if fork is not None and writer.status.end_offset > writer.status.committed_end:
                whole = self._committed_only(writer, fork, slot_confirmed, identity, history)
                writer.close()
                writer = self._writer()
                fork = self._fork(writer, slot_confirmed, identity, history) if whole else fork
            if fork is not None:
                raise self._diverged(fork)
            state = self._state(
                writer,
                slot_confirmed,
                identity,
                spool_limit=spool_limit,
                max_uncommitted_bytes=max_uncommitted_bytes,
            )
        except BaseException:
            writer.close()
            raise
        return Joined(writer, state, identity)

    def _writer(self) -> StreamWriter:
        return self.log.open_writer(self.source.name, self.failed)

    @staticmethod
    def _fork(
        writer: StreamWriter,
        slot_confirmed: Lsn | None,
        identity: SystemIdentity,
        history: ServerTimelines,
    ) -> Fork | None:
        status = writer.status
        position = LogPosition(
            status.last_timeline, status.last_end_lsn, status.confirmed_to, status.system_id
        )
        return source.evaluate(position, slot_confirmed, identity, history)

    def _committed_only(
        self,
        writer: StreamWriter,
        fork: Fork,
        slot_confirmed: Lsn | None,
        identity: SystemIdentity,
        history: ServerTimelines,
    ) -> bool:
        """Whether the slot continues the committed log; if so, the tail beyond it has been cut off."""
        name = self.source.name
        settle(writer, self.log, ANSWER_SECONDS)
        cut, status = self.log.status().streams[name], self.replica.stream_status(name)
        committed = LogPosition(
            cut.timeline if status.committed_end_lsn else 0,
            status.committed_end_lsn,
            status.confirmed_to,
            status.system_id,
        )
        if source.evaluate(committed, slot_confirmed, identity, history) is not None:
            return False
        _log.warning(
            "cutting off the uncommitted tail of the log, which the server does not have",
            source=name,
            reason=fork.reason,
            committed=format_lsn(status.committed_end_lsn),
            lacks=self._listed(fork.timeline, fork.lsn),
        )
        self.replica.cut_tail(name, writer.term, status.committed_end)
        return True

    def _state(
        self,
        writer: StreamWriter,
        slot_confirmed: Lsn | None,
        identity: SystemIdentity,
        *,
        spool_limit: int,
        max_uncommitted_bytes: int,
    ) -> core.CaptureState:
        status = writer.status
        confirmed = status.confirmed_to
        if confirmed is None:
            if slot_confirmed is None:
                # Waits for running transactions to end, without a limit.
                slot_confirmed = self.walsender.create_slot(self.source.slot, check=self.check)
            confirmed = WalPosition(identity.timeline, slot_confirmed)
        if status.confirmed_to is None or status.system_id is None:
            # A new stream, or one from before identifiers were recorded, which adopts this server's.
            self._record(writer, confirmed, identity.system_id)
        return core.CaptureState(
            timeline=identity.timeline,
            logged_lsn=status.last_end_lsn,
            committed_lsn=status.committed_end_lsn,
            previous_crc=status.last_crc,
            confirmed=confirmed,
            now=time.monotonic(),
            # Nothing passes the gate before its first poll.
            gate=0,
            overlap=Overlap.of(
                status.last_end_lsn, status.last_commit_time, confirmed.lsn, slot_confirmed or 0
            ),
            streams=Streams(spool_limit),
            max_uncommitted_bytes=max_uncommitted_bytes,
        )

    @staticmethod
    def _record(writer: StreamWriter, confirmed: WalPosition, system_id: int) -> None:
        """Record durably where the stream starts, and on which cluster, before streaming begins."""
        writer.send([], confirm_to=confirmed, gate_lsn=0, system_id=system_id)
        ack = writer.next_ack(ANSWER_SECONDS)
        if ack is None or ack.confirmed_to != confirmed:
            raise UnavailableError(
                "the log server did not record where the stream starts", where=writer.address
            )

    def _listed(self, timeline: int, lsn: Lsn) -> list[str]:
        """The log's first transactions behind this point, one line each."""
        found = self.replica.list_transactions_after(
            self.source.name, timeline, lsn, limit=LISTED + 1
        )
        lines = [
            f"xid {xid}, ends at {format_lsn(end)}, committed {utc(commit_time)}"
            for end, xid, commit_time in found[:LISTED]
        ]
        return lines + (["..."] if len(found) > LISTED else [])

    def _diverged(self, fork: Fork) -> DivergedError:
        """The error, with the log's transactions behind the fork."""
        lines = self._listed(fork.timeline, fork.lsn)
        listed = "\n  ".join(["transactions of the log after that point:", *(lines or ["none"])])
        restart = f"run `{reattach(self.source)}` to start over from this server, which brings its tables level"
        return DivergedError(
            f"stream {self.source.name} has diverged: {fork.reason}\n  {listed}",
            where=f"{self.source.where}, slot {self.source.slot}",
            repair=f"nothing was skipped; {fork.repair(restart)}",
        )
