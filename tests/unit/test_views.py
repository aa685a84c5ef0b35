"""Views: which SQL is kept, and how; what an epoch does with a view; by which rows two snapshots differ."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pyarrow as pa
import pytest

from spark_consumers.lake.epoch import view_attempts, view_sink, view_writer
from spark_consumers.lake.epoch.epoch_changes import FEW, columns_of
from spark_consumers.lake.epoch.table_changes import (
    ChangedFile,
    Moved,
    changed_files,
    changes_tasks,
)
from spark_consumers.lake.epoch.view_attempts import ViewAttempts, ViewTimeoutError
from spark_consumers.lake.epoch.view_writer import ViewWriter
from spark_consumers.lake.format.table_format import ScanFile, Vector
from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import HELD, PAUSED, STALE, TableVersion
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.reader import Snapshot
from spark_consumers.lake.views import plan
from spark_consumers.lake.views.average import average
from spark_consumers.lake.views.damaged import without_damaged
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.views.incremental import SIGN, Flat, Grouped
from spark_consumers.lake.views.plan import Apply, Compute, Keep, Stale, decide
from spark_consumers.lake.views.translate import BaseTable, base_tables, translate
from spark_consumers.spark.failures import line_of
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.observability.table_problems import problems, sentences
from walsender_bridge.postgres.column_masks import CONSTANT, DROP, HASH, ColumnMask

_NUMERIC = ((12 << 16) | 3) + 4
ORDERS = BaseTable(
    "shop.public.orders",
    "shop",
    "public",
    "orders",
    (
        ("id", 23, -1),
        ("customer", 20, -1),
        ("small", 21, -1),
        ("amount", 1700, _NUMERIC),
        ("price", 1700, -1),
        ("weight", 701, -1),
        ("note", 25, -1),
        ("code", 1042, 9),
        ("ok", 16, -1),
        ("day", 1082, -1),
        ("at", 1114, -1),
        ("seen", 1184, -1),
        ("ref", 2950, -1),
        ("tags", 1009, -1),
        ("doc", 3802, -1),
        ("span", 1186, -1),
        ("point", 16400, -1),
        ("fine", 1700, ((30 << 16) | 20) + 4),
    ),
)
CUSTOMERS = BaseTable(
    "shop.public.customers", "shop", "public", "customers", (("id", 20, -1), ("name", 25, -1))
)
TABLES = {table.full_name: table for table in (ORDERS, CUSTOMERS)}


@pytest.mark.parametrize(
    ("sql", "form"),
    [
        ("SELECT * FROM orders", Flat),
        ("SELECT id FROM public.orders o WHERE o.amount > 5 AND note IS NOT NULL", Flat),
        ("SELECT o.id, c.name FROM orders o JOIN customers c ON c.id = o.customer", Flat),
        ("SELECT o.id FROM orders o, customers c WHERE c.id = o.customer", Flat),
        ("SELECT note, count(*), sum(amount) FROM orders GROUP BY note", Grouped),
        ("SELECT count(*), max(day) FROM orders", Grouped),
        ("SELECT DISTINCT note FROM orders", Grouped),
        ("SELECT note, avg(id) FROM orders GROUP BY 1", Grouped),
        ("SELECT note, count(DISTINCT id) FROM orders GROUP BY note", type(None)),
        ("SELECT note FROM orders GROUP BY note HAVING count(*) > 1", type(None)),
        ("SELECT o.id FROM orders o LEFT JOIN customers c ON c.id = o.customer", type(None)),
        ("SELECT id FROM (SELECT id FROM orders) AS o", type(None)),
        ("SELECT weight, count(*) FROM orders GROUP BY weight", type(None)),
        ("SELECT min(weight) FROM orders", type(None)),
        ("SELECT id FROM orders UNION ALL SELECT id FROM customers", type(None)),
        ("WITH c AS (SELECT id FROM customers) SELECT * FROM c", type(None)),
    ],
)
def test_the_form_of_a_query_says_how_its_view_is_kept(sql, form):
    made = translate(sql, TABLES)
    assert type(made.incremental) is form
    assert made.why


@pytest.mark.parametrize(
    ("sql", "what"),
    [
        ("SELECT now() AS t FROM orders", "CURRENT_TIMESTAMP"),
        ("SELECT random() AS r FROM orders", "RANDOM"),
        ("SELECT id FROM orders ORDER BY id", "ORDER"),
        ("SELECT id FROM orders LIMIT 3", "LIMIT"),
        ("SELECT amount / 3 AS a FROM orders", "quotient"),
        ("SELECT weight * 2 AS w FROM orders", "arithmetic on double precision"),
        ("SELECT sum(weight) FROM orders", "the sum of floats"),
        ("SELECT price + 1 AS p FROM orders", "numeric without precision"),
        ("SELECT id FROM orders WHERE note < 'x'", "order of text"),
        ("SELECT max(note) FROM orders", "order of text"),
        ("SELECT min(ref) FROM orders", "order of uuid"),
        ("SELECT id FROM orders WHERE code = 'x'", "read this text differently"),
        ("SELECT o.id FROM orders o JOIN orders p ON o.code = p.code", "compares"),
        ("SELECT id FROM orders WHERE note ~ 'x'", "not supported"),
        ("SELECT id FROM orders WHERE note ILIKE 'x'", "not supported"),
        (r"SELECT id FROM orders WHERE note LIKE 'a\_'", "no backslash"),
        ("SELECT upper(note) AS u FROM orders", "UPPER"),
        ("SELECT note || id AS n FROM orders", "|| is supported for text"),
        ("SELECT id FROM orders WHERE note = id", "compares text with integer"),
        ("SELECT id FROM orders WHERE day > 'yesterday'", "read this text differently"),
        ("SELECT id FROM orders WHERE seen > '2024-01-01 00:00:00'", "read this text differently"),
        ("SELECT seen::date AS d FROM orders", "a cast of timestamptz to date"),
        ("SELECT extract(hour FROM seen) AS h FROM orders", "without time zone"),
        ("SELECT extract(second FROM at) AS s FROM orders", "the supported fields are"),
        ("SELECT amount::int AS a FROM orders", "a cast of numeric(12,3) to integer"),
        ("SELECT note::varchar(3) AS n FROM orders", "a cast to VARCHAR(3)"),
        ("SELECT sum(amount) OVER () AS s FROM orders", "not supported"),
        ("SELECT array_agg(id) AS a FROM orders", "not supported"),
        ("SELECT sum(DISTINCT id) AS a FROM orders", "DISTINCT is supported only in count"),
        ("SELECT note, id FROM orders GROUP BY note", "must be in GROUP BY"),
        ("SELECT doc FROM orders GROUP BY doc", "GROUP BY compares"),
        ("SELECT DISTINCT tags FROM orders", "DISTINCT compares"),
        ("SELECT DISTINCT ON (id) id FROM orders", "DISTINCT ON"),
        ("SELECT id FROM orders WHERE id IN (SELECT id FROM customers)", "IN is supported"),
        ("SELECT id FROM orders WHERE EXISTS (SELECT 1 FROM customers)", "not supported"),
        ("SELECT o.id FROM orders o NATURAL JOIN customers c", "not supported"),
        ("SELECT o.id FROM orders o JOIN customers c USING (id)", "USING"),
        ("SELECT id FROM orders TABLESAMPLE SYSTEM (1)", "not supported"),
        ("SELECT id FROM orders FOR UPDATE", "not supported"),
        ("SELECT 1 AS one", "must read a table"),
        ("SELECT id, id FROM orders", "two columns are named"),
        ("SELECT id + 1 FROM orders", "has no name"),
        ("SELECT nothing FROM orders", "does not exist"),
        ("SELECT id FROM orders, customers", "ambiguous"),
        ("SELECT id FROM nowhere", "the lake has no table"),
        ("DELETE FROM orders", "must be one SELECT"),
        ("SELECT id FROM orders; SELECT 1", "must be one SELECT"),
        ("SELEC id", "SELECT"),
        ("SELECT id FROM orders ? at", "cannot be read"),
        ("SELECT amount * amount * amount * amount AS a FROM orders", "38 digits"),
        ("SELECT E'a\\n' AS t FROM orders", "not supported"),
        ('SELECT note COLLATE "C" AS t FROM orders', "not supported"),
        ("SELECT substring(note, 1, -1) AS n FROM orders", "a constant length"),
        ("SELECT substring(note FROM -2) AS n FROM orders", "a constant position"),
        ("SELECT round(amount, -1) AS a FROM orders", "a constant number of digits"),
        ("SELECT nullif(id, 2.5) / 2 AS a FROM orders", "quotient"),
        ("SELECT amount::numeric(0) AS a FROM orders", "a numeric of 0 digits"),
        ("SELECT amount::numeric(3, 2, 1) AS a FROM orders", "a cast to DECIMAL(3, 2, 1)"),
        ("SELECT id::numeric(id) AS a FROM orders", "a cast to DECIMAL(ID)"),
        ("SELECT count() AS n FROM orders", "has no argument"),
        ("SELECT id FROM orders WHERE point IS NULL", "may be composite"),
        ("SELECT CASE WHEN ok THEN point END IS NOT NULL AS p FROM orders", "may be composite"),
        ("SELECT id + 1_000 FROM orders", "1_000: a number has decimal digits only"),
        ("SELECT id + 0o17 FROM orders", "0o17: a number has decimal digits only"),
        ("SELECT avg(coalesce(fine, 1)) FROM orders", "cast the argument to numeric(30,20)"),
        ("SELECT avg(greatest(fine, id) + 1) FROM orders", "cast the argument to numeric(31,20)"),
        ("SELECT user FROM orders", "in double quotes"),
        ('SELECT id AS "${env:HOME}" FROM orders', "another name"),
        ("SELECT c.* FROM orders", "FROM has no such table"),
        ("SELECT id FROM orders WHERE note LIKE '_\U0001f600%'", "beyond U+FFFF"),
        ("SELECT id FROM ((SELECT id FROM orders) LIMIT 1) AS o", "LIMIT"),
        (
            "SELECT c.name FROM orders o, customers b RIGHT JOIN customers c ON c.id = b.id",
            "behind a comma",
        ),
        ("WITH c (name, id) AS (SELECT id, name FROM customers) SELECT id FROM c", "WITH with"),
        (
            "WITH c AS (SELECT id FROM customers), d AS (WITH c AS (SELECT id FROM orders) TABLE c) TABLE d",
            "used twice in WITH",
        ),
        ("SELECT " + "(" * 600 + "id" + ")" * 600 + " AS i FROM orders", "nested too deeply"),
        ("SELECT " + " + ".join(["id"] * 900) + " AS i FROM orders", "nested too deeply"),
    ],
)
def test_what_may_mean_something_else_on_spark_is_refused_by_name(sql, what):
    with pytest.raises(NotSupportedError) as found:
        translate(sql, TABLES)
    assert what in found.value.what + found.value.repair
    assert found.value.repair


def test_no_part_of_a_condition_is_lost():
    """A parser may say NOT by a member of a node that a translation does not look at."""
    for sql, text in [
        ("note IS NOT NULL", "IS NOT NULL"),
        ("note NOT LIKE 'a%'", "NOT LIKE"),
        ("id NOT IN (1, 2)", "NOT ("),
        ("id NOT BETWEEN 1 AND 2", "NOT ("),
        ("ok IS NOT TRUE", "NOT ("),
        ("id IS DISTINCT FROM 3", "NOT ("),
    ]:
        assert text in translate(f"SELECT id FROM orders WHERE {sql}", TABLES).query, sql


def test_nullif_has_the_type_and_the_values_of_its_left_side():
    """As PostgreSQL's: a literal takes the other's type, and an integer beside a numeric is one."""
    made = translate(
        "SELECT nullif('x', note) AS n, nullif('2024-01-31', day) AS d FROM orders", TABLES
    )
    assert "ELSE 'x' END" in made.query
    assert "ELSE DATE '2024-01-31' END" in made.query
    made = translate("SELECT nullif(id, 2.5) AS n, nullif(small, id) AS s FROM orders", TABLES)
    assert [str(kind) for kind in made.columns.types] == ["decimal128(11, 1)", "int16"]


def test_comparisons_of_constants_are_those_of_texts():
    made = translate("SELECT NULL = NULL AS a, 'x' = 'y' AS b FROM orders", TABLES)
    assert "(CAST(NULL AS STRING) = CAST(NULL AS STRING))" in made.query


def test_an_aggregate_without_a_name_has_postgresqls():
    made = translate("SELECT bool_and(ok), bool_or(ok), count(*) FROM orders", TABLES)
    assert made.columns.names[:3] == ["bool_and", "bool_or", "count"]


def test_spark_substitutes_nothing_in_a_text():
    """Spark replaces `${...}` in all of a statement's text, before it parses that."""
    made = translate("SELECT id FROM orders WHERE note = '${env:HOME}'", TABLES)
    assert "${" not in made.query


def test_a_column_named_as_a_function_is_read_where_postgresql_reads_it():
    odd = BaseTable("s.public.t", "s", "public", "t", (("user", 25, -1),))
    made = translate('SELECT "user", t.user AS own FROM t', {odd.full_name: odd})
    assert made.columns.names == ["user", "own"]


def test_a_view_sees_the_columns_of_a_masked_table_as_the_lake_has_them():
    masks = (
        ColumnMask("customer", HASH, "0a"),
        ColumnMask("amount", DROP),
        ColumnMask("day", CONSTANT, "1900-01-01"),
    )
    known = base_tables({NAME: replace(TABLE, masks=masks)})
    made = translate("SELECT * FROM orders", known)
    assert "amount" not in made.columns.names
    assert str(made.columns.field("customer").type) == "string"
    assert str(made.columns.field("day").type) == "date32[day]"
    with pytest.raises(NotSupportedError, match="compares text with integer"):
        translate("SELECT id FROM orders WHERE customer = 5", known)


def test_a_live_read_names_a_view_that_it_cannot_compute_as_stale():
    """With `allow_stale`, its tables are of several versions: the rows are those that it had at the epoch."""
    left_out = replace(TABLE, state=HELD, as_of=6, reason="its columns changed")
    tables, views = {NAME: left_out}, {"views.v": VIEW}
    manifest = Manifest("lake", 6, 9, 6, 1, 0.0, tables=tables, views=views)
    snapshot = Snapshot(MagicMock(), Path(), manifest, allow_stale=True, tail=MagicMock())
    assert snapshot.stale["shop.views.v"] == f"as of epoch 6: it reads {NAME}: its columns changed"
    assert "shop.views.v" in snapshot.tables
    strict = Snapshot(MagicMock(), Path(), manifest, tail=MagicMock())
    assert "shop.views.v" not in strict.tables


def test_a_table_that_comes_with_the_name_of_a_view_is_read():
    view = replace(VIEW, table=replace(VIEW_TABLE, state=STALE, as_of=3, reason="taken"))
    tables = {NAME: replace(TABLE, path="tables/orders%t2-0c")}
    manifest = Manifest("lake", 6, 9, 6, 1, 0.0, tables=tables, views={"public.orders": view})
    assert manifest.readable == tables
    snapshot = Snapshot(MagicMock(), Path(), manifest)
    assert snapshot.tables == [NAME]
    assert not snapshot.stale
    # Its files stay until the view's table has left the links.
    assert len(manifest.versions) == 2


def test_names_and_texts_are_quoted():
    odd = BaseTable("s.public.t", "s", "public", "T`{x}", (("a`{0}", 25, -1),))
    made = translate("""SELECT "a`{0}" AS x FROM "T`{x}" WHERE "a`{0}" = 'it''s {\\'""", {"t": odd})
    text = made.query.format(t0="source")
    assert "FROM source AS `T``{x}`" in text
    assert "`T``{x}`.`a``{0}` = 'it\\'s {\\\\'" in text


@pytest.mark.parametrize(
    ("total", "count", "scale", "text"),
    [
        ("10", 4, 0, "2.5000000000000000"),
        ("1", 3, 0, "0.33333333333333333333"),
        ("-2", 3, 0, "-0.66666666666666666667"),
        ("100000", 3, 0, "33333.333333333333"),
        ("0", 5, 0, "0.00000000000000000000"),
        ("7.125", 1, 3, "7.1250000000000000"),
        ("0.001", 30000, 3, "0.000000033333333333333333"),
        ("-1234567890123456789012345678901234567", 1, 0, "-1234567890123456789012345678901234567"),
        (None, 0, 0, None),
        ("0", 0, 0, None),
    ],
)
def test_an_average_has_postgresqls_digits(total, count, scale, text):
    assert average(total, count, scale) == text


@pytest.mark.parametrize(
    "argument",
    [
        "fine",
        "coalesce(fine, 1)::numeric(30,20)",
        "round(coalesce(fine, 1), 2)",
        "fine + coalesce(fine, 1)",
        "coalesce(amount, 0)",
    ],
)
def test_an_average_is_kept_where_its_digits_do_not_depend_on_single_values(argument):
    assert translate(f"SELECT avg({argument}) FROM orders", TABLES).incremental


def test_a_number_that_is_rounded_to_more_digits_has_them():
    """As PostgreSQL's, whose average has as many."""
    made = translate("SELECT round(amount, 5) AS a FROM orders", TABLES)
    assert str(made.columns.field("a").type) == "decimal128(14, 5)"


# -- what an epoch does ---------------------------------------------------------------------------------

TABLE = TableVersion(
    "tables/orders%t1-0a", "iceberg", 10, "", ("id",), (), 0, 0, 100, 1, layout=ORDERS.layout
)
MADE = translate("SELECT id FROM orders", TABLES)
VIEW_TABLE = replace(TABLE, path="tables/v%t1-0b", key=())


def test_a_view_reads_masked_columns_as_the_lake_has_them() -> None:
    masks = (ColumnMask("customer", "hash", "f"), ColumnMask("note", "drop"))
    tables = base_tables({ORDERS.full_name: replace(TABLE, masks=masks)})
    made = translate("SELECT * FROM orders", tables)
    assert "note" not in made.columns.names
    assert str(made.columns.field("customer").type) == "string"
    with pytest.raises(NotSupportedError, match="text with integer"):
        translate("SELECT id FROM orders WHERE customer = 1", tables)
    with pytest.raises(NotSupportedError, match="note does not exist"):
        translate("SELECT note FROM orders", tables)


VIEW = ViewVersion(
    "SELECT id FROM orders",
    VIEW_TABLE,
    tables=MADE.tables,
    paths=(TABLE.path,),
    digest=MADE.digest,
)
NAME = ORDERS.full_name


def decided(view, before, after, made=MADE):
    tables = ({} if t is None else {NAME: t} for t in (before, after))
    return decide(view, made, *tables, taken=False)


def test_changes_are_applied_only_to_rows_of_the_head():
    later = replace(TABLE, snapshot_id=11)
    assert decided(VIEW, TABLE, later) == Apply((0,))
    assert decided(VIEW, TABLE, TABLE) == Keep()
    # A compaction: another snapshot with the same rows, at the head's epoch.
    assert decided(VIEW, later, later) == Keep()
    assert decided(None, TABLE, later) == Compute("it is new", anew=True)
    assert isinstance(decided(replace(VIEW, digest="other"), TABLE, later), Compute)
    # Another Iceberg table, or one that did not follow at the head, is not the head's plus the epoch's changes.
    assert isinstance(decided(VIEW, TABLE, replace(later, path="tables/orders%t2-0c")), Compute)
    moved = replace(TABLE, path="tables/orders%t2-0c")
    assert isinstance(decided(VIEW, moved, replace(moved, snapshot_id=12)), Compute)
    assert isinstance(decided(VIEW, replace(TABLE, state=PAUSED), TABLE), Compute)
    assert isinstance(decided(VIEW, None, later), Compute)
    stale = replace(VIEW, table=replace(VIEW_TABLE, state=STALE, as_of=3))
    assert decided(stale, TABLE, later) == Compute("it was stale")
    counted = replace(MADE, incremental=None, why="it has HAVING")
    view = replace(VIEW, digest=counted.digest)
    assert decided(view, TABLE, later, counted) == Compute("it has HAVING")


def test_a_view_of_a_table_that_is_not_at_the_epoch_is_stale():
    for after, reason in [
        (None, "the lake has no table shop.public.orders"),
        (replace(TABLE, state=PAUSED), "which is paused"),
        (replace(TABLE, quarantined_rows=2), "2 rows are quarantined"),
    ]:
        found = decided(VIEW, TABLE, after)
        assert isinstance(found, Stale)
        assert reason in found.reason
    taken = decide(VIEW, MADE, {NAME: TABLE}, {NAME: TABLE}, taken=True)
    assert isinstance(taken, Stale)


def test_many_changes_are_recomputed():
    assert not plan.is_too_much(100_000, 10)
    assert not plan.is_too_much(200_000, 1_000_000)
    assert plan.is_too_much(300_000, 1_000_000)


def test_two_snapshots_differ_by_new_files_gone_files_and_new_removals():
    def vector(file, rows, name):
        return Vector(file, name, 0, 0, rows, 0)

    def file(name, rows, vector=None):
        return ScanFile(f"/t/data/{name}", 1, rows, vector)

    before = [file("a", 10), file("b", 5, vector("b", 2, "v1")), file("c", 4), file("d", 3)]
    after = [
        file("a", 10),
        file("b", 5, vector("b", 3, "v2")),
        file("d", 3, vector("d", 1, "v3")),
        file("e", 6, vector("e", 1, "v4")),
    ]
    found = {each.path[-1]: each for each in changed_files(before, after)}
    assert found == {
        "e": ChangedFile("/t/data/e", 1, 5, 6, vector("e", 1, "v4")),
        "c": ChangedFile("/t/data/c", -1, 4, 4),
        "b": ChangedFile("/t/data/b", -1, 1, 5, vector("b", 2, "v1"), vector("b", 3, "v2")),
        "d": ChangedFile("/t/data/d", -1, 1, 3, None, vector("d", 1, "v3")),
    }
    assert changed_files(after, after) == []


def test_rows_that_a_write_has_only_moved_are_no_changes():
    def file(name, rows, dead=0):
        vector = Vector(name, f"v-{name}", 0, 0, dead, 0) if dead else None
        return ScanFile(f"/t/data/{name}", 1, rows, vector)

    def changes(move, before, after):
        return sorted(
            (each.path[-1], each.sign, each.rows, each.only)
            for each in changed_files(before, after, [move])
        )

    before = [file("a", 10, 2), file("b", 5), file("c", 4), file("d", 8, 1)]
    after = [file("c", 4), file("n", 12), file("o", 7), file("p", 3)]
    move = Moved({"data/a": 3, "data/b": 0, "data/d": 1}, "scratch", ("data/n", "data/o"))
    # One row of `a` was removed, `b` and `d` are as they were; `p` has the epoch's own rows.
    assert changes(move, before, after) == [("a", -1, 1, "scratch"), ("p", 1, 3, None)]
    whole = [("a", -1, 8, None), ("b", -1, 5, None), ("d", -1, 7, None)]
    whole += [("n", 1, 12, None), ("o", 1, 7, None), ("p", 1, 3, None)]
    # Of another attempt; of a file that is not new, or not gone; with other rows than it says.
    for other, old, new in [
        (replace(move, new=("data/m", "data/o")), before, after),
        (replace(move, old={**move.old, "data/x": 0}), before, after),
        (replace(move, old={**move.old, "data/a": 4}), before, after),
        (replace(move, old={**move.old, "data/a": 1, "data/b": 2}), before, after),
    ]:
        assert changes(other, old, new) == whole
    stays = [*after, file("b", 5)]
    assert ("n", 1, 12, None) in changes(move, before, stays)
    removed = [file("c", 4), file("n", 13, 1), file("o", 7), file("p", 3)]
    assert ("n", 1, 12, None) in changes(move, before, removed)


def test_a_task_reads_so_many_rows_at_most_whether_they_have_changed_or_not():
    schema = pa.schema([("n", pa.int64())])

    def parts(*files):
        tasks = changes_tasks("/t", [ChangedFile("f", 1, *each) for each in files], schema, SIGN)
        return [len(task.files) for task in tasks]

    assert parts((10, 900_000), (10, 900_000), (10, 900_000)) == [2, 1]
    assert parts((300_000, 300_000), (300_000, 300_000)) == [1, 1]
    assert parts((1, 1), (1, 9_000_000), (1, 1)) == [1, 1, 1]
    assert parts() == [0]


def test_changes_are_read_in_the_columns_of_the_views_that_are_kept_by_them():
    names = [column[0] for column in TABLE.layout]

    def read(*queries):
        made = [translate(query, base_tables({NAME: TABLE})) for query in queries]
        return columns_of(NAME, names, made)

    assert read("SELECT customer, sum(amount) AS s FROM orders GROUP BY customer") == {
        *("customer", "amount"),
    }
    assert read("SELECT id FROM orders WHERE day > '2024-01-01'", "SELECT amount FROM orders") == {
        *("id", "day", "amount"),
    }
    # Computed again from the table, or counting rows alone.
    assert read("SELECT count(DISTINCT customer) AS n FROM orders") == set()
    assert read("SELECT count(*) AS n FROM orders") == set()


def test_a_column_that_no_view_may_name_hinders_no_view_of_its_table():
    odd = BaseTable("s.public.t", "s", "public", "t", (("id", 23, -1), ("${x}", 25, -1)))
    made = translate("SELECT id FROM t", {odd.full_name: odd})
    assert columns_of(odd.full_name, ["id", "${x}"], [made]) == {"id"}


def test_status_names_the_views_that_do_not_follow():
    """With the reason, as it names tables."""
    stale = replace(VIEW, table=replace(VIEW_TABLE, state=STALE, as_of=3), reason="it waits")
    refused = ViewVersion("SELECT now()", reason="CURRENT_TIMESTAMP: not supported in a view")
    views = {"views.old": stale, "views.bad": refused, "views.good": VIEW}
    head = Manifest("lake", 1, 4, 3, 1, 0.0, tables={NAME: TABLE}, views=views)
    assert [*sentences(problems(head))] == [
        "view views.bad has no rows: CURRENT_TIMESTAMP: not supported in a view",
        "view views.old is stale, as of epoch 3: it waits",
    ]
    # And a link has them as it had them.
    assert Manifest.from_json(json.loads(json.dumps(head.to_json())), "x") == head
    assert {*head.readable} == {NAME, "shop.views.old", "shop.views.good"}


def test_a_damaged_view_is_computed_in_a_new_table():
    head = Manifest("lake", 1, 4, 3, 1, 0.0, tables={NAME: TABLE}, views={"views.v": VIEW})
    assert without_damaged(head, {TABLE.path: "lost"}) is head
    after = without_damaged(head, {VIEW_TABLE.path: "lost"}).views["views.v"]
    assert after.table == replace(VIEW_TABLE, state=STALE, as_of=4, reason="lost")
    assert decided(after, TABLE, TABLE) == Compute("its definition has changed", anew=True)


def test_a_view_whose_table_changed_while_it_waited_is_tried_again():
    """The change may have mended what it failed for, and no later epoch shows that change."""
    store = MagicMock()
    store.names.return_value = []
    attempts = ViewAttempts(MagicMock(), store)
    definition = ViewDefinition("views.v", "SELECT id FROM orders")
    reason = f"{plan.FAILED}division by zero"
    attempts.failed(definition, reason, 60.0, of_query=True)
    failed = replace(VIEW, table=replace(VIEW_TABLE, state=STALE, reason=reason))
    assert isinstance(decided(failed, TABLE, TABLE), Stale)
    waiting = attempts.waiting(definition)
    assert waiting is not None
    assert reason in waiting
    changed = replace(VIEW, table=replace(VIEW_TABLE, state=STALE, reason=waiting))
    assert isinstance(decided(changed, TABLE, TABLE), Compute)


def test_only_views_whose_last_attempt_was_brief_are_attempted_beside_others():
    attempts = ViewAttempts(MagicMock(), MagicMock())
    view = ViewDefinition("views.v", "SELECT id FROM orders")
    assert not attempts.is_brief(view)
    with attempts.attempt(view):
        pass
    attempts.succeeded(view, 0.5)
    assert attempts.is_brief(view)
    assert not attempts.is_brief(replace(view, sql="SELECT customer FROM orders"))
    with attempts.attempt(view, beside=True):
        pass
    assert attempts.is_brief(view)
    # What is attempted by itself has failed, or took too long, beside others.
    with attempts.attempt(view):
        assert not attempts.is_brief(view)
    attempts.succeeded(view, 10.0)
    assert not attempts.is_brief(view)


def test_an_attempt_beside_others_is_stopped_soon_and_leaves_no_record(monkeypatch):
    """If the process ended, nobody could say in which view's attempt."""
    monkeypatch.setattr(view_attempts, "_BESIDE", 0.01)
    spark, store = MagicMock(), MagicMock()
    store.names.return_value = []
    cancelled = threading.Event()
    spark.sparkContext.cancelJobsWithTag = lambda _: cancelled.set()
    view = ViewDefinition("views.v", "SELECT id FROM orders", timeout=600.0)

    def run():
        with ViewAttempts(spark, store).attempt(view, beside=True):
            assert cancelled.wait(30)
            raise RuntimeError("a job was cancelled")

    with pytest.raises(ViewTimeoutError):
        run()
    store.replace.assert_not_called()


@pytest.mark.parametrize(("limit", "action"), [(10, Stale), (20, Compute)])
def test_a_view_with_too_many_rows_is_tried_again_when_its_limit_is_another(limit, action):
    """Also if none of its tables has changed since."""
    reason = f"{plan.FAILED}{view_sink.TOO_MANY.format(10)}"
    table = replace(VIEW_TABLE, state=STALE, as_of=3, reason=reason)
    head = MagicMock(
        tables={NAME: TABLE}, views={"views.v": replace(VIEW, table=table, reason=reason)}
    )
    definition = ViewDefinition("views.v", "SELECT id FROM orders", max_rows=limit)
    found = view_writer._decided(definition, MADE, head, head.tables, {NAME})
    assert isinstance(found[1], action)


def test_the_reason_of_an_error_of_the_jvm_is_named():
    text = "An error occurred while calling o1.save.\n: java.lang.OutOfMemoryError: Java heap space\n\tat a.B"
    assert line_of(RuntimeError(text)) == "java.lang.OutOfMemoryError: Java heap space"


def test_changes_are_divided_by_columns_whatever_their_names(monkeypatch):
    chain = MagicMock()
    chain.store.read.side_effect = FileNotFoundError
    writer = ViewWriter(MagicMock(), chain, MagicMock(), 1, (), attempts=MagicMock(), deletes={})
    monkeypatch.setattr(view_writer, "sink", lambda *_: [])
    monkeypatch.setattr(writer, "_remove_left", MagicMock())
    frame = MagicMock()
    frame.columns = ["id", "a.b", "c`d", SIGN]
    monkeypatch.setattr(writer, "_remove_left", MagicMock())
    what = MagicMock(scratch="", part=""), frame, MagicMock(scratch_name="")
    for most in (None, FEW + 1):
        assert writer._staged(*what, most) is None
        frame.repartition.assert_called_once_with("`id`", "`a.b`", "`c``d`")
        frame.reset_mock()
    frame.limit.assert_not_called()
    # Few rows are one task's as they come.
    assert writer._staged(*what, FEW) is None
    frame.repartition.assert_not_called()
