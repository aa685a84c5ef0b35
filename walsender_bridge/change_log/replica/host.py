"""A hosted replica: the core and its store behind one lock, for the threads of a server.

Every change takes the same path: the core returns the effects, the store applies them in one durable
transaction, then the answer is sent. If the store fails, both are recovered from disk, so
the core is never ahead of the disk. If an invariant of the core is violated, nothing is written, and the replica
answers with that error until its process is restarted. Readers need the lock only to check the watermarks.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

from walsender_bridge.change_log.entry import (
    EntryHeader,
    read_header,
    read_payload,
    split_messages,
    split_schema_record,
)
from walsender_bridge.change_log.log_server_messages import ReplicaDescription
from walsender_bridge.change_log.protocol import (
    MAX_PLAN,
    READ_BATCH_BYTES,
    Ack,
    CutPoint,
    IssuedCommit,
    ReplicaReport,
    ReplicaStatus,
)
from walsender_bridge.change_log.replica import damaged_segments
from walsender_bridge.change_log.replica.core import (
    TRANSITIONS,
    Event,
    Replica,
    ReplicaState,
    sealed_error,
)
from walsender_bridge.change_log.replica.cuts import cut_point, planned
from walsender_bridge.change_log.replica.disk import (
    Durable,
    Effect,
    IndexRow,
    RecoveryOutcome,
    StoredReplica,
)
from walsender_bridge.change_log.replica.invariants import check_invariants
from walsender_bridge.change_log.replica.settings import SEGMENT_BYTES
from walsender_bridge.change_log.replica.synchronization import (
    SYNC_BATCH_BYTES,
    SyncBatch,
    SyncOffer,
    SyncRange,
    source_of,
)
from walsender_bridge.change_log.storage.segment import PUT_BACK
from walsender_bridge.change_log.storage.store import StoredEntry, StreamStore
from walsender_bridge.errors import (
    BehindError,
    CorruptError,
    FencedError,
    InvariantError,
    TrimmedError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition
from walsender_bridge.runtime import fail_point, logs

#: Seconds that an empty commit may wait for another write.
LAZY_SECONDS = 1.0
#: A time later than that of any commit (microseconds).
FOREVER = 2**62
#: The repairs of a disk that could not be accessed.
_BUSY: Final = "check for a full disk and for exhausted file descriptors"

_log = logs.logger()


def _check_holds(status: ReplicaStatus, end: int) -> None:
    if end > status.committed_end:
        raise BehindError(
            f"offset {end} is beyond the committed end {status.committed_end} of this replica",
            where=f"stream {status.stream}",
            repair="try again, or read from another replica",
        )


def _commit(commit: IssuedCommit, now: int) -> Callable[[Replica], list[Effect]]:
    return lambda core: core.commit(commit.context, now, commit.crc)


class HostedReplica:
    """See the module. `clock` gives monotonic seconds; `replica_id`, `step`: see `StreamStore`."""

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        replica_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        step: Callable[[str], None] = fail_point.hit,
    ) -> None:
        self.folder = folder
        self._segment_bytes = segment_bytes
        self.replica_id = replica_id
        self._clock = clock
        self._step = step
        self._lock = threading.Lock()
        self._session = 0
        self._superseded = FencedError(
            "a newer writer has been opened",
            where=f"stream {folder.name}",
            repair="stop this writer",
        )
        #: Why the previous session has ended.
        self._ended: TusklineError = self._superseded
        self._waiting_since: float | None = None
        #: Names of relations by schema hash; the registry never changes a record.
        self._names: dict[bytes, str] = {}
        self._broken: TusklineError | None = None
        self._closed = False
        #: The log of a replica that has no data yet (`learn`).
        self._learns: str | None = None
        self._store: StreamStore
        self._core: Replica

    # -- open and close -----------------------------------------------------------------------------

    def create(self, stream: str, log_id: str) -> None:
        """Create a new replica."""
        self._store = self._new_store()
        self._store.create(Durable(stream, log_id))
        self.replica_id = self._store.replica_id
        self._core = Replica(self._store.found, (), ())

    def _new_store(self) -> StreamStore:
        return StreamStore(
            self.folder,
            segment_bytes=self._segment_bytes,
            replica_id=self.replica_id,
            step=self._step,
        )

    def recover(self) -> None:
        """Open the replica from disk. One that cannot take part is kept, and reports why.

        Any other error leaves the replica broken, so that no core answers for a disk that could not be read.
        """
        self._store = self._new_store()
        try:
            self._store.open()
            found, self.replica_id = self._store.found, self._store.replica_id
            start = found.durable.committed_end
            self._core = Replica(found, self._store.uncommitted(start), self._store.known_schemas())
        except FileNotFoundError as error:
            self._store.close()
            if self._learns is None:
                self._broken = self._out_of_reach(error)
            else:
                self.learn(self._learns)
        except (TusklineError, OSError) as error:
            if isinstance(error, CorruptError):
                error = self._store.keep_damaged_aside() or error
            self._store.close()
            self._broken = error if isinstance(error, TusklineError) else self._out_of_reach(error)
        else:
            self._broken = None

    def _out_of_reach(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"could not access the replica's disk: {error}",
            where=str(self.folder),
            repair=PUT_BACK if isinstance(error, FileNotFoundError) else _BUSY,
        )

    def close(self) -> None:
        """Write what is pending, and close."""
        with self._lock:
            if self._broken is None:
                self._store.apply(self._core.persist())
                self._core.close()
                self._store.close()
            self._closed = True
            self._broken = UnavailableError("log server is shutting down", where=str(self.folder))

    @property
    def outcome(self) -> tuple[RecoveryOutcome, str]:
        """The result of recovery, with the reason if the replica is not valid."""
        if self._broken is not None:
            return RecoveryOutcome.INVALID, str(self._broken)
        return self._core.outcome, self._core.reason

    @property
    def disk_bytes(self) -> int:
        """Bytes of its files."""
        return self._store.disk_bytes

    def _try_again(self) -> None:
        """Recover again if the disk was only temporarily inaccessible. The lock is held."""
        if isinstance(self._broken, UnavailableError) and not self._closed:
            self.recover()

    def _look(self) -> None:
        """Recover from disk if its files are gone or others, also while nothing is written. The lock is held."""
        if self._broken is not None or self._core.state == ReplicaState.LEARNING:
            return  # nothing is reported; a damaged segment has been renamed
        try:
            self._store.check_place()
        except (UnavailableError, OSError) as error:
            _log.error("replica's files are gone", stream=self.folder.name, error=str(error))
            self._store.close()
            self.recover()

    def _healthy(self) -> Replica:
        self._try_again()
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        return self._core

    def _do(self, event: Callable[[Replica], list[Effect]], *, hot: bool = False) -> None:
        """Perform an event durably. The lock is held. Raises `InvariantError`, and from then on for every event."""
        core = self._healthy()
        before = core.current
        effects = event(core)
        if not hot:
            self._check(core, before)
        tail = core.tail.bytes_total - core.current.position.bytes_total
        try:
            self._store.apply(effects, tail_bytes=tail)
        except Exception as error:
            # The core is ahead of the disk now: nothing is answered until it has been recovered from disk.
            self._broken = self._out_of_reach(error)
            self._store.close()
            self.recover()
            raise

    def _check(self, core: Replica, before: Durable) -> None:
        try:
            check_invariants(core, before)
        except InvariantError as error:
            # The disk is consistent, and is left unchanged for the investigation of the fault.
            self._broken = error
            self._store.close()
            _log.error("replica stopped", **error.to_wire())
            raise

    # -- the writer ---------------------------------------------------------------------------------

    def open_writer(self, term: int) -> tuple[int, ReplicaStatus]:
        """Open a session for the writer of this term, which fences the previous session."""
        with self._lock:
            self._do(lambda core: core.open_writer(term))
            self._ended = self._superseded
            self._session += 1
            return self._session, self._core.status()

    def cut_tail(self, term: int, end: int) -> ReplicaStatus:
        """See `Replica.cut_tail`; the writer must then be opened again."""
        with self._lock:
            self._do(lambda core: core.cut_tail(term, end))
            self._ended = self._superseded
            self._session += 1
            return self._core.status()

    def append(
        self,
        session: int,
        entries: Sequence[bytes],
        schemas: Sequence[bytes],
        confirm_to: WalPosition | None,
        gate_lsn: Lsn,
        system_id: int | None = None,
    ) -> Ack:
        """See `Replica.append`; durable when it returns."""
        with self._lock:
            if session != self._session:
                raise self._ended.with_traceback(None)
            self._do(
                lambda core: core.append(entries, schemas, confirm_to, gate_lsn, system_id),
                hot=True,
            )
            return self._core.ack()

    # -- the repository -----------------------------------------------------------------------------

    def report(self, replica: str) -> ReplicaReport | None:
        """Report what may be committed; None while LEARNING. Writes an empty commit that has been pending long enough."""
        with self._lock:
            self._try_again()
            self._look()
            if self._broken is not None:
                return None
            if self._core.current == self._core.durable:
                self._waiting_since = None
            elif self._waiting_since is None:
                self._waiting_since = self._clock()
            elif self._clock() - self._waiting_since >= LAZY_SECONDS:
                self._waiting_since = None
                self._do(lambda core: core.persist())
            return self._core.report(replica)

    def commit(self, commits: Sequence[IssuedCommit], now: int) -> None:
        """Apply commits, in order, each durably unless it is empty. `now`: the repository's steady time (microseconds)."""
        with self._lock:
            for each in commits:
                self._do(_commit(each, now))

    def seal(self, end: int, term: int, version: int) -> ReplicaStatus:
        """See `Replica.seal`. It ends the session of the writer."""
        with self._lock:
            self._do(lambda core: core.seal(end, term, version))
            self._ended = sealed_error(self.folder.name)
            self._session += 1
            return self._core.status()

    def joined(self, replaced_by: str) -> None:
        """See `Replica.joined`."""
        with self._lock:
            self._do(lambda core: core.joined(replaced_by))

    def trim_point(self, up_to: int, before_time: int, now: int = FOREVER) -> int:
        """The end of the last commit that ends at or below `up_to` and was applied before that time; 1: there is none.

        A commit with a time after `now` was applied when the clock was ahead. It is older than the commits behind
        it, so it is trimmed with the first of these that is old enough.
        """
        self._readable_at_all()
        with self._reading():
            row = self._store.last_commit_where(
                lambda r: r.context.end <= up_to and not before_time <= r.taken_at <= now
            )
            if row is not None and row.taken_at > now:
                row = self._store.last_commit_where(
                    lambda r: r.context.end <= up_to and r.taken_at < before_time
                )
        return 1 if row is None else row.context.end

    def trim(self, up_to: int, version: int) -> int:
        """Trim the commits that end at or below `up_to`. Returns the low watermark; segments that are trimmed completely are deleted.

        `version`: see `Replica.trim`.
        """
        end = self.trim_point(up_to, FOREVER)
        with self._lock:
            self._healthy()
            if end > self._core.current.low_offset:
                self._do(lambda core: core.trim(end, version))
                self._store.drop_below(self._core.durable.low_offset)
            return self._core.durable.low_offset

    def check(self) -> None:
        """Raise `CorruptError`, or the error that prevents reading, if the replica is LEARNING."""
        with self._lock:
            core = self._healthy()
            if core.state == ReplicaState.LEARNING:
                raise CorruptError(
                    core.reason, where=f"stream {self.folder.name}", repair=damaged_segments.REPAIR
                )

    # -- synchronization ----------------------------------------------------------------------------

    def learn(self, log_id: str) -> None:
        """Create a replica that has lost everything, or never had anything: it is LEARNING until it is synchronized."""
        self._learns = log_id
        # Drawn before it has a segment, so that the log server can keep it.
        self.replica_id = self.replica_id or str(uuid.uuid4())
        self._store = self._new_store()
        self._core = self._lost(log_id, "it has no data yet")
        self._broken = None

    def _lost(self, log_id: str, reason: str) -> Replica:
        begun, nothing = self._store.begun_wipe(), Durable(self.folder.name, log_id)
        if begun is not None:
            nothing = replace(nothing, replaced_by=begun.replaced_by)
        found = StoredReplica(nothing, None, None, None, reason, wiping=begun is not None)
        return Replica(found, (), ())

    def sync_init(self, offer: SyncOffer, log_id: str) -> SyncRange:
        """See `Replica.sync_init`. A replica whose disk cannot be read counts as one that holds nothing.

        `log_id`: of the log that this log server belongs to, whatever the source says.
        """
        with self._lock:
            self._try_again()
            if isinstance(self._broken, CorruptError):
                core = self._lost(log_id, self._broken.what)
            else:
                core = self._healthy()
            lacking, effects = core.sync_init(offer)
            self._core, self._broken = core, None
            self._do(lambda _: effects)
            self._session += 1
            return lacking

    def sync_replicate(self, source: str, batch: SyncBatch) -> ReplicaStatus:
        """See `Replica.sync_replicate`; durable when it returns."""
        with self._lock:
            self._do(lambda core: core.sync_replicate(source, batch))
            return self._core.status()

    def sync_offer(self, source: str) -> SyncOffer:
        """What this replica offers as a source, the log server `source`. Raises what prevents that it is read."""
        self._readable_at_all()
        with self._lock:
            durable = self._core.durable.without_restart()
        low = durable.low_offset
        if low == durable.committed_end:
            return SyncOffer(source, durable.position, durable)
        with self._reading(low):
            first = self._store.position_at(low)
        if first is None:
            raise UnavailableError(
                f"no commit begins at the low watermark {low}: it was trimmed meanwhile",
                where=f"stream {durable.stream}",
                repair="try again",
            )
        return SyncOffer(source, first, durable)

    def sync_batches(self, offer: SyncOffer, lacking: SyncRange) -> Iterator[SyncBatch]:
        """What a destination lacks of this replica's offer, in batches of about `SYNC_BATCH_BYTES`, all entries checked."""
        schemas = self._every_schema()
        start, end = lacking.first, lacking.end
        if start == end:
            yield SyncBatch([], schemas, [], offer.durable)
        while start < end:
            self._readable(start)
            with self._reading(start):
                batch, after = self._store.read(start, end, SYNC_BATCH_BYTES)
                behind = self._store.commits_behind(start)
                rows = [*takewhile(lambda row: row.context.end <= after, behind)]  # noqa: B023  # used at once
            start = after
            done = offer.durable if start == end else None
            yield SyncBatch([each.data for each in batch], schemas, rows, done)
            schemas = []

    def _every_schema(self) -> list[bytes]:
        """All schema records, the newest one of each relation last: the last one counts as its newest."""
        newest = self.newest_schemas()
        with self._reading():
            known = self._store.schemas(self._store.known_schemas()).values()
        return [*(record for record in known if record not in newest), *newest]

    # -- readers ------------------------------------------------------------------------------------

    def status(self) -> ReplicaStatus:
        """See `ReplicaStatus`."""
        with self._lock:
            return self._healthy().status()

    def description(self) -> ReplicaDescription:
        """The replica in any state; see `ReplicaDescription`."""
        stream = self.folder.name
        with self._lock:
            self._try_again()
            begun = self._store.begun_wipe()
            wiped_for = "" if begun is None else begun.syncing_from
            replaced_by = (None if begun is None else begun.replaced_by) or ""
            if self._broken is not None:
                state, why, source = ReplicaState.LEARNING, str(self._broken), source_of(wiped_for)
                return ReplicaDescription(
                    stream, state, why, source, None, None, None, None, 0, replaced_by
                )
            core, status, current = self._core, self._core.status(), self._core.current
            state, why = core.state, core.reason
            source = source_of(core.synchronization or wiped_for)
        low_bytes = self._bytes_before(status) if Event.READ in TRANSITIONS[state] else None
        return ReplicaDescription(
            stream=stream,
            state=state,
            reason=why,
            syncing_from=source,
            status=status,
            context=current.context,
            sealed_at=current.sealed_at,
            low_bytes=low_bytes,
            disk_bytes=self.disk_bytes,
            replaced_by=replaced_by or status.replaced_by,
        )

    def _bytes_before(self, status: ReplicaStatus) -> int | None:
        """Bytes of the stream in front of the low watermark; None if they cannot be read now."""
        if status.low_offset == status.committed_end:
            return status.bytes_total
        with contextlib.suppress(TusklineError), self._reading(status.low_offset):
            row = next(self._store.commits_behind(status.low_offset), None)
            return None if row is None else row.position.bytes_total - row.size
        return None

    def commits(self, after: int, limit: int) -> list[IndexRow]:
        """The commits whose ends are greater than `after`, in order. Raises `TrimmedError`."""
        if after >= self._readable(after).committed_end:
            return []
        with self._reading(after):
            return [*islice(self._store.commits_behind(after), limit)]

    def _readable(self, offset: int) -> ReplicaStatus:
        """The status, if reading may start at `offset`."""
        with self._lock:
            core = self._healthy()
            core.check_readable()
            status = core.status()
        if offset < status.low_offset:
            raise TrimmedError(
                f"offset {offset} has been trimmed; the first one available is {status.low_offset}",
                where=f"stream {status.stream}",
                repair="copy the tables of a lake again (tuskline table resync); start a query with a new checkpoint",
            )
        return status

    @contextlib.contextmanager
    def _reading(self, offset: int | None = None) -> Iterator[None]:
        """Guard a read of the store from that offset on.

        A read fails because of a concurrent trim, or because of damage: then the replica sends no more reports,
        and the damaged segment is renamed.
        """
        try:
            yield
        except CorruptError as found:
            if offset is not None:
                self._readable(offset)
            with self._lock:
                self._healthy().check_readable()
                kept = self._store.keep_damaged_aside() or found
                self._core.damage(f"{kept.where}: {kept.what}")
            _log.error("damaged segment", stream=self.folder.name, error=str(kept))
            raise kept from found

    def check_holds(self, end: int) -> None:
        """Raise `BehindError` unless the replica is committed up to the offset `end`."""
        _check_holds(self.status(), end)

    @property
    def log_id(self) -> str:
        """The id of the replica's log, which never changes."""
        return self._core.durable.log_id

    def read(
        self, start: int, stop: int, relations: Sequence[str] | None
    ) -> tuple[list[StoredEntry], int]:
        """Read committed entries from `start` on, below `stop`: `READ_BATCH_BYTES` or one entry; and where to continue."""
        _check_holds(self._readable(start), stop)
        if start >= stop:
            return [], start
        wanted = None if relations is None else self._filter(frozenset(relations))
        with self._reading(start):
            return self._store.read(start, stop, READ_BATCH_BYTES, wanted)

    def _filter(self, relations: frozenset[str]) -> Callable[[EntryHeader], bool]:
        def wanted(header: EntryHeader) -> bool:
            if not header.ends_transaction and header.max_xid:
                # A transaction begins here and continues: the reader needs its Begin.
                return True
            # No name is a number: it has a dot.
            return any(
                str(r.relation_id) in relations or self._name(r.schema_hash) in relations
                for r in header.relations
            )

        return wanted

    def _name(self, digest: bytes) -> str:
        if digest not in self._names:
            record = self._store.schemas([digest])[digest]
            relation = pgoutput.parse_relation(split_schema_record(record)[0])
            self._names[digest] = relation.full_name
        return self._names[digest]

    def schemas(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Schema records by hash. Raises `CorruptError` if one is missing.

        That is no damage of this replica unless its registry is damaged: anybody may ask for any hash.
        """
        self._readable_at_all()
        with self._lock:
            unknown = self._healthy().unknown_schemas(digests)
        with self._reading():
            found = self._store.schemas(self._store.known_schemas() if unknown else digests)
        if unknown:
            what = f"schema {unknown[0].hex()} is not in the registry"
            raise CorruptError(what, where=str(self.folder))
        return found

    def _readable_at_all(self) -> None:
        with self._lock:
            self._healthy().check_readable()

    def newest_schemas(self) -> list[bytes]:
        """The newest schema record of each relation, ordered by name."""
        self._readable_at_all()
        with self._reading():
            return self._store.newest_schemas()

    def plan(
        self, after: int, up_to_version: int, max_bytes: int | None, max_versions: int | None
    ) -> list[CutPoint]:
        """See `ReplicaClient.plan`."""
        if after >= self._readable(after).committed_end:
            return []
        with self._reading(after):
            return planned(
                self._store.commits_behind(after), up_to_version, max_bytes, max_versions
            )

    def version_at(self, commit_time: int) -> CutPoint | None:
        """The first commit whose last transaction was committed at that time or later."""
        self._readable_at_all()
        with self._reading():
            row = self._store.first_commit_where(lambda r: r.position.latest_time >= commit_time)
        return None if row is None else cut_point(row)

    def cut_before(self, version: int) -> CutPoint | None:
        """The last commit below that version."""
        self._readable_at_all()
        with self._reading():
            row = self._store.last_commit_where(lambda r: r.context.version < version)
        return None if row is None else cut_point(row)

    def transactions_after(self, timeline: int, lsn: Lsn, limit: int) -> list[tuple[Lsn, int, int]]:
        """(end LSN, xid, commit time) of transactions of the present history beyond `lsn`, committed in the log or not."""
        with self._lock:
            core = self._healthy()
            core.check_readable()
            start, stop = core.current.committed_end, core.tail.end_offset
            place = core.tail.whole.history_start, lsn
        with self._reading():
            row = self._store.first_commit_where(
                lambda r: (r.position.history_start, r.position.end_lsn) > place
            )
            if row is not None:
                start = row.context.local_offset
            found = (
                (end, xid, time)
                for at, end, xid, time in self._transactions(start, stop)
                if end > lsn and at >= timeline
            )
            return [*islice(found, min(limit, MAX_PLAN))]

    def _transactions(self, start: int, stop: int) -> Iterator[tuple[int, Lsn, int, int]]:
        """(timeline, end LSN, xid, commit time) of those that end in [start, stop)."""
        xid = 0
        for data in self._store.scan(start, stop):
            header = read_header(data)
            for message in split_messages(read_payload(data, header)):
                if message[0] == pgoutput.BEGIN:
                    xid = pgoutput.parse_begin(message).xid
                elif message[0] == pgoutput.COMMIT:
                    commit = pgoutput.parse_commit(message)
                    yield header.timeline, commit.end_lsn, xid, commit.commit_time
