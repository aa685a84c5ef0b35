"""A snapshot of a PostgreSQL database at an exact LSN, which many sessions can read at once.

`ExportedSnapshot` creates a temporary logical slot; the server exports, at the slot's consistent point,
a snapshot that holds exactly the transactions whose commit record starts below that LSN (PostgreSQL
documentation, 49.2.5 "Exported Snapshots"). So a table copied from it and the changes of all later
transactions are the table, whatever was written meanwhile, with or without a primary key.

This module also knows what there is to read: tables, columns, keys, and parts of tables.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import numpy as np
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from spark_consumers.snapshot.key_ranges import Sample, ordinal_of, percent
from walsender_bridge.errors import (
    DeadlineError,
    PublicationError,
    SnapshotError,
    TusklineError,
    UsageError,
)
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.dsn import parameters
from walsender_bridge.postgres.client.hosts import for_reading, one_server
from walsender_bridge.postgres.client.replication_connection import (
    ANSWER_SECONDS,
    ReplicationConnection,
    describe,
    pinned_conninfo,
)
from walsender_bridge.postgres.protocol.pgoutput import Column
from walsender_bridge.postgres.protocol.refusals import connection_error, server_error
from walsender_bridge.postgres.protocol.relation_name import relation_name, split_relation
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.sql import load

#: A reader's transactions see one snapshot and change nothing; a long copy is not ended by a setting of
#: the role, and rows that a policy would hide are an error instead of missing.
_READER_OPTIONS = (
    " -c default_transaction_isolation=repeatable\\ read -c default_transaction_read_only=on"
    " -c statement_timeout=0 -c idle_in_transaction_session_timeout=0 -c row_security=off"
)
#: What else ends a long copy, since 17. An earlier server refuses a connection that names it.
_TRANSACTION_TIMEOUT = 170000
_NO_TRANSACTION_TIMEOUT = "-c transaction_timeout=0"
#: Servers say so before 17, and since.
_STALE_SNAPSHOT = ("22023", "42704")
#: How long the server may take for a sample: that of a large relation has millions of rows, in blocks all over its disk.
SAMPLE_SECONDS = 600.0
#: Seconds between two looks at transactions that are about to end.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
#: The first version with scans of ctid ranges.
_TID_RANGE_SCAN = 140000
#: The first version that can publish generated columns.
_PUBLISHED_GENERATED = 180000


@dataclass(frozen=True, slots=True)
class ReadColumn:
    """A column, and how its text is written: `output` is the type's output function (schema, name).

    `argument`: the type that it takes, where that is not the column's own.
    """

    column: Column
    generated: bool
    output: tuple[str, ...]
    argument: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table as a publication sends it; what is not sent (generated columns, say) is left out.

    `kind`: `r`, or `p` for a partitioned table. `replica_identity`: `d`, `n`, `f` or `i`. `key`: the
    columns by which the stream's updates and deletes name a row (`i`: those of the index, `d`: those of the
    primary key); None where they carry the whole row, or there are none.
    """

    schema: str
    name: str
    oid: int
    kind: str
    replica_identity: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] | None
    row_filter: str | None
    read_columns: tuple[ReadColumn, ...]

    @property
    def full_name(self) -> str:
        """`schema.table`."""
        return relation_name(self.schema, self.name)

    def restricted(self, condition: str) -> Self:
        """The table with those rows only that meet this condition as well; empty: all."""
        if not condition:
            return self
        both = f"({self.row_filter}) AND {condition}" if self.row_filter else condition
        return replace(self, row_filter=both)


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Blocks of one relation: from `first` up to, not including, `last` (None: to its end)."""

    relation: tuple[str, str]
    oid: int
    first: int
    last: int | None

    @property
    def settings(self) -> str:
        """For the transaction that reads it."""
        return ""

    @property
    def bounds(self) -> list[sql.Composed]:
        """The conditions of its rows."""
        found = []
        if self.first:
            found.append(sql.SQL("ctid >= {}").format(sql.Literal(f"({self.first},0)")))
        if self.last is not None:
            found.append(sql.SQL("ctid < {}").format(sql.Literal(f"({self.last},0)")))
        return found

    def __str__(self) -> str:
        return f"from block {self.first} on"


class RelationBlocks(NamedTuple):
    """How large a relation is: `kind` as in pg_class, `blocks` of `block_size` bytes."""

    schema: str
    name: str
    oid: int
    kind: str
    blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class AwaitedTransaction:
    """A transaction that has to end before a snapshot is exported: in words, and what ends it."""

    text: str
    repair: str


def awaited_transaction(dsn: str, pid: int) -> AwaitedTransaction | None:
    """The transaction that the walsender `pid` waits for, if there is one and the server says so. Raises `DeadlineError`."""
    try:
        with BoundedConnection.open(dsn) as connection:
            row = connection.execute(load("snapshot/waits_for"), {"pid": pid}).fetchone()
    except psycopg.Error:
        # The walsender's own connection shows what is wrong with the server.
        return None
    return None if row is None else _awaited(*row)


def _awaited(
    gid: str | None, database: str | None, holder: int | None, seconds: int | None
) -> AwaitedTransaction:
    age = "" if seconds is None else f", which is {seconds} s old"
    if gid is not None:
        name = sql.Literal(gid).as_string()
        return AwaitedTransaction(
            f"the prepared transaction {name} of database {database}{age}",
            f"in that database: COMMIT PREPARED {name}, or ROLLBACK PREPARED {name}",
        )
    if holder is None:
        return AwaitedTransaction(
            "a transaction that this role may not see", "GRANT pg_read_all_stats to it"
        )
    return AwaitedTransaction(
        f"the transaction of the server process {holder}{age}",
        f"end it, or SELECT pg_terminate_backend({holder})",
    )


def reader_conninfo(dsn: str) -> str:
    """`dsn` for a session that reads a snapshot: settings pinned, read only, one snapshot."""
    pinned = pinned_conninfo(dsn)
    options = str(conninfo_to_dict(pinned)["options"]) + _READER_OPTIONS
    return for_reading(make_conninfo(pinned, options=options))


def failure(
    sqlstate: str | None, text: str, where: str, snapshot: str | None = None
) -> TusklineError:
    """What an error of PostgreSQL means here."""
    if snapshot and snapshot in text and sqlstate in _STALE_SNAPSHOT:
        return SnapshotError(
            f"snapshot {snapshot!r} does not exist, or is no longer exported",
            where=where,
            repair="export one (ExportedSnapshot) and keep it open until the copy ends",
        )
    if sqlstate is None:
        return connection_error(text, where)
    return server_error(sqlstate, text, where)


@contextmanager
def reading(dsn: str, snapshot: str) -> Iterator[BoundedConnection]:
    """A connection inside a transaction that sees `snapshot`. Raises `SnapshotError` and connection errors."""
    where = describe(dsn)
    try:
        with BoundedConnection.connect(reader_conninfo(dsn)) as connection:
            connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(snapshot)))
            yield connection
    except psycopg.Error as error:
        raise failure(error.sqlstate, str(error), where, snapshot) from None


def exported_by(slot: str) -> str:
    """The query that has a row while this slot's session exports its snapshot."""
    query = sql.SQL(load("snapshot/is_exported")).format(slot=sql.Literal(slot))
    return query.as_string().strip().rstrip(";")


@contextmanager
def _asking(dsn: str) -> Iterator[BoundedConnection]:
    """A connection outside of any snapshot. Raises connection errors."""
    try:
        with BoundedConnection.open(dsn) as connection:
            yield connection
    except psycopg.Error as error:
        raise failure(error.sqlstate, str(error), describe(dsn)) from None


class ExportedSnapshot(Closing):
    """Export a snapshot of the DSN's database; it can be read until `close` (or the `with` ends).

    `lsn`: a transaction is in it exactly if its commit record starts below (`Begin.final_lsn < lsn`), on the
    timeline `timeline` of the cluster `system_id`.
    `read_at`: the server's time, just after it was taken (microseconds since the Unix epoch).
    `snapshot`: its name for `SET TRANSACTION SNAPSHOT`. It holds back vacuum and WAL while it is open.
    `slot`: its temporary slot, which is there for as long as it is exported.
    `dsn`: of the server that exports it, for the sessions that read it. Raises the errors of connections, and
    `DeadlineError` when transactions that run do not end within `timeout` seconds. Every few seconds until then, `waiting` is
    called with the transaction that the server waits for, and can end the wait by raising `UnavailableError`.
    """

    def __init__(
        self,
        dsn: str,
        *,
        timeout: float | None = 300.0,
        waiting: Callable[[AwaitedTransaction | None], None] = lambda _: None,
    ) -> None:
        # Of several hosts one: a snapshot is of the server that exports it.
        self.dsn = one_server(dsn)
        self._connection = ReplicationConnection.connect(self.dsn)
        self.slot = f"tuskline_snapshot_{secrets.token_hex(8)}"
        try:
            # Its transaction is idle for as long as others read, whatever timeouts the role or database has.
            self._connection.command(load("snapshot/lasts"), timeout=ANSWER_SECONDS)
            if self._connection.server_version >= _TRANSACTION_TIMEOUT:
                own = parameters(self.dsn).get("options") or ""
                options = f"{own} {_NO_TRANSACTION_TIMEOUT}".strip()
                self.dsn = make_conninfo(self.dsn, options=options)
            # Before the snapshot, which the connection's next command would end.
            identity = self._connection.identify()
            self.system_id, self.timeline = identity.system_id, identity.timeline
            began = time.monotonic()
            self.lsn, self.snapshot = self._export(timeout, waiting)
            self._await_ends(None if timeout is None else began + timeout, waiting)
        except BaseException:
            self._connection.close()
            raise

    def _await_ends(
        self, deadline: float | None, waiting: Callable[[AwaitedTransaction | None], None]
    ) -> None:
        """Wait until the server knows of all transactions in the snapshot that they committed.

        The snapshot is made of the WAL, to which a commit is written first. Who reads a row of such a transaction before that
        takes it for aborted, and marks the row so, for everybody and for ever.
        """
        with reading(self.dsn, self.snapshot) as connection:
            row = connection.execute(load("snapshot/transactions")).fetchone()
        ours, self.read_at = row or ("", 0)
        pause = _FIRST_PAUSE
        while True:
            with _asking(self.dsn) as connection:
                row = connection.execute(load("snapshot/unended"), {"snapshot": ours}).fetchone()
            if row is None:
                return
            awaited = _awaited(*row)
            # Nearly all of them end at once.
            waiting(awaited if pause == _LONGEST_PAUSE else None)
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineError(
                    f"the snapshot waits for the end of {awaited.text}",
                    where=describe(self.dsn),
                    repair=awaited.repair,
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _export(
        self, timeout: float | None, waiting: Callable[[AwaitedTransaction | None], None]
    ) -> tuple[int, str]:
        awaited: AwaitedTransaction | None = None

        def check() -> None:
            nonlocal awaited
            # If the server does not answer now, that is what ends the wait.
            awaited = None
            awaited = awaited_transaction(self.dsn, self._connection.backend_pid)
            waiting(awaited)

        try:
            return self._connection.create_temporary_slot_with_snapshot(
                self.slot, timeout=timeout, check=check
            )
        except DeadlineError as error:
            if awaited is None:
                raise
            raise DeadlineError(
                f"the snapshot waits for {awaited.text}", where=error.where, repair=awaited.repair
            ) from None

    def tables(self, publication: str) -> list[PublishedTable]:
        """The publication's tables, in the order of their names. Raises `PublicationError`."""
        with reading(self.dsn, self.snapshot) as connection:
            return published_tables(connection, publication)

    def close(self) -> None:
        """Let the snapshot go. Transactions that have it already keep it."""
        self._connection.close()


def published_tables(
    connection: psycopg.Connection[tuple[Any, ...]], publication: str
) -> list[PublishedTable]:
    """What a publication sends. Raises `PublicationError` if it has no tables."""
    rows = connection.execute(load("snapshot/tables"), {"publication": publication}).fetchall()
    if not rows:
        raise PublicationError(
            f"publication {publication!r} has no tables, or does not exist",
            where=describe(connection.info.dsn),
            repair="CREATE PUBLICATION ... FOR TABLE ...",
        )
    return [_table(connection, *row) for row in rows]


def one_table(
    connection: psycopg.Connection[tuple[Any, ...]], name: str, publication: str | None
) -> PublishedTable:
    """The table `schema.table`, as the publication sends it if one is named.

    Raises `UsageError` or `PublicationError`.
    """
    where = describe(connection.info.dsn)
    if publication is not None:
        tables = {t.full_name: t for t in published_tables(connection, publication)}
        if name not in tables:
            raise PublicationError(
                f"{name} is not in publication {publication!r}",
                where=where,
                repair="ALTER PUBLICATION ... ADD TABLE ...",
            )
        return tables[name]
    schema, table = split_relation(name)
    row = connection.execute(load("snapshot/table"), {"schema": schema, "table": table}).fetchone()
    if row is None:
        raise UsageError(
            f"table {name!r} does not exist",
            where=where,
            repair="specify it as schema.table, as it is written in the catalog",
        )
    schema, table, oid, kind, identity = row
    return _table(connection, schema, table, oid, kind, identity, None, None)


def _table(
    connection: psycopg.Connection[tuple[Any, ...]],
    schema: str,
    name: str,
    oid: int,
    kind: str,
    identity: str,
    sent: list[str] | None,
    row_filter: str | None,
) -> PublishedTable:
    found = connection.execute(load("snapshot/columns"), {"table": oid}).fetchall()
    generated_sent = sent is not None and connection.info.server_version >= _PUBLISHED_GENERATED
    columns = tuple(
        ReadColumn(
            Column(column, type_oid, typmod, is_key),
            generated,
            tuple(output),
            tuple(argument) if argument else None,
        )
        for column, type_oid, typmod, generated, output, argument, is_key in found
        if (sent is None or column in sent) and (generated_sent or not generated)
    )
    key = tuple(c.column.name for c in columns if c.column.is_key)
    return PublishedTable(
        schema=schema,
        name=name,
        oid=oid,
        kind=kind,
        replica_identity=identity,
        columns=tuple(c.column for c in columns),
        key=key or None,
        row_filter=row_filter,
        read_columns=columns,
    )


def relations_of(
    connection: psycopg.Connection[tuple[Any, ...]], table: PublishedTable
) -> list[RelationBlocks]:
    """The relations that have the table's rows."""
    found = connection.execute(load("snapshot/parts"), {"table": table.oid}).fetchall()
    return [RelationBlocks(*row) for row in found]


def have_index(
    connection: psycopg.Connection[tuple[Any, ...]],
    relations: Sequence[RelationBlocks],
    column: str,
) -> bool:
    """Whether an index of each of these relations finds a range of this column's values."""
    names = {"relations": [each.oid for each in relations], "column": column}
    return not connection.execute(load("snapshot/without_index"), names).fetchall()


def samples(
    connection: BoundedConnection,
    relations: Sequence[RelationBlocks],
    column: str,
    *,
    piece: int,
    is_uuid: bool = False,
) -> list[Sample]:
    """A sample of each of these relations by this column, of integers or UUIDs, for pieces of so many bytes."""
    found = []
    # Before 18 there is no min(uuid). Its text has the same order, by bytes.
    value = '{}::text COLLATE "C"' if is_uuid else "{}::int8"
    for schema, name, oid, _, blocks, block_size in relations:
        size = blocks * block_size
        query = sql.SQL(load("snapshot/sample")).format(
            value=sql.SQL(value).format(sql.Identifier(column)),
            relation=sql.Identifier(schema, name),
            percent=sql.Literal(percent(blocks, size, piece)),
        )
        with connection.patient(SAMPLE_SECONDS):
            rows = connection.execute(query).fetchall()
        keys = np.array([ordinal_of(key) if is_uuid else key for (key,) in rows], np.int64)
        found.append(Sample((schema, name), oid, size, keys))
    return found


def parts(
    connection: psycopg.Connection[tuple[Any, ...]],
    table: PublishedTable,
    *,
    count: int | None,
    size: int,
) -> list[BlockRange]:
    """The table in about `count` parts of equal size, or in parts of about `size` bytes.

    The last part of a relation is open: rows of the snapshot may lie behind the blocks counted here.
    Servers before 14 read a relation in one part; partitions are always parts of their own.
    """
    found = relations_of(connection, table)
    ranges = connection.info.server_version >= _TID_RANGE_SCAN
    total = sum(blocks for *_, blocks, _ in found)
    pieces = []
    for schema, name, oid, kind, blocks, block_size in found:
        step = max(size // block_size, 1) if count is None else max(-(-total // count), 1)
        firsts: Sequence[int] = [0]
        if ranges and kind in {"r", "m"}:
            firsts = range(0, max(blocks, 1), step)
        lasts = [*firsts[1:], None]
        pieces += [
            BlockRange((schema, name), oid, first, last)
            for first, last in zip(firsts, lasts, strict=True)
        ]
    return pieces
