"""Row filters: the lake has the rows of `SELECT ... WHERE` on PostgreSQL, at each epoch and in live reads."""

import random
from collections import Counter

import pytest

from spark_consumers import read
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.equality import cut
from spark_consumers.lake.equality.record import EQUAL
from spark_consumers.lake.manifest.chain import open_chain
from tests.spark.test_equality import behind_the_log, compared, named, states
from tests.spark.test_recorded_changes import install
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import Pipeline, dies
from tests.support.pinned import connect_pinned
from tests.support.waiting import wait_for
from walsender_bridge.errors import LakeError
from walsender_bridge.postgres.column_masks import parse_masks
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

#: One condition after the other, each of which a row may meet, not meet, or leave unknown.
FILTERS = {
    "docs": "(n > 2.5 OR f >= 1) AND NOT (state = 'gone' OR state IS NULL)",
    "pairs": "a BETWEEN 2 AND 7 OR day < '2024-03-01' OR flag IS NOT FALSE",
    "bag": "f > g OR a IN (1, NULL) OR NOT flag",
}
TABLES = (
    "CREATE TABLE docs (id int PRIMARY KEY, state text, body text, n numeric(9, 2), f float8)",
    "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL",
    "CREATE TABLE pairs (a int, b text, day date, flag boolean, PRIMARY KEY (b, a))",
    "CREATE TABLE bag (a int, f float8, g float4, flag boolean)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
)
VALUES = {
    "docs": (
        *(("0", "1", "2", "3", "4", "5", "6"), ("'open'", "'gone'", "NULL", "'Open'", "'é\\'")),
        *(("NULL", "repeat('x', 4000)", "'b'"), ("NULL", "2.5", "2.51", "-3")),
        ("NULL", "0", "'-0'", "1", "'NaN'", "'Infinity'", "'-Infinity'"),
    ),
    "pairs": (
        *(("1", "2", "7", "8"), ("'x'", "'y'")),
        *(("NULL", "'2024-02-29'", "'2024-03-01'"), ("NULL", "true", "false")),
    ),
    "bag": (
        ("NULL", "1", "2"),
        ("NULL", "0", "'-0'", "0.1", "'NaN'", "'Infinity'"),
        ("NULL", "0", "'-0'", "0.1", "'NaN'", "'-Infinity'"),
        ("NULL", "true", "false"),
    ),
}
COLUMNS = {"docs": "id, state, body, n, f", "pairs": "a, b, day, flag", "bag": "a, f, g, flag"}


def rule(name, rows, masks=None):
    pattern = Pattern.parse(f"public.{name}")
    return LayoutRule(pattern, TableLayout(), masks=parse_masks(masks or {}), row_filter=rows)


RULES = [rule(name, rows) for name, rows in FILTERS.items()]


def assert_filtered(pipeline, snapshot, filters=FILTERS, names=FILTERS):
    """The tables have the rows that PostgreSQL selects by the conditions as they are written here."""
    for name in names:
        with connect_pinned(pipeline.database.dsn) as connection:
            # A float4 is shorter in PostgreSQL's driver than in Spark's rows.
            columns = COLUMNS[name].replace(" g,", " g::float8,")
            text = f"SELECT {columns} FROM {name} WHERE {filters[name]}"
            expected = Counter(map(repr, connection.execute(text.encode()).fetchall()))
        found = snapshot[name].select(*COLUMNS[name].split(", ")).collect()
        rows = Counter(repr(tuple(row)) for row in found)
        assert rows == expected, (name, filters[name])
        assert sum(rows.values()) == snapshot.manifest.tables[f"{STREAM}.public.{name}"].rows or (
            snapshot.manifest.epoch != pipeline.head().epoch
        )
    return snapshot


def change(draw, *, whole=False):
    name = draw.choice([*VALUES])
    row = [draw.choice(values) for values in VALUES[name]]
    columns = COLUMNS[name].split(", ")
    at = draw.randrange(len(row))
    where = f"{columns[0]} = {draw.choice(VALUES[name][0])}"
    if name == "docs" and whole:
        # All that may be out of line is sent.
        row[2] = "'sent' || random()"
    kinds = [
        f"INSERT INTO {name} VALUES ({', '.join(row)}) ON CONFLICT DO NOTHING",
        f"DELETE FROM {name} WHERE {where}",
    ]
    sets = [(columns[at], row[at])] + ([("body", row[2])] if name == "docs" and whole else [])
    text = ", ".join(f"{column} = {value}" for column, value in dict(sets).items())
    key = {"docs": ["id"], "pairs": ["a", "b"]}.get(name, [])
    free = "true"
    if columns[at] in key:
        others = [f"t.{k} = {row[at] if k == columns[at] else f'{name}.{k}'}" for k in key]
        free = f"NOT EXISTS (SELECT FROM {name} t WHERE {' AND '.join(others)})"
        where += f" AND ctid = (SELECT min(ctid) FROM {name} WHERE {where})"
    kinds += [f"UPDATE {name} SET {text} WHERE {where} AND {free}"] * 3
    return draw.choice([*kinds, f"TRUNCATE {name}" if draw.random() < 0.05 else kinds[0]])


@pytest.fixture
def filtered(spark, tmp_path, database, request):
    draw = random.Random(request.config.getoption("--seed"))
    rows = [
        f"INSERT INTO {name} VALUES ({', '.join(map(draw.choice, VALUES[name]))}) ON CONFLICT DO NOTHING"
        for name in VALUES
        for _ in range(20)
    ]
    database.execute(*TABLES, *rows)
    with Pipeline(spark, tmp_path, database, [f"public.{name}" for name in FILTERS]) as pipeline:
        pipeline.draw = draw
        pipeline.house = pipeline.lakehouse(layouts=RULES)
        pipeline.wait_for_tables(*FILTERS)
        yield pipeline


@pytest.mark.parametrize("ranges", [False, True], ids=["at-once", "in-ranges"])
def test_random_changes_leave_what_postgresql_selects(filtered, database, monkeypatch, ranges):
    if ranges:
        monkeypatch.setattr(plan, "RANGE_BYTES", 1)
    assert_filtered(filtered, filtered.flush())
    paths = {name: table.path for name, table in filtered.head().tables.items()}
    for number in range(6):
        for _ in range(3):
            changes = [change(filtered.draw, whole=True) for _ in range(6)]
            database.execute(f"BEGIN; {'; '.join(changes)}; COMMIT")
        filtered.barrier()
        live = read(filtered.spark, filtered.lake, live=True, log=filtered.log.address)
        assert_filtered(filtered, live)
        if number == 3:
            dies(monkeypatch, filtered, "before-manifest")
            filtered.house = filtered.lakehouse(layouts=RULES)
        assert_filtered(filtered, filtered.flush())
    assert {name: table.path for name, table in filtered.head().tables.items()} == paths
    assert states(compared(filtered)) == dict.fromkeys(FILTERS, EQUAL)
    assert_no_orphans(filtered.spark, filtered.lake)


def test_values_that_are_not_sent(filtered, database):
    """Of a row that the lake has they are taken from it; of one that comes, the table is copied again."""
    database.execute(
        "DELETE FROM docs",
        "INSERT INTO docs SELECT g, 'open', repeat('x', 4000), g, 0 FROM generate_series(1, 6) g",
    )
    assert_filtered(filtered, filtered.flush())
    path = filtered.head().tables[f"{STREAM}.public.docs"].path
    # One stays, one leaves, one is moved, and one that never was there changes without coming.
    database.execute(
        "UPDATE docs SET n = 9 WHERE id = 4",
        "UPDATE docs SET state = 'gone' WHERE id = 5",
        "UPDATE docs SET id = 60 WHERE id = 6",
        "UPDATE docs SET n = 1 WHERE id = 2",
    )
    filtered.barrier()
    live = read(filtered.spark, filtered.lake, live=True, log=filtered.log.address)
    with pytest.raises(LakeError, match="it has a row filter"):
        live["docs"]
    assert_filtered(filtered, live, names=("pairs", "bag"))
    assert_filtered(filtered, filtered.flush())
    assert filtered.head().tables[f"{STREAM}.public.docs"].path == path
    database.execute("UPDATE docs SET n = 9 WHERE id = 2")

    def copied():
        filtered.house.run_once(force=True)
        table = filtered.head().tables[f"{STREAM}.public.docs"]
        return table.path != path and table.state == "live"

    filtered.barrier()
    wait_for(copied, 60, "a copy")
    assert_filtered(filtered, filtered.flush())
    links = [m.tables.get(f"{STREAM}.public.docs") for m in open_chain(filtered.lake).newest(20)]
    assert any("moved a row into its row filter" in t.reason for t in links if t)


def test_verify_finds_a_row_that_the_filter_excludes_and_one_that_it_lacks(
    filtered, database, monkeypatch
):
    monkeypatch.setattr(cut, "unshown", lambda *_: {})
    database.execute(
        "DELETE FROM pairs",
        "INSERT INTO pairs SELECT g, 'x', NULL, false FROM generate_series(1, 9) g",
    )
    assert_filtered(filtered, filtered.flush())
    behind_the_log(database, "pairs", "UPDATE pairs SET flag = NULL WHERE a = 1")
    behind_the_log(
        database, "pairs", "UPDATE pairs SET a = 20 WHERE a = 2", "DELETE FROM pairs WHERE a = 9"
    )
    assert sorted(named(compared(filtered, "pairs"), "pairs"), key=str) == [
        ("extra", {"b": "x", "a": "2"}, ()),
        ("missing", {"b": "x", "a": "1"}, ()),
    ]


def test_another_filter_copies_and_a_changed_column_of_it_too(filtered, database):
    install(database)
    filtered.flush()
    filtered.house.run_once()
    before = {name: table.path for name, table in filtered.head().tables.items()}
    database.execute("ALTER TABLE docs ADD more int", "ALTER TABLE pairs RENAME day TO date_of_it")
    others = {
        **FILTERS,
        "bag": "a = 2",
        "pairs": "a BETWEEN 2 AND 7 OR date_of_it < '2024-03-01' OR flag IS NOT FALSE",
    }

    def refused():
        filtered.house.run_once(force=True)
        return filtered.head().not_copied

    filtered.barrier()
    wait_for(refused, 60, "a refused copy")
    assert "the table has no column 'day'" in refused()[f"{STREAM}.public.pairs"]
    filtered.house.close()
    filtered.house = filtered.lakehouse(layouts=[rule(name, rows) for name, rows in others.items()])

    def copied():
        filtered.house.run_once(force=True)
        after = filtered.head().tables
        return {n for n, t in after.items() if t.path != before[n] and t.state == "live"} == {
            f"{STREAM}.public.pairs",
            f"{STREAM}.public.bag",
        }

    wait_for(copied, 60, "copies with other filters")
    columns = {**COLUMNS, "pairs": "a, b, date_of_it, flag"}
    COLUMNS.update(columns)
    try:
        assert_filtered(filtered, filtered.flush(), others)
    finally:
        COLUMNS["pairs"] = "a, b, day, flag"


def test_filters_that_cannot_be_evaluated_copy_nothing(spark, tmp_path, database):
    database.execute(*TABLES, "INSERT INTO pairs VALUES (1, 'x', NULL, true)")
    rules = [
        rule("docs", "state > 'a'"),
        rule("pairs", "b = 'x'", masks={"b": "hash"}),
        rule("bag", "lower(b) = 'x'"),
    ]
    with Pipeline(spark, tmp_path, database, [f"public.{name}" for name in FILTERS]) as pipeline:
        pipeline.house = pipeline.lakehouse(layouts=rules, mask_key=b"k" * 32)

        def refused():
            pipeline.house.run_once(force=True)
            return len(pipeline.head().not_copied) == 3

        wait_for(refused, 60, "refused copies")
        reasons = pipeline.head().not_copied
        for name, reason in {
            "docs": "are compared by = and <> only",
            "pairs": "the column 'b' is masked",
            "bag": "a comparison needs a column",
        }.items():
            assert reason in reasons[f"{STREAM}.public.{name}"]
