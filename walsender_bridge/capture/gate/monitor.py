"""Polls what the commit gate depends on, on a thread of its own, and publishes the gate's position.

A watch belongs to one session of capture, and polls the same server that the session streams from: another server's slots
prove nothing about this one's transactions. So its connection goes to the same host, every answer must be of the
session's timeline, and when its connection breaks the session ends with it.

PostgreSQL offers no notification for this. While transactions wait, the watch polls every `BUSY_SECONDS` as long as
the gate advances, and with increasing pauses up to `LONGEST_SECONDS` while it does not; otherwise once a second. A poll is one
query over shared memory (docs/decisions/capture.md).
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg

from walsender_bridge.capture import source
from walsender_bridge.capture.gate.core import Decided, GateState, ObservedServer, Rule, step
from walsender_bridge.capture.gate.invariants import check_invariants, checked
from walsender_bridge.capture.gate.record import GateRecord
from walsender_bridge.capture.gate.slots import GateSlot, Sender
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.capture.status_record import CandidateStatus, GateStatus
from walsender_bridge.errors import ConnectionFailedError, TusklineError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, format_lsn
from walsender_bridge.postgres.protocol.replication import SystemIdentity
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.commit_page import CommitPageReader
from walsender_bridge.runtime.sql import load

#: Seconds from when a transaction starts to wait until the first poll: a standby's disk is about as fast as ours.
FIRST_SECONDS = 0.02
BUSY_SECONDS = 0.05
LONGEST_SECONDS = 0.2
IDLE_SECONDS = 1.0

_log = logs.logger()


class Watch(Protocol):
    """The gate of a session, for its poll loop. No call blocks."""

    def position(self) -> Lsn:
        """The LSN up to which transactions may be shown, possibly late. Raises the error that ended the watch."""

    def want(self, lsn: Lsn) -> None:
        """Note that the log has a transaction that ends here."""

    def status(self) -> GateStatus | None:
        """The gate's part of the status file; None without a gate, or before its first poll."""


class GateMonitor(Protocol):
    """Creates the watch of a session."""

    @property
    def failover(self) -> bool:
        """Whether there are failover candidates."""

    def watch(
        self, here: CaptureSource, identity: SystemIdentity, shown: Lsn, wake: Callable[[], None]
    ) -> AbstractContextManager[Watch]:
        """`here`: the source, with a DSN of the one server that the session streams from, which is `identity`.

        `shown`: the end LSN of what is committed in the log. `wake` is called when the position has moved.
        """


def slots_of(facts: dict[str, Any]) -> dict[str, GateSlot]:
    """The slots in the result of sql/gate/slots.sql."""
    return {
        name: GateSlot(
            restart_lsn=slot["restart_lsn"],
            sender=_sender(slot["sender"], facts["may_see"]),
            physical=slot["physical"],
            lost=slot["wal_status"] == "lost",
        )
        for name, slot in facts["slots"].items()
    }


def _sender(found: dict[str, Any] | None, may_see: bool) -> Sender | None:
    if found is None:
        return None
    # With the right to see all sessions, an empty state means that it is not a walsender, or has just ended.
    return Sender(**{**found, "state": found["state"] or ("" if may_see else None)})


class _Open:
    """A gate that is always open."""

    def position(self) -> Lsn:
        return MAX_LSN

    def want(self, lsn: Lsn) -> None:
        del lsn

    def status(self) -> None:
        return None


class OpenGate:
    """No candidates and no safekeepers: everything that the source has committed may be shown."""

    failover = False

    @contextmanager
    def watch(
        self, here: CaptureSource, identity: SystemIdentity, shown: Lsn, wake: Callable[[], None]
    ) -> Iterator[Watch]:
        """A watch that is open."""
        del here, identity, shown, wake
        yield _Open()


@dataclass(frozen=True, slots=True)
class ServerGate:
    """Waits for candidates and safekeepers according to `rule`.

    `record`: the file of decisions. `commit_page`: the page in which the safekeepers' proposer publishes the quorum's LSN.
    """

    rule: Rule
    record: Path
    commit_page: Path | None = None

    @property
    def failover(self) -> bool:
        """Whether there are candidates."""
        return bool(self.rule.candidates)

    @contextmanager
    def watch(
        self, here: CaptureSource, identity: SystemIdentity, shown: Lsn, wake: Callable[[], None]
    ) -> Iterator[Watch]:
        """A watch that has polled once. Raises connection errors, and `CorruptError` for the record."""
        with closing(_ServerWatch(self, here, identity, shown, wake)) as watch:
            watch.start()
            yield watch


class _ServerWatch:
    def __init__(
        self,
        gate: ServerGate,
        here: CaptureSource,
        identity: SystemIdentity,
        shown: Lsn,
        wake: Callable[[], None],
    ) -> None:
        self._gate = gate
        self._here = here
        self._identity = identity
        self._wake = wake
        self._record = GateRecord(gate.record)
        self._page = None if gate.commit_page is None else CommitPageReader(gate.commit_page)
        self._state = GateState(
            gate.rule,
            timeline=self._record.timeline,
            shown=shown,
            standings=dict(self._record.standings),
            streamed=set(self._record.streamed),
        )
        self._changed = threading.Condition()
        self._polled = threading.Event()
        self._wanted = 0
        self._closed = False
        self._error: TusklineError | None = None
        self._position = 0
        self._status: GateStatus | None = None
        #: Since when transactions have waited without any passing; seconds since the Unix epoch.
        self._stuck_since: float | None = None
        self._query = load("gate/slots").encode()
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)

    def start(self) -> None:
        """Start polling, and wait for the first poll. Raises its error."""
        self._thread.start()
        self._polled.wait()
        self.position()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # A thread blocked by a hung server ends by itself within its connection's time limit.
        self._thread.join(1.0)

    def position(self) -> Lsn:
        if self._error is not None:
            raise self._error
        return self._position

    def want(self, lsn: Lsn) -> None:
        if lsn <= self._wanted:
            return
        with self._changed:
            self._wanted = lsn
            if lsn > self._position:
                self._changed.notify_all()

    def status(self) -> GateStatus | None:
        return self._status

    # -- the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with source.connect(self._here) as connection:
                pause = FIRST_SECONDS
                while not self._closed:
                    moved = self._poll(connection)
                    self._polled.set()
                    pause = self._rest(BUSY_SECONDS if moved else min(pause * 2, LONGEST_SECONDS))
        except TusklineError as error:
            self._error = error
        except Exception as error:
            # Any error ends the watch: a gate that is no longer polled must not look like a closed one.
            _log.exception("commit gate watch failed")
            self._error = TusklineError(f"commit gate watch failed: {error}"[:400])
        self._polled.set()
        self._wake()

    def _rest(self, pause: float) -> float:
        """Wait until the next poll is due; return the intended pause."""
        with self._changed:
            if self._wanted > self._position:
                self._changed.wait_for(lambda: self._closed, pause)
                return pause
            self._changed.wait_for(
                lambda: self._closed or self._wanted > self._position, IDLE_SECONDS
            )
            if self._wanted > self._position:
                self._changed.wait_for(lambda: self._closed, FIRST_SECONDS)
        return FIRST_SECONDS

    def _poll(self, connection: psycopg.Connection[Any]) -> bool:
        """Query the server and step the gate; return whether its position has advanced."""
        names = {"slots": list(self._gate.rule.candidates)}
        row = connection.execute(self._query, names).fetchone()
        assert row is not None
        if self._closed:
            return False  # the next session's watch is in charge now
        position = self._position
        seen, before = self._observed(row[0]), checked(self._state)
        effects = step(self._state, seen)
        check_invariants(self._state, before, seen)
        for effect in effects:
            if isinstance(effect, Decided):
                self._record.add(effect)
                _log.warning(
                    f"commit gate: {effect.decision}",
                    source=self._here.name,
                    candidate=effect.candidate,
                    timeline=effect.timeline,
                    lsn=format_lsn(effect.position),
                    why=effect.why,
                )
            else:
                position = effect.lsn
        moved = position > self._position
        if position >= self._wanted:
            self._stuck_since = None
        elif moved or self._stuck_since is None:
            self._stuck_since = time.time()
        self._status = self._to_status(position)
        if not moved:
            return False
        self._position = position
        self._wake()
        return True

    def _observed(self, found: dict[str, Any]) -> ObservedServer:
        timeline = found["timeline"]
        if found["in_recovery"] or timeline != self._identity.timeline:
            now = "a standby" if found["in_recovery"] else f"on timeline {timeline}"
            raise ConnectionFailedError(
                f"the server is now {now}, but the session started on timeline {self._identity.timeline}",
                where=self._here.where,
            )
        quorum, why = self._quorum()
        return ObservedServer(
            now=time.monotonic(),
            timeline=timeline,
            flush_lsn=found["flush_lsn"],
            slots=slots_of(found),
            was=found["was"] or "",
            quorum=quorum,
            quorum_why=why,
        )

    def _quorum(self) -> tuple[Lsn | None, str]:
        """The LSN that a quorum of safekeepers has of this timeline, from its proposer, or why it is unknown."""
        if not self._gate.rule.safekeepers or self._page is None:
            return None, ""
        return self._page.committed(self._identity.system_id, self._identity.timeline)

    def _to_status(self, position: Lsn) -> GateStatus:
        state = self._state
        return GateStatus(
            open=state.open,
            position_lsn=position,
            holding=tuple(state.holding(self._wanted)),
            stuck_since=self._stuck_since,
            quorum_lsn=state.quorum if state.rule.safekeepers else None,
            candidates=tuple(
                CandidateStatus(each.slot, each.standing, each.flush_lsn, each.away)
                for each in state.candidates.values()
            ),
        )
