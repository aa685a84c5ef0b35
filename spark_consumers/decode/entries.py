"""The change log's entries as Arrow columns: many rows at once, with numpy and pyarrow.

Entries come in offset order from a commit boundary, or from inside a transaction that is known. Their payloads are put end to end until there are
`target_bytes`, and decoded together: message boundaries, transactions, then each table's rows (module
`scan`) and their values (module `types`). What a transaction is (xid, LSN, time) comes from its Begin
and is carried over entries and batches.

Invariant: every Insert, Update, Delete and Truncate of the wanted relations comes out exactly once, in
commit order within its relation; one that cannot be read or held is an error with its place, and nothing
after it comes out. Each entry's checksum is verified before a byte of its payload is looked at.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_consumers.decode.frames import Frames, Piece, Transaction, frame
from spark_consumers.decode.masking import NOTHING, Masking, constant, hashed, kept, misfit
from spark_consumers.decode.spans import Bools, Int64s, gather
from spark_consumers.decode.split import malformed
from spark_consumers.decode.tuple_scan import TEXT, UNCHANGED, Tuples, scan, scatter
from spark_consumers.decode.types import (
    ColumnType,
    apart,
    checked_utf8,
    column_type,
    from_text,
    with_base_types,
)
from spark_consumers.decode.unrepresentable import UnrepresentableValueError
from walsender_bridge.change_log.entry import (
    EntryHeader,
    EntryKind,
    check,
    check_follows,
    read_payload,
    split_messages,
    split_schema_record,
)
from walsender_bridge.errors import (
    CorruptError,
    MalformedMessageError,
    NotSupportedError,
    UnsupportedValueError,
)
from walsender_bridge.postgres.column_masks import CONSTANT
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.protocol.pgoutput import (
    BEGIN,
    DELETE,
    INSERT,
    TRUNCATE,
    UPDATE,
    Relation,
    parse_begin,
    parse_relation,
)

if TYPE_CHECKING:
    from walsender_bridge.change_log.client import LogEntry

#: How much of the log is decoded at once: enough rows to make numpy's calls cheap, and it stays in the
#: cache (measured: 2 to 32 MiB, 4 is the best for narrow and for wide rows).
TARGET_BYTES = 4 * 2**20

_NEW, _KEY, _OLD = b"NKO"


@dataclass(slots=True)
class ChangeBatch:
    """Changes of one relation with one schema, in commit order; every array has one item a change.

    Each array in `columns` holds the new values of one column of `relation.columns`: NULL in the rows
    of Delete and Truncate, and where `unchanged` is set (a TOAST value that the server did not send).
    With an old tuple of kind `O` such a value is taken from there, and is not `unchanged`.
    `old_columns` likewise holds what was before (of kind `K`: the columns of the key, the others NULL).
    """

    relation: Relation
    schema_hash: bytes
    #: `I`, `U`, `D`, `T` as bytes.
    ops: npt.NDArray[np.uint8]
    #: Where the transaction's commit record starts (`Begin.final_lsn`).
    commit_lsn: npt.NDArray[np.uint64]
    xid: npt.NDArray[np.uint32]
    #: Microseconds since the Unix epoch, UTC.
    commit_time: npt.NDArray[np.int64]
    offset: npt.NDArray[np.uint64]
    version: npt.NDArray[np.uint64]
    #: The message's number in its entry, from 0.
    sequence: npt.NDArray[np.uint32]
    columns: list[pa.Array]
    #: Rows by columns, or None where nothing is unchanged.
    unchanged: Bools | None
    old_columns: list[pa.Array] | None
    #: 0 (none), `K` (the key) or `O` (the whole row).
    old_kind: npt.NDArray[np.uint8]
    #: PostgreSQL's text of the unrepresentable values, by column (NULL for the others), if they are kept.
    unrepresentable: dict[int, pa.Array] = field(default_factory=dict)
    old_unrepresentable: dict[int, pa.Array] = field(default_factory=dict)
    #: Offset and sequence of rows of partitions, and the partition's OID, where the log has it (`PartitionRow`): they are
    #: among the changes of the relation, but maybe not in this batch.
    partitions: list[tuple[int, int, int]] = field(default_factory=list)
    #: The relation as it was sent, where some of its columns are masked: `relation` has those that are left.
    unmasked: Relation | None = None
    #: Why they cannot be masked; then there are no values.
    unmaskable: str = ""

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def sent(self) -> Relation:
        """The relation as it was sent."""
        return self.unmasked or self.relation


def rows_of(batch: ChangeBatch, mask: npt.NDArray[np.bool_]) -> ChangeBatch:
    """The rows of the batch that the mask has."""
    chosen = pa.array(mask)
    return replace(
        batch,
        ops=batch.ops[mask],
        commit_lsn=batch.commit_lsn[mask],
        xid=batch.xid[mask],
        commit_time=batch.commit_time[mask],
        offset=batch.offset[mask],
        version=batch.version[mask],
        sequence=batch.sequence[mask],
        columns=[c.filter(chosen) for c in batch.columns],
        unchanged=None if batch.unchanged is None else batch.unchanged[mask],
        old_columns=None
        if batch.old_columns is None
        else [c.filter(chosen) for c in batch.old_columns],
        old_kind=batch.old_kind[mask],
        unrepresentable={i: raw.filter(chosen) for i, raw in batch.unrepresentable.items()},
        old_unrepresentable={i: raw.filter(chosen) for i, raw in batch.old_unrepresentable.items()},
    )


def decode_entries(
    entries: Iterable["LogEntry"],
    schemas: Callable[[bytes], bytes],
    *,
    relations: Container[str] | None = None,
    columns: Container[str] | None = None,
    as_text: bool = False,
    keep_unrepresentable: Container[str] = (),
    failed: Callable[[Relation, Exception], None] | None = None,
    begun: Transaction | None = None,
    masking: Callable[[Relation], Masking | str] | None = None,
    target_bytes: int = TARGET_BYTES,
) -> Iterator[ChangeBatch]:
    """Decode a run of entries that starts at a commit boundary, or inside a transaction.

    `begun`: the last transaction that began before the run (`last_begun`), if the run starts inside a commit; it may have ended
    before the run, too. `schemas` gives a schema record for its hash. `relations` (names `schema.table`, or OIDs as text) leaves others out,
    and then entries may be missing that hold none of them; `columns` leaves out columns (of every
    relation). `as_text` gives every column as PostgreSQL's own text. `keep_unrepresentable`: relations whose
    unrepresentable values become NULL, with their text in `ChangeBatch.unrepresentable`, instead of an error. `failed` is
    called with a relation whose changes cannot be decoded, and the error, instead of raising it; the rest of its changes
    is skipped. `masking`: the masks of a relation, or why its values must not be decoded (`masking`). Memory:
    some `target_bytes`, or one entry.

    Raises `MalformedMessageError`, `CorruptError`, `UnsupportedValueError` (a value that the column's
    type cannot hold: table, column and position are named), and what `schemas` raises.
    """
    decoder = _Decoder(schemas, relations, columns, as_text, keep_unrepresentable, failed, masking)
    transaction = begun
    expected: int | None = None
    previous: int | None = None
    # What comes before the run is missing here: where a transaction starts, that one has ended.
    missing = begun is not None
    run: list[Piece] = []
    size = 0
    for entry in entries:
        header = _checked(entry, previous if entry.offset == expected else None)
        previous = header.crc
        if expected is not None and entry.offset != expected:
            if relations is None or entry.offset < expected:
                raise CorruptError(
                    f"expected offset {expected}, got {entry.offset}", where="change log"
                )
            missing = True
        expected = entry.offset + 1
        if header.kind != EntryKind.DATA:
            continue
        if decoder.can_skip(header):
            missing = True
            continue
        payload = read_payload(entry.data, header)
        if run and size + len(payload) > target_bytes:
            yield from decoder.decode(frames := frame(run, transaction), run)
            transaction, run, size = frames.transaction, [], 0
        # Where entries were left out, the transaction that was open before may have ended there.
        after_gap = missing and header.starts_transaction
        hashes = {r.relation_id: r.schema_hash for r in header.relations}
        run.append(
            Piece(entry, payload, header.message_count, after_gap, hashes, header.partitions)
        )
        missing = False
        size += len(payload)
    if run:
        yield from decoder.decode(frame(run, transaction), run)


def last_begun(entry: "LogEntry") -> Transaction:
    """The last transaction that begins in this entry. Raises `CorruptError`, `MalformedMessageError` if there is none."""
    header = _checked(entry, None)
    for message in reversed(split_messages(read_payload(entry.data, header))):
        if message[0] == BEGIN:
            found = parse_begin(message)
            return Transaction(found.final_lsn, found.commit_time, found.xid)
    raise malformed(f"no transaction begins in the entry at offset {entry.offset}")


def _checked(entry: "LogEntry", previous_crc: int | None) -> EntryHeader:
    """The header, after the checksum of the whole entry is verified."""
    try:
        header = check(entry.data)
        if previous_crc is not None:
            check_follows(header, previous_crc)
    except (CorruptError, NotSupportedError) as error:
        where = f"change log, offset {entry.offset}"
        raise type(error)(error.what, where=where, repair=error.repair) from None
    return header


@dataclass(slots=True)
class _Schema:
    relation: Relation
    #: Which of the tuple's columns are wanted.
    chosen: list[int]
    kinds: list[ColumnType]
    width: int
    masking: Masking
    #: As in `ChangeBatch`.
    unmasked: Relation | None
    unmaskable: str


class _Decoder:
    def __init__(
        self,
        schemas: Callable[[bytes], bytes],
        relations: Container[str] | None,
        columns: Container[str] | None,
        as_text: bool,
        keep_unrepresentable: Container[str],
        failed: Callable[[Relation, Exception], None] | None,
        masking: Callable[[Relation], Masking | str] | None,
    ) -> None:
        self._schemas = schemas
        self._relations = relations
        self._columns = columns
        self._as_text = as_text
        self._keep_unrepresentable = keep_unrepresentable
        self._failed = failed
        self._masking = masking
        self._failing: set[int] = set()
        self._known: dict[bytes, _Schema] = {}

    def can_skip(self, header: EntryHeader) -> bool:
        """Nothing in this entry is wanted, not even the Begin of a transaction that continues in the next one."""
        wanted = self._relations
        if wanted is None or (header.max_xid and not header.ends_transaction):
            return False
        return not any(
            str(r.relation_id) in wanted
            or self._schema(r.schema_hash, r.relation_id).relation.full_name in wanted
            for r in header.relations
        )

    def decode(self, frames: Frames, run: list[Piece]) -> Iterator[ChangeBatch]:
        """The changes in these frames, which are those of `run`."""
        for oid, messages in frames.by_relation():
            entry = frames.entry[messages]
            for first, last, digest in _runs(oid, entry, run):
                schema = self._schema(digest, oid)
                name = schema.relation.full_name
                if oid in self._failing or not (
                    self._relations is None
                    or name in self._relations
                    or str(oid) in self._relations
                ):
                    continue
                try:
                    batch = self._batch(frames, messages[first:last], schema, digest)
                except Exception as error:
                    if self._failed is None:
                        raise
                    self._failed(schema.relation, error)
                    self._failing.add(oid)
                    continue
                batch.partitions = [
                    (p.entry.offset, row.number, row.relation_id)
                    for p in run
                    for row in p.partitions
                    if row.schema_hash == digest
                ]
                yield batch

    def _schema(self, digest: bytes, oid: int) -> _Schema:
        found = self._known.get(digest)
        if found is None:
            relation_message, *types = split_schema_record(self._schemas(digest))
            relation = with_base_types(parse_relation(relation_message, tuple(types)))
            masking, unmaskable = self._masking_of(relation)
            lake = kept(relation.columns, masking.masks)
            names = {column.name for column in lake}
            chosen = [
                i
                for i, column in enumerate(relation.columns)
                if column.name in names and (self._columns is None or column.name in self._columns)
            ]
            wanted = tuple(c for c in lake if self._columns is None or c.name in self._columns)
            found = _Schema(
                replace(relation, columns=wanted),
                chosen,
                [column_type(c.type_oid, c.typmod) for c in wanted],
                len(relation.columns),
                masking,
                relation if masking.masks else None,
                unmaskable,
            )
            self._known[digest] = found
        if found.relation.oid != oid:
            raise malformed(f"the schema of relation {oid} is that of {found.relation.oid}")
        return found

    def _masking_of(self, relation: Relation) -> tuple[Masking, str]:
        """How it is masked, and why it cannot be."""
        found = NOTHING if self._masking is None else self._masking(relation)
        if isinstance(found, str):
            return NOTHING, found
        return found, misfit(relation.columns, relation.key, found.masks) or ""

    def _batch(
        self, frames: Frames, messages: Int64s, schema: _Schema, digest: bytes
    ) -> ChangeBatch:
        count = len(messages)
        buffer = frames.buffer
        ops = frames.kinds[messages]
        starts, limits = frames.starts[messages], frames.limits[messages]
        markers = np.where(ops == TRUNCATE, 0, buffer[starts + 5])
        has_old = (markers == _KEY) | (markers == _OLD)
        wrong = ((ops == INSERT) & has_old) | ((ops == DELETE) & (markers == _NEW))
        if (wrong | ((ops != TRUNCATE) & ~has_old & (markers != _NEW))).any():
            raise malformed("unexpected kind of tuple in a row")

        place = starts + 6
        old, old_rows = None, np.flatnonzero(has_old)
        if len(old_rows):
            old = scan(buffer, place[old_rows], limits[old_rows], schema.width)
            if any((kinds == UNCHANGED).any() for kinds in old.kinds):
                raise malformed("an old tuple lacks a value")
            place[old_rows] = old.ends
            updated = old_rows[ops[old_rows] == UPDATE]
            if (place[updated] >= limits[updated]).any() or (buffer[place[updated]] != _NEW).any():
                raise malformed("a row has no new tuple")
            place[updated] += 1
        new_rows = np.flatnonzero((ops == INSERT) | (ops == UPDATE))
        new = scan(buffer, place[new_rows], limits[new_rows], schema.width)
        place[new_rows] = new.ends
        if (place != limits)[ops != TRUNCATE].any():
            raise malformed("unexpected bytes after a row")

        new = scatter(new, new_rows, count)
        unchanged = None
        if old is not None:
            old = scatter(old, old_rows, count)
            _fill(new, old, markers == _OLD)
        # A column that has one value is never unchanged.
        marks = {
            i: new.kinds[i] == UNCHANGED
            for i, column in zip(schema.chosen, schema.relation.columns, strict=True)
            if (mask := schema.masking.of(column.name)) is None or mask.kind != CONSTANT
        }
        if any(marked.any() for marked in marks.values()):
            none = np.zeros(count, np.bool_)
            unchanged = np.column_stack([marks.get(i, none) for i in schema.chosen])
        transaction = frames.number[messages]
        batch = ChangeBatch(
            relation=schema.relation,
            schema_hash=digest,
            ops=ops,
            commit_lsn=frames.commit_lsn[transaction],
            xid=frames.xid[transaction],
            commit_time=frames.commit_time[transaction],
            offset=frames.offset[messages],
            version=frames.version[messages],
            sequence=frames.sequence[messages],
            columns=[],
            unchanged=unchanged,
            old_columns=None,
            old_kind=np.where(has_old, markers, 0).astype(np.uint8),
            unmasked=schema.unmasked,
            unmaskable=schema.unmaskable,
        )
        there = (ops == INSERT) | (ops == UPDATE)
        batch.columns = self._values(frames, new, schema, batch, batch.unrepresentable, there)
        if old is not None:
            there = markers == _OLD
            batch.old_columns = self._values(
                frames, old, schema, batch, batch.old_unrepresentable, there
            )
        return batch

    def _values(
        self,
        frames: Frames,
        tuples: Tuples,
        schema: _Schema,
        batch: ChangeBatch,
        unrepresentable: dict[int, pa.Array],
        there: Bools,
    ) -> list[pa.Array]:
        """The columns' values; the text of unrepresentable ones goes to `unrepresentable`, if they are kept.

        `there`: where there is a row.
        """
        if schema.unmaskable:
            return [pa.nulls(len(batch), kind.arrow) for kind in schema.kinds]
        arrays: list[pa.Array] = []
        relation = schema.relation
        kept_of = self._keep_unrepresentable
        keep = relation.full_name in kept_of or str(relation.oid) in kept_of
        for i, column, kind in zip(
            schema.chosen, schema.relation.columns, schema.kinds, strict=True
        ):
            mask = schema.masking.of(column.name)
            if mask is not None and mask.kind == CONSTANT:
                arrays.append(constant(column, mask, there))
                continue
            sent = tuples.kinds[i] == TEXT
            if not sent.any():
                arrays.append(pa.nulls(len(sent), pa.string() if self._as_text else kind.arrow))
                continue
            try:
                texts = gather(
                    frames.memory, tuples.starts[i], tuples.lengths[i], sent, pa.string()
                )
                if mask is not None:
                    arrays.append(hashed(texts, schema.masking.key))
                    continue
                if keep:
                    values, raw = apart(texts, kind.arrow, partial(from_text, kind=kind))
                    if raw is not None:
                        unrepresentable[len(arrays)] = raw
                    arrays.append(values)
                    continue
                arrays.append(checked_utf8(texts) if self._as_text else from_text(texts, kind))
            except UnrepresentableValueError as fault:
                raise _named(fault, schema.relation, column.name, batch) from fault
        return arrays


def _fill(new: Tuples, old: Tuples, whole: Bools) -> None:
    """Take unchanged values from the old tuple where that is the whole row."""
    for i, kinds in enumerate(new.kinds):
        missing = (kinds == UNCHANGED) & whole
        if missing.any():
            new.kinds[i] = np.where(missing, old.kinds[i], kinds)
            new.starts[i] = np.where(missing, old.starts[i], new.starts[i])
            new.lengths[i] = np.where(missing, old.lengths[i], new.lengths[i])


def _runs(oid: int, entry: Int64s, run: list[Piece]) -> Iterator[tuple[int, int, bytes]]:
    """The rows of one relation (each in entry number `entry`, rising) as runs of one schema."""
    changes = np.flatnonzero(np.diff(entry)) + 1
    bounds = [0, *changes.tolist()]
    first, digest = 0, None
    for at in bounds:
        here = run[int(entry[at])].schemas.get(oid)
        if here is None:
            raise malformed(
                f"an entry has changes of relation {oid}, which its header does not list"
            )
        if digest is not None and here != digest:
            yield first, at, digest
            first = at
        digest = here
    if digest is not None:
        yield first, len(entry), digest


def _named(
    fault: UnrepresentableValueError, relation: Relation, column: str, batch: ChangeBatch
) -> UnsupportedValueError | MalformedMessageError:
    row = fault.index
    place = (
        f"{relation.full_name}.{column}, transaction {batch.xid[row]} at "
        f"{format_lsn(int(batch.commit_lsn[row]))}, log offset {batch.offset[row]}, "
        f"message {batch.sequence[row]}"
    )
    if fault.malformed:
        return MalformedMessageError(
            fault.what,
            where=place,
            repair="check which program wrote the log, and the log server's disk",
        )
    return UnsupportedValueError(
        fault.what,
        where=place,
        repair="change the value at the source, exclude the column from the publication, or quarantine such rows "
        "([lake.on_unrepresentable_value])",
    )
