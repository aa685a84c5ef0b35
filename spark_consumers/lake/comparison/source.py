"""What the source computes: sums of its rows' digests, at an exported snapshot, one bounded query at a time.

One connection. Each query is a transaction of its own with the snapshot: so the lock on a relation, behind which an `ALTER TABLE` would
wait, and others behind that, is held for one query, and not until the snapshot ends. As in a copy, the relation is
checked before and after it is read (`snapshot.same_relation`). Between two queries the connection rests.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import sql

from spark_consumers.decode.types import UUID
from spark_consumers.lake.comparison.chunks import Chunks, buckets_of, ranges_of
from spark_consumers.lake.comparison.forms import (
    sql_bytes,
    sql_form,
    sql_held,
    sql_is_utf8,
    sql_joined,
    sql_text,
)
from spark_consumers.lake.comparison.sums import KeyAndDigest, Sums
from spark_consumers.lake.tables.chunks import CHUNKED_BY
from spark_consumers.snapshot import same_relation
from spark_consumers.snapshot.exported import (
    BlockRange,
    ExportedSnapshot,
    PublishedTable,
    RelationBlocks,
    exported_by,
    failure,
    have_index,
    parts,
    reader_conninfo,
    reading,
    relations_of,
    samples,
)
from spark_consumers.snapshot.key_ranges import KeyRange, is_clustered
from spark_consumers.snapshot.same_relation import RelationAnswer, RelationStep
from walsender_bridge.errors import SnapshotError
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.replication_connection import describe
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.sql import load

#: Bytes of a table from which on it is divided by ranges even if its rows are not in the order of its key: each then reads blocks
#: all over the table, but the table as a whole might take longer than a snapshot is held.
_TOO_LARGE: Final = 8 << 30
_MODULUS: Final = 2**64
#: Milliseconds to wait for a relation that is locked, as by an ALTER TABLE: its table is tried again at another cut.
_LOCK_MS: Final = 3000
#: The longest rest of the connection, in seconds.
_LONGEST_REST: Final = 60.0

Part = BlockRange | KeyRange


class OutOfTimeError(SnapshotError):
    """The snapshot has been held for as long as it may be; what is left is compared at another one."""


@dataclass(frozen=True, slots=True)
class Load:
    """How much the source is burdened. `share`: the part of the time for which the connection is busy; `seconds`: how long a snapshot is held.

    `rate`: bytes of tables, as PostgreSQL stores them, that are read per second at most; None: unlimited.
    """

    share: float
    seconds: float
    rate: float | None = None

    def rest(self, busy: float, size: float) -> float:
        """Seconds to rest after a query that read so many bytes, and kept the connection busy for so many seconds. Pure."""
        resting = min(_LONGEST_REST, busy * (1 / self.share - 1))
        return resting if self.rate is None else max(resting, size / self.rate - busy)


class SourceRows(Closing):
    """A source's rows at an exported snapshot. Raises the errors of connections, `SnapshotError`, `OutOfTimeError`."""

    def __init__(
        self, exported: ExportedSnapshot, began: float, load: Load, resting: Callable[[], None]
    ) -> None:
        self._exported = exported
        self._load = load
        self._until = began + load.seconds
        self._resting = resting
        self._where = describe(exported.dsn)
        self._connection = BoundedConnection.connect(reader_conninfo(exported.dsn))
        #: By OID: the relations that were measured.
        self._sizes: dict[int, RelationBlocks] = {}
        #: Of the database, by PostgreSQL's name.
        self.encoding = self._connection.info.parameter_status("server_encoding") or ""

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    @property
    def left(self) -> float:
        """Seconds for which the snapshot may still be held."""
        return self._until - time.monotonic()

    def divided(self, table: PublishedTable, size: int) -> Chunks:
        """How the table is divided into chunks of about `size` bytes."""
        with reading(self._exported.dsn, self._exported.snapshot) as connection:
            relations = self._measured(relations_of(connection, table))
            total = sum(each.blocks * each.block_size for each in relations)
            column = table.key[0] if table.key else ""
            kinds = {c.name: c.type_oid for c in table.columns}
            if column and kinds[column] in CHUNKED_BY:
                if total <= size:
                    return Chunks(column, (), kinds[column] == UUID)
                if have_index(connection, relations, column):
                    is_uuid = kinds[column] == UUID
                    found = samples(connection, relations, column, piece=size, is_uuid=is_uuid)
                    if total > _TOO_LARGE or is_clustered(found, size):
                        return ranges_of(found, column, size, is_uuid=is_uuid)
            return buckets_of(total, size)

    def relations(self, table: PublishedTable) -> list[RelationBlocks]:
        """Those that have the table's rows."""
        with reading(self._exported.dsn, self._exported.snapshot) as connection:
            return self._measured(relations_of(connection, table))

    def blocks(self, table: PublishedTable, size: int) -> list[BlockRange]:
        """The table in parts of about `size` bytes."""
        with reading(self._exported.dsn, self._exported.snapshot) as connection:
            self._measured(relations_of(connection, table))
            return parts(connection, table, count=None, size=size)

    def _measured(self, relations: list[RelationBlocks]) -> list[RelationBlocks]:
        self._sizes |= {each.oid: each for each in relations}
        return relations

    def _size(self, part: Part, chunks: Chunks) -> float:
        """Bytes of a part, as PostgreSQL stores it; of a range of a key, an estimate."""
        there = self._sizes[part.oid]
        if isinstance(part, KeyRange):
            return there.blocks * there.block_size / chunks.count
        last = there.blocks if part.last is None else part.last
        return max(0, last - part.first) * there.block_size

    def sums(
        self, table: PublishedTable, chunks: Chunks, wanted: Collection[int] | None, part: Part
    ) -> list[tuple[int, Sums]]:
        """The sums of a part's rows, by bucket (a range's by 0). `wanted`: only these buckets; None: all."""
        query = sql.SQL(load("equality/sums")).format(
            chunk=chunks.sql_number(_divided_by(table)),
            digests=_digests(table, part, self.encoding, keyed=not chunks.column),
            wanted=_wanted(table, chunks, wanted),
        )
        return [
            (int(number), Sums(rows, int(first) % _MODULUS, int(second) % _MODULUS, beyond))
            for number, rows, first, second, beyond in self._read(part, chunks, query)
        ]

    def keys(
        self, table: PublishedTable, chunks: Chunks, wanted: Collection[int] | None, part: Part
    ) -> Iterator[tuple[KeyAndDigest, int]]:
        """The keys and digests of a part's rows, with how many there are of each."""
        places = _key_places(table)
        keys = sql.SQL("ARRAY[{}]::text[]").format(_aliases("f", places))
        query = sql.SQL(load("equality/keys")).format(
            keys=keys,
            digests=_digests(table, part, self.encoding, keyed=not chunks.column),
            wanted=_wanted(table, chunks, wanted),
        )
        for key, digest, count in self._read(part, chunks, query):
            yield (tuple(key), bytes(digest)), count

    def values(
        self, table: PublishedTable, chunks: Chunks, wanted: Collection[bytes], part: Part
    ) -> dict[bytes, tuple[list[str | None], list[str | None]]]:
        """The forms and the texts of the columns of a part's rows with these digests, by digest."""
        places = range(len(table.read_columns))
        query = sql.SQL(load("equality/values")).format(
            forms=sql.SQL("ARRAY[{}]::text[]").format(_aliases("f", places)),
            texts=sql.SQL("ARRAY[{}]::text[]").format(_aliases("t", places)),
            digests=_digests(table, part, self.encoding, keyed=False, texts=True),
            wanted=sql.Literal(list(wanted)),
        )
        return {bytes(d): (forms, texts) for d, forms, texts in self._read(part, chunks, query)}

    def _read(self, part: Part, chunks: Chunks, query: sql.Composed) -> list[tuple[Any, ...]]:
        """The rows of a query that reads this part, in a transaction of its own."""
        if self.left <= 0:
            raise self._out_of_time()
        began = time.monotonic()
        rows: list[tuple[Any, ...]] = []
        try:
            for step in same_relation.ORDER:
                match step:
                    case RelationStep.LOCK:
                        self._lock(part)
                    case RelationStep.ASK:
                        self._check(part)
                    case RelationStep.READ:
                        with self._connection.patient(self.left + 10):
                            rows = self._connection.execute(query).fetchall()
            self._connection.rollback()
        except psycopg.errors.LockNotAvailable:
            self._connection.rollback()
            raise SnapshotError(f"{'.'.join(part.relation)} is locked", where=self._where) from None
        except psycopg.Error as error:
            if isinstance(error, psycopg.errors.QueryCanceled) and self.left <= 0:
                self._connection.rollback()
                raise self._out_of_time() from None
            raise failure(
                error.sqlstate, str(error), self._where, self._exported.snapshot
            ) from None
        self._rest(self._load.rest(time.monotonic() - began, self._size(part, chunks)))
        return rows

    def _lock(self, part: Part) -> None:
        begin = sql.SQL(load("snapshot/begin")).format(
            snapshot=sql.Literal(self._exported.snapshot)
        )
        limit = (
            f"SET LOCAL statement_timeout = {max(1, int(1000 * self.left))};"
            f"SET LOCAL lock_timeout = {_LOCK_MS};"
        )
        self._connection.execute(
            (begin.as_string() + limit + part.settings + same_relation.lock(part.relation)).encode()
        )
        if not self._connection.execute(exported_by(self._exported.slot).encode()).fetchall():
            raise SnapshotError(
                f"snapshot {self._exported.snapshot!r} is no longer exported by its session",
                where=self._where,
                repair="no action is needed: what is left is compared at another snapshot",
            )

    def _check(self, part: Part) -> None:
        question = same_relation.question(part.relation, part.oid).encode()
        (found,) = self._connection.execute(question).fetchall()
        same_relation.check(part.relation, RelationAnswer(*found), self._where)

    def _rest(self, seconds: float) -> None:
        """Leave the source alone for so many seconds, or until the snapshot's time is over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and self.left > 0:
            self._resting()
            time.sleep(min(1.0, left))

    def _out_of_time(self) -> OutOfTimeError:
        return OutOfTimeError(
            f"the snapshot has been held for {self._load.seconds:.0f} s", where=self._where
        )


@dataclass(frozen=True, slots=True)
class DigestedPart:
    """Those rows of a part that have one of some digests, for a reader of parts (`sources.snapshot`). `condition`: what says so."""

    part: Part
    condition: sql.Composed

    @classmethod
    def of(
        cls, table: PublishedTable, part: Part, wanted: Collection[bytes], encoding: str
    ) -> "DigestedPart":
        """Those with the `wanted` digests. `encoding`: the database's."""
        row = sql_bytes(_joined(table, encoding), encoding)
        names = "{" + ",".join(sorted(digest.hex() for digest in wanted)) + "}"
        condition = sql.SQL(load("equality/has_digest")).format(row=row, wanted=sql.Literal(names))
        return cls(part, condition)

    @property
    def relation(self) -> tuple[str, str]:
        """See `BlockRange`."""
        return self.part.relation

    @property
    def oid(self) -> int:
        """See `BlockRange`."""
        return self.part.oid

    @property
    def settings(self) -> str:
        """See `BlockRange`."""
        return self.part.settings

    @property
    def bounds(self) -> list[sql.Composed]:
        """See `BlockRange`."""
        return [*self.part.bounds, self.condition]

    def __str__(self) -> str:
        return str(self.part)


def _digests(
    table: PublishedTable, part: Part, encoding: str, *, keyed: bool, texts: bool = False
) -> sql.Composed:
    """The query for the digests of a part's rows; `keyed`: of their keys, too, in a table that has one."""
    reads = table.read_columns
    places = range(len(reads))
    columns: list[sql.Composable] = [
        sql.SQL("{} AS {}").format(sql_form(read, encoding), sql.Identifier(f"f{i}"))
        for i, read in enumerate(reads)
    ]
    if texts:
        columns += [
            sql.SQL("{} AS {}").format(sql_text(read), sql.Identifier(f"t{i}"))
            for i, read in enumerate(reads)
        ]
    held = [each for read in reads if (each := sql_held(read)) is not None]
    if encoding == "SQL_ASCII":
        held.append(sql_is_utf8(_joined(table, encoding)))
    row = sql_joined([sql.Identifier(f"f{i}") for i in places], encoding)
    key: sql.Composable = sql.SQL("NULL::bytea")
    if keyed and table.key:
        of_key = sql_joined([sql.Identifier(f"f{i}") for i in _key_places(table)], encoding)
        key = sql.SQL("substr(sha256({}), 1, 16)").format(sql_bytes(of_key, encoding))
    bounds = part.bounds
    return sql.SQL(load("equality/digests")).format(
        row=sql_bytes(row, encoding),
        key=key,
        columns=sql.SQL(", ").join(columns),
        held=sql.SQL(" AND ").join(held) if held else sql.SQL("true"),
        relation=sql.Identifier(*part.relation),
        range=sql.SQL(" AND ").join(bounds) if bounds else sql.SQL("true"),
        filter=sql.SQL(f"({table.row_filter})") if table.row_filter else sql.SQL("true"),
    )


def _joined(table: PublishedTable, encoding: str) -> sql.Composable:
    """The forms of a row's columns, end to end."""
    return sql_joined([sql_form(read, encoding) for read in table.read_columns], encoding)


def _key_places(table: PublishedTable) -> list[int]:
    names = [read.column.name for read in table.read_columns]
    return [names.index(name) for name in table.key or ()]


def _aliases(prefix: str, places: Sequence[int]) -> sql.Composed:
    return sql.SQL(", ").join(sql.Identifier(f"{prefix}{i}") for i in places)


def _divided_by(table: PublishedTable) -> str:
    """The digest by which a row is in a bucket."""
    return "key_digest" if table.key else "digest"


def _wanted(
    table: PublishedTable, chunks: Chunks, wanted: Collection[int] | None
) -> sql.Composable:
    if wanted is None or chunks.column:
        return sql.SQL("true")
    number = chunks.sql_number(_divided_by(table))
    return sql.SQL("{} = ANY ({}::int[])").format(number, sql.Literal(sorted(wanted)))
