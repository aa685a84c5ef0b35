"""The core of one safekeeper, without disk and sockets: events in, ordered effects out.

Safety rests on four rules, each next to its code (numbers refer to README.md):

- A vote is for a strictly greater term and persisted before the reply (rule 2); the reply reports the WAL held after
the vote (rule 1), up to the last complete record (rule 9). From then on no older proposer can write.
- A log follows the proposer's only from the divergence point, which both sides compute themselves (rule 6). Zeros on
disk precede the history, the history precedes new WAL (rule 3). A gap, or a rewrite below the last complete record
known to be committed, is always refused.
- `AppendAck` is sent for durable WAL, in the term of the vote, after that term's history was adopted (rule 4).
- One connection may write: the latest on which this NodeId was accepted; an older one is closed, and the driver drops
its unread input (rule 5).

`restart_lsn` never falls (rule 7), except to the truncation point of its log. `commit_lsn` never falls below a complete
record: when a new timeline replaces the rest of an incomplete one, it returns to the start of that record.
"""

from dataclasses import replace

from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.history import History, divergence
from walsender_bridge.quorum.safekeeper import catch_up, votes
from walsender_bridge.quorum.safekeeper.effects import (
    AlignWal,
    Close,
    Closed,
    ControlState,
    DiskFull,
    Drained,
    Effect,
    Event,
    Fence,
    KeepTimelines,
    MessageReceived,
    PersistControl,
    PersistDue,
    ReadersMoved,
    ResetWal,
    SendMessage,
    ServeReaders,
    SyncWal,
    TruncateWal,
    WalAligned,
    WalSynced,
    WriteWal,
)


class Safekeeper:
    """See the module. `flush_lsn`: the end of valid WAL, from the start scan.

    Every attribute is immutable and replaced as a whole, so a shallow copy suffices.
    """

    __slots__ = (
        "aligned",
        "commit_lsn",
        "control",
        "feedback",
        "flush_lsn",
        "greeted",
        "owner",
        "pending",
        "restart_lsn",
        "served_lsn",
        "told_feedback",
        "written_lsn",
    )

    def __init__(self, control: ControlState, flush_lsn: Lsn) -> None:
        self.control = control
        #: WAL without a history does not count: a full resync was under way.
        self.flush_lsn = flush_lsn if control.history else 0
        self.written_lsn = self.flush_lsn
        self.commit_lsn = control.commit_lsn
        self.restart_lsn = control.restart_lsn
        self.served_lsn = 0
        #: Connections that have greeted, with their greetings.
        self.greeted: dict[int, m.ProposerGreeting] = {}
        #: The only connection that may write, and whether its VoteReply waits for `WalAligned`.
        self.owner: int | None = None
        self.pending = False
        #: The positions in the vote reply: the divergence point is computed from them.
        self.aligned: WalAligned | None = None
        self.feedback: m.HotStandbyFeedback | None = None
        self.told_feedback: m.HotStandbyFeedback | None = None

    @property
    def taken(self) -> bool:
        """Whether the history of the proposer with this safekeeper's vote was adopted, so that its WAL can follow."""
        return self.control.history.latest_election_epoch == self.control.node_id.term > 0

    def step(self, event: Event) -> list[Effect]:
        """The effects of an event. Frequent events come first."""
        if isinstance(event, MessageReceived):
            return self._received(event.conn, event.message)
        if isinstance(event, Drained):
            return [SyncWal(self.written_lsn)] if self.written_lsn > self.flush_lsn else []
        if isinstance(event, WalSynced):
            return self._synced(event.flush_lsn)
        if isinstance(event, WalAligned):
            return self._aligned(event)
        if isinstance(event, DiskFull):
            return self._full(event)
        if isinstance(event, Closed):
            self._forget(event.conn)
            return []
        if isinstance(event, ReadersMoved):
            self.feedback = event.feedback
            return []
        assert isinstance(event, PersistDue)
        lazy = self.control.commit_lsn, self.control.restart_lsn
        return [self._persist()] if lazy != (self.commit_lsn, self.restart_lsn) else []

    def _received(self, conn: int, message: m.ToSafekeeper) -> list[Effect]:
        if isinstance(message, m.Append):
            return self._append(conn, message)
        if isinstance(message, m.ProposerGreeting):
            return self._greeting(conn, message)
        if conn not in self.greeted:
            return self._refuse(
                conn, m.Refusal.OUT_OF_ORDER, "a connection must begin with a greeting"
            )
        if isinstance(message, m.Vote):
            return self._vote(conn, message)
        if isinstance(message, m.Resume):
            return self._resume(conn, message)
        if conn != self.owner or message.term != self.control.node_id.term:
            return self._refuse(conn, m.Refusal.OLDER_TERM, "it is not the leader")
        if isinstance(message, m.Elected):
            return self._elected(conn, message)
        if isinstance(message, m.Configure):
            return self._configure(conn, message)
        return self._below(conn, message)

    # -- connections --------------------------------------------------------------------------------

    def _greeting(self, conn: int, greeting: m.ProposerGreeting) -> list[Effect]:
        if refusal := votes.to_greeting(self.control, greeting):
            return self._refuse(conn, *refusal)
        self.greeted = {**self.greeted, conn: greeting}
        counted = self.control.history.counted(self.flush_lsn)
        reply = m.SafekeeperGreeting(
            self.control.safekeeper,
            self.control.server,
            self.control.node_id,
            self.control.configuration,
            self.flush_lsn,
            min(self.commit_lsn, self.flush_lsn),
            counted[-1].timeline if counted else 0,
            self.control.fence.timeline if self.control.fence else 0,
        )
        return [SendMessage(conn, reply)]

    def _refuse(self, conn: int, reason: m.Refusal, detail: str) -> list[Effect]:
        self._forget(conn)
        return [SendMessage(conn, m.Refused(reason, self.control.node_id, detail)), Close(conn)]

    def _forget(self, conn: int) -> None:
        self.greeted = {other: g for other, g in self.greeted.items() if other != conn}
        if conn == self.owner:
            self.owner, self.pending, self.aligned = None, False, None

    def _own(self, conn: int) -> list[Effect]:
        """Only `conn` may write from now on: the older connection is closed (rule 5)."""
        older, self.owner = self.owner, conn
        self.pending, self.aligned = True, None
        self.told_feedback = None
        if older is None or older == conn:
            return []
        self.greeted = {other: g for other, g in self.greeted.items() if other != older}
        return [Close(older)]

    # -- elections ----------------------------------------------------------------------------------

    def _vote(self, conn: int, vote: m.Vote) -> list[Effect]:
        control = self.control
        refusal = votes.to_vote(control, vote, self.flush_lsn)
        if refusal is not None:
            return self._refuse(conn, *refusal)
        fence = control.fence
        if vote.purpose == m.Purpose.FAILOVER:
            fence = Fence(vote.node_id.term, vote.timeline)
        elif vote.purpose == m.Purpose.ABORT:
            fence = None
        self.control = replace(
            control,
            server=self.greeted[conn].server,
            node_id=vote.node_id,
            fence=fence,
            configuration=votes.membership(control, vote),
        )
        # The vote is durable before the older proposer is informed, and before the WAL held is determined (rule 1).
        displaced: list[Effect] = []
        if self.owner is not None and self.owner != conn:
            fenced = m.Refused(m.Refusal.OLDER_TERM, vote.node_id, "displaced")
            displaced.append(SendMessage(self.owner, fenced))
        return [self._persist(), *displaced, *self._own(conn), *self._tell_what_is_held()]

    def _resume(self, conn: int, resume: m.Resume) -> list[Effect]:
        """The same process: no vote, and never a truncation of its own election epoch (rule 5)."""
        if resume.node_id != self.control.node_id:
            return self._refuse(
                conn, m.Refusal.OLDER_TERM, f"the vote went to {self.control.node_id}"
            )
        return [*self._own(conn), *self._tell_what_is_held()]

    def _tell_what_is_held(self) -> list[Effect]:
        if not self.control.history:
            return self._aligned(WalAligned(0, 0, 0))
        effects: list[Effect] = []
        if self.written_lsn > self.flush_lsn:
            effects.append(SyncWal(self.written_lsn))
        end = self.written_lsn
        return [*effects, AlignWal(end, min(self.commit_lsn, end))]

    def _aligned(self, aligned: WalAligned) -> list[Effect]:
        if self.owner is None or not self.pending:
            return []  # the connection broke meanwhile
        self.pending = False
        # A log that begins above commit_lsn has no record below it.
        aligned = replace(aligned, commit_lsn=min(aligned.commit_lsn, self.commit_lsn))
        self.aligned = aligned
        reply = m.VoteReply(
            self.control.node_id,
            flush_lsn=self.flush_lsn if self.taken else aligned.flush_lsn,
            commit_lsn=aligned.commit_lsn,
            restart_lsn=self.restart_lsn,
            begin_lsn=aligned.begin_lsn,
            history=self.control.history,
            configuration=self.control.configuration,
        )
        return [SendMessage(self.owner, reply)]

    def _elected(self, conn: int, elected: m.Elected) -> list[Effect]:
        aligned = self.aligned
        if aligned is None or (self.taken and not elected.rebuild):
            return self._refuse(conn, m.Refusal.OUT_OF_ORDER, "Elected came before a vote request")
        try:
            replaced = elected.history.start_after(
                self.control.history.latest_election_epoch, elected.term
            )
        except TusklineError as error:
            return self._refuse(conn, m.Refusal.DIVERGED, error.what)
        if elected.configuration.version < self.control.configuration.version:
            return self._refuse(conn, m.Refusal.DIVERGED, "its membership is older")
        if elected.rebuild:
            problem = self._rebuild_problem(elected, aligned)
            effects = [] if problem else self._rebuild(elected)
        else:
            problem = self._truncation_problem(elected, aligned)
            effects = [] if problem else self._truncate(elected.start_lsn, replaced)
        if problem:
            return self._refuse(conn, m.Refusal.DIVERGED, problem)
        fence = self.control.fence
        attached = elected.history.counted(elected.start_lsn)
        if fence is not None and fence.term == elected.term:
            # Votes are requested before the log is chosen: the fence is on the log's timeline.
            latest = max(fence.timeline, elected.history.entries[-1].timeline)
            fence = replace(fence, timeline=latest)
        elif fence is not None and attached and attached[-1].timeline > fence.timeline:
            fence = None  # the successor's log has arrived
        self.control = replace(
            self.control,
            history=elected.history,
            configuration=elected.configuration,
            fence=fence,
        )
        self.flush_lsn = self.written_lsn = elected.start_lsn
        if elected.ancestors:
            effects = [*effects, KeepTimelines(elected.history, elected.ancestors)]
        return [*effects, self._persist(), SendMessage(conn, self._ack())]

    def _point(self, elected: m.Elected, aligned: WalAligned) -> Lsn | None:
        """The divergence point as computed here, whatever the proposer claims."""
        history = elected.history
        return divergence(
            self.control.history, aligned.flush_lsn, history, history.start_of(elected.term)
        )

    def _truncation_problem(self, elected: m.Elected, aligned: WalAligned) -> str:
        point = self._point(elected, aligned)
        if point is None or point != elected.start_lsn:
            found = "nowhere" if point is None else format_lsn(point)
            return f"the logs diverge at {found}, not at {format_lsn(elected.start_lsn)}"
        if point < aligned.begin_lsn:
            return f"the logs diverge at {format_lsn(point)}, below {format_lsn(aligned.begin_lsn)}, where this one begins"
        if point < aligned.commit_lsn:
            return f"WAL below {format_lsn(aligned.commit_lsn)} is committed and never rewritten"
        return ""

    def _truncate(self, point: Lsn, replaced: Lsn) -> list[Effect]:
        """The effects that must be durable before the new history is (rule 3)."""
        # Past the start of the first election epoch that is new to it (not always the proposer's own) nothing is known to
        # be committed: commit_lsn was inside a record that was replaced there (rule 9).
        self.commit_lsn = min(self.commit_lsn, replaced)
        # The same holds for restart_lsn.
        self.restart_lsn = min(self.restart_lsn, point)
        # Even beyond the known end: after a crash, old WAL can lie behind the end that the scan found.
        return [*self._serve(min(self.commit_lsn, point)), TruncateWal(point)]

    def _rebuild_problem(self, elected: m.Elected, aligned: WalAligned) -> str:
        """Why a full resync is not allowed: only a log that diverges before the new start, or shares nothing, may do one.

        A log that begins behind its divergence point shares nothing with the proposer's.
        """
        point = self._point(elected, aligned)
        behind = point is None or point < max(elected.start_lsn, aligned.begin_lsn)
        if not behind or elected.start_lsn > elected.commit_lsn:
            return (
                f"a full resync at {format_lsn(elected.start_lsn)} needs a log that diverges before it "
                "and a quorum that has committed it"
            )
        return ""

    def _rebuild(self, elected: m.Elected) -> list[Effect]:
        """Do a full resync. A crash leaves WAL without a history, which counts as an empty log.

        No commit is lost: everything below the new start is committed by a quorum without this safekeeper, whose log ends
        before it, or holds other bytes there, which are not committed.
        """
        effects = self._serve(0)
        if self.control.history:
            self.control = replace(self.control, history=History())
            effects.append(self._persist())
        self.commit_lsn = min(self.commit_lsn, elected.start_lsn)
        effects.append(ResetWal(elected.start_lsn))
        return effects

    # -- WAL ----------------------------------------------------------------------------------------

    def _append(self, conn: int, append: m.Append) -> list[Effect]:
        if conn != self.owner or append.term != self.control.node_id.term or not self.taken:
            return self._refuse(conn, m.Refusal.OLDER_TERM, "it is not the leader")
        if append.begin_lsn != self.written_lsn:
            return self._refuse(
                conn,
                m.Refusal.DIVERGED,
                f"WAL from {format_lsn(append.begin_lsn)} does not follow "
                f"{format_lsn(self.written_lsn)}",
            )
        self.commit_lsn = max(self.commit_lsn, append.commit_lsn)
        self.restart_lsn = greatest_restart(self.restart_lsn, append.restart_lsn)
        effects = self._serve(min(self.commit_lsn, self.flush_lsn))
        if append.length:
            history = self.control.history
            end = append.begin_lsn + append.length
            boundary = history.boundary_after(append.begin_lsn)
            if boundary is not None and end > boundary:
                return self._refuse(conn, m.Refusal.DIVERGED, "WAL of two timelines in one message")
            timeline = history.timeline_at(append.begin_lsn)
            effects.append(WriteWal(append.begin_lsn, append.length, timeline))
            self.written_lsn = end
        elif self.written_lsn == self.flush_lsn:
            effects.append(
                SendMessage(conn, self._ack())
            )  # otherwise the acknowledgement of the sync answers the heartbeat
        return effects

    def _synced(self, flush_lsn: Lsn) -> list[Effect]:
        assert self.flush_lsn <= flush_lsn <= self.written_lsn, (self.flush_lsn, flush_lsn)
        self.flush_lsn = flush_lsn
        if self.owner is None or self.pending or not self.taken:
            return []
        # Only a durable position in the leader's term is acknowledged (rule 4).
        return [
            SendMessage(self.owner, self._ack()),
            *self._serve(min(self.commit_lsn, self.flush_lsn)),
        ]

    def _full(self, event: DiskFull) -> list[Effect]:
        """Disconnect the proposer, which comes back: each time it reports what may be removed, and retries."""
        self.flush_lsn = self.written_lsn = event.flush_lsn
        effects = self._serve(min(self.commit_lsn, self.flush_lsn))
        if self.owner is not None:
            effects += self._refuse(self.owner, m.Refusal.DISK_FULL, event.why)
        return effects

    def _ack(self) -> m.AppendAck:
        feedback = None if self.feedback == self.told_feedback else self.feedback
        self.told_feedback = self.feedback
        return m.AppendAck(self.control.node_id.term, self.flush_lsn, self.commit_lsn, feedback)

    def _serve(self, lsn: Lsn) -> list[Effect]:
        if lsn == self.served_lsn:
            return []
        self.served_lsn = lsn
        return [ServeReaders(lsn)]

    def _below(self, conn: int, message: m.Fetch | m.CatchUpWal) -> list[Effect]:
        effects = catch_up.answer(conn, message, self.control, self.flush_lsn)
        return effects or self._refuse(
            conn, m.Refusal.OUT_OF_ORDER, "the requested WAL is not available"
        )

    # -- the rest -----------------------------------------------------------------------------------

    def _configure(self, conn: int, configure: m.Configure) -> list[Effect]:
        configuration = configure.configuration
        if refusal := votes.to_quorum(self.control, configuration.quorum):
            return self._refuse(conn, *refusal)
        if not self.taken or configuration.version < self.control.configuration.version:
            return self._refuse(conn, m.Refusal.OUT_OF_ORDER, "its membership is older")
        self.control = replace(self.control, configuration=configuration)
        return [
            self._persist(),
            SendMessage(conn, m.Configured(configure.term, configuration.generation)),
        ]

    def _persist(self) -> PersistControl:
        self.control = replace(
            self.control, commit_lsn=self.commit_lsn, restart_lsn=self.restart_lsn
        )
        return PersistControl(self.control)


def greatest_restart(known: Lsn, received: Lsn) -> Lsn:
    """The restart LSN never falls: WAL below it may have been removed (rule 7)."""
    return max(known, received)
