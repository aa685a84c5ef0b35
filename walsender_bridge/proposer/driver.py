"""Runs a proposer's core: the primary's stream, the safekeepers' connections, the queue of WAL, and the clock.

One thread and one epoll for everything that a commit waits for. A `Session` is one process of the protocol: a UUID
of its own, one election, and its end when the primary's connection breaks (a server that restarted is looked at
anew) or the core says `Stop`. A safekeeper's connection that breaks is made again, and the core resumes it.

Invariant: the primary is told of an LSN only as the effect `Feedback` says. Until the first one it is told 0,
which is no position, so no commit returns.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from walsender_bridge import fail_point
from walsender_bridge.capture.handover import Waker
from walsender_bridge.errors import ConnectionFailedError, MalformedMessageError, NotSupportedError
from walsender_bridge.proposer import effects as e
from walsender_bridge.proposer.clean_segments import CleanSegments
from walsender_bridge.proposer.core import Phase, Proposer
from walsender_bridge.proposer.ending import ended
from walsender_bridge.proposer.link import CONNECT_SECONDS, DIAL_SECONDS, FAULT_SECONDS, Link, dial
from walsender_bridge.proposer.member_changes import Address, MemberChanges
from walsender_bridge.proposer.primary import Job, OlderWal, PrimaryStream
from walsender_bridge.proposer.report import keeps_up, report
from walsender_bridge.proposer.shutdown_watch import ShutdownWatch
from walsender_bridge.proposer.status import completed
from walsender_bridge.proposer.wal_queue import WalQueue
from walsender_bridge.proposer.wal_source import WalSource
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration
from walsender_bridge.safekeeper.frames import decode
from walsender_bridge.wire.lsn import format_lsn
from walsender_bridge.wire.replication import (
    XLOG_DATA,
    XLOG_HEADER_SIZE,
    hot_standby_feedback,
    parse_keepalive,
    parse_xlog_header,
    status_update,
)

#: Seconds between two ticks of the core: heartbeats, tries.
TICK_SECONDS = 0.2
#: Seconds between two reports to the primary when nothing changes.
REPORT_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Settings:
    """`safekeepers`: (host, port) of each. `slot`: the idle physical slot that keeps WAL for them.

    `members_file`: where an operator asks for another membership (`member_changes.py`).
    """

    dsn: str
    safekeepers: tuple[Address, ...]
    application_name: str
    slot: str
    limits: e.Limits = e.Limits()  # noqa: RUF009  # it is frozen
    members_file: Path | None = None


class Session:
    """See the module. `tell(commit_lsn, phase)` hears of every change and tick; `source` stands in for the primary."""

    def __init__(
        self,
        settings: Settings,
        configuration: Configuration,
        tell: Callable[[int, Phase], None],
        *,
        purpose: m.Purpose = m.Purpose.ATTACH,
        source: WalSource | None = None,
    ) -> None:
        """Connects to the primary. Raises what `PrimaryStream` raises."""
        self._settings = settings
        self._tell = tell
        self._stopped = False
        self._stream = source or PrimaryStream.connect(
            settings.dsn, application_name=settings.application_name
        )
        self._waker = Waker()
        self._links: dict[int, Link] = {}
        self._changes = MemberChanges(settings.members_file)
        #: By the peer's number; they only become more.
        self._addresses = list(dict.fromkeys((*settings.safekeepers, *self._changes.look())))
        self._faults: dict[int, str] = {}
        self._dial_at: dict[int, float] = {}
        self._poll = select.epoll()
        self._by_fd: dict[int, int] = {}
        try:
            server = self._stream.server_info()
            primary = self._stream.primary()
            kept = self._stream.hold_wal(settings.slot)
        except BaseException:
            self._stream.close()
            raise
        lineage = primary.lineage if primary else e.Lineage(0)  # of which nothing is asked
        self._older = OlderWal(settings.dsn, settings.slot, lineage, self._waker)
        self._timeline = lineage.timeline
        self.core = Proposer(
            int.from_bytes(os.urandom(16), "big"),
            server,
            primary,
            configuration,
            len(self._addresses),
            purpose=purpose,
            limits=settings.limits,
            primary_begin=kept,
        )
        self._queue = WalQueue(0)
        self._clean = CleanSegments(0, server.segment_size)
        self._streaming = False
        #: Bytes of the last `WalRead` for each safekeeper, and of a comparison: the two sides.
        self._hands: dict[int, tuple[int, memoryview]] = {}
        self._sides: dict[e.CompareWal, bytes] = {}
        self._events: deque[e.Event] = deque()
        self._commit = 0
        self._reported_at = 0.0
        self._shutdown = ShutdownWatch()
        self._phase = Phase.GREETING
        self._stop: e.Stop | None = None

    def stop(self) -> None:
        """End `run` soon. May be called from a signal handler."""
        self._stopped = True
        self._waker.wake()

    def run(self) -> None:
        """Until `stop`. Raises `ConnectionFailedError` (the primary), and what a `Stop` means."""
        try:
            self._poll.register(self._stream, select.EPOLLIN)
            self._poll.register(self._waker.fileno(), select.EPOLLIN)
            tick_at = 0.0
            while not self._stopped and self._stop is None:
                now = time.monotonic()
                if now >= tick_at:
                    tick_at = now + TICK_SECONDS
                    self._look_for_changes()
                    self._dial(now)
                    self._handle(e.Tick())
                    self._tell(self._commit, self._phase)
                    if now >= self._reported_at + REPORT_SECONDS:
                        self._report(now)
                self._turn(tick_at - time.monotonic())
            if self._stop is not None:
                raise ended(self._stop, self._stream.where)
        finally:
            self._close()

    def _close(self) -> None:
        for link in self._links.values():
            link.end.close()
        self._stream.close()
        self._older.close()
        self._waker.close()
        self._poll.close()

    # -- the loop -----------------------------------------------------------------------------------

    def _turn(self, seconds: float) -> None:
        stream = self._stream.fileno()
        for descriptor, events in self._poll.poll(max(seconds, 0.0)):
            if descriptor == stream:
                self._take_wal()
            elif descriptor == self._waker.fileno():
                self._waker.clear()
                for job, data in self._older.answers():
                    self._older_came(job, data)
            elif (peer := self._by_fd.get(descriptor)) is not None:
                self._serve(peer, events)
            if self._stop is not None:
                return
        self._flush_links()
        more = 0 if self._stream.flush() else select.EPOLLOUT
        self._poll.modify(self._stream, select.EPOLLIN | more)

    def _take_wal(self) -> None:
        """What the primary has sent: one event for all of it."""
        begin, reply = self._queue.end, False
        for payload in self._stream.receive() if self._streaming else ():
            if payload[0] != XLOG_DATA:
                reply |= parse_keepalive(payload).reply_requested
                continue
            if parse_xlog_header(payload).start_lsn != self._queue.end:
                raise MalformedMessageError("WAL out of order", where=self._stream.where)
            self._queue.append(memoryview(payload)[XLOG_HEADER_SIZE:])
        if self._queue.end > begin:
            self._clean.pass_over(self._queue)
            self._handle(e.WalReceived(begin, self._queue.end))
        if reply:
            self._shutdown.asked(time.monotonic(), self._commit, self._stream.where)
            self._report(time.monotonic())

    def _report(self, now: float) -> None:
        if not self._streaming:
            return
        self._reported_at = now
        self._stream.send(
            status_update(
                write=self._commit, flush=self._commit, apply=0, now_us=time.time_ns() // 1000
            )
        )

    # -- safekeepers --------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What `report.py` and `status.py` say of this session."""
        for peer in [each for each in self._faults if keeps_up(self.core, each)]:
            del self._faults[peer]
        told = report(self.core, self._addresses, self._faults, self._changes)
        heard = {peer: link.since for peer, link in self._links.items()}
        return completed(told, self.core, heard, time.monotonic())

    def _look_for_changes(self) -> None:
        known = set(self._addresses)
        self._addresses += [each for each in self._changes.look() if each not in known]
        wanted = self._changes.next(self.core.configuration, self.core.streaming)
        if wanted is not None:
            self._handle(wanted)

    def _dial(self, now: float) -> None:
        for peer, (host, port) in enumerate(self._addresses):
            link = self._links.get(peer)
            if link is not None:
                if not link.connected and now - link.since > CONNECT_SECONDS:
                    self._broken(peer, "no answer to the connection")
                continue
            if now < self._dial_at.get(peer, 0.0):
                continue
            self._dial_at[peer] = now + DIAL_SECONDS
            if (link := dial(host, port)) is None:
                continue
            self._links[peer] = link
            self._by_fd[link.end.fileno()] = peer
            self._poll.register(link.end, select.EPOLLIN | select.EPOLLOUT)

    def _serve(self, peer: int, events: int) -> None:
        link = self._links[peer]
        try:
            if not link.connected:
                if events & (select.EPOLLERR | select.EPOLLHUP):
                    raise ConnectionFailedError("refused", where=link.end.where)
                link.connected = True
                self._handle(e.PeerConnected(peer))
            if events & select.EPOLLIN:
                link.end.receive()
                link.since = time.monotonic()
                for header, body in link.end.frames():
                    message = decode(header, b"" if header.carries_wal else body)
                    if isinstance(message, m.Fetched):
                        self._fetched(link, message, body)
                    elif isinstance(message, m.ToProposer):
                        self._handle(e.PeerReceived(peer, message))
                    else:
                        raise MalformedMessageError("a proposer's message", where=link.end.where)
                    if self._links.get(peer) is not link or self._stop is not None:
                        return
            elif events & (select.EPOLLERR | select.EPOLLHUP):
                raise ConnectionFailedError("the connection broke", where=link.end.where)
        except (ConnectionFailedError, MalformedMessageError, NotSupportedError) as error:
            if self._links.get(peer) is link:
                self._broken(peer, error.what)

    def _broken(self, peer: int, reason: str) -> None:
        link = self._drop(peer)
        if link.connected:
            _log.info("safekeeper's connection ended", safekeeper=link.end.where, reason=reason)
            self._handle(e.PeerClosed(peer))
        for fetch in link.fetches:
            self._fetch_failed(fetch)

    def _drop(self, peer: int) -> Link:
        link = self._links.pop(peer)
        descriptor = link.end.fileno()
        del self._by_fd[descriptor]
        self._poll.unregister(descriptor)
        link.end.close()
        return link

    def _flush_links(self) -> None:
        for peer, link in list(self._links.items()):
            if link.connected:
                try:
                    link.end.flush()
                    self._poll.modify(link.end, link.end.events)
                except ConnectionFailedError as error:
                    self._broken(peer, error.what)

    # -- WAL that is not in the queue ---------------------------------------------------------------

    def _fetched(self, link: Link, message: m.Fetched, body: memoryview) -> None:
        """A piece of what was asked of this safekeeper. An empty one: it does not hold it any more."""
        if not link.fetches:
            raise MalformedMessageError("WAL that nobody asked for", where=link.end.where)
        fetch = link.fetches[0]
        link.fetched += body
        if message.length and len(link.fetched) < fetch.end_lsn - fetch.begin_lsn:
            return
        link.fetches.popleft()
        data, link.fetched = bytes(link.fetched), bytearray()
        if len(data) != fetch.end_lsn - fetch.begin_lsn:
            self._fetch_failed(fetch)
        elif isinstance(fetch, e.CompareWal):
            self._side(fetch, data)
        else:
            self._in_hand(fetch, data)

    def _fetch_failed(self, fetch: e.ReadWal | e.CompareWal) -> None:
        if isinstance(fetch, e.CompareWal):
            self._sides.pop(fetch, None)
            self._handle(e.WalCompared(fetch.peer, fetch.end_lsn, None))
        else:
            self._in_hand(fetch, b"")

    def _older_came(self, job: Job, data: bytes) -> None:
        wanted = job.tag
        if isinstance(wanted, e.ReadWal):
            self._in_hand(wanted, data)
        elif isinstance(wanted, e.CompareWal):
            if data:
                self._side(wanted, data)
            else:
                self._fetch_failed(wanted)

    def _side(self, wanted: e.CompareWal, data: bytes) -> None:
        """One side of a comparison; with the other one there is an answer."""
        other = self._sides.pop(wanted, None)
        if other is None:
            self._sides[wanted] = data
        else:
            self._handle(e.WalCompared(wanted.peer, wanted.end_lsn, other == data))

    def _in_hand(self, read: e.ReadWal, data: bytes) -> None:
        self._hands[read.peer] = read.begin_lsn, memoryview(data)
        self._handle(e.WalRead(read.peer, read.begin_lsn, read.begin_lsn + len(data)))

    # -- events and effects -------------------------------------------------------------------------

    def _handle(self, event: e.Event) -> None:
        """The event, and those that its effects lead to, one after the other."""
        self._events.append(event)
        if len(self._events) > 1:
            return
        while self._events:
            for effect in self.core.step(self._events[0]):
                fail_point.hit(f"proposer-{type(effect).__name__}")
                self._perform(effect)
            self._events.popleft()
        if self.core.phase != self._phase:
            self._phase = self.core.phase
            self._tell(self._commit, self._phase)

    def _perform(self, effect: e.Effect) -> None:
        match effect:
            case e.SendWal(peer, begin, end):
                self._send_wal(effect)
            case e.SendMessage(peer, message):
                if (link := self._links.get(peer)) is not None:
                    link.end.send(message)
            case e.Feedback(lsn):
                self._commit = lsn
                self._report(time.monotonic())
                self._tell(lsn, self._phase)
            case e.ReleaseWal(lsn):
                self._queue.release(lsn)
            case e.ReadWal():
                self._read(effect)
            case e.CompareWal(peer, begin, end):
                self._fetch(peer, effect)
                self._older.ask(Job(effect, begin, end))
            case e.StartStreaming(node_id, lsn):
                _log.info("elected", node_id=str(node_id), lsn=format_lsn(lsn))
                self._queue = WalQueue(lsn)
                self._clean = CleanSegments(lsn, self.core.server.segment_size)
                self._stream.start_physical(lsn, self._timeline)
                self._streaming = True
                self._report(time.monotonic())
                self._take_wal()  # what came with the answer makes nothing readable
            case e.AdvanceSlot(lsn):
                self._let_go(lsn)
            case e.ClosePeer(peer):
                if peer in self._links:
                    self._broken(peer, "closed by the proposer")
            case e.PassFeedback(feedback):
                self._pass_feedback(feedback)
            case e.LocatePrimary():
                with PrimaryStream.connect(self._settings.dsn) as asked:
                    self._handle(e.PrimaryAt(asked.primary().flush_lsn))
            case e.PeerFault(peer, refused):
                host, port = self._addresses[peer]
                self._faults[peer] = refused.detail
                self._dial_at[peer] = time.monotonic() + FAULT_SECONDS
                _log.error("safekeeper refused", address=f"{host}:{port}", reason=refused.detail)
            case e.MarkRebuild(safekeeper):
                _log.error("safekeeper is to be rebuilt", safekeeper=f"{safekeeper:032x}")
            case e.MembersChanged(configuration):
                _log.info("membership", generation=configuration.generation)
            case e.Stop():
                self._stop = effect

    def _send_wal(self, effect: e.SendWal) -> None:
        link = self._links.get(effect.peer)
        if link is None:
            return
        begin, end = effect.begin_lsn, effect.end_lsn
        append = m.Append(
            self.core.node_id.term, begin, effect.commit_lsn, effect.restart_lsn, end - begin
        )
        views: list[memoryview] = []
        if end > begin:
            if begin >= self._queue.begin:
                views = [*self._queue.views(begin, end)]
            else:
                start, hand = self._hands.pop(effect.peer)
                views = [hand[begin - start : end - start]]
        link.end.send(append, views)

    def _read(self, effect: e.ReadWal) -> None:
        if effect.source == e.Source.PRIMARY:
            self._older.ask(Job(effect, effect.begin_lsn, effect.end_lsn))
        elif effect.donor is not None:
            self._fetch(effect.donor, effect)
        else:
            raise AssertionError("no spill file was announced")

    def _fetch(self, peer: int, wanted: e.ReadWal | e.CompareWal) -> None:
        link = self._links.get(peer)
        if link is None:
            self._fetch_failed(wanted)
            return
        link.fetches.append(wanted)
        link.end.send(m.Fetch(self.core.node_id.term, wanted.begin_lsn, wanted.end_lsn))

    def _let_go(self, lsn: int) -> None:
        """All have the WAL below: up to the record that goes on there, it may go."""
        keep, kept = self._clean.last_at(lsn), self.core.primary_begin
        if keep is not None and kept is not None and keep > kept:
            self._older.ask(Job(None, advance=keep))
            self._handle(e.PrimaryKeeps(keep))

    def _pass_feedback(self, feedback: m.HotStandbyFeedback) -> None:
        if self._streaming:
            now_us = time.time_ns() // 1000
            self._stream.send(hot_standby_feedback(**asdict(feedback), now_us=now_us))
