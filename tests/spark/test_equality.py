"""`tuskline verify`: the source and the lake compared at one exact cut, while both change."""

import random
import threading
from contextlib import contextmanager

import psycopg
import pytest

from spark_consumers.lake.comparison.source import Load
from spark_consumers.lake.equality import cut, run
from spark_consumers.lake.equality.record import DIFFERENT, EQUAL, NOT_COMPARED, read_record
from spark_consumers.lake.equality.run import Watch, begin, verify
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.tables.sources import Source
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_pipeline import Pipeline

FAST = Load(1.0, 120.0)
#: Tables of several chunks, with each kind of key, and with none.
SIZED = (
    "CREATE TABLE ints (id bigint PRIMARY KEY, t text, f float8)",
    "CREATE TABLE uuids (id uuid PRIMARY KEY, t text, f float8)",
    "CREATE TABLE texts (id text PRIMARY KEY, t text, f float8)",
    "CREATE TABLE bags (id int, t text, f float8)",
    "ALTER TABLE bags REPLICA IDENTITY FULL",
    "INSERT INTO ints SELECT g, repeat('x', 90), g FROM generate_series(1, 4000) g",
    "INSERT INTO uuids SELECT rpad(lpad(to_hex(g * 90000), 8, '0'), 32, '0')::uuid, repeat('x', 90), g FROM generate_series(1, 4000) g",
    "INSERT INTO texts SELECT 'Key ' || g, repeat('x', 90), g FROM generate_series(1, 4000) g",
    "INSERT INTO bags SELECT g / 2, repeat('x', 90), 1 FROM generate_series(1, 4000) g",
)
NAMES = ("ints", "uuids", "texts", "bags")
CHUNK = 64 << 10


@pytest.fixture
def sized(spark, tmp_path, database):
    database.execute(*SIZED, "ANALYZE")
    with Pipeline(spark, tmp_path, database, [f"public.{name}" for name in NAMES]) as running:
        running.wait_for_tables(*NAMES)
        yield running


def begun(pipeline, *names, sample=1.0):
    chain = open_chain(pipeline.lake, pipeline.store)
    return begin(chain, [STREAM], [f"{STREAM}.public.{name}" for name in names], sample, 7)


def compared(pipeline, *names, sample=1.0, record=None, load=FAST, **options):
    """The record of a run over these tables; without names, over all."""
    record = record or begun(pipeline, *names, sample=sample)
    options.setdefault("patience", 10)
    source = Source(STREAM, pipeline.database.dsn, PUBLICATION)
    return verify(
        pipeline.spark, str(pipeline.lake), pipeline.log.address, [source], record, load, **options
    )


def states(record):
    return {name.rpartition(".")[2]: table.state for name, table in record.tables.items()}


def named(record, name):
    """The differences of a table: kind, key, columns."""
    found = record.tables[f"{STREAM}.public.{name}"].differences
    return [(each.kind, dict(each.key), each.columns) for each in found]


def behind_the_log(database, table, *statements):
    """Change a table while it is not published: the log never has it."""
    with psycopg.connect(database.dsn) as connection:
        connection.execute(f"ALTER PUBLICATION {PUBLICATION} DROP TABLE {table}".encode())
        for statement in statements:
            connection.execute(statement.encode())
        connection.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE {table}".encode())


@pytest.fixture
def unnoticed(monkeypatch):
    """As if Tuskline did not find out that a table was out of the publication."""
    monkeypatch.setattr(cut, "unshown", lambda *_: {})


#: A change, what is found, and what undoes it.
PLANTED = {
    "docs": (
        (
            "INSERT INTO docs VALUES (99, 'more', NULL, 1, 1)",
            [("missing", {"id": "99"}, ())],
            "DELETE FROM docs WHERE id = 99",
        ),
        (
            "DELETE FROM docs WHERE id = 3",
            [("extra", {"id": "3"}, ())],
            "INSERT INTO docs VALUES (3, 't3', repeat('c', 4000), 3, 0)",
        ),
        (
            "UPDATE docs SET title = 'T1', f = '-0', n = n + 0.001 WHERE id = 1",
            [("changed", {"id": "1"}, ("title", "n", "f"))],
            "UPDATE docs SET title = 't1', f = 0, n = 1 WHERE id = 1",
        ),
        (
            "UPDATE docs SET title = title || ' ' WHERE id = 2; UPDATE docs SET body = NULL, f = 'NaN' WHERE id = 4",
            [("changed", {"id": "2"}, ("title",)), ("changed", {"id": "4"}, ("body", "f"))],
            "UPDATE docs SET title = 't2' WHERE id = 2; UPDATE docs SET body = repeat('d', 4000), f = 0 WHERE id = 4",
        ),
    ),
    "pairs": (
        (
            "UPDATE pairs SET tags = '{1}', at = at + '1 us' WHERE a = 1",
            [("changed", {"b": "x", "a": "1"}, ("at", "tags"))],
            "UPDATE pairs SET tags = '{1,NULL}', at = at - '1 us'::interval WHERE a = 1",
        ),
        (
            "UPDATE pairs SET b = 'X' WHERE a = 1",
            [("missing", {"b": "X", "a": "1"}, ()), ("extra", {"b": "x", "a": "1"}, ())],
            "UPDATE pairs SET b = 'x' WHERE a = 1",
        ),
    ),
    "bag": (
        (
            "INSERT INTO bag SELECT * FROM bag WHERE f = 'NaN'",
            [("count", 2, 1)],
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE f = 'NaN')",
        ),
        (
            "UPDATE bag SET f = '-0' WHERE ctid = (SELECT min(ctid) FROM bag WHERE f::text = '0')",
            [("count", 2, 1), ("count", 2, 3)],
            "UPDATE bag SET f = '0' WHERE ctid = (SELECT min(ctid) FROM bag WHERE f::text = '-0')",
        ),
    ),
}


@pytest.mark.parametrize("table", PLANTED)
def test_each_planted_difference_is_named_and_nothing_else(pipeline, database, unnoticed, table):
    assert states(compared(pipeline)) == dict.fromkeys(PLANTED, EQUAL)
    for change, expected, back in PLANTED[table]:
        behind_the_log(database, table, change)
        found = compared(pipeline, table)
        assert states(found) == {table: DIFFERENT}, change
        record = found.tables[f"{STREAM}.public.{table}"]
        if table == "bag":
            counts = [(d.kind, d.source_rows, d.lake_rows) for d in record.differences]
            assert sorted(counts) == sorted(expected), change
        else:
            assert sorted(named(found, table), key=str) == sorted(expected, key=str), change
        behind_the_log(database, table, back)
    assert states(compared(pipeline, table)) == {table: EQUAL}


@pytest.mark.parametrize("name", NAMES)
def test_differences_at_ten_places_of_a_table_in_chunks(sized, database, unnoticed, name):
    with database.connect() as connection:
        ids = [r[0] for r in connection.execute(f"SELECT DISTINCT id FROM {name} ORDER BY id")]
    draw = random.Random(3)
    places = [ids[0], ids[-1], *draw.sample(ids[1:-1], 8)]
    shown = ", ".join(f"'{place}'" for place in places)
    behind_the_log(database, name, f"UPDATE {name} SET t = upper(t) WHERE id IN ({shown})")
    found = compared(sized, name, chunk_bytes=CHUNK)
    record = found.tables[f"{STREAM}.public.{name}"]
    assert record.state == DIFFERENT
    assert record.chunks >= 6
    if name == "bags":
        with database.connect() as connection:
            query = f"SELECT count(*) FROM {name} WHERE id IN ({shown})"
            (rows,) = connection.execute(query.encode()).fetchone()
        counts = [(d.kind, d.source_rows) for d in record.differences]
        assert sum(n for kind, n in counts if kind == "missing") == rows
    else:
        keys = {each.key["id"] for each in record.differences}
        assert keys == {str(place) for place in places}
        assert {each.columns for each in record.differences} == {("t",)}


@contextmanager
def under_load(pipeline, database, tables, *, epochs=True):
    """Random transactions over the tables, and epochs, in threads of their own."""
    stop, failed = threading.Event(), []

    def write():
        draw = random.Random(5)
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            while not stop.is_set():
                with connection.transaction():
                    for _ in range(draw.randrange(1, 5)):
                        connection.execute(_change(draw, draw.choice(tables)).encode())

    def publish():
        while not stop.is_set():
            pipeline.house.run_once(force=True)

    def caught(work):
        try:
            work()
        except Exception as error:
            failed.append(error)

    works = (write, publish) if epochs else (write,)
    threads = [threading.Thread(target=caught, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failed


def _change(draw, table):
    # Not what a test has planted.
    row = f"(SELECT ctid FROM {table} WHERE t ~ '^(x|new)' OFFSET {draw.randrange(3000)} LIMIT 1)"
    return draw.choice(
        (
            f"UPDATE {table} SET t = 'x{draw.random()}' WHERE ctid = {row}",
            f"UPDATE {table} SET f = -f WHERE ctid = {row}",
            f"DELETE FROM {table} WHERE ctid = {row}",
            f"INSERT INTO {table} SELECT {_NEW[table]}, 'new', 1 FROM (SELECT {draw.randrange(10**9)} AS r) z",
        )
    )


_NEW = {
    "ints": "10000 + r",
    "uuids": "md5(r::text)::uuid",
    "texts": "'new ' || r",
    "bags": "r",
}


def test_no_difference_where_none_is_under_load(sized, database):
    with under_load(sized, database, NAMES):
        for _ in range(4):
            found = compared(sized, chunk_bytes=CHUNK)
            assert states(found) == dict.fromkeys(NAMES, EQUAL), found


def test_a_difference_is_found_under_load(sized, database, unnoticed):
    behind_the_log(database, "ints", "UPDATE ints SET t = 'planted' WHERE id = 4000")
    with under_load(sized, database, NAMES[1:], epochs=False):
        for _ in range(2):
            found = compared(sized, chunk_bytes=CHUNK)
            assert states(found) == {**dict.fromkeys(NAMES, EQUAL), "ints": DIFFERENT}
            assert named(found, "ints") == [("changed", {"id": "4000"}, ("t",))]


#: What differs at a place of a table: how it is planted, and what is found in a table with a key.
KINDS = {
    "missing": "INSERT INTO {table} SELECT id, 'planted', f FROM gone WHERE id = '{id}'",
    "extra": "DELETE FROM {table} WHERE id = '{id}'",
    "value": "UPDATE {table} SET t = 'planted' WHERE id = '{id}'",
    "null": "UPDATE {table} SET t = NULL WHERE id = '{id}'",
}


@pytest.mark.parametrize("name", NAMES)
def test_each_kind_of_difference_is_found_at_ten_places_under_load_on_the_same_table(
    sized, database, unnoticed, name
):
    """A row more, a row less, another value, another NULL: all of them named, and no other."""
    with database.connect() as connection:
        every = f"(SELECT DISTINCT id FROM {name}) AS ids"
        query = f"SELECT id FROM (SELECT id, row_number() OVER (ORDER BY id) AS n FROM {every}) AS o WHERE n % 45 = 7"
        ids = [str(each) for (each,) in connection.execute(query.encode())]
        planted = {kind: ids[number : 40 : len(KINDS)] for number, kind in enumerate(KINDS)}
        assert {len(places) for places in planted.values()} == {10}
        # What is to be a row more has to have a place in each part of the table: the lake sees these rows go.
        shown = ", ".join(f"'{each}'" for each in planted["missing"])
        connection.execute(
            f"CREATE TABLE gone AS SELECT * FROM {name} WHERE id IN ({shown})".encode()
        )
        connection.execute(f"DELETE FROM {name} WHERE id IN ({shown})".encode())
        count = {}
        for kind, places in planted.items():
            table = "gone" if kind == "missing" else name
            shown = ", ".join(f"'{each}'" for each in places)
            query = f"SELECT count(*) FROM {table} WHERE id IN ({shown})"
            (count[kind],) = connection.execute(query.encode()).fetchone()
    sized.flush()
    behind_the_log(
        database,
        name,
        *(KINDS[kind].format(table=name, id=place) for kind in KINDS for place in planted[kind]),
    )
    with under_load(sized, database, NAMES, epochs=False):
        found = compared(sized, chunk_bytes=CHUNK)
    assert states(found) == {**dict.fromkeys(NAMES, EQUAL), name: DIFFERENT}
    record = found.tables[f"{STREAM}.public.{name}"]
    if name == "bags":
        more = [max(0, d.source_rows - d.lake_rows) for d in record.differences]
        less = [max(0, d.lake_rows - d.source_rows) for d in record.differences]
        changed = count["value"] + count["null"]
        assert sum(more) == count["missing"] + changed
        assert sum(less) == count["extra"] + changed
        return
    told = {(kind, key["id"], columns) for kind, key, columns in named(found, name)}
    columns = {"missing": (), "extra": (), "value": ("t",), "null": ("t",)}
    expected = {
        (kind if not columns[kind] else "changed", each, columns[kind])
        for kind, places in planted.items()
        for each in places
    }
    assert told == expected
    assert len(record.differences) == len(expected)


def test_a_run_that_is_killed_continues_with_the_chunks_that_are_left(sized, monkeypatch):
    monkeypatch.setattr(run, "_BATCH", 2)

    class Killed(BaseException):
        pass

    def progress(name, done, total):
        if done >= total // 2:
            raise Killed

    with pytest.raises(Killed):
        compared(sized, "ints", chunk_bytes=CHUNK, watch=Watch(progress=progress))
    last = read_record(open_chain(sized.lake))
    assert last is not None
    (table,) = last.tables.values()
    assert 0 < len(table.done) < table.chunks
    steps = []
    found = compared(
        sized,
        record=last,
        chunk_bytes=CHUNK,
        watch=Watch(progress=lambda *step: steps.append(step)),
    )
    assert states(found) == {"ints": EQUAL}
    assert steps[0][1] == len(table.done)
    assert found.tables[f"{STREAM}.public.ints"].rows == 4000
    assert found.tables[f"{STREAM}.public.ints"].cuts == 2
    assert read_record(open_chain(sized.lake)) == found


def test_a_sample_compares_a_part_of_the_chunks(sized, database):
    found = compared(sized, "ints", "bags", sample=0.25, chunk_bytes=CHUNK)
    assert states(found) == {"ints": EQUAL, "bags": EQUAL}
    for table in found.tables.values():
        assert 0 < table.rows < 2500
    again = compared(sized, "ints", sample=0.25, chunk_bytes=CHUNK)
    name = f"{STREAM}.public.ints"
    assert again.tables[name].done == found.tables[name].done


def test_a_table_that_does_not_follow_is_not_called_equal(pipeline, database):
    requests.ask(open_chain(pipeline.lake), "pause", [f"{STREAM}.public.docs"])
    pipeline.flush()
    found = compared(pipeline)
    assert states(found) == {"docs": NOT_COMPARED, "pairs": EQUAL, "bag": EQUAL}
    assert "paused" in found.tables[f"{STREAM}.public.docs"].reason
    database.execute("ALTER TABLE pairs ADD COLUMN more int", "UPDATE pairs SET more = 1")
    found = compared(pipeline, "pairs", "bag", patience=0)
    assert states(found) == {"pairs": NOT_COMPARED, "bag": EQUAL}
    pipeline.flush()
    assert states(compared(pipeline, "pairs")) == {"pairs": EQUAL}
