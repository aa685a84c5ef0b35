"""`format("tuskline-snapshot")`: one table of an exported snapshot, read by the executors in parallel.

    spark.read.format("tuskline-snapshot").option("dsn", ...).option("snapshot", exported.snapshot)
         .option("table", "public.orders").load()

Each task imports the snapshot and copies a range of the table's blocks into Arrow. Types that arrive
exactly in PostgreSQL's binary form are read so; of all others the server sends the text that their
output function writes, and `types.from_text`, which the change stream uses too, converts it: snapshot
and stream agree.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from spark_consumers.decode import types
from spark_consumers.decode.masking import NOTHING, Masking, constant, hashed, kept
from spark_consumers.decode.types import (
    ColumnType,
    apart,
    arrow_schema,
    checked_utf8,
    column_type,
    from_text,
    spark_schema,
)
from spark_consumers.decode.unrepresentable import UnrepresentableValueError
from spark_consumers.snapshot import same_relation
from spark_consumers.snapshot.driver_copy import DriverCopy
from spark_consumers.snapshot.exported import (
    PublishedTable,
    ReadColumn,
    exported_by,
    failure,
    one_table,
    parts,
    reading,
)
from spark_consumers.snapshot.plain_copy import PlainCopy
from spark_consumers.snapshot.same_relation import RelationAnswer, RelationStep
from spark_consumers.snapshot.watchdog import Watchdog, open_sockets
from spark_consumers.sources.options import Options
from walsender_bridge.errors import SnapshotError, UnsupportedValueError
from walsender_bridge.postgres.client.replication_connection import describe
from walsender_bridge.postgres.column_masks import CONSTANT
from walsender_bridge.postgres.protocol.pgoutput import Column
from walsender_bridge.runtime.sql import load

NAME = "tuskline-snapshot"
OPTIONS = ("dsn", "snapshot", "table", "publication", "partitions", "partitionBytes", "columns")
#: Bytes of a table for one task.
PARTITION_BYTES = 64 * 2**20
#: Types whose binary form becomes the Arrow type that `types` gives them, exactly: ours (`decode.copy_rows`), and in ADBC.
_BINARY = frozenset(
    {
        types.BOOL,
        types.BYTEA,
        types.INT2,
        types.INT4,
        types.INT8,
        types.FLOAT4,
        types.FLOAT8,
        types.TEXT,
        types.VARCHAR,
        types.BPCHAR,
        types.DATE,
        types.TIMESTAMP,
        types.TIMESTAMPTZ,
    }
)
#: Of these, the types with values that their Arrow type lacks: the text shows the value.
_BEYOND = frozenset({types.DATE, types.TIMESTAMP, types.TIMESTAMPTZ})
#: 0001-01-01 and 9999-12-31 in days, and the first and last microsecond of them, since 1970. What lies
#: outside, infinity too, has no text in the stream that a target could hold.
_DAYS = (-719162, 2932896)
_MICROSECONDS = (_DAYS[0] * 86_400_000_000, (_DAYS[1] + 1) * 86_400_000_000 - 1)


class Part(Protocol):
    """Rows of one relation: `BlockRange`, `KeyRange`, or some of theirs. Its text says where they are."""

    @property
    def relation(self) -> tuple[str, str]:
        """Schema and name."""

    @property
    def oid(self) -> int:
        """The relation's."""

    @property
    def settings(self) -> str:
        """For the transaction that reads it."""

    @property
    def bounds(self) -> list[sql.Composed]:
        """The conditions of its rows."""


Session = PlainCopy | DriverCopy


@dataclass
class _Piece(InputPartition):
    """What one task reads: everything it needs, so that it queries only PostgreSQL."""

    part: Part
    query: str


class SnapshotSource(DataSource):
    """The data source. Raises `UsageError`, `SnapshotError`, and the errors of connections.

    Of Tuskline's own copies: `parts`: what is to be read, instead of the whole table; `slot`: of the snapshot (`ExportedSnapshot`);
    `masking`: how the columns are masked, which fits the table; `condition`: which rows are read, in SQL; empty: all.
    """

    def __init__(
        self,
        options: dict[str, str],
        parts: Sequence[Part] | None = None,
        slot: str = "",
        masking: Masking = NOTHING,
        condition: str = "",
    ) -> None:
        super().__init__(options)
        self.condition = condition
        self.parts = parts
        self.slot = slot
        self.masking = masking
        given = Options(NAME, options, OPTIONS)
        self.dsn = given.required("dsn")
        self.snapshot = given.required("snapshot")
        self.name_of_table = given.required("table")
        self.publication = given.text("publication")
        self.partitions = given.number("partitions")
        self.partition_bytes = given.number("partitionBytes") or PARTITION_BYTES
        self.chosen = given.names("columns")
        if self.partitions is not None and given.text("partitionBytes") is not None:
            raise given.wrong("partitions", "specify either this or partitionBytes")

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return NAME

    def schema(self) -> StructType:
        """The table's columns, as they are in the snapshot."""
        with reading(self.dsn, self.snapshot) as connection:
            table = one_table(connection, self.name_of_table, self.publication)
        return spark_schema(arrow_schema(c.column for c in self.wanted(table)))

    def wanted(self, table: PublishedTable) -> tuple[ReadColumn, ...]:
        """The columns to read. Raises `UsageError` for one that the table does not have."""
        if self.chosen is None:
            names = {column.name for column in kept(table.columns, self.masking.masks)}
            return tuple(c for c in table.read_columns if c.column.name in names)
        by_name = {c.column.name: c for c in table.read_columns}
        given = Options(NAME, {}, OPTIONS)
        for name in self.chosen:
            if name not in by_name:
                raise given.wrong("columns", f"{table.full_name} has no column {name!r} to read")
        return tuple(by_name[name] for name in self.chosen)

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader, for Spark. Raises `SnapshotError` if these are not the columns that are read (any more)."""
        return _SnapshotReader(self, schema)

    def reader_apart(self, schema: StructType) -> DataSourceReader:
        """A reader whose batches have the text of what does not fit behind their columns, one for each.

        Such a value is NULL in its column, and not an error; the text of all others is NULL. Raises as `reader`.
        """
        return _SnapshotReader(self, schema, apart=True)


class _SnapshotReader(DataSourceReader):
    """Plans on the driver, reads on the executors."""

    def __init__(self, source: SnapshotSource, schema: StructType, *, apart: bool = False) -> None:
        self._apart = apart
        self._dsn = source.dsn
        self._snapshot = source.snapshot
        self._slot = source.slot
        self._table = source.name_of_table
        self._masking = source.masking
        with reading(source.dsn, source.snapshot) as connection:
            table = _table(connection, source)
            self._columns = source.wanted(table)
            _check_columns(schema.names, [c.column.name for c in self._columns], self._table)
            self._pieces = [
                _Piece(part, _query(part, self._columns, table.row_filter, self._is_binary))
                for part in source.parts
                or parts(connection, table, count=source.partitions, size=source.partition_bytes)
            ]

    def partitions(self) -> Sequence[InputPartition]:
        return self._pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Piece):
            raise TypeError(partition)
        yield from self._read(partition)

    def _read(self, piece: _Piece) -> Iterator[pa.RecordBatch]:
        from adbc_driver_manager import Error

        where, before = describe(self._dsn), open_sockets()
        watchdog: Watchdog | None = None
        try:
            with (
                _session(self._dsn) as session,
                Watchdog(self._dsn, before) as watchdog,
            ):
                for step in same_relation.ORDER:
                    match step:
                        case RelationStep.LOCK:
                            self._lock(session, piece.part)
                        case RelationStep.ASK:
                            self._check(session, piece.part)
                        case RelationStep.READ:
                            for batch in self._batches(session, piece):
                                watchdog.moved()
                                yield batch
        except (Error, psycopg.Error) as error:
            cause = watchdog.error() if watchdog else None
            text = _without_query(str(error), self._queries(piece))
            raise cause or failure(error.sqlstate, text, where, self._snapshot) from None
        except (pa.ArrowException, OSError) as error:
            # The connection's error, or in the middle of the driver's COPY the server's.
            cause = watchdog.error() if watchdog else None
            raise cause or failure(None, str(error), where) from None

    def _queries(self, piece: _Piece) -> tuple[str, str, str]:
        """All queries for a piece."""
        question = same_relation.question(piece.part.relation, piece.part.oid)
        return self._locking(piece.part), question, piece.query

    def _locking(self, part: Part) -> str:
        begin = sql.SQL(load("snapshot/begin")).format(snapshot=sql.Literal(self._snapshot))
        return begin.as_string() + part.settings + same_relation.lock(part.relation)

    def _lock(self, session: Session, part: Part) -> None:
        session.run(self._locking(part))
        # The name of a snapshot comes again after a restart of the server, and on another one behind the same address.
        if self._slot and not session.rows(exported_by(self._slot)):
            raise SnapshotError(
                f"snapshot {self._snapshot!r} is no longer exported by the session with which the copy began",
                where=describe(self._dsn),
                repair="no action is needed: the copy begins again",
            )

    def _check(self, session: Session, part: Part) -> None:
        (found,) = session.rows(same_relation.question(part.relation, part.oid))
        same_relation.check(part.relation, RelationAnswer(*found), describe(self._dsn))

    def _batches(self, session: Session, piece: _Piece) -> Iterator[pa.RecordBatch]:
        row = 0
        oids = [
            read.column.type_oid if self._is_binary(read.column) else None for read in self._columns
        ]
        for batch in session.batches(piece.query, oids):
            yield self._converted(batch, piece.part, row)
            row += batch.num_rows

    @property
    def _binary(self) -> frozenset[int]:
        """The types that are read in their binary form."""
        return _BINARY - _BEYOND if self._apart else _BINARY

    def _is_binary(self, column: Column) -> bool:
        return column.type_oid in self._binary and self._masking.of(column.name) is None

    def _masked(self, column: Column, array: pa.Array) -> pa.Array | None:
        """What is left of a column's texts; None if it is not masked."""
        mask = self._masking.of(column.name)
        if mask is None:
            return None
        if mask.kind == CONSTANT:
            return constant(column, mask, np.ones(len(array), np.bool_))
        return hashed(array, self._masking.key)

    def _with_texts(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays, texts = [], []
        for read, array in zip(self._columns, batch.columns, strict=True):
            masked = self._masked(read.column, array)
            if masked is not None:
                arrays.append(masked)
                texts.append(pa.nulls(len(array), pa.string()))
                continue
            oid, typmod = read.column.type_oid, read.column.typmod
            convert = partial(converted, type_oid=oid, typmod=typmod, binary=self._binary)
            values, text = apart(array, column_type(oid, typmod).arrow, convert)
            arrays.append(values)
            texts.append(pa.nulls(len(array), pa.string()) if text is None else text)
        names = [str(i) for i in range(2 * len(arrays))]
        return pa.RecordBatch.from_arrays([*arrays, *texts], names)

    def _converted(self, batch: pa.RecordBatch, part: Part, row: int) -> pa.RecordBatch:
        if self._apart:
            return self._with_texts(batch)
        arrays = []
        for read, array in zip(self._columns, batch.columns, strict=True):
            column = read.column
            try:
                masked = self._masked(column, array)
                if masked is None:
                    masked = converted(array, column.type_oid, column.typmod)
                arrays.append(masked)
            except UnrepresentableValueError as fault:
                raise UnsupportedValueError(
                    fault.what,
                    where=f"{self._table}.{column.name}, row {row + fault.index + 1} of "
                    f"{'.'.join(part.relation)}, {part}",
                    repair="change the value at the source, leave the column out (columns), or quarantine such "
                    "rows, if the lake copies the table ([lake.on_unrepresentable_value])",
                ) from fault
        columns = kept([c.column for c in self._columns], self._masking.masks)
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _session(dsn: str) -> Session:
    return PlainCopy.connect(dsn) or DriverCopy(dsn)


def _without_query(text: str, queries: Sequence[str]) -> str:
    """The text of an ADBC error as the server wrote it: ADBC puts the query before that, and it may fill an error."""
    for query in queries:
        text = text.replace(f"Failed to execute query '{query}': ", "")
    return text


def _table(
    connection: psycopg.Connection[tuple[Any, ...]], source: SnapshotSource
) -> PublishedTable:
    """The table of the snapshot. Its row filter names the columns as the snapshot does, or `SnapshotError`."""
    table = one_table(connection, source.name_of_table, source.publication)
    if table.row_filter is None:
        return table.restricted(source.condition)
    # The server writes the filter with today's names: it is asked once more, while they cannot change.
    relation = (table.schema, table.name)
    connection.execute(same_relation.lock(relation))
    (found,) = connection.execute(same_relation.question(relation, table.oid)).fetchall()
    same_relation.check(relation, RelationAnswer(*found), describe(source.dsn))
    table = one_table(connection, source.name_of_table, source.publication)
    return table.restricted(source.condition)


def _check_columns(expected: Sequence[str], found: Sequence[str], table: str) -> None:
    """Rows are written by the columns' order, and a publication is what it is by now, in any snapshot."""
    if found != expected:
        raise SnapshotError(
            f"the columns to read changed from ({', '.join(expected)}) to ({', '.join(found)})",
            where=table,
            repair="copy the table again, and do not alter the publication meanwhile",
        )


def _query(
    part: Part,
    columns: Sequence[ReadColumn],
    row_filter: str | None,
    is_binary: Callable[[Column], bool],
) -> str:
    """The query for a part of a table; generated, quoted, complete."""
    wanted: list[sql.Composable] = []
    for read in columns:
        name: sql.Composable = sql.Identifier(read.column.name)
        if is_binary(read.column):
            wanted.append(name)
        else:
            # The type's own output function: a cast to text differs for some (inet, bpchar, bool).
            if read.argument:
                name = sql.SQL("{}::{}").format(name, sql.Identifier(*read.argument))
            wanted.append(
                sql.SQL("{}({})::pg_catalog.text").format(sql.Identifier(*read.output), name)
            )
    bounds = part.bounds
    query = sql.SQL(load("snapshot/read")).format(
        columns=sql.SQL(", ").join(wanted),
        relation=sql.Identifier(*part.relation),
        range=sql.SQL(" AND ").join(bounds) if bounds else sql.SQL("true"),
        filter=sql.SQL(f"({row_filter})") if row_filter else sql.SQL("true"),
    )
    return query.as_string()


def converted(
    array: pa.Array, type_oid: int, typmod: int, binary: frozenset[int] = _BINARY
) -> pa.Array:
    """A column as a session gives it, as the stream has it; `binary` types are no text.

    Raises `UnrepresentableValueError`, and `SnapshotError` for a column that ADBC did not recognize.
    """
    kind = column_type(type_oid, typmod)
    if type_oid not in binary:
        return from_text(array, kind)
    if array.type != kind.arrow:
        array = _known(array, kind).cast(kind.arrow)
    if pa.types.is_string(kind.arrow):
        return checked_utf8(array)
    if pa.types.is_floating(kind.arrow):
        # PostgreSQL prints every NaN alike; the stream knows one.
        return pc.if_else(pc.is_nan(array), pa.scalar(np.nan, kind.arrow), array)
    if pa.types.is_date(kind.arrow):
        return _within(array, pa.int32(), _DAYS)
    if pa.types.is_timestamp(kind.arrow):
        return _within(array, pa.int64(), _MICROSECONDS)
    return array


def _known(array: pa.Array, kind: ColumnType) -> pa.Array:
    """The array, whose type is not the one that is expected, if a cast keeps its values. Raises `SnapshotError`.

    ADBC gives the bytes of a type that it does not recognize. Those of a text are the text; those of a number would be
    parsed as one, and may be the digits of another.
    """
    if pa.types.is_string(kind.arrow) and (
        pa.types.is_binary(array.type) or pa.types.is_large_string(array.type)
    ):
        return array
    raise SnapshotError(
        f"the driver returned {array.type} for a value of type OID {kind.type_oid}, which is read as {kind.arrow}",
        where="adbc-driver-postgresql",
        repair="check that no setting, pooler or login trigger changes what sessions see of pg_type, and that the "
        "installed version is one that Tuskline supports",
    )


def _within(array: pa.Array, plain: pa.DataType, limits: tuple[int, int]) -> pa.Array:
    """The array, once every value lies within the limits (those of its plain numbers)."""
    numbers = array.view(plain)
    least, most = limits
    bounds: dict[str, Any] = pc.min_max(numbers).as_py()
    if bounds["min"] is not None and (bounds["min"] < least or bounds["max"] > most):
        outside = pc.or_(pc.less(numbers, least), pc.greater(numbers, most))
        at = pc.index(pc.fill_null(outside, False), True).as_py()
        raise UnrepresentableValueError(
            at, f"infinity or a year that {array.type} lacks", malformed=False
        )
    return array
