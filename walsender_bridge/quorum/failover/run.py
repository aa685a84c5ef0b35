r"""Does what `failover.next_step` says, on real servers and safekeepers. The API of a failover.

    run = FailoverRun(settings)
    print(*run.plan(), sep="\n")     # a dry run: nobody is displaced, nothing is changed
    run.run()                        # until the safekeepers follow the candidate, or an error says why not
    abort(settings.proposer)         # or: the old primary goes on

Nothing is remembered outside the safekeepers and the servers: a run that was killed is started again. The elected
proposer stays in office, on a thread, until the candidate is to be promoted: it feeds safekeepers that lag behind, tells
readers what is committed, and whoever displaces it ends the run before the next step.

A server that cannot be reached, or a majority that does not answer, is tried again until the step's time is over: one
of them may be starting. When the proposer has gone with it, the run begins again with an election.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from walsender_bridge.errors import (
    ConnectionFailedError,
    DeadlineError,
    DivergedError,
    FencedError,
    OutvotedError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.quorum.failover import plan as failover
from walsender_bridge.quorum.failover.candidate import CandidateServer
from walsender_bridge.quorum.failover.compare import compare, compared_range
from walsender_bridge.quorum.failover.invariants import check_invariants
from walsender_bridge.quorum.failover.plan import FailoverQuorum, FailoverStep, PromotionCandidate
from walsender_bridge.quorum.failover.term import LeaderTerm
from walsender_bridge.quorum.proposer.driver import ProposerSession
from walsender_bridge.quorum.proposer.first_membership import find_membership
from walsender_bridge.quorum.proposer.handshake import ask_all
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.primary.wal_source import NoPrimary, StandbyStream
from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId, in_force
from walsender_bridge.quorum.proposer.quorum_id_record import known_on
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.messages import Purpose, SafekeeperGreeting, ServerInfo
from walsender_bridge.runtime import fail_point

#: Seconds between two looks.
_LOOK = 0.1

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """`proposer.dsn` is the candidate's. `upstream`: how it reaches the safekeepers' WAL servers (libpq; several hosts).

    `promote`, `slot`: see `CandidateServer`. `seconds`: how long each step may take.
    """

    proposer: ProposerSettings
    upstream: str
    promote: Callable[[], object] | None = None
    trusts_restore: bool = False
    seconds: float = 60.0
    slot: str | None = None


class FailoverRun:
    """See the module."""

    def __init__(self, settings: FailoverSettings) -> None:
        self._settings = settings
        self._proposer = settings.proposer
        self._server = CandidateServer(
            settings.proposer.dsn,
            settings.proposer.application_name,
            settings.upstream,
            settings.promote,
            settings.slot,
        )
        self._office: LeaderTerm | None = None
        #: When the step at hand has to be done, and what held it up last.
        self._deadline = 0.0
        self._reason = ""

    def plan(self) -> list[FailoverStep]:
        """What a run would do now, as far as can be told without an election. Raises what `run` raises."""
        info = self._server.server_info()
        members = _members(self._proposer, info)
        return failover.plan(
            self._server.look(),
            members.quorum(),
            max(greeting.flush_lsn for greeting in members.greetings),
            trusts_restore=self._settings.trusts_restore,
        )

    def run(self) -> list[FailoverStep]:
        """Fail over to the candidate; the steps that were done. May be run again after whatever happened.

        Raises what `failover.next_step` raises, `FencedError` (another proposer came), `DeadlineError` (a step took
        longer than `seconds`; with the last reason), and errors of the servers. Who cannot be reached at the very
        beginning, when nothing is done yet, is an error at once: `UnavailableError`, `ConnectionFailedError`.
        """
        info = self._server.server_info()
        quorum = _members(self._proposer, info).quorum()
        self._begin_step()
        done: list[FailoverStep] = []
        try:
            while FailoverStep.DONE not in done:
                quorum = self._advance(done, quorum, info)
        except BaseException:
            try:
                self._leave()
            except DeadlineError as error:  # what went wrong first is what the operator has to know
                _log.error("the failover's proposer goes on", reason=error.what)
            raise
        self._leave()
        return done

    def _advance(
        self, done: list[FailoverStep], quorum: FailoverQuorum, info: ServerInfo
    ) -> FailoverQuorum:
        """Look, and do the next step; `done` gains it when it is new. What has passed is passed over."""
        try:
            candidate = self._server.look()
            if not candidate.in_recovery:
                quorum = _members(self._proposer, info).quorum()
            else:
                self._check()
            step = failover.next_step(
                candidate, quorum, trusts_restore=self._settings.trusts_restore
            )
            check_invariants(step, candidate, quorum)
            if step not in done:
                _log.info("failover", step=step.value, candidate=self._server.where)
                done.append(step)
                self._begin_step()
            fail_point.hit(f"failover-before-{step.name}")
            if step in {FailoverStep.ATTACH, FailoverStep.DONE}:
                # Here, as a run may have been killed, and the bridge have attached, right after the promotion.
                self._server.name_slot()
            if step == FailoverStep.DONE:
                return quorum
            self._in_time(step)
            quorum = self._perform(step, candidate, quorum, info)
            fail_point.hit(f"failover-after-{step.name}")
        except (ConnectionFailedError, UnavailableError) as error:
            self._note(error)
            self._in_time(done[-1] if done else None)
            time.sleep(_LOOK)
            if self._office is None or self._office.over:
                self._leave()
                quorum = FailoverQuorum(quorum.timeline, quorum.fenced)
        return quorum

    def _begin_step(self) -> None:
        self._deadline = time.monotonic() + self._settings.seconds
        self._reason = ""

    def _note(self, error: TusklineError) -> None:
        """Remember why it does not get on."""
        reason = f"{error.what} ({error.where})" if error.where else error.what
        if reason != self._reason:
            _log.info("failover is held up", reason=reason)
            self._reason = reason

    def _in_time(self, step: FailoverStep | None) -> None:
        """Raises `DeadlineError` once the step's time is over."""
        if time.monotonic() > self._deadline:
            what = step.value if step else "look at the candidate"
            why = f"; last: {self._reason}" if self._reason else ""
            raise DeadlineError(
                f"this took longer than {self._settings.seconds:g} s: {what}{why}",
                where=self._server.where,
                repair="look at its log, and run this again: it goes on from here",
            )

    def _perform(
        self,
        step: FailoverStep,
        candidate: PromotionCandidate,
        quorum: FailoverQuorum,
        info: ServerInfo,
    ) -> FailoverQuorum:
        server, seconds = self._server, self._settings.seconds
        match step:
            case FailoverStep.ELECT:
                return self._elect(quorum, info)
            case FailoverStep.GUARD:
                server.guard()
            case FailoverStep.COMPARE:
                return self._compare(candidate, quorum, info)
            case FailoverStep.FOLLOW:
                server.follow(seconds)
            case FailoverStep.COMMIT:
                return self._commit(candidate, quorum, info)
            case FailoverStep.PROMOTE:
                # A standby's stream goes on over its promotion: the new timeline's WAL is not this term's.
                self._leave()
                server.promote(seconds)
            case FailoverStep.ATTACH:
                self._attach(candidate, info)
            case FailoverStep.RECEIVE | FailoverStep.REPLAY | FailoverStep.DONE:
                pass
        time.sleep(_LOOK)
        return quorum

    # -- in office ----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises what ended the term in office."""
        if self._office is not None:
            self._office.check()

    def _leave(self) -> None:
        office, self._office = self._office, None
        if office is not None:
            office.close()

    def _enter(self, info: ServerInfo, source: NoPrimary | StandbyStream | None) -> LeaderTerm:
        """A proposer in office; the one before it has gone."""
        self._leave()
        purpose = Purpose.FAILOVER if source else Purpose.ATTACH
        self._office = _enter(self._proposer, info, purpose, source)
        return self._office

    def _elect(self, quorum: FailoverQuorum, info: ServerInfo) -> FailoverQuorum:
        office = self._enter(info, NoPrimary(info))
        office.wait(lambda: office.established, self._settings.seconds, FailoverStep.ELECT)
        _log.info("a quorum has everything that may be committed", lsn=format_lsn(office.vcl))
        return replace(quorum, timeline=office.timeline, fenced=office.timeline, vcl=office.vcl)

    def _compare(
        self, candidate: PromotionCandidate, quorum: FailoverQuorum, info: ServerInfo
    ) -> FailoverQuorum:
        """The candidate's last bytes below VCL, with those that a safekeeper serves; see `compare.py`."""
        assert quorum.vcl is not None
        assert self._office is not None, "it is elected before"
        held_from = self._office.begin_lsn
        if held_from is None:
            raise UnavailableError("no safekeeper that has voted is connected")
        begin, end = compared_range(
            candidate,
            quorum.vcl,
            held_from,
            self._proposer.limits.compare_bytes,
            info.segment_size,
        )
        timeline = candidate.lineage.timeline_at(begin)
        compare(self._proposer.dsn, self._settings.upstream, begin, end, timeline, self._check)
        return replace(quorum, equal_to=end)

    def _commit(
        self, candidate: PromotionCandidate, quorum: FailoverQuorum, info: ServerInfo
    ) -> FailoverQuorum:
        """The candidate as the source of WAL: its bytes below VCL are compared once more, its tail is committed."""
        end = candidate.end_lsn
        office = self._enter(info, StandbyStream.connect(self._proposer.dsn))
        office.wait(
            lambda: office.established and office.commit_lsn >= end,
            self._settings.seconds,
            FailoverStep.COMMIT,
        )
        return replace(quorum, vcl=office.vcl, committed=end)

    def _attach(self, candidate: PromotionCandidate, info: ServerInfo) -> None:
        office = self._enter(info, None)
        timeline = candidate.lineage.timeline

        def attached() -> bool:
            found = _members(self._proposer, info).quorum()
            return found.timeline >= timeline > found.fenced

        try:
            office.wait(
                lambda: office.established and attached(),
                self._settings.seconds,
                FailoverStep.ATTACH,
            )
        except FencedError:
            # The bridge's own proposer may have been quicker.
            if not attached():
                raise


def abort(settings: ProposerSettings, *, seconds: float = 60.0) -> bool:
    """Take a failover back: the old primary, whose DSN this is, goes on. False: nothing was fenced.

    A candidate that was promoted meanwhile is lost: it comes back with pg_rewind. Raises `DivergedError` when the
    safekeepers follow a promoted server already, `FencedError`, `DeadlineError`, `UnavailableError`.
    """
    with PrimaryStream.connect(settings.dsn) as asked:
        info, primary = asked.server_info(), asked.primary()
    quorum = _members(settings, info).quorum()
    if quorum.timeline > primary.lineage.timeline:
        raise DivergedError(
            f"the safekeepers follow timeline {quorum.timeline} already, this server is on {primary.lineage.timeline}",
            repair="it comes back with pg_rewind, or as a standby if it ends where the other began",
        )
    if quorum.fenced < primary.lineage.timeline:
        return False
    deadline = time.monotonic() + seconds
    while True:
        try:
            _take_back(settings, info, deadline - time.monotonic())
        except OutvotedError as error:
            _log.info("the abort is delayed", reason=error.what)
        else:
            return True


def _take_back(settings: ProposerSettings, info: ServerInfo, seconds: float) -> None:
    """One election for an abort. Raises as `abort`, and `OutvotedError`."""
    office = _enter(settings, info, Purpose.ABORT, None)
    try:
        office.wait(lambda: office.established, seconds, "take the fence back")
    finally:
        office.close()


def _enter(
    settings: ProposerSettings,
    info: ServerInfo,
    purpose: Purpose,
    source: NoPrimary | StandbyStream | None,
) -> LeaderTerm:
    membership = find_membership(settings.safekeepers, info, known=_known(settings))
    return LeaderTerm(
        lambda tell: ProposerSession(settings, membership, tell, purpose=purpose, source=source)
    )


def _known(settings: ProposerSettings) -> KnownQuorumId:
    """Which quorum it is: the bridge says so, where its disk is left; and the standby, which has the primary's record."""
    with StandbyStream.connect(settings.dsn) as asked:
        return known_on(asked, settings.quorum_file, settings.application_name)


@dataclass(frozen=True, slots=True)
class _Members:
    """The membership in force, and those of its members that answer. Another quorum's safekeepers have no say."""

    configuration: Configuration
    greetings: tuple[SafekeeperGreeting, ...]

    def quorum(self) -> FailoverQuorum:
        """What a majority of them agrees on."""
        timelines = {greeting.safekeeper: greeting.timeline for greeting in self.greetings}
        return FailoverQuorum(
            timeline=self.configuration.quorum_lsn(timelines),
            fenced=max(greeting.fenced_timeline for greeting in self.greetings),
        )


def _members(settings: ProposerSettings, info: ServerInfo) -> _Members:
    """Those that answer, a majority. Nobody's term changes by being asked. Raises `UnavailableError`."""
    asked = [answer for _, answer in ask_all(settings.safekeepers, info)]
    greetings = [answer for answer in asked if isinstance(answer, SafekeeperGreeting)]
    configuration = in_force(greetings, len(settings.safekeepers), _known(settings))
    members = tuple(each for each in greetings if each.safekeeper in configuration.trusted)
    if not configuration.has_quorum({member.safekeeper for member in members}):
        raise UnavailableError(
            f"{len(members)} of {len(asked)} safekeepers answer as members of the quorum: no majority",
            where=", ".join(f"{host}:{port}" for host, port in settings.safekeepers),
            repair="start them; without a majority nobody knows what is committed",
        )
    return _Members(configuration, members)
