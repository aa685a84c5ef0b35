"""Thousands of columns of generated types: what is decoded is what PostgreSQL itself writes."""

import random

import pyarrow as pa
import pytest
from psycopg import sql

from spark_consumers.decode.entries import decode_entries
from spark_consumers.snapshot.exported import ExportedSnapshot
from spark_consumers.sources.snapshot import SnapshotSource
from tests.support.pinned import connect_pinned
from tests.support.servers import Database, each_major
from tests.support.slot_changes import PUBLICATION, changes_of
from tests.support.type_columns import Kind, Kinds, same

#: Columns of a table, and rows: one of them is all NULL.
WIDTH, ROWS = 100, 9


class Columns:
    """A database with tables of generated columns, and what PostgreSQL writes for their values."""

    def __init__(self, database: Database, seed: int, tables: int) -> None:
        self.database = database
        self.kinds: list[list[Kind]] = []
        draw = random.Random(seed)
        with database.connect() as connection:
            types = Kinds(connection, draw)
            for number in range(tables):
                self.kinds.append([types.any() for _ in range(WIDTH)])
                columns = ", ".join(f"c{i} {k.ddl}" for i, k in enumerate(self.kinds[-1]))
                connection.execute(
                    f"CREATE TABLE t{number} (id int PRIMARY KEY, {columns})".encode()
                )
            names = ", ".join(f"t{number}" for number in range(tables))
            connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {names}".encode())
        self._draw = draw

    def fill(self) -> None:
        with connect_pinned(self.database.dsn) as connection:
            for number, kinds in enumerate(self.kinds):
                with connection.cursor().copy(f"COPY t{number} FROM STDIN".encode()) as copy:
                    for row in range(ROWS):
                        copy.write_row([str(row), *(self._value(kind, row) for kind in kinds)])

    def _value(self, kind: Kind, row: int) -> str | None:
        return None if not row or self._draw.random() < 0.1 else kind.values(self._draw)

    def own(self, number: int) -> list[list[str | None]]:
        """Each column of a table as PostgreSQL writes it."""
        with connect_pinned(self.database.dsn) as connection:
            query = sql.SQL("COPY (SELECT * FROM {} ORDER BY id) TO STDOUT")
            with connection.cursor().copy(query.format(sql.Identifier(f"t{number}"))) as lines:
                rows = list(lines.rows())
        return [list(column) for column in zip(*rows, strict=True)][1:]


def check(database: Database, seed: int, tables: int) -> int:
    """Compare every column: as text, typed from the stream, typed from the snapshot; how many."""
    print(f"seed {seed}")
    columns = Columns(database, seed, tables)
    with changes_of(database.dsn) as changes:
        columns.fill()
        log = changes()
    texts = {b.relation.name: b for b in decode_entries(log.entries, log.schemas, as_text=True)}
    compared = 0
    with ExportedSnapshot(database.dsn) as snapshot:
        for number, kinds in enumerate(columns.kinds):
            name, own = f"t{number}", columns.own(number)
            assert [c.to_pylist() for c in texts[name].columns[1:]] == own
            fitting = [i for i, kind in enumerate(kinds) if not kind.as_list]
            names = [f"c{i}" for i in fitting]
            (typed,) = decode_entries(
                log.entries, log.schemas, relations={f"public.{name}"}, columns={"id", *names}
            )
            copied = copy_of(database, snapshot, name, names)
            for i, stream, copy in zip(fitting, typed.columns[1:], copied, strict=True):
                told = f"{name}.c{i} {kinds[i].ddl}"
                assert stream.type == copy.type, told
                for values in (stream.to_pylist(), copy.to_pylist()):
                    for value, text in zip(values, own[i], strict=True):
                        assert same(value, text, stream.type), (told, value, text)
            compared += len(kinds)
    return compared


def copy_of(
    database: Database, snapshot: ExportedSnapshot, table: str, names: list[str]
) -> list[pa.Array]:
    """Columns of a table as the snapshot source reads them, in the order of the key."""
    options = {"dsn": database.dsn, "snapshot": snapshot.snapshot, "table": f"public.{table}"}
    options["columns"] = ",".join(["id", *names])
    source = SnapshotSource(options)
    reader = source.reader(source.schema())
    parts = [batch for part in reader.partitions() for batch in iter(reader.read(part))]
    found = pa.Table.from_batches(parts).sort_by("id")
    return [found[name].combine_chunks() for name in names]


@pytest.mark.parametrize("tables", [6, pytest.param(50, marks=pytest.mark.long)])
def test_23_thousands_of_columns_are_what_postgresql_writes(
    database: Database, seed: int, tables: int
) -> None:
    assert check(database, seed, tables=tables) == 100 * tables


@pytest.mark.long
@each_major
def test_23_columns_of_each_major(database: Database, seed: int) -> None:
    assert check(database, seed + 1, tables=20) == 2000
