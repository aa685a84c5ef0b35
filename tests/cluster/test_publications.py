"""What a publication and a table's identity make of changes, from the server through capture, log and fold.

Each table at the end, folded from the log alone, is what PostgreSQL has: the columns of the column list, the
rows of the row filter, under the name that the publication gives.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_consumers.decode.entries import ChangeBatch, decode_entries
from spark_consumers.fold.keyed import fold
from spark_consumers.fold.multiset import fold_multiset
from tests.support.capture_stack import (
    PUBLICATION,
    STREAM,
    CaptureProcess,
    ChangeLog,
    wal_end,
)
from tests.support.servers import MAJORS_IN_TURN, Database
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.stream_reader import StreamReader

each_major = pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)

LONG = "repeat(md5({}::text), 200)"

TABLES = [
    # Replica identities, each with a value that is kept out of line.
    "CREATE TABLE by_key (id int PRIMARY KEY, code int NOT NULL UNIQUE, n int, body text)",
    "CREATE TABLE by_index (LIKE by_key INCLUDING ALL)",
    "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code_key",
    "CREATE TABLE by_row (LIKE by_key INCLUDING ALL)",
    "ALTER TABLE by_row REPLICA IDENTITY FULL",
    "CREATE TABLE bag (a int, b text)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "CREATE TABLE nothing (a int, b text)",
    "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
    *(f"ALTER TABLE {t} ALTER body SET STORAGE EXTERNAL" for t in ("by_key", "by_index", "by_row")),
    # TRUNCATE of several, and CASCADE.
    "CREATE TABLE parent (id int PRIMARY KEY)",
    "CREATE TABLE child (id int PRIMARY KEY, parent int REFERENCES parent)",
    "CREATE TABLE aside (id int PRIMARY KEY)",
    # Partitions.
    "CREATE TABLE parts (id int, region text, n int, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
    "CREATE TABLE parts_a PARTITION OF parts FOR VALUES IN ('a')",
    "CREATE TABLE parts_b (n int, region text NOT NULL, id int NOT NULL, PRIMARY KEY (id, region))",
    "ALTER TABLE parts ATTACH PARTITION parts_b FOR VALUES IN ('b')",
]
CHANGES = [
    *(
        statement.format(table)
        for table in ("by_key", "by_index", "by_row")
        for statement in (
            "INSERT INTO {} SELECT g, g * 10, 0, "
            + LONG.format("g")
            + " FROM generate_series(1, 5) g",
            "UPDATE {} SET n = n + 1",
            "UPDATE {} SET id = id + 100, code = code + 1 WHERE id < 3",
            "UPDATE {} SET body = 'short' WHERE id = 3",
            "DELETE FROM {} WHERE id = 4",
            "UPDATE {} SET body = " + LONG.format("(n + 7)") + " WHERE id = 101",
            "UPDATE {} SET n = 9 WHERE id = 101",
        )
    ),
    "INSERT INTO bag VALUES (1, 'x'), (1, 'x'), (1, 'x'), (2, NULL), (NULL, 'y')",
    "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)",
    "UPDATE bag SET b = 'z' WHERE a IS NULL",
    "INSERT INTO nothing VALUES (1, 'only inserts')",
    "INSERT INTO parent SELECT generate_series(1, 3)",
    "INSERT INTO child VALUES (1, 1), (2, 2)",
    "INSERT INTO aside VALUES (1)",
    "TRUNCATE parent, aside CASCADE",
    "INSERT INTO parent VALUES (9)",
    "INSERT INTO child VALUES (9, 9)",
    "INSERT INTO parts VALUES (1, 'a', 0), (2, 'a', 0), (3, 'b', 0), (4, 'b', 0)",
    "UPDATE parts SET n = 1 WHERE id IN (1, 3)",
    "UPDATE parts SET region = 'b', n = 2 WHERE id = 2",
    "UPDATE parts SET region = 'a' WHERE id = 3",
    "DELETE FROM parts WHERE id = 4",
]
#: By table: key columns (None: a bag) and the query that has the same rows.
WANTED: dict[str, tuple[tuple[str, ...] | None, str]] = {
    **{
        t: (("id",), f"SELECT * FROM {t}") for t in ("by_key", "by_row", "parent", "child", "aside")
    },
    "by_index": (("code",), "SELECT * FROM by_index"),
    **{t: (None, f"SELECT * FROM {t}") for t in ("bag", "nothing")},
}


def folded(log: ChangeLog, wanted: dict[str, tuple[str, ...] | None]) -> dict[str, Counter[Any]]:
    """Rows by table, as texts, of everything in the log."""
    with LogClient(log.address) as client:
        cut = client.status().streams[STREAM]
    batches: dict[str, list[ChangeBatch]] = {}
    with StreamReader.of(cut) as reader:

        def schema(digest: bytes) -> bytes:
            return reader.schemas([digest])[digest]

        entries = reader.read(cut.low_offset, cut.end_offset)
        for batch in decode_entries(entries, schema, as_text=True):
            batches.setdefault(batch.relation.name, []).append(batch)
    found = {}
    for name, key in wanted.items():
        of_table = batches[name]
        names = [column.name for column in of_table[0].relation.columns]
        columns: list[pa.Array]
        if key is None:
            columns = fold_multiset(of_table).rows()
        else:
            result = fold(of_table, [names.index(column) for column in key])
            assert not len(result.patches)
            columns = result.rows()
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        found[name] = Counter(tuple(zip(names, row, strict=True)) for row in rows)
    return found


def compare(log: ChangeLog, database: Database, wanted: dict[str, tuple[Any, str]]) -> None:
    """The log, folded, against the server's own answers, when the log has all of it."""
    with database.connect() as connection:
        end = wal_end(connection)
        connection.execute("UPDATE tuskline.flush SET token = token + 1")
        wait_for(lambda: log.committed_lsn() > end, 60, "the log has the last transaction")
        found = folded(log, {name: key for name, (key, _) in wanted.items()})
        for name, (_, query) in wanted.items():
            cursor = connection.execute(query.encode())
            names = [column.name for column in cursor.description or ()]
            rows = Counter(
                tuple(zip(names, (None if v is None else _text(v) for v in row), strict=True))
                for row in cursor.fetchall()
            )
            assert found[name] == rows, name


def _text(value: object) -> str:
    return str(value)


@each_major
def test_24_25_identities_key_changes_truncates_and_partitions(
    tmp_path: Path, log: ChangeLog, database: Database
) -> None:
    database.execute(*TABLES)
    major = database.server.installation.major
    # The tables that are told, and the partitions by themselves (publishing the root comes with 13).
    parts = ["parts"] if major >= 13 else ["parts_a", "parts_b"]
    named = ["by_key", "by_index", "by_row", "bag", "parent", "child", "aside", *parts]
    database.execute(
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {', '.join([*named, 'nothing'])}"
        + (" WITH (publish_via_partition_root = true)" if major >= 13 else "")
    )
    with CaptureProcess(tmp_path, log, database.dsn) as capture:
        wait_for(capture.streams, 30, "capture streams")
        database.execute(*CHANGES)
        wanted = {**WANTED}
        if major >= 13:
            wanted["parts"] = (("id", "region"), "SELECT * FROM parts")
        compare(log, database, wanted)
        if major >= 13:
            # From here on each partition is a table of its own, with its own order of columns.
            database.execute(
                f"ALTER PUBLICATION {PUBLICATION} SET (publish_via_partition_root = false)",
                "TRUNCATE parts",
                "INSERT INTO parts VALUES (1, 'a', 0), (2, 'a', 0), (3, 'b', 0)",
                "UPDATE parts SET region = 'b', n = 2 WHERE id = 2",
            )
        leaves = {
            name: (("id", "region"), f"SELECT * FROM {name}") for name in ("parts_a", "parts_b")
        }
        compare(log, database, leaves)


@each_major
def test_column_lists_row_filters_and_generated_columns(
    tmp_path: Path, log: ChangeLog, database: Database
) -> None:
    major = database.server.installation.major
    if major < 15:
        pytest.skip("column lists and row filters came with PostgreSQL 15")
    database.execute(
        "CREATE TABLE listed (id int PRIMARY KEY, secret text, shown text)",
        "CREATE TABLE filtered (id int PRIMARY KEY, n int NOT NULL, body text)",
        "ALTER TABLE filtered REPLICA IDENTITY FULL",
        "CREATE TABLE made (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED)",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE listed (id, shown), filtered WHERE (n > 10), made"
        + (" WITH (publish_generated_columns = stored)" if major >= 18 else ""),
    )
    made = "*" if major >= 18 else "id, n"
    wanted: dict[str, tuple[Any, str]] = {
        "listed": (("id",), "SELECT id, shown FROM listed"),
        "filtered": (("id",), "SELECT * FROM filtered WHERE n > 10"),
        "made": (("id",), f"SELECT {made} FROM made"),
    }
    with CaptureProcess(tmp_path, log, database.dsn) as capture:
        wait_for(capture.streams, 30, "capture streams")
        database.execute(
            "INSERT INTO listed VALUES (1, 'hidden', 'a'), (2, 'hidden', 'b')",
            "UPDATE listed SET secret = 'changed'",
            "UPDATE listed SET shown = 'c' WHERE id = 2",
            "INSERT INTO filtered VALUES (1, 5, 'out'), (2, 20, 'in'), (3, 30, 'in'), (4, 11, 'in')",
            # Into the filter, out of it, within it.
            "UPDATE filtered SET n = 50 WHERE id = 1",
            "UPDATE filtered SET n = 1 WHERE id = 2",
            "UPDATE filtered SET body = 'more' WHERE id = 3",
            "DELETE FROM filtered WHERE id = 4",
            "INSERT INTO made (id, n) VALUES (1, 5), (2, NULL)",
            "UPDATE made SET n = 7 WHERE id = 1",
        )
        compare(log, database, wanted)
        assert not any(b"hidden" in message for message in log.messages())
