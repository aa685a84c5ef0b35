"""The entries of one replica on disk: a sequence of segments, each of which is dropped whole when trimmed.

    <stream>/segment-00000000000000000001/   entries 1 .. 8999, and stale copies of what follows
    <stream>/segment-00000000000000009000/   the newest: everything from 9000, and the small record

An LMDB file never shrinks, so the stream is split into environments. The state record of the newest one is
the replica's; those of older ones are obsolete. A segment owns the offsets from its name to the next
one's. Rolling follows a commit: the new segment receives the state record, the schemas and the uncommitted tail
in one transaction, under a temporary name, and is renamed when it is durable. So at any
moment exactly one complete segment is the newest, and uncommitted entries, the only ones that may ever be
removed, are in that segment only. (I13) Then the one before it notes that it has a next one, so that it never passes for the
newest one itself; if the process ends between the two, the next opening does it.

Trimming makes the low watermark durable first, then drops segments that lie below it; a crash between
the two is finished at the next opening. A wipe removes the older segments first: an older state record would belong to an
older version, so it must never become the newest. A file (`wiping`) marks a wipe from before its first step until after
its last one, and the replica as not valid; it names the synchronization for which it is wiped, and says whether anything was lost
before (`Durable.replaced_by`), which no record of a segment that is left can say. Reads are short transactions that copy: a reader that stalls
holds no page of any segment.
"""

import contextlib
import shutil
import threading
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import lmdb

from walsender_bridge.change_log.entry import EntryHeader, read_header
from walsender_bridge.change_log.protocol import START, Position
from walsender_bridge.change_log.replica import damaged_segments, fatal_segments
from walsender_bridge.change_log.replica.damaged_segments import REPAIR
from walsender_bridge.change_log.replica.disk import (
    Durable,
    Effect,
    IndexRow,
    PutIndex,
    StoredReplica,
    Wipe,
)
from walsender_bridge.change_log.replica.settings import SEGMENT_BYTES
from walsender_bridge.change_log.storage.entries import (
    committed_entries,
    entries,
    newest_schemas,
    schema,
)
from walsender_bridge.change_log.storage.records import (
    chain_of,
    key_of,
    pack_state,
    replica_id_of,
    unpack_state,
)
from walsender_bridge.change_log.storage.segment import (
    REFUSALS,
    REPLICA,
    Segment,
    SegmentSnapshot,
    check_newest,
    check_old,
    dense,
    failed_write,
    missing_next,
    refused_read,
)
from walsender_bridge.errors import CorruptError, TusklineError, UnavailableError
from walsender_bridge.runtime import fail_point
from walsender_bridge.runtime.durable import replace_file, sync_folder

#: Segments behind the newest that stay open between two reads.
_KEPT_OPEN = 8
_DRAFT = "new-"
#: A file: the replica is being wiped. Whatever segments are there, they are not its state.
WIPING = "wiping"


class BegunWipe(NamedTuple):
    """A wipe that was begun: for a synchronization (`syncing_from`), by a replica with this `replaced_by`."""

    syncing_from: str
    replaced_by: str | None

    def to_file(self) -> bytes:
        """The content of the file."""
        return f"{self.syncing_from}\n{self.replaced_by or ''}".encode()


class StoredEntry(NamedTuple):
    """A committed entry and its places."""

    offset: int
    version: int
    global_offset: int
    data: bytes


class StreamStore:
    """See the module. Any thread may read; a writer holds the replica's lock.

    `segment_bytes`: a segment that is larger is followed by a new one. `replica_id`: see `ReplicaIds`; empty: that of the newest
    segment, or a new one, is taken; None: so it is, and the folder may have any name. `step` is called with a name between
    the steps of a change, so that a test can kill the process or raise there.
    """

    def __init__(
        self,
        folder: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        replica_id: str | None = None,
        step: Callable[[str], None] = fail_point.hit,
    ) -> None:
        self.folder = folder
        self.replica_id = replica_id
        self._segment_bytes = segment_bytes
        self._step = step
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._recent: list[Segment] = []
        #: By first offset: what was wrong with a segment that was read.
        self._damaged: dict[int, CorruptError] = {}
        self.found: StoredReplica

    # -- create and open ----------------------------------------------------------------------------

    def create(self, durable: Durable) -> None:
        """Make the store of a new replica."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        sync_folder(self.folder.parent)
        self._make_only(durable)

    def _make(self, first_offset: int, fill: Callable[[Segment], None]) -> Segment:
        """A new segment, whole or not at all."""
        segment = Segment.at(self.folder, first_offset)
        draft = Segment(self.folder / f"{_DRAFT}{segment.folder.name}", first_offset)
        shutil.rmtree(draft.folder, ignore_errors=True)
        # Not those above it: they are taken away while their disk is.
        draft.folder.mkdir(mode=0o700)
        draft.open(write=True)
        try:
            fill(draft)
        finally:
            draft.close()
        sync_folder(draft.folder)
        self._step("log-roll-durable")
        draft.folder.rename(segment.folder)
        sync_folder(self.folder)
        self._step("log-roll-renamed")
        segment.open(write=True)
        return segment

    def open(self) -> None:
        """Open the segments, and set `found`. Raises `CorruptError`, after renaming the damaged segment."""
        damage = ""
        offsets = []
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(_DRAFT):
                shutil.rmtree(path)
            elif path.name == WIPING:
                damage = "it was being wiped to be synchronized with another replica"
            elif renamed := damaged_segments.damage(path):
                damage = renamed
            elif (offset := Segment.offset_in_name(path.name)) is not None:
                offsets.append(offset)
        self._segments = [Segment.at(self.folder, offset) for offset in offsets]
        if not self._segments:
            raise CorruptError(damage or "there are no segments", where=str(self.folder))
        newest = self._segments[-1]
        durable, chain, gone = self._open_newest(newest)
        damage = damage or gone
        for before, after in list(pairwise(self._segments)):
            if after.first_offset <= durable.low_offset:
                before.remove()
                self._segments.remove(before)
        missing = self._missing(chain, durable.low_offset)
        if missing is not None:
            damage = damage or f"the segment starting at {missing} is missing"
        begun = self.begun_wipe()
        if begun is not None:
            durable = replace(durable, replaced_by=begun.replaced_by)
        try:
            stored = self._find(durable, damage)
        except CorruptError as found:
            error = self.keep_damaged_aside() or found
            stored = StoredReplica(durable, None, None, None, f"{error.where}: {error.what}")
        self.found = replace(stored, wiping=begun is not None)

    def _open_newest(self, newest: Segment) -> tuple[Durable, list[int], str]:
        """Its record, the segments before it, and what is missing behind it."""
        try:
            newest.open(write=True)
            with self._snapshot(newest) as snapshot:
                state, chain = snapshot.get(b"meta", b"state"), snapshot.get(b"meta", b"chain")
                if state is None or chain is None:
                    raise CorruptError("segment has no state record", where=str(newest.folder))
                durable = unpack_state(state, newest.folder)
                check_newest(snapshot, durable.stream, self.replica_id)
                its = replica_id_of(snapshot.get(b"meta", REPLICA), newest.file)
                gone = missing_next(snapshot)
            self._take_id(newest, its)
            return durable, chain_of(chain, newest.file), gone
        except CorruptError as error:
            newest.close()
            raise damaged_segments.keep_aside(newest.folder, error) from error
        except BaseException:
            newest.close()
            raise

    def _take_id(self, newest: Segment, its: str) -> None:
        """Know the replica's id, and have it in the newest segment from now on."""
        replica_id = self.replica_id = self.replica_id or its or str(uuid.uuid4())
        if not its:
            # A full disk must not keep the replica from being read: the next opening writes it.
            with contextlib.suppress(lmdb.Error, OSError):
                newest.write_replica_id(replica_id)

    def keep_damaged_aside(self) -> CorruptError | None:
        """Rename the segments in which a read found damage, so that the next opening reports it, too.

        Concurrent readers are not affected: the environment stays open.
        """
        kept = None
        with self._lock:
            for segment in self._segments:
                error = self._damaged.pop(segment.first_offset, None)
                if error is not None and segment.folder.exists():
                    kept = damaged_segments.keep_aside(segment.folder, error)
        return kept

    def _missing(self, chain: Iterable[int], low: int) -> int | None:
        """A segment that should be there."""
        there = [s.first_offset for s in self._segments]
        expected = [*chain, there[-1]]
        for first, following in pairwise(expected):
            if following > low and first not in there:
                return first
        return None

    def _find(self, durable: Durable, damage: str) -> StoredReplica:
        """Find the first and last entries; the history in between is not read."""
        newest = self._segments[-1]
        with self._snapshot(newest) as snapshot:
            bounds = dense(snapshot)
            commit = snapshot.last_commit()
        first, last = bounds or (None, None)
        has_next = True
        if len(self._segments) > 1:
            with self._snapshot(self._segments[-2]) as snapshot:
                commit = commit or snapshot.last_commit()
                has_next = bool(missing_next(snapshot))
            with self._snapshot(self._segments[0]) as snapshot:
                first = snapshot.segment.first_offset
            last = last or newest.first_offset - 1
        for segment in self._segments[:-1]:
            segment.retire()
        if not has_next:
            self._note_next()
        return StoredReplica(
            durable, first, last, None if commit is None else commit.context.end, damage
        )

    def _note_next(self) -> None:
        """Have the segment before the newest one say that there is another. Nobody reads it yet."""
        before, newest = self._segments[-2:]
        # A full disk must not keep the replica from being read: the next opening writes it.
        with contextlib.suppress(UnavailableError, lmdb.Error, OSError):
            before.open(write=True)
            try:
                before.write_next(newest.first_offset)
            finally:
                before.close()

    def close(self) -> None:
        """Close all segments without a reader now, the others when they have been read."""
        with self._lock:
            for segment in self._segments:
                segment.retire()
            self._segments = []

    def check_place(self) -> None:
        """See `Segment.check_place`, of the newest one."""
        for newest in self._segments[-1:]:
            newest.check_place()

    # -- writing ------------------------------------------------------------------------------------

    def apply(self, effects: list[Effect], *, tail_bytes: int = 0) -> None:
        """Do all of them durably, or none. Raises `UnavailableError`, `CorruptError`: open the store again.

        `tail_bytes`: of what is uncommitted afterwards; it has to be copied if this commit fills the
        segment.
        """
        if not effects:
            return
        if isinstance(effects[0], Wipe):
            self._wipe(effects[0].durable)
            return
        newest = self._segments[-1]
        try:
            newest.write(effects, self._step)
            # Afterwards: what is answered has been written where the next start looks for it.
            newest.check_place()
            commits = [e.row.context.end for e in effects if isinstance(e, PutIndex)]
            full = newest.used_bytes >= self._segment_bytes + tail_bytes
            # A long transaction that is not finished is not copied about: the roll waits for its end.
            if commits and full and tail_bytes <= self._segment_bytes:
                self._roll(commits[-1])
        except (lmdb.Error, OSError) as error:
            raise self._refused_write(newest, error) from error

    def _refused_write(self, newest: Segment, error: lmdb.Error | OSError) -> TusklineError:
        """Why LMDB did not write: a damaged segment, which is kept aside, or the disk."""
        failed = failed_write(error, "could not write the replica", newest.folder)
        damage = "" if isinstance(error, OSError) else fatal_segments.damage_of(newest.folder)
        if isinstance(error, REFUSALS):
            damage = damage or f"LMDB could not write it: {error}"
        if not damage:
            return failed
        return damaged_segments.keep_aside(newest.folder, CorruptError(damage, where=newest.file))

    def _roll(self, first_offset: int) -> None:
        before = self._segments[-1]
        chain = [s.first_offset for s in self._segments]

        replica_id = self.replica_id or ""

        def fill(segment: Segment) -> None:
            with before.reading() as snapshot:
                segment.write_copy(snapshot, chain, replica_id, self._step)

        segment = self._make(first_offset, fill)
        with self._lock:
            self._segments.append(segment)
        # The roll is done, whether or not the disk has room for this: the next opening writes it.
        with contextlib.suppress(lmdb.Error, OSError):
            before.write_next(first_offset)
        # From now on it is only read: it is opened again for that, with its own size.
        before.retire()

    def _wipe(self, durable: Durable) -> None:
        """Replace everything by one empty segment. The store may be one that could not be opened."""
        with self._lock:
            opened = {segment.first_offset: segment for segment in self._segments}
            self._segments = []
            self._recent.clear()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            sync_folder(self.folder.parent)
            begun = BegunWipe(durable.syncing_from or "", durable.replaced_by)
            replace_file(self.folder / WIPING, begun.to_file(), mode=0o600)
            offsets = [Segment.offset_in_name(path.name) for path in self.folder.iterdir()]
            for offset in sorted(each for each in offsets if each is not None):
                segment = opened.get(offset) or Segment.at(self.folder, offset)
                segment.set_aside(f"{_DRAFT}removed-{uuid.uuid4()}")
                opened.pop(offset, None)
                self._step("log-wipe-removed")
            self._make_only(durable)
            for path in self.folder.iterdir():
                damaged_segments.replaced(path)
            sync_folder(self.folder)
            self._step("log-wiped")
            (self.folder / WIPING).unlink()
            sync_folder(self.folder)
        except (lmdb.Error, OSError) as error:
            raise failed_write(error, "could not wipe the replica", self.folder) from error
        finally:
            # Those that were not reached, and damaged ones that have another name by now.
            for segment in opened.values():
                segment.retire()

    def begun_wipe(self) -> BegunWipe | None:
        """The wipe that was begun and has not ended; None: there is none, or it is not known whether anything was lost before."""
        try:
            text = (self.folder / WIPING).read_text("ascii", errors="replace")
        except OSError:
            return None
        syncing_from, known, replaced_by = text.partition("\n")
        # An earlier version wrote only the first line.
        return BegunWipe(syncing_from, replaced_by or None) if known else None

    def _make_only(self, durable: Durable) -> None:
        """The first segment of a stream that has none."""
        replica_id = self.replica_id = self.replica_id or str(uuid.uuid4())

        def fill(segment: Segment) -> None:
            segment.write_first(pack_state(durable), replica_id)

        segment = self._make(durable.low_offset, fill)
        with self._lock:
            self._segments = [segment]
            self._damaged.clear()
        self.found = StoredReplica(durable, None, None, None)

    def drop_below(self, low: int) -> None:
        """Drop the segments of which every entry is below the durable low watermark."""
        self._step("log-trim-durable")
        while len(self._segments) > 1 and self._segments[1].first_offset <= low:
            with self._lock:
                dropped = self._segments.pop(0)
            dropped.remove()
            self._step("log-trim-dropped")

    @property
    def disk_bytes(self) -> int:
        """Bytes of all its files."""
        with self._lock:
            return sum(s.used_bytes for s in self._segments)

    # -- reading ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _snapshot(self, segment: Segment) -> Iterator[SegmentSnapshot]:
        """A short read of one segment; damage that is met is named."""
        try:
            with segment.reading() as snapshot:
                yield snapshot
        except CorruptError as error:
            self._note_damage(segment, error)
            raise
        except lmdb.Error as error:
            refused = refused_read(error, segment.file)
            refused.repair = refused.repair or REPAIR
            if isinstance(refused, CorruptError):
                self._note_damage(segment, refused)
            raise refused from error

    def _note_damage(self, segment: Segment, error: CorruptError) -> None:
        with self._lock:
            # One that a wipe has removed meanwhile is not damaged, and another may have its name.
            if segment in self._segments:
                self._damaged.setdefault(segment.first_offset, error)

    def _check_open(self) -> None:
        """The lock is held. A read may meet a store that was closed meanwhile: its owner stops, or recovers it."""
        if not self._segments:
            raise UnavailableError("it is closed", where=str(self.folder), repair="try again")

    def _newest(self) -> Segment:
        with self._lock:
            self._check_open()
            return self._segments[-1]

    @contextlib.contextmanager
    def _owner(self, offset: int) -> Iterator[tuple[SegmentSnapshot, int | None]]:
        """The segment that owns this offset, and where the next one starts (None: it is the newest)."""
        with self._lock:
            self._check_open()
            place = bisect_right([s.first_offset for s in self._segments], offset) - 1
            segment = self._segments[max(place, 0)]
            following = self._segments[max(place, 0) + 1 :]
            end = following[0].first_offset if following else None
            was_open = segment.is_open
            user = segment.using()
            user.__enter__()
        try:
            with self._snapshot(segment) as snapshot:
                if not was_open and end is not None:
                    durable = self.found.durable
                    check_old(snapshot, end, durable.stream, durable.log_id)
                yield snapshot, end
        finally:
            user.__exit__(None, None, None)
            if end is not None:
                self._used(segment)

    def _used(self, segment: Segment) -> None:
        """Close the older segments that were not read lately."""
        with self._lock:
            if segment in self._recent:
                self._recent.remove(segment)
            self._recent.append(segment)
            for old in self._recent[:-_KEPT_OPEN]:
                old.retire()
            del self._recent[:-_KEPT_OPEN]

    def uncommitted(self, start: int) -> Iterator[bytes]:
        """The entries from the committed end on."""
        with self._snapshot(self._newest()) as snapshot:
            for _, value in snapshot.rows(b"entries", key_of(start)):
                yield bytes(value)

    def read(
        self,
        start: int,
        stop: int,
        max_bytes: int,
        wanted: Callable[[EntryHeader], bool] | None = None,
    ) -> tuple[list[StoredEntry], int]:
        """Committed entries from `start` on, below `stop`, and where to continue.

        At least one is read, then as many as fit into `max_bytes`, of one segment; each is checked.
        `wanted` says by its header whether an entry comes along. Raises `CorruptError`.
        """
        found: list[StoredEntry] = []
        size = 0
        with self._owner(start) as (snapshot, end):
            stop = min(stop, end or stop)
            offset = start
            for at, commit, header, data in committed_entries(snapshot, start):
                context = commit.context
                if wanted is None or wanted(header):
                    place = context.global_offset + at - context.local_offset
                    found.append(StoredEntry(at, context.version, place, data))
                # All were copied to be checked: one transaction must stay short all the same.
                size += len(data)
                offset = at + 1
                if offset >= stop or size >= max_bytes:
                    break
            if offset == start:
                raise CorruptError(
                    f"entry {start} is missing", where=snapshot.segment.file, repair=REPAIR
                )
        return found, offset

    def scan(self, start: int, stop: int) -> Iterator[bytes]:
        """Entries from `start` to `stop`, whether they are committed or not, one at a time.

        Raises `CorruptError`.
        """
        while start < stop:
            with self._owner(start) as (snapshot, _):
                found = next(entries(snapshot, start), None)
                if found is None:
                    raise CorruptError(f"entry {start} is missing", where=snapshot.segment.file)
            yield found[2]
            start += 1

    def commits_behind(self, offset: int) -> Iterator[IndexRow]:
        """The commits whose ends are greater than `offset`, in order; short reads of some hundred."""
        while True:
            rows: list[IndexRow] = []
            with self._owner(offset) as (snapshot, end):
                rows += islice(snapshot.commits_behind(offset), 500)
            yield from rows
            if rows:
                offset = rows[-1].context.end
            elif end is None:
                return
            else:
                offset = end

    def first_commit_where(self, true_from: Callable[[IndexRow], bool]) -> IndexRow | None:
        """The first commit for which `true_from` holds; it must hold for all later ones too."""
        offsets = self._offsets()
        low, high = 0, len(offsets)
        while low < high:
            middle = (low + high) // 2
            with self._owner(offsets[middle]) as (snapshot, _):
                last = snapshot.last_commit()
            if last is None or true_from(last):
                high = middle
            else:
                low = middle + 1
        if low == len(offsets):
            return None
        with self._owner(offsets[low]) as (snapshot, _):
            return snapshot.first_commit_where(true_from)

    def last_commit_where(self, true_until: Callable[[IndexRow], bool]) -> IndexRow | None:
        """The last commit for which `true_until` holds; it must hold for all earlier ones too."""
        first_false = self.first_commit_where(lambda row: not true_until(row))
        if first_false is None:
            return self._last_commit()
        return self.commit_ending_at(first_false.context.local_offset)

    def _last_commit(self) -> IndexRow | None:
        for offset in reversed(self._offsets()):
            with self._owner(offset) as (snapshot, _):
                commit = snapshot.last_commit()
            if commit is not None:
                return commit
        return None

    def commit_ending_at(self, offset: int) -> IndexRow | None:
        """The commit whose end this is, if it is still there."""
        if offset <= 1:
            return None
        with self._owner(offset - 1) as (snapshot, _):
            row = snapshot.commit_behind(offset - 1)
        return row if row is not None and row.context.end == offset else None

    def _offsets(self) -> list[int]:
        with self._lock:
            return [s.first_offset for s in self._segments]

    def schemas(self, digests: Iterable[bytes]) -> dict[bytes, bytes]:
        """The records of these hashes. Raises `CorruptError` for one that is not there, or is another."""
        with self._snapshot(self._newest()) as snapshot:
            return {digest: schema(snapshot, digest) for digest in digests}

    def position_at(self, offset: int) -> Position | None:
        """The position in front of the commit that begins at this offset; None: no commit does.

        Where the commit before it was trimmed, only what the entries behind it continue is known: checksum and bytes.
        """
        before = None if offset in self._offsets() else self.commit_ending_at(offset)
        if before is not None:
            return before.position
        row = next(self.commits_behind(offset - 1), None)
        if row is None or row.context.local_offset != offset:
            return None
        first = next(self.scan(offset, offset + 1))
        return replace(
            START,
            end_offset=offset,
            bytes_total=row.position.bytes_total - row.size,
            crc=read_header(first).previous_crc,
        )

    def known_schemas(self) -> list[bytes]:
        """The hashes of all schema records."""
        with self._snapshot(self._newest()) as snapshot:
            return [bytes(key) for key, _ in snapshot.rows(b"schemas")]

    def newest_schemas(self) -> list[bytes]:
        """The newest record of each relation, ordered by name."""
        with self._snapshot(self._newest()) as snapshot:
            return [*newest_schemas(snapshot)]
