"""The durable state of a replica, its evaluation at recovery, and the effects on it.

Recovery reads the latest commit context and the first and last entries, never the history, so
its duration does not depend on the length of the stream. It is strict: anything that could be a loss is treated as one,
and only the durable low watermark distinguishes a loss from a trim. The evaluation removes nothing.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from walsender_bridge.change_log.entry import EntryHeader, EntryKind
from walsender_bridge.change_log.protocol import START, CommitContext, Position
from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, WalPosition, format_lsn


@dataclass(frozen=True, slots=True)
class BeforeRestart:
    """What a RESTART entry has replaced: valid again if the entry is removed before it is committed."""

    confirmed_to: WalPosition | None
    system_id: int | None


@dataclass(frozen=True, slots=True)
class Durable:
    """The state record of a replica, of which the store keeps only the latest.

    `position`: behind the last committed entry. `confirmed_to`, `system_id`: see `ReplicaStatus`.
    `sealed_at`: the local end at which the stream is, or is to be, sealed. `taken_at`: of the last row
    of the index. `syncing_from`: the synchronization that it is in (`call_name`); None: in none. `before_restart`: None
    unless there is a RESTART among the uncommitted entries. `was_sealed`: whether `term` can only rise by a seal.
    `replaced_by`: the synchronization that has replaced what was lost here, until the replica is known to be a member again
    (`Replica.joined`); None: nothing has been lost since.
    """

    stream: str
    log_id: str
    term: int = 0
    low_offset: int = 1
    context: CommitContext | None = None
    position: Position = START
    confirmed_to: WalPosition | None = None
    gate_lsn: Lsn = MAX_LSN
    sealed_at: int | None = None
    taken_at: int = 0
    system_id: int | None = None
    syncing_from: str | None = None
    before_restart: BeforeRestart | None = None
    was_sealed: bool = False
    replaced_by: str | None = None

    def without_restart(self) -> "Durable":
        """The record as it was before a RESTART that is not committed."""
        before = self.before_restart
        if before is None:
            return self
        return replace(
            self,
            confirmed_to=before.confirmed_to,
            system_id=before.system_id,
            before_restart=None,
        )

    @property
    def committed_end(self) -> int:
        """The next local offset to be committed (I1): without a commit context, the low watermark."""
        return self.context.end if self.context else self.low_offset

    @property
    def version(self) -> int:
        """The highest version known."""
        return self.context.version if self.context else 0


@dataclass(frozen=True, slots=True)
class IndexRow:
    """A non-empty commit. `size`: bytes of its entries; `position`: behind the last.

    `taken_at`: when this replica applied it (microseconds), by the repository's steady clock. Older versions used the wall
    clock, which may have been ahead: the time decreases only behind such a row.
    """

    context: CommitContext
    size: int
    position: Position
    taken_at: int


@dataclass(frozen=True, slots=True)
class StoredReplica:
    """The contents of a store when it is opened.

    `first_offset`, `last_offset`: of the entries, including trimmed ones that are still on disk.
    `indexed_end`: of the last commit in the index. `damage`: damage that the store itself detected. `wiping`: the damage is
    a wipe that was interrupted, and `durable` says whether anything was lost before it (`replaced_by`).
    """

    durable: Durable
    first_offset: int | None
    last_offset: int | None
    indexed_end: int | None
    damage: str = ""
    wiping: bool = False


class RecoveryOutcome(StrEnum):
    """The result of evaluating a stored replica."""

    NEW = "new"
    ALL_TRIMMED = "all trimmed"
    VALID = "valid"
    SYNCHRONIZING = "synchronizing"
    INVALID = "invalid"


def evaluate(found: StoredReplica) -> tuple[RecoveryOutcome, str]:
    """Evaluate whether this replica may take part, with the reason if it may not (Varlog, "Recovery").

    An uncommitted tail is valid: the next report offers it. A replica that was being synchronized has what its commit
    context says, and does not take part before that has ended.
    """
    outcome, reason = _evaluate(found)
    source = found.durable.syncing_from
    if source is None or outcome == RecoveryOutcome.INVALID:
        return outcome, reason
    return RecoveryOutcome.SYNCHRONIZING, f"it is being synchronized with log server {source}"


def _evaluate(found: StoredReplica) -> tuple[RecoveryOutcome, str]:
    durable, context = found.durable, found.durable.context
    first, last = found.first_offset, found.last_offset
    low, end = durable.low_offset, durable.committed_end

    def invalid(reason: str) -> tuple[RecoveryOutcome, str]:
        return RecoveryOutcome.INVALID, reason

    if found.damage:
        return invalid(found.damage)
    if low > end:
        return invalid(f"low watermark {low} is beyond the commit context's end {end}")
    if durable.position.end_offset != end:
        return invalid(f"position {durable.position.end_offset} and context {end} differ")
    if found.indexed_end is not None and found.indexed_end != end:
        side = "behind" if found.indexed_end > end else "ahead of"
        return invalid(f"commit context ({end}) is {side} the index ({found.indexed_end})")
    if first is None or last is None:
        if context is None:
            return RecoveryOutcome.NEW, ""
        if low == end:
            return RecoveryOutcome.ALL_TRIMMED, ""
        return invalid(
            f"entries {low} to {end - 1} are lost: there are no entries, and none was trimmed"
        )
    if first > low:
        return invalid(f"entries {low} to {first - 1} are lost: they were not trimmed")
    if last + 1 < end:
        return invalid(f"entries {last + 1} to {end - 1} are lost: they were committed")
    if found.indexed_end is None and low < end:
        return invalid(f"the index of the commits up to {end} is lost")
    return RecoveryOutcome.VALID, ""


# -- effects of an event on the disk: applied in order, all or none ---------------------------------


@dataclass(frozen=True, slots=True)
class DropFrom:
    """Remove all entries from this offset on."""

    offset: int


@dataclass(frozen=True, slots=True)
class PutSchema:
    """Store a schema record, the newest of the relation `name`."""

    digest: bytes
    record: bytes
    name: str


@dataclass(frozen=True, slots=True)
class PutEntry:
    """Write an entry."""

    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PutIndex:
    """Store a commit in the index."""

    row: IndexRow


@dataclass(frozen=True, slots=True)
class PutDurable:
    """Replace the state record."""

    durable: Durable


@dataclass(frozen=True, slots=True)
class Wipe:
    """Remove all entries and the index, and replace the state record; always the only effect of its event."""

    durable: Durable


Effect = DropFrom | PutSchema | PutEntry | PutIndex | PutDurable | Wipe


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of the written entries: of the last entry, and (`whole`) of the last complete transaction."""

    end_offset: int
    crc: int
    bytes_total: int
    timeline: int
    whole: Position

    @property
    def unfinished(self) -> bool:
        """Whether the last transaction has not ended."""
        return self.end_offset > self.whole.end_offset

    def extended(self, header: EntryHeader, size: int) -> "Tail":
        """Return the tail with one more entry. Raises `MalformedMessageError` if it does not continue the log."""
        where = f"entry {self.end_offset}"
        if header.starts_transaction == self.unfinished:
            wrong = (
                "starts inside a transaction" if self.unfinished else "does not start a transaction"
            )
            raise MalformedMessageError(f"entry {wrong}", where=where)
        if header.last_end_lsn and header.first_end_lsn <= self.whole.end_lsn:
            raise MalformedMessageError(
                f"entry ends at {format_lsn(header.first_end_lsn)}, which the log has already passed "
                f"({format_lsn(self.whole.end_lsn)})",
                where=where,
            )
        end, total = self.end_offset + 1, self.bytes_total + size
        whole = self.whole
        if header.kind == EntryKind.RESTART:
            # As at the start of a stream: the LSNs of the next history are unrelated.
            whole = replace(
                START,
                end_offset=end,
                latest_time=whole.latest_time,
                bytes_total=total,
                crc=header.crc,
                history_start=end,
            )
        elif header.ends_transaction:
            time = header.last_commit_time
            whole = Position(
                end,
                header.last_end_lsn or whole.end_lsn,
                time or whole.commit_time,
                max(whole.latest_time, time),
                header.timeline,
                total,
                header.crc,
                whole.history_start,
            )
        return Tail(end, header.crc, total, header.timeline, whole)


def tail_at(position: Position) -> Tail:
    """The tail of a log whose last entry ends a transaction at this position."""
    return Tail(
        position.end_offset, position.crc, position.bytes_total, position.timeline, position
    )
