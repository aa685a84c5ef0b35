"""What an explored cluster has reported, and may never contradict: leaders, commits, rejections, logs.

Election safety: a term has one leader. Committed never lost: what was committed in an earlier term
is in the log of every later leader, and no two terms commit different bytes. Log safety: equal bytes in equal election
epochs. Readers get only what is committed. A rejected proposer never gets a vote in a later term. Proposer and safekeeper
always agree on the divergence point of two logs.
"""

from tests.support.quorum.nodes import Cell, Interned, Part, SafekeeperPart
from walsender_bridge.quorum.proposer.core import Proposer
from walsender_bridge.quorum.protocol.messages import NodeId, Refusal, Refused, ToProposer

#: Where every log begins.
BASE = 8
Commits = tuple[tuple[int, tuple[Cell, ...]], ...]


class Past(Part):
    """What was reported: the leader of each term, the commits of each term, the rejected proposers."""

    __slots__ = ("commits", "leaders", "rejections")

    def __init__(
        self,
        number: int,
        leaders: tuple[NodeId, ...],
        commits: Commits,
        rejections: tuple[NodeId, ...],
    ) -> None:
        super().__init__(number)
        self.leaders, self.commits, self.rejections = leaders, commits, rejections


class Claims:
    """See the module."""

    def __init__(self) -> None:
        self.pasts: Interned[Past] = Interned()
        self.agreeing: set[tuple[int, int]] = set()

    def past(
        self,
        leaders: tuple[NodeId, ...] = (),
        commits: Commits = (),
        rejections: tuple[NodeId, ...] = (),
    ) -> Past:
        """The interned past with these reports."""
        reports = leaders, commits, rejections
        return self.pasts.get(reports, lambda number: Past(number, *reports))

    def took_lead(self, past: Past, core: Proposer, own: tuple[Cell, ...]) -> Past:
        """A proposer was elected, on a server that holds `own`."""
        for other in past.leaders:
            assert other.term != core.node_id.term or other == core.node_id, "election safety"
        for term, cells in past.commits:
            if term < core.node_id.term:
                assert core.vcl >= BASE + len(cells), "committed never lost: it ends before"
                assert own[: len(cells)] == cells, "committed never lost: other bytes"
        return self.past((*past.leaders, core.node_id), past.commits, past.rejections)

    def committed(self, past: Past, term: int, cells: tuple[Cell, ...]) -> Past:
        """The proposer of this term reported to its server that a quorum has these."""
        for _, known in past.commits:
            shorter = min(len(known), len(cells))
            assert known[:shorter] == cells[:shorter], "committed never lost: two versions"
        others = tuple(each for each in past.commits if each[0] != term)
        return self.past(past.leaders, (*others, (term, cells)), past.rejections)

    def refused(self, past: Past, node_id: NodeId) -> Past:
        """A proposer was refused because another one leads."""
        return self.past(past.leaders, past.commits, (*past.rejections, node_id))

    def voted(self, past: Past, node_id: NodeId) -> None:
        """A safekeeper gave its vote."""
        for rejected in past.rejections:
            again = rejected.proposer == node_id.proposer and rejected.term < node_id.term
            assert not again, "a rejected proposer elected itself again"

    @staticmethod
    def answered(message: ToProposer) -> None:
        """Both sides compute the same divergence point, and WAL follows without a gap."""
        if isinstance(message, Refused):
            assert message.reason != Refusal.DIVERGED, f"divergence points differ: {message.detail}"

    def served(self, past: Past, part: SafekeeperPart, lsn: int) -> None:
        """A safekeeper serves its readers the WAL below `lsn`. (What it held at the start was never committed.)"""
        cells = part.wal[: max(lsn - BASE, 0)]
        longest = max((known for _, known in past.commits), key=len, default=())
        assert cells == longest[: len(cells)], "a reader gets what is not committed"

    def agree(self, one: SafekeeperPart, two: SafekeeperPart) -> None:
        """Each byte of an election epoch is the same in both."""
        pair = one.anonymous, two.anonymous
        if pair in self.agreeing:
            return
        marked: dict[tuple[int, int], Cell] = {}
        for part in (one, two):
            core = part.core
            entries = core.control.history.counted(core.flush_lsn)
            first = max(BASE, entries[0].start_lsn) if entries else core.flush_lsn
            for at in range(first, core.flush_lsn):
                assert at - BASE < len(part.wal), "log safety: a hole"
                epoch = max(entry.election_epoch for entry in entries if entry.start_lsn <= at)
                cell = part.wal[at - BASE]
                known = marked.setdefault((epoch, at), cell)
                assert known == cell, f"log safety: election epoch {epoch} at {at}"
        self.agreeing.add(pair)
