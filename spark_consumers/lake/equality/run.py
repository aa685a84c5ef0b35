"""The proof of equality, round by round: each has a cut, at which as many chunks are compared as a snapshot may be held for.

A chunk whose sums differ is read again at the same cut, by rows; so is what differs in a row. What cannot be read again in time is recorded as a
difference of the whole chunk: none is lost because a later change has repaired it.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from spark_consumers.decode.mode_columns import BESIDE
from spark_consumers.lake.comparison.chunks import Chunks, sampled
from spark_consumers.lake.comparison.lake import Division, keys_of, sums_of, values_of
from spark_consumers.lake.comparison.source import Load, OutOfTimeError, Part, SourceRows
from spark_consumers.lake.comparison.sums import (
    CHANGED,
    KeyAndDigest,
    RowDifference,
    Sums,
    added,
    differing,
)
from spark_consumers.lake.equality.cut import Cut, cut_of
from spark_consumers.lake.equality.record import (
    CHUNK,
    DIFFERENT,
    EQUAL,
    NOT_COMPARED,
    PENDING,
    Difference,
    EqualityRecord,
    TableRecord,
    read_record,
    write_record,
)
from spark_consumers.lake.manifest.chain import Chain, Manifest, open_chain
from spark_consumers.lake.manifest.table_version import LIVE, RESUMING, TableVersion
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, StoreOptions
from spark_consumers.lake.tables.sources import Source
from spark_consumers.lake.tables.states import stream_of
from spark_consumers.lake.tables.table_filter import filter_of
from spark_consumers.snapshot.exported import AwaitedTransaction, PublishedTable
from walsender_bridge.errors import LakeError, SnapshotError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Bytes of a table, as PostgreSQL stores it, for one chunk, and for one query of a table in buckets.
CHUNK_BYTES: Final = 32 << 20
#: The part of a snapshot's time that is left for reading chunks again that differ.
_RESERVE: Final = 0.3
#: Chunks, and seconds, after which Spark compares what the source has computed.
_BATCH: Final = 500
_BATCH_SECONDS: Final = 60.0
#: Differing chunks that are read again together, and how many differences of a table are named.
_NARROWED: Final = 4
NAMED: Final = 100
#: Seconds for which a table that cannot be read at the cuts is tried again, and between two attempts.
PATIENCE: Final = 120.0
_PAUSE: Final = 2.0


@dataclass(frozen=True)
class Values:
    """The texts of the columns that differ in a row, for a user who has asked for them."""

    table: str
    key: Mapping[str, str]
    source: Mapping[str, str | None] | None
    lake: Mapping[str, str | None] | None


@dataclass(frozen=True)
class Watch:
    """What is called while it runs: with a table, and how many of its chunks are done; while the connection rests; with values."""

    progress: Callable[[str, int, int], None] = lambda *_: None
    resting: Callable[[], None] = lambda: None
    waiting: Callable[[AwaitedTransaction | None], None] = lambda _: None
    values: Callable[[Values], None] | None = None


def begin(
    chain: Chain, streams: Collection[str], names: Sequence[str], sample: float, seed: int
) -> EqualityRecord:
    """A new run over these tables; without names, over all tables of these streams that the newest epoch has. Raises `LakeError`."""
    head = chain.head()
    if head is None:
        raise LakeError(
            "no epoch is published yet",
            where=str(chain.root),
            repair="check that `tuskline lake run` is running",
        )
    wanted = names or sorted(n for n in head.tables if stream_of(n) in streams)
    tables = {name: TableRecord() for name in wanted}
    record = EqualityRecord(time.time(), 0.0, tuple(names), sample, seed, tables)
    return record.after(read_record(chain), head.tables)


def verify(
    spark: "SparkSession",
    lake: str,
    log: str,
    sources: Sequence[Source],
    record: EqualityRecord,
    load: Load,
    *,
    watch: Watch = Watch(),  # it is frozen
    store: StoreOptions = FROM_ENVIRONMENT,
    patience: float = PATIENCE,
    chunk_bytes: int = CHUNK_BYTES,
) -> EqualityRecord:
    """Compare what the record has not compared yet; the record at the end, which the lake has, too.

    Raises the errors of connections, snapshots, the lake and the log: a later call continues.
    """
    chain = open_chain(lake, store)
    run = _Run(spark, chain, store, log, record, load, watch, chunk_bytes)
    for source in sources:
        run.source(source, patience)
    run.record = replace(run.record, ended_at=time.time())
    write_record(chain, run.record)
    return run.record


@dataclass
class _Run:
    spark: "SparkSession"
    chain: Chain
    store: StoreOptions
    log: str
    record: EqualityRecord
    load: Load
    watch: Watch
    chunk_bytes: int

    def source(self, source: Source, patience: float) -> None:
        """Compare all tables of a source."""
        tried: dict[str, float] = {}
        while pending := self._pending(source.stream):
            before = self.record
            try:
                with cut_of(
                    self.spark,
                    self.chain,
                    self.store,
                    self.log,
                    source,
                    pending,
                    self.watch.waiting,
                ) as cut:
                    deferred = self._round(cut, pending)
            except OutOfTimeError:
                deferred = {}
            if self.record == before:
                time.sleep(_PAUSE)
            for name, why in deferred.items():
                if time.monotonic() - tried.setdefault(name, time.monotonic()) > patience:
                    self._not_compared(name, why)

    def _pending(self, stream: str) -> list[str]:
        tables = self.record.tables.items()
        return [n for n, t in tables if t.state == PENDING and stream_of(n) == stream]

    def _round(self, cut: Cut, names: Sequence[str]) -> dict[str, str]:
        """Compare what this cut's time is sufficient for; the tables that it does not have, and why."""
        deferred = {}
        with SourceRows(cut.exported, cut.began, self.load, self.watch.resting) as rows:
            for name in names:
                why, is_final = _why_not(cut, name)
                if why and is_final:
                    self._not_compared(name, why)
                elif why:
                    deferred[name] = why
                else:
                    try:
                        _Comparison(self, cut, rows, name).run()
                    except OutOfTimeError as error:
                        self._check_progress(name, error)
                        break
                    except SnapshotError as error:
                        deferred[name] = error.what
        return deferred

    def _check_progress(self, name: str, error: OutOfTimeError) -> None:
        """A table that is compared as a whole has to be within the time of one snapshot."""
        table = self.record.tables[name]
        if table.cuts and not table.done:
            self._not_compared(
                name,
                f"{error.what}, which is too short to compare it: increase --snapshot-seconds or --load",
            )
        else:
            self.save(name, replace(table, cuts=table.cuts + 1))

    def _not_compared(self, name: str, why: str) -> None:
        self.save(name, replace(self.record.tables[name], state=NOT_COMPARED, reason=why))

    def save(self, name: str, table: TableRecord) -> None:
        """Record how far a table is."""
        self.record = self.record.with_table(name, table)
        write_record(self.chain, self.record)


def _why_not(cut: Cut, name: str) -> tuple[str, bool]:
    """Why the table cannot be compared at this cut, and whether that is so at a later one, too."""
    table = cut.head.tables.get(name)
    if table is None:
        return "it is not in the lake: " + _missing(cut.head, name), name not in cut.head.copies
    if table.state not in {LIVE, RESUMING}:
        return f"it is {table.state}" + (f": {table.reason}" if table.reason else ""), True
    if table.system_id not in {0, cut.exported.system_id}:
        return "it was copied from another cluster than this source's", True
    if table.masks:
        # The lake does not have what the source has: that is what they are for.
        return "some of its columns are masked", True
    if name in cut.left_out:
        return cut.left_out[name], False
    there = cut.published.get(name)
    if there is None:
        return "the source does not publish it", False
    shown = cut.lake.manifest.tables.get(name)
    if shown is None:
        return "it does not follow the log", False
    if [(c.name, c.type_oid, c.typmod) for c in there.columns] != list(shown.layout):
        return "its columns have changed", False
    if set(there.key or ()) != set(shown.key):
        return "its key has changed", False
    return "", False


def _missing(head: Manifest, name: str) -> str:
    return "it is being copied" if name in head.copies else head.not_copied.get(name, "unknown")


class _Comparison:
    """One table at one cut."""

    def __init__(self, run: _Run, cut: Cut, rows: SourceRows, name: str) -> None:
        self._run = run
        self._cut = cut
        self._rows = rows
        self._name = name
        self._there: PublishedTable = cut.published[name]
        self._table: TableVersion = cut.lake.manifest.tables[name]
        condition = filter_of(name, self._table)
        if condition is not None:
            self._there = self._there.restricted(condition.sql)
        names = [column for column, *_ in self._table.layout]
        frame = cut.lake[name]
        if beside := BESIDE[self._table.mode]:
            # The source has the living rows, or the open versions.
            frame = frame.where(f"{beside[-1].name} IS NULL")
        self._frame: DataFrame = frame.select(*(f"`{n.replace('`', '``')}`" for n in names))

    def run(self) -> None:
        """Compare the chunks that are left, as far as time allows. Raises `OutOfTimeError`."""
        record = self._planned()
        chunks = _chunks(record)
        wanted = sampled(
            chunks.count, self._run.record.sample, f"{self._run.record.seed} {self._name}"
        )
        self._progress(record)
        while left := sorted(set(wanted) - set(record.done)):
            ours = self._ranges(chunks, left) if chunks.column else self._buckets(chunks, left)
            theirs = sums_of(self._frame, Division.of(self._table, chunks, ours))
            record = self._compared(record, chunks, ours, theirs)
            is_last = len(record.done) == len(wanted)
            if is_last:
                state = DIFFERENT if record.different_chunks else EQUAL
                record = replace(record, state=state)
            self._run.save(self._name, record)
            self._progress(record)

    def _progress(self, record: TableRecord) -> None:
        self._run.watch.progress(self._name, len(record.done), record.chunks)

    def _planned(self) -> TableRecord:
        """The table's record, with its chunks; begun again if another table has its name now."""
        record = self._run.record.tables[self._name]
        # A cut before may have been one at which the key's first column had another name.
        is_divided_so = record.column in {"", *self._table.key[:1]}
        if record.chunks and record.relation_id == self._table.relation_id and is_divided_so:
            return record
        chunks = self._rows.divided(self._there, self._run.chunk_bytes)
        count = len(sampled(chunks.count, self._run.record.sample, "0"))
        record = TableRecord(
            relation_id=self._table.relation_id,
            column=chunks.column,
            bounds=chunks.bounds,
            is_uuid=chunks.is_uuid,
            buckets=chunks.buckets,
            chunks=count,
        )
        self._run.save(self._name, record)
        return record

    def _ranges(self, chunks: Chunks, left: Sequence[int]) -> dict[int, Sums]:
        """The source's sums of the next ranges: as many as there is time for before some of it is needed to read them again."""
        found: dict[int, Sums] = {}
        until = time.monotonic() + _BATCH_SECONDS
        reserve = _RESERVE * self._run.load.seconds
        for number in left[:_BATCH]:
            if found and (time.monotonic() > until or self._rows.left < reserve):
                break
            parts = self._parts(chunks, number)
            sums = (
                each for part in parts for each in self._rows.sums(self._there, chunks, None, part)
            )
            found[number] = added(sums).get(0, Sums())
        return found

    def _buckets(self, chunks: Chunks, left: Sequence[int]) -> dict[int, Sums]:
        """The source's sums of all buckets that are left."""
        wanted = None if len(left) == chunks.count else left
        sums = added(
            each
            for part in self._rows.blocks(self._there, self._run.chunk_bytes)
            for each in self._rows.sums(self._there, chunks, wanted, part)
        )
        return {number: sums.get(number, Sums()) for number in left}

    def _parts(self, chunks: Chunks, number: int) -> Sequence[Part]:
        if not chunks.column:
            return self._rows.blocks(self._there, self._run.chunk_bytes)
        relations = [(r.schema, r.name, r.oid) for r in self._rows.relations(self._there)]
        return chunks.ranges(number, relations)

    def _compared(
        self,
        record: TableRecord,
        chunks: Chunks,
        ours: Mapping[int, Sums],
        theirs: Mapping[int, Sums],
    ) -> TableRecord:
        """The record after this comparison, with the differences named."""
        bad = [n for n, sums in ours.items() if not sums.equals(theirs.get(n, Sums()))]
        named = list(record.differences)
        for at in range(0, len(bad), _NARROWED):
            if len(named) >= NAMED:
                break
            some = bad[at : at + _NARROWED]
            try:
                named += self._named(chunks, some, NAMED - len(named))
            except (OutOfTimeError, SnapshotError):
                named += [self._of_chunk(chunks, n, ours, theirs) for n in some]
        return replace(
            record,
            done=tuple(sorted({*record.done, *ours})),
            rows=record.rows + sum(sums.rows for sums in ours.values()),
            beyond=record.beyond + sum(sums.beyond for sums in ours.values()),
            cuts=record.cuts + (record.lsn != self._cut.lsn),
            lsn=self._cut.lsn,
            epoch=self._cut.head.epoch,
            different_chunks=record.different_chunks + len(bad),
            differences=tuple(named[:NAMED]),
        )

    def _of_chunk(
        self, chunks: Chunks, number: int, ours: Mapping[int, Sums], theirs: Mapping[int, Sums]
    ) -> Difference:
        begin, end = chunks.limits(number) if chunks.column else (number, None)
        key = {"from": str(begin), "to": str(end)} if chunks.column else {"bucket": str(number)}
        there = theirs.get(number, Sums()).rows
        return Difference(
            CHUNK, key, (), ours[number].rows, there, self._cut.lsn, self._cut.head.epoch
        )

    def _named(self, chunks: Chunks, numbers: Sequence[int], limit: int) -> list[Difference]:
        """The rows that differ in these chunks, `limit` at most."""
        division = Division.of(self._table, chunks, numbers)
        parts = (
            [part for number in numbers for part in self._parts(chunks, number)]
            if chunks.column
            else self._parts(chunks, 0)
        )
        source: dict[KeyAndDigest, int] = {}
        for part in parts:
            for row, count in self._rows.keys(self._there, chunks, numbers, part):
                source[row] = source.get(row, 0) + count
        found = differing(source, keys_of(self._frame, division))[:limit]
        here = {digest for each in found for digest, _ in each.source}
        there = {digest for each in found for digest, _ in each.lake}
        ours: dict[bytes, tuple[list[str | None], list[str | None]]] = {}
        for part in parts if here else ():
            ours |= self._rows.values(self._there, chunks, here, part)
        theirs = values_of(self._frame, division, there) if there else {}
        return [self._difference(each, ours, theirs) for each in found]

    def _difference(
        self,
        row: RowDifference,
        ours: Mapping[bytes, tuple[list[str | None], list[str | None]]],
        theirs: Mapping[bytes, tuple[list[str | None], list[str | None]]],
    ) -> Difference:
        names = [column for column, *_ in self._table.layout]
        here = ours.get(row.source[0][0]) if row.source else None
        there = theirs.get(row.lake[0][0]) if row.lake else None
        columns: list[str] = []
        if row.kind == CHANGED and here and there:
            pairs = zip(names, here[0], there[0], strict=True)
            columns = [name for name, mine, its in pairs if mine != its]
        known = here or there
        texts = dict(zip(names, known[1], strict=True)) if known else {}
        key = {name: str(texts.get(name)) for name in self._table.key}
        if not key:
            key = {"digest": (row.source or row.lake)[0][0].hex()}
        if self._run.watch.values is not None:
            shown = columns or names

            def chosen(
                row: tuple[list[str | None], list[str | None]] | None,
            ) -> dict[str, str | None] | None:
                return row and {n: t for n, t in zip(names, row[1], strict=True) if n in shown}

            self._run.watch.values(Values(self._name, key, chosen(here), chosen(there)))
        return Difference(
            row.kind,
            key,
            tuple(columns),
            sum(count for _, count in row.source),
            sum(count for _, count in row.lake),
            self._cut.lsn,
            self._cut.head.epoch,
        )


def _chunks(record: TableRecord) -> Chunks:
    return Chunks(record.column, record.bounds, record.is_uuid, record.buckets)
