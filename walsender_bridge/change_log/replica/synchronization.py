"""Synchronization of a replica with another one: what is offered, what is lacking, and what is sent. Pure.

Varlog's proposal, "Synchronization": the source offers its range of committed entries (SyncInit), the destination answers
with the part that it lacks, and the source sends that part (SyncReplicate). Two things differ from it. A batch carries
entries *with* the commits that end in them, and is applied in one durable transaction, so no crash and no lost message
separates a commit context from its entries. And the destination does not compare offsets alone: each entry carries the
checksum of the one before it, so a copy that continues another history is refused at the first entry.

    destination has              source offers               lacking
    nothing, or is invalid       [low, end)                  [low, end), behind a wipe
    entries up to e < low        [low, end)                  [low, end), behind a wipe: what lies between was trimmed
    entries up to e >= low       [low, end)                  [e, end); uncommitted entries are dropped
    entries up to end            [low, end)                  the newest commit context, if it has an older one
    entries beyond end           [low, end)                  refused: the source has lost commits (also if it is invalid)
    anything, from before a      [low, end)                  [low, end), behind a wipe: the repository was lost, and built
    rebuild                                                  again without this replica, whose last commit it may not know

A wipe removes entries and commit context together. It happens only here, once a source has offered all that replaces them:
as little as possible is removed. From SyncInit to its end the destination has a durable marker and is LEARNING: it sends no
reports, serves no reads, and after a crash begins again where its commit context ends.

*What replaces a loss stands for nothing yet.* A replica that was not valid may have had, as a member, commits that its source has
not: what is left of its record may be of an older segment. The source and whoever orders the copy cannot prove that they have
them. A leader that was deposed still takes a replica for a member that has been left out since, and seals need no record that it
could not have written before. So SyncInit marks such a replica durably with the name of the synchronization (`Durable.replaced_by`),
which is drawn for each, and the mark outlasts it. With the mark a replica takes part as any other, in reports, reads and seals; but
a rebuild of a lost repository, the only one who asks what members *had*, counts it as away (`repository/rebuild.py`, 2).

The mark ends when the repository says that it has recorded this replica as a member, with the mark that it showed when it was sealed
(`Replica.joined`). That record is written while the stream is sealed, and the replica was sealed at the stream's end, so it has all
that a member has. A deposed leader cannot write it; one that is deposed behind the record says what is true. Nothing less suffices.
A seal, or a writer with its term, may be late, and of the time before the loss, and a source has the same terms: so the message
names the mark. If the entries are lost once more, the next SyncInit draws another one, and what is said of the former has no effect.

    crash or loss of a message                   what is found
    before SyncInit is durable                   not valid: as before; counts as away
    in the middle of the wipe                    not valid; the file that marks the wipe has the mark, or that nothing was lost
    from there to the record of the join         the mark
    between the record and the message           the mark: it is sent again, or shown and answered at the stream's next seal
    the message comes late, or twice             it names a mark that is there no more, or what it says is still true

A valid replica that is only behind keeps what it had: negotiation refuses sources that have less. It is not marked, and neither is
one whose wipe was interrupted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from walsender_bridge.change_log.protocol import (
    CommitContext,
    Position,
    is_from_before_a_rebuild,
)
from walsender_bridge.change_log.replica.disk import Durable, IndexRow, RecoveryOutcome
from walsender_bridge.errors import DivergedError, InvalidReplicaError

#: Bytes of a batch. An append that meets a batch may wait for it, and larger ones are hardly faster.
SYNC_BATCH_BYTES: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class SyncOffer:
    """SyncInit: what a source has committed, from the position `first` on, up to `durable`'s commit context.

    `source`: the name of the call (`call_name`). `durable`: the source's state record.
    """

    source: str
    first: Position
    durable: Durable


@dataclass(frozen=True, slots=True)
class SyncRange:
    """The answer to SyncInit: the entries [first, end) are lacking. `context`: the commit context is, too."""

    first: int
    end: int
    context: bool = True


@dataclass(frozen=True, slots=True)
class SyncBatch:
    """SyncReplicate: entries in order, the schemas they need, and the commits that end in them.

    A commit that is larger than a batch is sent in several, of which the last one carries its row.
    `done`: the source's state record at the end of the range; only in the last batch.
    """

    entries: Sequence[bytes]
    schemas: Sequence[bytes] = ()
    rows: Sequence[IndexRow] = ()
    done: Durable | None = None


def call_name(log_server: str, unique: str) -> str:
    """The name of one synchronization from this log server."""
    return f"{log_server}-{unique}"


def source_of(name: str) -> str:
    """The log server of a synchronization with this name; empty for none."""
    return name.rpartition("-")[0]


def negotiate(outcome: RecoveryOutcome, own: Durable, offer: SyncOffer) -> tuple[SyncRange, bool]:
    """What the destination lacks of an offer, and whether it has to be wiped first (see the module's table).

    Raises `DivergedError` if the offer is of another stream or history, or ends before the destination's commits.
    """
    theirs = offer.durable
    where = f"stream {own.stream}, source {offer.source}"
    if (theirs.stream, theirs.log_id) != (own.stream, own.log_id):
        raise DivergedError(
            f"the source offers stream {theirs.stream} of log {theirs.log_id}, not of log {own.log_id}",
            where=where,
        )
    first, end = offer.first.end_offset, theirs.committed_end
    if not 1 <= first <= end or theirs.position.end_offset != end:
        raise InvalidReplicaError(
            f"the source offers [{first}, {end}), at {theirs.position.end_offset}", where=where
        )
    held = own.committed_end
    if own.context is None:
        # It holds nothing, or nothing of it could be read.
        return SyncRange(first, end), outcome == RecoveryOutcome.INVALID or held != first
    if is_from_before_a_rebuild(own.version, theirs.version):
        return SyncRange(first, end), True
    # A replica that is not valid may hold more than this source, too: most of it is intact.
    if held > end or own.version > theirs.version:
        raise DivergedError(
            f"the source ends at {end} in version {theirs.version}, before the destination"
            f" ({held} in version {own.version})",
            where=where,
            repair="synchronize in the other direction: the source has lost commits",
        )
    if held < first or outcome == RecoveryOutcome.INVALID:
        return SyncRange(first, end), True
    if held == end and own.position.crc != theirs.position.crc:
        raise another_history(own.stream, offer.source, held)
    return SyncRange(held, end, context=own.context != theirs.context), False


def another_history(stream: str, source: str, offset: int) -> DivergedError:
    """The error for entries that do not continue the destination's."""
    return DivergedError(
        f"the source has another history: its entries do not continue those before {offset}",
        where=f"stream {stream}, source {source}",
        repair="compare both replicas with `tuskline log verify`; remove the one that is wrong",
    )


def ends_as(own: Durable, theirs: Durable) -> str:
    """Why the source's state record is not that of the end of what was received; empty: it is."""
    mine, context = own.context, theirs.context
    if (theirs.stream, theirs.log_id) != (own.stream, own.log_id):
        return f"it is of stream {theirs.stream} of log {theirs.log_id}"
    if theirs.committed_end != own.committed_end:
        return f"it ends at {theirs.committed_end}, not at {own.committed_end}"
    if theirs.version < own.version or (theirs.version == own.version and context != mine):
        return f"version {theirs.version} follows {own.version}, with another commit context"
    # Without a context of its own: everything below was trimmed, the last commit with it.
    if mine is not None and context is not None and context.version > mine.version:
        known = mine.global_end
        if context.length or context.global_offset < known:
            return (
                f"commit {context.version} does not follow: global offsets up to {known} are known"
            )
    return ""


def follows(own: Durable, row: IndexRow) -> str:
    """Why this commit does not follow the destination's last one; empty: it does."""
    known: CommitContext | None = own.context
    if row.context.local_offset != own.committed_end or row.context.length < 1:
        return (
            f"it is of [{row.context.local_offset}, {row.context.end}), after {own.committed_end}"
        )
    if row.position.end_offset != row.context.end:
        return f"its position is at {row.position.end_offset}"
    if row.context.version <= own.version:
        return f"version {own.version} is known"
    if known is not None and row.context.global_offset < known.global_end:
        return f"global offsets up to {known.global_end} are known"
    return ""
