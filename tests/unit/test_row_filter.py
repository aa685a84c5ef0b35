"""Row filters: what is refused, how values compare, and that a filtered fold leaves the rows that meet the filter."""

import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.fold.keyed import PATCH, ROW, Fold, fold
from spark_consumers.lake.epoch.stage import filtered
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.tables.row_condition import opened
from tests.unit.test_fold import KEY, TYPES, batches, histories
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.protocol.pgoutput import Column

NUMERIC_9_2 = (9 << 16 | 2) + 4


def column(name, kind, typmod=-1):
    return Column(name, kind, typmod, is_key=False)


COLUMNS = (
    *(column("id", 23), column("t", 25), column("n", 1700, NUMERIC_9_2), column("f", 701)),
    *(column("b", 16), column("d", 1082), column("tz", 1184), column("u", 2950)),
    *(column("own", 99_999), column("c", 1042), column("free", 1700), column("Odd", 20)),
)


def opened_here(text, masked=()):
    return opened(text, COLUMNS, frozenset(masked), where="s.public.t")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("t < 'b'", "by = and <> only"),
        ("lower(t) = 'a'", "needs a column on one of its sides"),
        ("t LIKE 'a%'", "not among the conditions"),
        ("c = 'a'", "has a type that cannot be compared"),
        ("free > 1", "has a type that cannot be compared"),
        ("own IS NULL", "is not one of PostgreSQL's own"),
        ("tz < '2024-01-01'", "with the offset +00"),
        ("d < 'tomorrow'", "cannot be compared with 'd'"),
        ("d > current_date", "is not a value"),
        ("id > 1.5", "cannot be compared with the column's type"),
        ("id > (SELECT 1)", "is not a value"),
        ("id = n", "types that cannot be compared"),
        ("id = 1; DROP TABLE t", "cannot be read"),
        ("id = 1) OR (true", "not among the conditions"),
        ("id = 1) ORDER BY (1", "one condition"),
        ("other = 1", "has no column 'other'"),
        ("odd = 1", "has no column 'odd'"),
        ("id = (", "cannot be read"),
        ("d = '0000-01-01'", "cannot be compared with 'd'"),
        (f"{'(' * 300}id = 1{')' * 300}", "nested too deeply"),
    ],
)
def test_a_condition_that_changes_cannot_be_evaluated_by_is_refused_by_name(text, reason):
    with pytest.raises(NotSupportedError, match="its row filter cannot be used") as found:
        opened_here(text)
    assert reason in found.value.what
    assert found.value.where == "s.public.t"


@pytest.mark.parametrize("word", ["AND", "OR"])
def test_many_conditions_are_evaluated_where_they_are_sent(word):
    found = opened_here(f" {word} ".join(f"id <> {number}" for number in range(500)))
    sent = pickle.loads(pickle.dumps(found))  # noqa: S301  # as Spark does
    assert sent.sql.count(word) == 499
    ids = pa.array([1, 500, None], pa.int32())
    assert sent.matches(["id"], [ids]).tolist() == [word == "OR", True, False]


def test_a_masked_column_is_refused():
    with pytest.raises(NotSupportedError, match="the column 't' is masked"):
        opened_here("t = 'a'", ["t"])


@pytest.mark.parametrize(
    ("text", "sql", "columns"),
    [
        (
            "ID = -1 and t = 'a''\\'",
            """(("id" = '-1'::bigint) AND ("t" COLLATE "C" = E'a''\\\\'))""",
            {"id", "t"},
        ),
        ('"Odd" IN (1, NULL)', """(("Odd" = '1'::bigint) OR ("Odd" = NULL))""", {"Odd"}),
        ("id IS NOT NULL", '(NOT ("id" IS NULL))', {"id"}),
        ("b IS NOT TRUE", '(NOT ("b" IS TRUE))', {"b"}),
        ("not b -- now", '(NOT "b")', {"b"}),
    ],
)
def test_postgresql_gets_the_text_of_what_is_evaluated(text, sql, columns):
    found = opened_here(text)
    assert (found.sql, found.columns) == (sql, columns)


@given(histories(), st.lists(st.integers(0, 100), max_size=4))
@settings(max_examples=200)
def test_a_filtered_fold_leaves_the_rows_that_meet_the_filter(history, cuts):
    """The lake lacks rows before, and what a patch lacks is taken from those that it has; one that it does not have is asked for."""
    table, events, expected = history
    names = ["id", "a", "b", "f"]
    kinds = (20, 25, 25, 701)
    columns = tuple(column(name, kind) for name, kind in zip(names, kinds, strict=True))
    condition = opened("a = 'ä' OR f >= 0.5", columns, frozenset(), where="t")

    def meeting(rows):
        if not rows:
            return {}
        arrays = [pa.array([row[i] for row in rows.values()], kind) for i, kind in enumerate(TYPES)]
        return {
            k: r
            for (k, r), ok in zip(rows.items(), condition.matches(names, arrays), strict=True)
            if ok
        }

    lake = meeting(table)
    schema = pa.schema(list(zip(names, TYPES, strict=True)))
    target = Target("s.a.t", "a.t", "/data/", schema, schema, ("id",), 0, 1)
    result = filtered(
        replace(target, row_filter=condition), condition, fold(batches(events, cuts), KEY)
    )
    assert isinstance(result, Fold)
    before = {} if result.truncated else lake
    after = {
        key: row
        for key, row in before.items()
        if key
        not in {
            (k,) for k, gone in zip(result.keys[0].to_pylist(), result.existed, strict=True) if gone
        }
    }
    values = [c.to_pylist() for c in result.columns]
    for i in np.flatnonzero(result.state == ROW):
        after[values[0][i],] = tuple(c[i] for c in values)
    for i in np.flatnonzero(result.state == PATCH):
        assert result.source is not None
        assert result.unset is not None
        there = before.get((result.source[0][i].as_py(),))
        if there is None:
            # The table is copied again, which gives what is expected.
            return
        row = tuple(there[c] if result.unset[i, c] else values[c][i] for c in range(4))
        after |= meeting({(row[0],): row})
    assert {k: repr(r) for k, r in after.items()} == {
        k: repr(r) for k, r in meeting(expected).items()
    }
