r"""Performs the steps of `plan.next_step` on real servers and safekeepers. The API of a failover.

    run = FailoverRun(settings)
    print(*run.plan(), sep="\n")     # a dry run: displaces no proposer, changes nothing
    run.run()                        # until the safekeepers follow the candidate, or an error is raised
    abort(settings.proposer)         # or: the old primary continues

No state is kept outside the safekeepers and the servers: a run that was killed is simply repeated. The elected
proposer remains the leader, on a thread of its own, until the promotion: it feeds lagging safekeepers, reports
`commit_lsn` to readers, and if another proposer displaces it, the run ends before the next step.

Connections to an unreachable server, or to a majority that does not answer, are retried until the step times out: they
may be starting. If the proposer was lost meanwhile, the run starts over with an election.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

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
from walsender_bridge.runtime import fail_point, logs

#: Seconds between two polls.
_POLL_SECONDS = 0.1

_log = logs.logger()


@dataclass(frozen=True, slots=True)
class FailoverSettings:
    """The `dsn` of `proposer` is the candidate's. `upstream`: the libpq connection string of the safekeepers' WAL servers.

    `promote`, `slot`: see `CandidateServer`. `seconds`: the timeout of each step.
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
        self._term: LeaderTerm | None = None
        #: Deadline of the current step, and the last reason for its delay.
        self._deadline = 0.0
        self._reason = ""

    def plan(self) -> list[FailoverStep]:
        """The steps that a run would perform now, as far as they are known without an election. Raises what `run` raises."""
        info = self._server.server_info()
        members = _members(self._proposer, info)
        return failover.plan(
            self._server.probe(),
            members.quorum(),
            max(greeting.flush_lsn for greeting in members.greetings),
            trusts_restore=self._settings.trusts_restore,
        )

    def run(self) -> list[FailoverStep]:
        """Fail over to the candidate; returns the steps performed. May be repeated after any failure.

        Raises what `plan.next_step` raises, `FencedError` (displaced by another proposer), `DeadlineError` (a step took
        longer than `seconds`; with the last reason), and errors of the servers. A server that is unreachable before the first
        step is an error at once: `UnavailableError`, `ConnectionFailedError`.
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
            except DeadlineError as error:  # the operator needs the first error
                _log.error("the failover's proposer is still running", reason=error.what)
            raise
        self._leave()
        return done

    def _advance(
        self, done: list[FailoverStep], quorum: FailoverQuorum, info: ServerInfo
    ) -> FailoverQuorum:
        """Probe, and perform the next step; appends it to `done` if it is new. Steps that are complete are skipped."""
        try:
            candidate = self._server.probe()
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
            time.sleep(_POLL_SECONDS)
            if self._term is None or self._term.over:
                self._leave()
                quorum = FailoverQuorum(quorum.timeline, quorum.fenced)
        return quorum

    def _begin_step(self) -> None:
        self._deadline = time.monotonic() + self._settings.seconds
        self._reason = ""

    def _note(self, error: TusklineError) -> None:
        """Record the reason for the delay."""
        reason = f"{error.what} ({error.where})" if error.where else error.what
        if reason != self._reason:
            _log.info("failover is delayed", reason=reason)
            self._reason = reason

    def _in_time(self, step: FailoverStep | None) -> None:
        """Raises `DeadlineError` once the step has timed out."""
        if time.monotonic() > self._deadline:
            what = step.value if step else "probe the candidate"
            why = f"; last: {self._reason}" if self._reason else ""
            raise DeadlineError(
                f"step took longer than {self._settings.seconds:g} s: {what}{why}",
                where=self._server.where,
                repair="check the candidate's log and repeat this command, which continues from here",
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
                # A standby's stream continues across its promotion, but the new timeline's WAL is not part of this term.
                self._leave()
                server.promote(seconds)
            case FailoverStep.ATTACH:
                self._attach(candidate, info)
            case FailoverStep.RECEIVE | FailoverStep.REPLAY | FailoverStep.DONE:
                pass
        time.sleep(_POLL_SECONDS)
        return quorum

    # -- the leader's term --------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises the error that ended the leader's term."""
        if self._term is not None:
            self._term.check()

    def _leave(self) -> None:
        term, self._term = self._term, None
        if term is not None:
            term.close()

    def _enter(self, info: ServerInfo, source: NoPrimary | StandbyStream | None) -> LeaderTerm:
        """Start a proposer for another election, after the end of the previous one."""
        self._leave()
        purpose = Purpose.FAILOVER if source else Purpose.ATTACH
        self._term = _enter(self._proposer, info, purpose, source)
        return self._term

    def _elect(self, quorum: FailoverQuorum, info: ServerInfo) -> FailoverQuorum:
        term = self._enter(info, NoPrimary(info))
        term.wait(lambda: term.established, self._settings.seconds, FailoverStep.ELECT)
        _log.info("a quorum has all WAL that may be committed", lsn=format_lsn(term.vcl))
        return replace(quorum, timeline=term.timeline, fenced=term.timeline, vcl=term.vcl)

    def _compare(
        self, candidate: PromotionCandidate, quorum: FailoverQuorum, info: ServerInfo
    ) -> FailoverQuorum:
        """The candidate's last bytes below VCL, with those that a safekeeper serves; see `compare.py`."""
        assert quorum.vcl is not None
        assert self._term is not None, "it is elected before"
        held_from = self._term.begin_lsn
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
        """Elect with the candidate as the WAL source: its bytes below VCL are compared again, its tail is committed."""
        end = candidate.end_lsn
        term = self._enter(info, StandbyStream.connect(self._proposer.dsn))
        term.wait(
            lambda: term.established and term.commit_lsn >= end,
            self._settings.seconds,
            FailoverStep.COMMIT,
        )
        return replace(quorum, vcl=term.vcl, committed=end)

    def _attach(self, candidate: PromotionCandidate, info: ServerInfo) -> None:
        term = self._enter(info, None)
        timeline = candidate.lineage.timeline

        def attached() -> bool:
            found = _members(self._proposer, info).quorum()
            return found.timeline >= timeline > found.fenced

        try:
            term.wait(
                lambda: term.established and attached(),
                self._settings.seconds,
                FailoverStep.ATTACH,
            )
        except FencedError:
            # The bridge's own proposer may have attached it first.
            if not attached():
                raise


def abort(settings: ProposerSettings, *, seconds: float = 60.0) -> bool:
    """Abort a failover: the old primary, whose DSN this is, continues. False: nothing was fenced.

    A candidate that was promoted meanwhile needs pg_rewind. Raises `DivergedError` when the
    safekeepers follow a promoted server already, `FencedError`, `DeadlineError`, `UnavailableError`.
    """
    with PrimaryStream.connect(settings.dsn) as asked:
        info, primary = asked.server_info(), asked.primary()
    quorum = _members(settings, info).quorum()
    if quorum.timeline > primary.lineage.timeline:
        raise DivergedError(
            f"the safekeepers already follow timeline {quorum.timeline}, this server is on {primary.lineage.timeline}",
            repair="run pg_rewind on this server, or start it as a standby if it ends at the switch point",
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
    term = _enter(settings, info, Purpose.ABORT, None)
    try:
        term.wait(lambda: term.established, seconds, "lift the fence")
    finally:
        term.close()


def _enter(
    settings: ProposerSettings,
    info: ServerInfo,
    purpose: Purpose,
    source: NoPrimary | StandbyStream | None,
) -> LeaderTerm:
    membership = find_membership(
        settings.safekeepers, info, known=_known(settings), tls=settings.tls
    )
    return LeaderTerm(
        lambda tell: ProposerSession(settings, membership, tell, purpose=purpose, source=source)
    )


def _known(settings: ProposerSettings) -> KnownQuorumId:
    """The quorum's id, from the bridge's disk if it survives, and from the standby, which has the primary's record."""
    with StandbyStream.connect(settings.dsn) as asked:
        return known_on(asked, settings.quorum_file, settings.application_name)


@dataclass(frozen=True, slots=True)
class _Members:
    """The membership in force, and those of its members that answer. Safekeepers of another quorum do not count."""

    configuration: Configuration
    greetings: tuple[SafekeeperGreeting, ...]

    def quorum(self) -> FailoverQuorum:
        """The state that a majority of them agrees on."""
        timelines = {greeting.safekeeper: greeting.timeline for greeting in self.greetings}
        return FailoverQuorum(
            timeline=self.configuration.quorum_lsn(timelines),
            fenced=max(greeting.fenced_timeline for greeting in self.greetings),
        )


def _members(settings: ProposerSettings, info: ServerInfo) -> _Members:
    """The members that answer, a majority. Greeting changes no term. Raises `UnavailableError`."""
    asked = [answer for _, answer in ask_all(settings.safekeepers, info, tls=settings.tls)]
    greetings = [answer for answer in asked if isinstance(answer, SafekeeperGreeting)]
    configuration = in_force(greetings, len(settings.safekeepers), _known(settings))
    members = tuple(each for each in greetings if each.safekeeper in configuration.trusted)
    if not configuration.has_quorum({member.safekeeper for member in members}):
        raise UnavailableError(
            f"only {len(members)} of {len(asked)} safekeepers answer as members of the quorum, which is no majority",
            where=", ".join(f"{host}:{port}" for host, port in settings.safekeepers),
            repair="start them; the commit position is unknown without a majority",
        )
    return _Members(configuration, members)
