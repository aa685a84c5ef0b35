"""Runs a proposer's core: the primary's stream, the safekeepers' connections, the queue of WAL, and the clock.

One thread and one epoll serve everything that a commit waits for; calls that may wait for a server go to the blocking
executor. A `ProposerSession` is one process of the protocol: a UUID of its own and one election. It ends when the
primary's connection breaks (a restarted server is probed by a new session) or the core returns `Stop`. A safekeeper's
connection that breaks is reopened, and the core resumes it.

Invariant: an LSN is reported to the primary only by the effect `Feedback`. Until the first one 0 is reported, which is
no position, so no commit returns. A violated invariant of the core ends the session before any effect of that event.

Memory is bounded: beyond half the queue, and what was under way, of WAL that no quorum has yet, the primary is not read
any further, and TCP holds its walsender back. Commits then wait for the quorum anyway.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from walsender_bridge.errors import (
    AuthenticationError,
    ConnectionFailedError,
    MalformedMessageError,
    NotSupportedError,
    TusklineError,
)
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.proposer import effects as e
from walsender_bridge.quorum.proposer import invariants
from walsender_bridge.quorum.proposer.blocking_executor import BlockingExecutor
from walsender_bridge.quorum.proposer.catch_up.feed import CatchUpFeed
from walsender_bridge.quorum.proposer.catch_up.primary_wal import PrimaryWalReader
from walsender_bridge.quorum.proposer.catch_up.wal_reads import WalReads
from walsender_bridge.quorum.proposer.core import Phase, Proposer
from walsender_bridge.quorum.proposer.exit_error import ended
from walsender_bridge.quorum.proposer.links import Links, SafekeeperLink
from walsender_bridge.quorum.proposer.member_changes import MemberChanges
from walsender_bridge.quorum.proposer.peer import PeerState
from walsender_bridge.quorum.proposer.primary.clean_segments import CleanSegments
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream, WalSlot
from walsender_bridge.quorum.proposer.primary.link import PrimaryLink
from walsender_bridge.quorum.proposer.primary.wal_source import WalSource
from walsender_bridge.quorum.proposer.quorum_id_record import QuorumRecord
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.proposer.status import Surroundings, keeps_up, of_session
from walsender_bridge.quorum.proposer.status_record import SessionStatus
from walsender_bridge.quorum.proposer.wal_queue import WalQueue
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.frames import decode, encode
from walsender_bridge.runtime import fail_point, logs
from walsender_bridge.runtime.gc_control import Sweeper
from walsender_bridge.runtime.tls_context import client_context
from walsender_bridge.runtime.waker import Waker

#: Seconds between two ticks of the core: heartbeats, retries.
TICK_SECONDS = 0.2
#: Seconds that a primary ahead of the quorum is held back while commit_lsn does not advance. A shutdown is announced in
#: the stream, which is not read meanwhile, so the shutdown waits this long.
HOLD_SECONDS = 3.0
#: A safekeeper in one of these states sends nothing unless asked.
_QUIET = (PeerState.GREETED, PeerState.VOTED)
#: What a safekeeper, or what is at its address, does that costs it its connection.
_ENDS_CONNECTION = (
    AuthenticationError,
    ConnectionFailedError,
    MalformedMessageError,
    NotSupportedError,
)

_log = logs.logger()


class ProposerSession:
    """See the module. `report(commit_lsn, phase)` is called at every change and tick; `source` replaces the primary.

    `above`: the greatest term known to earlier sessions of this process. `quorum`: the id for a membership without one;
    `formed`: the quorum's id is recorded. `may_begin`: see `Proposer`.
    """

    def __init__(
        self,
        settings: ProposerSettings,
        configuration: Configuration,
        report: Callable[[Lsn, Phase], None],
        *,
        purpose: m.Purpose = m.Purpose.ATTACH,
        source: WalSource | None = None,
        above: int = 0,
        quorum: int = 0,
        formed: bool = False,
        may_begin: bool = False,
    ) -> None:
        """Connects to the primary. Raises what `PrimaryStream` raises."""
        self._settings = settings
        self._report = report
        self._stopped = False
        connection: WalSource = source or PrimaryStream.connect(
            settings.dsn, application_name=settings.application_name
        )
        try:
            server = connection.server_info()
            # Before the position, with whose segment a new quorum begins: a checkpoint removes what no slot keeps yet.
            kept = connection.hold_wal(settings.slot)
            primary = connection.primary()
        except BaseException:
            connection.close()
            raise
        self._waker = Waker()
        self._executor = BlockingExecutor(self._waker)
        self._poll = select.epoll()
        self._primary = PrimaryLink(connection, self._poll)
        self._changes = MemberChanges(settings.members_file)
        #: By the peer's number; the list only grows.
        self._addresses = list(dict.fromkeys((*settings.safekeepers, *self._changes.poll())))
        tls = None if settings.tls is None else client_context(settings.tls)
        self._links = Links(self._addresses, self._poll, tls=tls)
        self._lineage = (
            primary.lineage if primary is not None else e.Lineage(0)
        )  # which is not read from
        self._primary_wal = PrimaryWalReader(
            settings.dsn, self._lineage, self._executor, self._poll
        )
        self._feed = CatchUpFeed(lambda: self.core, primary, server.segment_size, self._send)
        self._reads = WalReads(
            self._primary_wal, self._handle, self._send, lambda: self.core.node_id.term, self._feed
        )
        self._quorum_record = QuorumRecord(
            settings.quorum_file, settings.dsn, settings.slot, self._executor, formed=formed
        )
        self._slot = WalSlot(settings.dsn, settings.slot)
        self.core = Proposer(
            int.from_bytes(os.urandom(16), "big"),
            server,
            primary,
            configuration,
            len(self._addresses),
            purpose=purpose,
            limits=settings.limits,
            primary_begin=kept,
            above=above,
            quorum=quorum,
            configured=len(set(settings.safekeepers)),
            may_begin=may_begin,
        )
        self._checked = invariants.checked(self.core)
        self._queue = WalQueue(0)
        self._clean = CleanSegments(0, server.segment_size)
        #: Bytes above commit_lsn at which reading from the primary pauses.
        self._most_ahead = settings.limits.queue_bytes // 2
        #: Frame and WAL of the last Append from the queue, reused for the next safekeeper.
        self._same: tuple[tuple[int, int, int, int], bytes, list[memoryview]] | None = None
        #: Safekeepers for which output was queued in this turn.
        self._to_flush: dict[int, SafekeeperLink] = {}
        self._events: deque[e.Event] = deque()
        self._sweeper = Sweeper()
        self._start = 0
        #: Time of the last advance of commit_lsn while the primary was ahead of it.
        self._moved_at = 0.0
        self._advancing = self._asking = False
        self._faults: dict[int, str] = {}
        self._phase = Phase.GREETING
        self._stop: e.Stop | None = None

    def stop(self) -> None:
        """End `run` soon. May be called from a signal handler."""
        self._stopped = True
        self._waker.wake()

    def run(self) -> None:
        """Run until `stop`. Raises `ConnectionFailedError` (the primary), `InvariantError`, and the error of a `Stop`."""
        try:
            self._poll.register(self._waker.fileno(), select.EPOLLIN)
            tick_at = 0.0
            while not self._stopped and self._stop is None:
                now = time.monotonic()
                if now >= tick_at:
                    tick_at = now + TICK_SECONDS
                    self._tick(now)
                self._turn(tick_at - now)
            if self._stop is not None:
                raise ended(self._stop, self._primary.where)
        finally:
            self._close()

    def _close(self) -> None:
        self._links.close()
        self._primary.close()
        self._primary_wal.close()
        self._executor.close()
        self._slot.close()
        self._poll.close()
        self._waker.close()

    # -- the loop -----------------------------------------------------------------------------------

    def _turn(self, seconds: float) -> None:
        stream = self._primary.fileno()
        for descriptor, events in self._poll.poll(max(seconds, 0.0)):
            if descriptor == stream:
                self._take_wal(events)
            elif (peer := self._links.by_fd.get(descriptor)) is not None:
                self._serve(peer, events)
            elif descriptor == self._waker.fileno():
                self._waker.clear()
                self._executor.serve()
            elif self._primary_wal.owns(descriptor):
                self._primary_wal.serve(descriptor)
            if self._to_flush:
                self._flush()
            if self._stop is not None:
                return

    def _tick(self, now: float) -> None:
        states = self.core.peers
        for peer, reason in self._links.silent(now, lambda n: states[n].state not in _QUIET):
            self._broken(peer, reason)
        self._poll_member_changes()
        for peer in [each for each in self._faults if keeps_up(self.core, each)]:
            del self._faults[peer]
            self._links.settled(peer)
        for peer, reason in self._links.dial(now):
            self._fault(peer, reason)
        self._primary_wal.tick()
        self._handle(e.Tick())
        self._feed.tick()
        self._flush()
        self._report(self._primary.commit_lsn, self._phase)
        self._pause()
        self._primary.tick(now)
        self._sweeper.tick(now)

    def _take_wal(self, events: int) -> None:
        """Take what the primary has sent, as one event."""
        queue = self._queue
        begin = queue.end
        self._primary.take(events, queue)
        if queue.end > begin:
            self._clean.pass_over(queue)
            self._handle(e.WalReceived(begin, queue.end))
        self._pause()

    def _pause(self) -> None:
        """Pause reading from a primary that is far ahead of the quorum, as long as commit_lsn advances.

        Without a quorum it is read to its end, and the queue drops WAL: a server that shuts down must send everything.
        """
        ahead = self._queue.end - max(self._primary.commit_lsn, self._start) >= self._most_ahead
        self._primary.pause(ahead and time.monotonic() - self._moved_at < HOLD_SECONDS)

    # -- safekeepers --------------------------------------------------------------------------------

    def status(self) -> SessionStatus:
        """The status of this session."""
        around = Surroundings(
            addresses=self._addresses,
            faults=self._faults,
            changes=self._changes,
            configured=self._settings.safekeepers,
            goals=self._feed.goals(),
            stuck=self._feed.stuck(),
            heard={peer: link.since for peer, link in self._links.by_peer.items()},
            now=time.monotonic(),
        )
        return of_session(self.core, around)

    def _poll_member_changes(self) -> None:
        known = set(self._addresses)
        self._addresses += [each for each in self._changes.poll() if each not in known]
        wanted = self._changes.next(self.core.membership, self.core.streaming)
        if wanted is not None:
            self._handle(wanted)

    def _serve(self, peer: int, events: int) -> None:
        link = self._links.by_peer[peer]
        end = link.end
        try:
            if not link.connected:
                if events & (select.EPOLLERR | select.EPOLLHUP):
                    raise ConnectionFailedError("refused", where=end.where)
                link.connected = True
                self._handle(e.PeerConnected(peer))
            if events & select.EPOLLIN:
                end.receive()
                link.since = time.monotonic()
                for header, body in end.frames():
                    message = decode(header, b"" if header.carries_wal else body)
                    if isinstance(message, m.Fetched):
                        self._reads.fetched(link, message, body)
                    elif isinstance(message, m.Held):
                        self._feed.held(peer, message)
                    elif isinstance(message, m.ToProposer):
                        self._handle(e.PeerReceived(peer, message))
                    else:
                        raise MalformedMessageError(
                            "received a proposer's message", where=end.where
                        )
                    if self._links.by_peer.get(peer) is not link or self._stop is not None:
                        return
            elif events & (select.EPOLLERR | select.EPOLLHUP):
                raise ConnectionFailedError("the connection broke", where=end.where)
            if events & select.EPOLLOUT or end.sending:
                self._to_flush[peer] = link
        except _ENDS_CONNECTION as error:
            if self._links.by_peer.get(peer) is link:
                self._broken(peer, error.what)
            if isinstance(error, AuthenticationError):
                self._fault(peer, error.what)
            elif not isinstance(error, ConnectionFailedError):
                self._fault(peer, f"peer is not a safekeeper of this version: {error.what}")

    def _broken(self, peer: int, reason: str) -> None:
        link = self._links.drop(peer)
        if link.connected:
            _log.info("safekeeper's connection ended", safekeeper=link.end.where, reason=reason)
            self._handle(e.PeerClosed(peer))
        for fetch in link.fetches:
            self._reads.failed(fetch)

    def _flush(self) -> None:
        """Send what is queued. A connection that breaks may queue more."""
        while self._to_flush:
            waiting, self._to_flush = self._to_flush, {}
            for peer, link in waiting.items():
                if self._links.by_peer.get(peer) is link and link.connected:
                    try:
                        link.end.flush()
                        self._links.watch(link)
                    except ConnectionFailedError as error:
                        self._broken(peer, error.what)

    # -- events and effects -------------------------------------------------------------------------

    def _handle(self, event: e.Event) -> None:
        """Handle the event, and those that its effects cause, one after another."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for effect in self._step(self._events[0]):
                if fail_point.ARMED:
                    fail_point.hit(f"proposer-{type(effect).__name__}")
                self._perform(effect)
            self._events.popleft()
        if self.core.phase != self._phase:
            self._phase = self.core.phase
            self._report(self._primary.commit_lsn, self._phase)

    def _step(self, event: e.Event) -> list[e.Effect]:
        """The core's effects. Raises `InvariantError` before any of them is performed."""
        effects = self.core.step(event)
        hot = invariants.is_hot(event)
        check = invariants.check_commit if hot else invariants.check_invariants
        self._checked = check(self.core, self._checked)
        return effects

    def _perform(self, effect: e.Effect) -> None:
        match effect:
            case e.SendWal():
                self._send_wal(effect)
            case e.Feedback(lsn):
                self._primary.commit_lsn = lsn
                self._primary.report()
                if self._queue.end - lsn >= self._most_ahead // 2:
                    self._moved_at = time.monotonic()
                self._pause()
                self._report(lsn, self._phase)
            case e.ReleaseWal(lsn):
                self._queue.release(lsn)
            case e.AdvanceSlot(lsn):
                self._release_slot_wal(lsn)
            case e.SendMessage(peer, message):
                self._send(peer, message)
            case e.ReadWal():
                self._reads.read(effect)
            case e.CompareWal():
                self._reads.compare(effect)
            case e.StartStreaming(node_id, lsn):
                _log.info("elected", node_id=str(node_id), lsn=format_lsn(lsn))
                self._start_streaming(lsn)
            case e.ClosePeer(peer):
                if peer in self._links.by_peer:
                    self._broken(peer, "closed by the proposer")
            case e.PassFeedback(feedback):
                self._primary.pass_feedback(feedback)
            case e.LocatePrimary():
                self._ask_where()
            case e.PeerFault(peer, refused):
                self._fault(peer, refused.detail)
            case e.MarkRebuild(safekeeper):
                _log.error("safekeeper needs a full resync", safekeeper=f"{safekeeper:032x}")
            case e.MembersChanged(configuration):
                _log.info("membership", generation=configuration.generation)
            case e.MembersSettled(configuration):
                _log.info("membership is settled", generation=configuration.generation)
                self._quorum_record.settled(configuration.quorum)
            case e.Stop():
                self._stop = effect

    def _send(self, peer: int, message: m.ToSafekeeper, *wal: memoryview) -> SafekeeperLink | None:
        """Queue a message, followed by WAL; None if there is no connection."""
        link = self._links.by_peer.get(peer)
        if link is not None:
            link.end.send(message, list(wal))
            self._to_flush[peer] = link
        return link

    def _start_streaming(self, lsn: Lsn) -> None:
        self._start, self._moved_at = lsn, time.monotonic()
        self._queue = WalQueue(lsn)
        self._clean = CleanSegments(lsn, self.core.server.segment_size)
        lineage = self._lineage
        self._primary.start(lsn, lineage.timeline_at(lsn), lineage.timeline)

    def _send_wal(self, effect: e.SendWal) -> None:
        peer, begin, end = effect.peer, effect.begin_lsn, effect.end_lsn
        link = self._links.by_peer.get(peer)
        if link is None or (begin == end and link.end.sending):
            return  # a peer that does not read gets no further heartbeats
        key = begin, end, effect.commit_lsn, effect.restart_lsn
        if self._same is not None and self._same[0] == key:
            _, frame, views = self._same
        else:
            term = self.core.node_id.term
            frame = encode(
                m.Append(term, begin, effect.commit_lsn, effect.restart_lsn, end - begin)
            )
            if begin == end or self._queue.holds(begin, end):
                views = self._queue.views(begin, end) if end > begin else []
                self._same = key, frame, views
            else:
                views = [self._reads.hand(peer, begin, end)]
        link.end.send_frame(frame, views)
        self._to_flush[peer] = link

    def _fault(self, peer: int, detail: str) -> None:
        self._links.refused(peer)
        if self._faults.get(peer) != detail:
            self._faults[peer] = detail
            _log.error("safekeeper refused", address=self._links.where(peer), reason=detail)

    def _ask_where(self) -> None:
        """Request the primary's flush position; one request at a time."""
        if self._asking:
            return
        self._asking = True

        def ask() -> Lsn:
            with PrimaryStream.connect(self._settings.dsn) as asked:
                return asked.primary().flush_lsn

        def located(flush_lsn: Lsn | TusklineError) -> None:
            self._asking = False
            if isinstance(flush_lsn, TusklineError):
                raise flush_lsn
            self._handle(e.PrimaryAt(flush_lsn))

        self._executor.ask(ask, located)

    def _release_slot_wal(self, lsn: Lsn) -> None:
        """All have the WAL below: up to the record that its last byte belongs to, it may go.

        The next proposer compares that byte, too, so the segment that ends with it stays.
        """
        keep, kept = self._clean.last_at(lsn - 1), self.core.primary_begin
        if keep is None or kept is None or keep <= kept or self._advancing:
            return
        self._advancing = True
        self._executor.ask(partial(self._slot.advance, keep), self._advanced)
        self._handle(e.PrimaryKeeps(keep))

    def _advanced(self, result: Lsn | TusklineError) -> None:
        self._advancing = False
        if isinstance(result, TusklineError):
            _log.warning("could not advance the slot", slot=self._settings.slot, reason=result.what)
        elif self.core.streaming is not None:
            self._release_slot_wal(self.core.streaming.restart_lsn)
