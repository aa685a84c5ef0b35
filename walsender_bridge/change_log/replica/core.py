"""The core of a replica of one log stream: events in, effects out, no I/O.

The store applies the effects of an event in one durable transaction, in order, or none of them;
if it cannot, this object is discarded and a new one is recovered from the store. So every answer
to an event is true of the disk.

    local offsets    low                 committed_end        end
                      |  committed entries  |  uncommitted      |
                      +---------------------+---------+---------+
                                            | whole   | unfin-  |
                                            | trans-  | ished   |
                                            | actions |         |

Invariants (numbered as in docs/invariants.md): the context's end is `committed_end` (I1); offsets are dense in
[low, end) (I2); versions grow (I5); a report starts at `committed_end`, so no offset is
reported again after its commit (I7); a stream is never sealed behind the last commit (I8), and a
rejected entry is removed before SEALED is durable, so it cannot reappear (I9); every reported or
committed end is the end of a transaction (I14). An entry is accepted only if it continues the chain of checksums
and the order of end LSNs: exactly once, in the server's order.

Only the latest commit context is kept (Varlog's proposal). An empty commit changes only the
version, so it is written with the next write or by `persist`; the report shows the durable version.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum

from walsender_bridge.change_log.entry import (
    EntryHeader,
    check,
    schema_hash,
    split_schema_record,
    verify,
)
from walsender_bridge.change_log.protocol import (
    MAX_COUNT,
    Ack,
    CommitContext,
    Position,
    ReplicaReport,
    ReplicaStatus,
    is_from_before_a_rebuild,
)
from walsender_bridge.change_log.replica.disk import (
    BeforeRestart,
    DropFrom,
    Durable,
    Effect,
    IndexRow,
    PutDurable,
    PutEntry,
    PutIndex,
    PutSchema,
    RecoveryOutcome,
    StoredReplica,
    Tail,
    Wipe,
    evaluate,
    tail_at,
)
from walsender_bridge.change_log.replica.synchronization import (
    SyncBatch,
    SyncOffer,
    SyncRange,
    another_history,
    ends_as,
    follows,
    negotiate,
)
from walsender_bridge.change_log.restart import check_cut, is_restart
from walsender_bridge.errors import (
    BehindError,
    CorruptError,
    DivergedError,
    FencedError,
    InvalidReplicaError,
    MalformedMessageError,
    StreamSealedError,
)
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, WalPosition


class ReplicaState(StrEnum):
    """The state of a replica. LEARNING sends no reports: it recovers, or is invalid and has to be synchronized."""

    LEARNING = "learning"
    APPENDABLE = "appendable"
    SEALING = "sealing"
    SEALED = "sealed"
    CLOSED = "closed"


class Event(StrEnum):
    """The events of a replica."""

    RECOVER = "recover"
    RECOVER_SEALING = "recover as sealing"
    RECOVER_SEALED = "recover as sealed"
    OPEN_WRITER = "open a writer"
    CUT_TAIL = "cut the tail"
    APPEND = "append"
    COMMIT = "commit"
    EMPTY_COMMIT = "learn a version"
    REPORT = "report"
    READ = "read"
    TRIM = "trim"
    SEAL_BEHIND = "seal, behind the last commit"
    SEAL = "seal"
    UNSEAL = "unseal"
    DAMAGE = "damage"
    SYNC_INIT = "begin to synchronize"
    SYNC_REPLICATE = "take entries of another replica"
    SYNC_DONE = "end the synchronization"
    JOIN = "be known as a member again"
    CLOSE = "close"


#: All transitions. Any other is refused.
TRANSITIONS: dict[ReplicaState, dict[Event, ReplicaState]] = {
    ReplicaState.LEARNING: {
        Event.RECOVER: ReplicaState.APPENDABLE,
        Event.RECOVER_SEALING: ReplicaState.SEALING,
        Event.RECOVER_SEALED: ReplicaState.SEALED,
        Event.SYNC_INIT: ReplicaState.LEARNING,
        Event.SYNC_REPLICATE: ReplicaState.LEARNING,
        Event.SYNC_DONE: ReplicaState.SEALED,
        Event.DAMAGE: ReplicaState.LEARNING,
        Event.CLOSE: ReplicaState.CLOSED,
    },
    ReplicaState.APPENDABLE: {
        Event.OPEN_WRITER: ReplicaState.APPENDABLE,
        Event.CUT_TAIL: ReplicaState.APPENDABLE,
        Event.APPEND: ReplicaState.APPENDABLE,
        Event.COMMIT: ReplicaState.APPENDABLE,
        Event.EMPTY_COMMIT: ReplicaState.APPENDABLE,
        Event.REPORT: ReplicaState.APPENDABLE,
        Event.READ: ReplicaState.APPENDABLE,
        Event.TRIM: ReplicaState.APPENDABLE,
        Event.SEAL_BEHIND: ReplicaState.SEALING,
        Event.SEAL: ReplicaState.SEALED,
        Event.JOIN: ReplicaState.APPENDABLE,
        Event.DAMAGE: ReplicaState.LEARNING,
        Event.CLOSE: ReplicaState.CLOSED,
    },
    ReplicaState.SEALING: {
        Event.COMMIT: ReplicaState.SEALING,
        Event.EMPTY_COMMIT: ReplicaState.SEALING,
        Event.REPORT: ReplicaState.SEALING,
        Event.READ: ReplicaState.SEALING,
        Event.TRIM: ReplicaState.SEALING,
        Event.SEAL_BEHIND: ReplicaState.SEALING,
        Event.SEAL: ReplicaState.SEALED,
        Event.SYNC_INIT: ReplicaState.LEARNING,
        Event.JOIN: ReplicaState.SEALING,
        Event.DAMAGE: ReplicaState.LEARNING,
        Event.CLOSE: ReplicaState.CLOSED,
    },
    ReplicaState.SEALED: {
        Event.UNSEAL: ReplicaState.APPENDABLE,
        Event.EMPTY_COMMIT: ReplicaState.SEALED,
        Event.REPORT: ReplicaState.SEALED,
        Event.READ: ReplicaState.SEALED,
        Event.TRIM: ReplicaState.SEALED,
        Event.SEAL_BEHIND: ReplicaState.SEALING,
        Event.SEAL: ReplicaState.SEALED,
        Event.JOIN: ReplicaState.SEALED,
        Event.DAMAGE: ReplicaState.LEARNING,
        Event.CLOSE: ReplicaState.CLOSED,
    },
    ReplicaState.CLOSED: {},
}


def sealed_error(stream: str) -> StreamSealedError:
    """The error for a writer whose stream was sealed."""
    return StreamSealedError(
        "the stream was sealed; a writer needs a new term",
        where=f"stream {stream}",
        repair="try again",
    )


def check_source(offer: SyncOffer, end: int) -> None:
    """Raise `BehindError` if the source has not what is committed up to `end`."""
    if offer.durable.committed_end < end:
        raise BehindError(
            f"log server {offer.source} has committed up to {offer.durable.committed_end}, and not yet up to {end}",
            where=f"stream {offer.durable.stream}",
            repair="try again, or synchronize from another replica",
        )


# -- the core ---------------------------------------------------------------------------------------


class Replica:
    """See the module. `uncommitted`: the entries beyond the context's end, from the store."""

    def __init__(
        self,
        found: StoredReplica,
        uncommitted: Iterable[bytes | memoryview],
        schemas: Iterable[bytes],
    ) -> None:
        self.durable = found.durable
        self.current = found.durable
        self.state = ReplicaState.LEARNING
        self._schemas = set(schemas)
        #: Ends of transactions that are written and not committed, in order.
        self._ends: deque[Position] = deque()
        self.tail = tail_at(found.durable.position)
        self.outcome, self.reason = evaluate(found)
        #: Whether what it had may be lost, so that a synchronization replaces it.
        self._lacks = self.outcome == RecoveryOutcome.INVALID and not found.wiping
        if self.outcome in {RecoveryOutcome.INVALID, RecoveryOutcome.SYNCHRONIZING}:
            return
        for data in uncommitted:
            # A tail that does not verify cannot have been acknowledged in this form: it is damaged.
            self._extend(self.tail.extended(verify(data, self.tail.crc), len(data)))
        sealed_at = self.durable.sealed_at
        if sealed_at is None:
            self._move(Event.RECOVER)
        elif sealed_at > self.durable.committed_end:
            self._move(Event.RECOVER_SEALING)
        else:
            self._move(Event.RECOVER_SEALED)

    @property
    def uncommitted_ends(self) -> Sequence[Position]:
        """Ends of transactions that are written and not committed, in order."""
        return self._ends

    def _move(self, event: Event) -> None:
        after = TRANSITIONS[self.state].get(event)
        if after is None:
            raise InvalidReplicaError(
                f"cannot {event}: the replica is {self.state}"
                + (f" ({self.reason})" if self.reason else ""),
                where=f"stream {self.durable.stream}",
                repair="see `tuskline log status`" if self.reason else "",
            )
        self.state = after

    def _extend(self, tail: Tail) -> None:
        if tail.whole is not self.tail.whole:
            self._ends.append(tail.whole)
        self.tail = tail

    def _write(self, effects: list[Effect]) -> list[Effect]:
        """The effects of an event, and the state record if it differs from the one on disk."""
        if self.current != self.durable:
            self.durable = self.current
            effects.append(PutDurable(self.current))
        return effects

    # -- the writer ---------------------------------------------------------------------------------

    def open_writer(self, term: int) -> list[Effect]:
        """Open a writer. Raises `FencedError` if a newer one has been opened.

        An unfinished transaction is cut off: its writer has been replaced, and the new one sends it again.

        The writer with the term of a seal unseals the replica: the repository gives out that term once it has durably
        unsealed the stream, with this replica as a member. Any other term does not: one that is older is fenced, and a newer
        one is of a seal that this replica does not know. So once a replica has been sealed, no writer raises its term: one that
        claims to could fence the true one, and every seal after it up to that term.
        """
        if term < self.current.term:
            if self.state in {ReplicaState.SEALING, ReplicaState.SEALED}:
                # No newer writer need exist: the stream may have been sealed since this one got its term.
                raise sealed_error(self.durable.stream)
            raise FencedError(
                f"the writer's term {term} is older than the current term {self.current.term}",
                where=f"stream {self.durable.stream}",
                repair="another capture process has taken over; stop this one",
            )
        if self.state == ReplicaState.SEALED and term == self.current.term:
            self._move(Event.UNSEAL)
            self.current = replace(self.current, sealed_at=None)
        self._move(Event.OPEN_WRITER)
        if self.current.was_sealed and term > self.current.term:
            raise InvalidReplicaError(
                f"the writer's term {term} is not that of the last seal, {self.current.term}",
                where=f"stream {self.durable.stream}",
                repair="ask the repository for a term",
            )
        effects: list[Effect] = []
        if self.tail.unfinished:
            effects.append(DropFrom(self.tail.whole.end_offset))
            self.tail = tail_at(self.tail.whole)
        self.current = replace(self.current, term=term)
        return self._write(effects)

    def cut_tail(self, term: int, end: int) -> list[Effect]:
        """Remove the uncommitted entries on behalf of the writer of this term: the source no longer has them.

        `end`: the end of the last commit, as that writer knows it. Raises `FencedError` if a newer writer has been opened,
        `InvalidReplicaError` if there are commits beyond `end`.
        """
        if term != self.current.term:
            raise FencedError(
                f"term {term} is not the current writer's term {self.current.term}",
                where=f"stream {self.durable.stream}",
                repair="another capture process has taken over; stop this one",
            )
        if end != self.current.committed_end:
            raise InvalidReplicaError(
                f"cannot cut the tail at {end}: the replica has committed up to {self.current.committed_end}",
                where=f"stream {self.durable.stream}",
            )
        check_cut(self.tail, self.current.position)
        self._move(Event.CUT_TAIL)
        if self.tail.end_offset == end:
            return []
        self._ends.clear()
        self.tail = tail_at(self.current.position)
        return self._write([DropFrom(end)])

    def append(
        self,
        entries: Sequence[bytes],
        schemas: Sequence[bytes] = (),
        confirm_to: WalPosition | None = None,
        gate_lsn: Lsn = MAX_LSN,
        system_id: int | None = None,
    ) -> list[Effect]:
        """Append entries with the schemas that they are the first to need, and the writer's positions.

        On an error nothing changes. Raises `MalformedMessageError`, `CorruptError`, or
        `DivergedError` if `system_id` differs from the stream's, which is fixed until a RESTART (`restart`).
        """
        self._move(Event.APPEND)
        effects, known = self._schemas_of(schemas)
        tails, headers = [self.tail], []
        for data in entries:
            header = verify(data, tails[-1].crc)
            headers.append(header)
            self._check_schemas(header, known)
            effects.append(PutEntry(tails[-1].end_offset, data))
            tails.append(tails[-1].extended(header, len(data)))
        committed_end = self.current.committed_end
        restarts = is_restart(headers, self.tail, committed_end, confirm_to, system_id)
        system_id = system_id or self.current.system_id
        if not restarts and self.current.system_id not in {None, system_id}:
            raise DivergedError(
                f"the stream has system identifier {self.current.system_id}, not {system_id}",
                where=f"stream {self.durable.stream}",
            )
        self._schemas |= known
        for tail in tails[1:]:
            self._extend(tail)
        confirmed, before = self.current.confirmed_to, self.current.before_restart
        if restarts:
            before = BeforeRestart(confirmed, self.current.system_id)
        if confirm_to is not None and (restarts or confirmed is None or confirm_to > confirmed):
            confirmed = confirm_to
        sent = (confirmed, system_id)
        lowers = gate_lsn < self.durable.gate_lsn
        idle = not effects and sent == (self.current.confirmed_to, self.current.system_id)
        self.current = replace(
            self.current,
            confirmed_to=confirmed,
            gate_lsn=gate_lsn,
            system_id=system_id,
            before_restart=before,
        )
        # A gate that is raised needs no write: the next heartbeat sends it again.
        return [] if idle and not lowers else self._write(effects)

    def _schemas_of(self, records: Sequence[bytes]) -> tuple[list[Effect], set[bytes]]:
        effects: list[Effect] = []
        for record in records:
            name = pgoutput.parse_relation(split_schema_record(record)[0]).full_name
            effects.append(PutSchema(schema_hash(record), record, name))
        return effects, {schema_hash(record) for record in records}

    def unknown_schemas(self, digests: Iterable[bytes]) -> list[bytes]:
        """Those of the hashes that the registry does not have, so that no entry here names them."""
        return [digest for digest in digests if digest not in self._schemas]

    def _check_schemas(self, header: EntryHeader, known: set[bytes]) -> None:
        for relation in header.relations:
            if relation.schema_hash not in known and relation.schema_hash not in self._schemas:
                raise MalformedMessageError(
                    f"schema of relation {relation.relation_id} is missing",
                    where=f"stream {self.durable.stream}",
                )

    def ack(self) -> Ack:
        """The acknowledgement to send once the effects are durable."""
        return Ack(
            self.tail.end_offset,
            self.tail.whole.end_lsn,
            self.current.committed_end,
            self.current.position.end_lsn,
            self.durable.confirmed_to,
        )

    # -- the repository -----------------------------------------------------------------------------

    def report(self, replica: str) -> ReplicaReport | None:
        """Report what can be committed: complete transactions that the gate lets through. None while LEARNING."""
        if Event.REPORT not in TRANSITIONS[self.state]:
            return None
        position = self.current.position
        if self.state == ReplicaState.APPENDABLE:
            for end in self._ends:
                if end.end_lsn > self.current.gate_lsn:
                    break
                position = end
                if end.history_start == end.end_offset:
                    # A RESTART gets a commit of its own: readers start behind it, at the end of a commit.
                    break
        start = self.current.committed_end
        return ReplicaReport(
            replica,
            self.durable.stream,
            self.durable.log_id,
            self.current.term,
            self.durable.version,
            start,
            position.end_offset - start,
            position,
            self.durable.low_offset,
        )

    def commit(self, context: CommitContext, now: int = 0, crc: int | None = None) -> list[Effect]:
        """Apply a commit, at this time (microseconds). A version that is already known is ignored. `crc`: see `IssuedCommit`.

        Raises `InvalidReplicaError` if it does not follow, ends where no transaction does, or is of other entries.
        """
        if self.state in {ReplicaState.LEARNING, ReplicaState.CLOSED}:
            self._move(Event.COMMIT)
        if context.version <= self.current.version:
            return []
        start = self.current.committed_end
        known = self.current.context.global_end if self.current.context else 1
        if context.local_offset != start or context.global_offset < known:
            raise self._refused(context, f"the replica is at {start} (global {known})")
        if not context.length:
            self._move(Event.EMPTY_COMMIT)
            self.current = replace(self.current, context=context)
            return []
        position = next((e for e in self._ends if e.end_offset == context.end), None)
        if position is None:
            raise self._refused(context, f"no transaction ends at {context.end}")
        if crc not in {None, position.crc}:
            raise self._refused(context, f"the entry in front of {context.end} is another one")
        self._move(Event.COMMIT)
        while self._ends and self._ends[0].end_offset <= context.end:
            self._ends.popleft()
        size = position.bytes_total - self.current.position.bytes_total
        self.current = replace(
            self.current, context=context, position=position, taken_at=now, before_restart=None
        )
        effects: list[Effect] = [PutIndex(IndexRow(context, size, position, now))]
        if self.state == ReplicaState.SEALING and self.current.sealed_at == context.end:
            effects += self._sealed()
        return self._write(effects)

    def _refused(self, context: CommitContext, reason: str) -> InvalidReplicaError:
        return InvalidReplicaError(
            f"commit {context.version} of [{context.local_offset}, {context.end}) at global "
            f"{context.global_offset} does not follow: {reason}",
            where=f"stream {self.durable.stream}",
        )

    def persist(self) -> list[Effect]:
        """Write an empty commit or a gate position that is still pending."""
        return [] if self.state == ReplicaState.LEARNING else self._write([])

    def seal(self, end: int, term: int, version: int) -> list[Effect]:
        """Accept no more entries, and remove those at or above `end`, the end of the last commit.

        `term`: of the seal, which fences the writers before it. `version`: the newest one that the repository has issued.
        The state is SEALING while commits below `end` are missing.
        Raises `FencedError` if the repository has been rebuilt since, whatever its terms are; if the replica has a newer
        term; or if this term's writer has unsealed it: then the request is late, and would remove entries that were reported.
        Raises `InvalidReplicaError` if the replica has committed more than the repository knows.
        """
        if Event.SEAL not in TRANSITIONS[self.state]:
            self._move(Event.SEAL)
        self._check_repository("seal", version)
        unsealed = self.state == ReplicaState.APPENDABLE and term == self.current.term
        if term < self.current.term or unsealed:
            raise FencedError(
                f"the seal's term {term} is not newer than the current term {self.current.term}",
                where=f"stream {self.durable.stream}",
            )
        if end < self.current.committed_end:
            raise InvalidReplicaError(
                f"cannot seal at {end}: the replica has committed up to {self.current.committed_end}",
                where=f"stream {self.durable.stream}",
            )
        effects: list[Effect] = []
        if end > self.current.committed_end:
            self._move(Event.SEAL_BEHIND)
        else:
            effects = self._sealed()
        self.current = replace(self.current, sealed_at=end, term=term, was_sealed=True)
        return self._write(effects)

    def _check_repository(self, what: str, version: int) -> None:
        if is_from_before_a_rebuild(version, self.current.version):
            raise FencedError(
                f"the {what} comes from a repository that has issued version {version}, and the replica has version"
                f" {self.current.version}: the repository has been rebuilt since",
                where=f"stream {self.durable.stream}",
                repair="stop the old repository",
            )

    def _sealed(self) -> list[Effect]:
        self._move(Event.SEAL)
        end = self.current.committed_end
        rejected = self.tail.end_offset > end
        self._ends.clear()
        self.tail = tail_at(self.current.position)
        # The history before a RESTART that is removed goes on, with its position and its cluster.
        self.current = self.current.without_restart()
        return [DropFrom(end)] if rejected else []

    def trim(self, offset: int, version: int) -> list[Effect]:
        """Remove the entries below `offset`, the end of a commit; the watermark never decreases.

        `version`: the newest one that the repository has issued. Raises `FencedError` if the repository has been rebuilt since:
        the old one knows nothing of the leases of the new one.
        """
        self._check_repository("trim", version)
        self._move(Event.TRIM)
        if offset > self.current.committed_end:
            raise InvalidReplicaError(
                f"cannot trim to {offset}: only {self.current.committed_end} is committed",
                where=f"stream {self.durable.stream}",
            )
        if offset <= self.current.low_offset:
            return []
        self.current = replace(self.current, low_offset=offset)
        return self._write([])

    # -- synchronization (synchronization.py) -------------------------------------------------------

    def sync_init(self, offer: SyncOffer) -> tuple[SyncRange, list[Effect]]:
        """Begin to synchronize, and answer what is lacking. Only a replica that is behind does: LEARNING or SEALING.

        May be repeated, also with another source. Raises `InvalidReplicaError`, or `DivergedError` (`negotiate`), and
        `BehindError` for a source that is behind entries of this replica below the end at which it is being sealed: they may be
        committed, and would be removed.
        """
        lacking, wipe = negotiate(self.outcome, self.current, offer)
        end = self.current.sealed_at
        # At `MAX_COUNT` it is one from before a rebuild, or has all entries, and no commit that it knows of ends there.
        if self.state == ReplicaState.SEALING and end is not None and end < MAX_COUNT:
            check_source(offer, min(end, self.tail.end_offset))
        self._move(Event.SYNC_INIT)
        theirs = offer.durable
        replaced_by = offer.source if self._lacks else self.current.replaced_by
        self._lacks = False
        self._ends.clear()
        self.reason = f"it is being synchronized with log server {offer.source}"
        own = replace(
            self.current.without_restart(),
            term=max(self.current.term, theirs.term),
            sealed_at=None,
            syncing_from=offer.source,
            replaced_by=replaced_by,
        )
        self.outcome = RecoveryOutcome.SYNCHRONIZING
        if wipe:
            first = offer.first
            own = replace(
                own, low_offset=first.end_offset, context=None, position=first, taken_at=0
            )
            self.tail = tail_at(first)
            self.current = self.durable = own
            # The source sends all of them.
            self._schemas = set()
            return lacking, [Wipe(own)]
        self.tail = tail_at(own.position)
        self.current = own
        # A replica that did not take part has not looked whether there are any.
        return lacking, self._write([DropFrom(own.committed_end)])

    def sync_replicate(self, source: str, batch: SyncBatch) -> list[Effect]:
        """Take a batch, in one transaction with its commits; with `done`, the replica is SEALED where the range ends.

        On an error nothing changes. Raises `InvalidReplicaError` for another source than that of `sync_init`, or a batch
        that does not follow; `DivergedError`, `CorruptError` or `MalformedMessageError` for its entries.
        """
        # One that was found damaged since may lack what was there at SyncInit.
        damaged = self.outcome == RecoveryOutcome.INVALID
        if self.current.syncing_from != source or damaged:
            raise InvalidReplicaError(
                f"it is being synchronized with {self.current.syncing_from or 'no log server'}, not {source}"
                if not damaged
                else f"it is damaged: {self.reason}",
                where=f"stream {self.durable.stream}",
                repair="begin with SyncInit",
            )
        if Event.SYNC_REPLICATE not in TRANSITIONS[self.state]:
            self._move(Event.SYNC_REPLICATE)
        effects, known = self._schemas_of(batch.schemas)
        tail, current, rows = self.tail, self.current, deque(batch.rows)
        for data in batch.entries:
            try:
                header = verify(data, tail.crc)
            except CorruptError:
                check(data)
                raise another_history(current.stream, source, tail.end_offset) from None
            self._check_schemas(header, known)
            effects.append(PutEntry(tail.end_offset, data))
            tail = tail.extended(header, len(data))
            if rows and rows[0].context.end == tail.end_offset:
                row = rows.popleft()
                current = self._synced(current, tail, row)
                tail = tail_at(row.position)
                effects.append(PutIndex(row))
        if rows:
            raise self._refused(rows[0].context, "its last entry is not in the batch")
        if batch.done is not None:
            current = self._sync_done(current, tail, batch.done)
        self._move(Event.SYNC_REPLICATE if batch.done is None else Event.SYNC_DONE)
        self._schemas |= known
        self.tail, self.current = tail, current
        if batch.done is not None:
            self.outcome, self.reason = RecoveryOutcome.VALID, ""
        return self._write(effects)

    def _synced(self, current: Durable, tail: Tail, row: IndexRow) -> Durable:
        """The state behind a commit of the source, which has to end where `tail` does."""
        reason = follows(current, row)
        p, whole = row.position, tail.whole
        if (p.end_offset, p.crc, p.bytes_total) != (whole.end_offset, whole.crc, whole.bytes_total):
            reason = reason or f"the entries end a transaction at {whole.end_offset}"
        if reason:
            raise self._refused(row.context, reason)
        return replace(current, context=row.context, position=row.position, taken_at=row.taken_at)

    def _sync_done(self, current: Durable, tail: Tail, theirs: Durable) -> Durable:
        """The state at the end of a synchronization: the source's commit context, which may be an empty, newer one."""
        end = current.committed_end
        reason = ends_as(current, theirs)
        if tail.end_offset != end:
            reason = reason or f"entries up to {tail.end_offset} came, and commits up to {end}"
        if reason:
            raise InvalidReplicaError(
                f"the end of the synchronization does not fit: {reason}",
                where=f"stream {current.stream}",
                repair="begin again with SyncInit",
            )
        if theirs.position.crc != current.position.crc:
            raise another_history(current.stream, str(current.syncing_from), end)
        return replace(
            current,
            term=max(current.term, theirs.term),
            context=theirs.context,
            confirmed_to=theirs.confirmed_to,
            system_id=theirs.system_id,
            gate_lsn=theirs.gate_lsn,
            sealed_at=end,
            syncing_from=None,
            was_sealed=True,
        )

    def joined(self, replaced_by: str) -> list[Effect]:
        """The repository has recorded that this replica is a member, as which it showed `replaced_by` when it was sealed.

        Anything else says nothing of what it has now: what it had then has been lost since.
        """
        if not replaced_by or self.current.replaced_by != replaced_by:
            return []
        self._move(Event.JOIN)
        self.current = replace(self.current, replaced_by=None)
        return self._write([])

    # -- status -------------------------------------------------------------------------------------

    @property
    def synchronization(self) -> str:
        """The name of the synchronization that it is in; empty: of none, or the replica is damaged.

        The state record of a damaged replica may be that of the segment before its newest one, which was filled during a
        synchronization that has ended since: the replica may have become a member, and have commits that its source has not.
        """
        if self.outcome != RecoveryOutcome.SYNCHRONIZING:
            return ""
        return self.current.syncing_from or ""

    def check_readable(self) -> None:
        """Raise `InvalidReplicaError` if the replica must not be read."""
        self._move(Event.READ)

    def damage(self, reason: str) -> None:
        """Note damage on disk: no more reports are sent from now on."""
        self._move(Event.DAMAGE)
        self.outcome, self.reason, self._lacks = RecoveryOutcome.INVALID, reason, True

    def close(self) -> None:
        """Enter the final state."""
        if self.state != ReplicaState.CLOSED:
            self._move(Event.CLOSE)

    def status(self) -> ReplicaStatus:
        """See `ReplicaStatus`."""
        return ReplicaStatus(
            stream=self.durable.stream,
            log_id=self.durable.log_id,
            state=self.state,
            term=self.current.term,
            low_offset=self.current.low_offset,
            end_offset=self.tail.end_offset,
            committed_end=self.current.committed_end,
            version=self.current.version,
            last_end_lsn=self.tail.whole.end_lsn,
            last_crc=self.tail.crc,
            last_timeline=self.tail.timeline,
            last_commit_time=self.tail.whole.commit_time,
            committed_end_lsn=self.current.position.end_lsn,
            confirmed_to=self.durable.confirmed_to,
            bytes_total=self.current.position.bytes_total,
            system_id=self.durable.system_id,
            replaced_by=self.durable.replaced_by or "",
        )
