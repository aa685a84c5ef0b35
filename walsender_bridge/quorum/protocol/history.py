"""The epoch history of a WAL log: which proposer wrote which bytes, and on which timeline.

    entries      (2, 100, tl 1)        (5, 180, tl 1)   (5, 240, tl 2)
    log          100 ............ 180 ............ 240 ........ flush_lsn

An election epoch *is* the term in which its proposer was elected (rule 2), and a term elects at most one proposer, so
two logs that hold bytes of the same election epoch hold the same bytes there, and the same bytes before them. A promoted
server can continue within an election epoch on a new timeline, so (election epoch, timeline) identifies an entry.

Invariant: entries grow strictly in (election epoch, timeline) and never fall in `start_lsn`. A history is copied whole
from the proposer, while the log may still end below some of its entries: an entry *counts* when
`start_lsn <= flush_lsn`. That alone determines the most advanced log (`rank`) and the divergence point of two logs
(`divergence`). LSNs are bytes from the start of the log.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn

#: The most non-empty election epochs, one for each start of a proposer that received WAL: it bounds the messages that
#: carry a history. Beyond it the oldest are merged (`History.compacted`).
MAX_ENTRIES = 2048


@dataclass(frozen=True, slots=True, order=True)
class HistoryEntry:
    """From `start_lsn` on, the log was written by the proposer of `election_epoch`, on `timeline`."""

    election_epoch: int
    start_lsn: Lsn
    timeline: int

    @property
    def name(self) -> tuple[int, int]:
        """Identifies an entry: two logs that have equal keys share it."""
        return self.election_epoch, self.timeline


@dataclass(frozen=True, slots=True)
class History:
    """See the module. Empty: an empty log. Raises `CorruptError` when out of order."""

    entries: tuple[HistoryEntry, ...] = ()

    def __post_init__(self) -> None:
        for before, after in zip(self.entries, self.entries[1:], strict=False):
            if after.name <= before.name or after.start_lsn < before.start_lsn:
                raise CorruptError(f"epoch history out of order: {before} before {after}")

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def latest_election_epoch(self) -> int:
        """The last election epoch that was adopted, whether it counts yet or not; 0 for none."""
        return self.entries[-1].election_epoch if self.entries else 0

    def counted(self, flush_lsn: Lsn) -> tuple[HistoryEntry, ...]:
        """The entries that count for a log that ends at `flush_lsn`."""
        return tuple(entry for entry in self.entries if entry.start_lsn <= flush_lsn)

    def rank(self, flush_lsn: Lsn) -> tuple[int, Lsn]:
        """How advanced a log is: (last election epoch that counts, its end). The greater of two logs has more."""
        counted = self.counted(flush_lsn)
        return (counted[-1].election_epoch, flush_lsn) if counted else (0, 0)

    def timeline_at(self, lsn: Lsn) -> int:
        """The timeline of the byte at `lsn`. Raises `CorruptError` below the first entry's start."""
        for entry in reversed(self.entries):
            if entry.start_lsn <= lsn:
                return entry.timeline
        raise CorruptError(f"no entry of the epoch history covers {format_lsn(lsn)}")

    def timeline_start(self, lsn: Lsn) -> Lsn:
        """The start, in this log, of the timeline of the byte at `lsn`. Raises `CorruptError` as `timeline_at`."""
        timeline = self.timeline_at(lsn)
        return min(e.start_lsn for e in self.entries if e.timeline == timeline)

    def boundary_after(self, lsn: Lsn) -> Lsn | None:
        """The end of the timeline of the byte at `lsn`, if another one follows."""
        if self.entries and lsn >= self.entries[-1].start_lsn:
            return None  # the fast path: called for each message
        timeline = self.timeline_at(lsn)
        for entry in self.entries:
            if entry.start_lsn > lsn and entry.timeline != timeline:
                return entry.start_lsn
        return None

    def start_of(self, epoch: int) -> Lsn:
        """The start of an election epoch of this history. Raises `CorruptError` if it has no such entry."""
        for entry in self.entries:
            if entry.election_epoch == epoch:
                return entry.start_lsn
        raise CorruptError(f"election epoch {epoch} is not in the history")

    def start_after(self, epoch: int, last: int) -> Lsn:
        """The start of the first election epoch after `epoch`, at most that of `last`. Raises `CorruptError` without `last`."""
        start = self.start_of(last)
        return min(
            [start, *(each.start_lsn for each in self.entries if each.election_epoch > epoch)]
        )

    def succeeded(self, end_lsn: Lsn, successors: Iterable[HistoryEntry]) -> "History":
        """This history truncated at `end_lsn`, then `successors`, without empty election epochs.

        An empty one can be left out: the one before it ends where it would have ended.
        """
        chain = [entry for entry in self.entries if entry.start_lsn < end_lsn]
        for entry in successors:
            while chain and chain[-1].start_lsn == entry.start_lsn:
                chain.pop()
            chain.append(entry)
        return History(tuple(chain))

    def pruned(self, horizon: Lsn) -> "History":
        """Without entries that end below `horizon`, up to which every member has the same log.

        The entry of the byte before the horizon stays: the logs have it in common.
        """
        below = [entry for entry in self.entries if entry.start_lsn < horizon]
        return History(self.entries[max(len(below) - 1, 0) :])

    def compacted(self, limit: int, commit_lsn: Lsn) -> "History":
        """With at most `limit` entries, as far as `commit_lsn` allows: the oldest are merged into one for each timeline.

        That one has the last election epoch of those merged, so a log that ends in an older one no longer has an entry in common
        and does a full resync. Nothing is lost: the last of them starts below `commit_lsn`, so a majority has its bytes, and no
        such log is part of that majority. For the same reason older bytes may be labeled with it: a log that ends among them is
        still less advanced than any of the majority. Raises `NotSupportedError` if more than `MAX_ENTRIES` are left.
        """
        result = self.entries
        starts: dict[int, Lsn] = {}
        for index, entry in enumerate(self.entries):
            if len(result) <= limit or entry.start_lsn >= commit_lsn:
                break
            starts.setdefault(entry.timeline, entry.start_lsn)
            oldest = [
                HistoryEntry(entry.election_epoch, start, timeline)
                for timeline, start in starts.items()
            ]
            result = (*oldest, *self.entries[index + 1 :])
        if len(result) > MAX_ENTRIES:
            raise NotSupportedError(
                f"{len(result)} election epochs and timelines above {format_lsn(commit_lsn)}, the last LSN known to be "
                "committed",
                repair="find out why no proposer remains the leader until a quorum has committed its WAL",
            )
        return History(result)


def divergence(log: History, flush_lsn: Lsn, leader: History, leader_end: Lsn) -> Lsn | None:
    """The divergence point of a log that ends at `flush_lsn` and the leader's, which ends at `leader_end` (rule 6).

    The last common entry ends, on either side, where the next entry starts or the log ends; the logs are
    equal up to the smaller of the two. None: they have no entry in common.
    """
    for entry in reversed(log.counted(flush_lsn)):
        theirs = _end_of(leader, entry.name, leader_end)
        if theirs is not None:
            mine = _end_of(log, entry.name, flush_lsn)
            assert mine is not None
            return min(mine, theirs)
    return None


def _end_of(history: History, name: tuple[int, int], end_lsn: Lsn) -> Lsn | None:
    for index, entry in enumerate(history.entries):
        if entry.name == name:
            after = history.entries[index + 1 : index + 2]
            return min(after[0].start_lsn, end_lsn) if after else end_lsn
    return None
