"""Row filters as executors evaluate them, against PostgreSQL: the same rows meet random conditions."""

import random

import pyarrow as pa
import pytest
from psycopg import sql

from spark_consumers.decode.types import column_type, from_text
from spark_consumers.lake.tables.row_condition import opened
from tests.support.pinned import connect_pinned
from walsender_bridge.postgres.protocol.pgoutput import Column

NUMERIC_9_2 = (9 << 16 | 2) + 4
#: Of each column its type, its OID and modifier, and values, some of which are literals.
KINDS = {
    "i2": ("smallint", 21, -1, ["NULL", "0", "1", "-1", "32767"]),
    "i4": ("int", 23, -1, ["NULL", "0", "1", "-1", "2147483647"]),
    "i8": ("bigint", 20, -1, ["NULL", "0", "1", "9223372036854775807", "-9223372036854775808"]),
    "n": ("numeric(9,2)", 1700, NUMERIC_9_2, ["NULL", "0", "0.1", "-2.50", "9999999.99"]),
    "f4": (
        "real",
        700,
        -1,
        ["NULL", "0", "'-0'", "0.1", "16777217", "'NaN'", "'Infinity'", "'-Infinity'"],
    ),
    "f8": (
        "float8",
        701,
        -1,
        ["NULL", "0", "'-0'", "0.1", "16777217", "'NaN'", "'Infinity'", "'-Infinity'"],
    ),
    "b": ("boolean", 16, -1, ["NULL", "true", "false"]),
    "t": ("text", 25, -1, ["NULL", "''", "'a'", "'A'", "'a '", "'ä'", r"'\'", "'it''s'"]),
    "v": ("varchar(9)", 1043, -1, ["NULL", "''", "'a'", "'A'", "'a '"]),
    "d": ("date", 1082, -1, ["NULL", "'2024-02-29'", "'1969-12-31'", "'0001-01-01'"]),
    "ts": (
        "timestamp",
        1114,
        -1,
        ["NULL", "'2024-02-29 12:00:00.5'", "'1969-12-31 23:59:59.999999'"],
    ),
    "tz": (
        "timestamptz",
        1184,
        -1,
        ["NULL", "'2024-02-29 12:00:00+00'", "'1969-12-31 23:59:59.999999+00'"],
    ),
    "u": (
        "uuid",
        2950,
        -1,
        [
            "NULL",
            "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",
            "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12'",
        ],
    ),
}
FAMILIES = [{"i2", "i4", "i8"}, {"f4", "f8"}, {"t", "v"}]
EQUAL_ONLY = {"b", "t", "v", "u"}
COLUMNS = tuple(Column(n, oid, typmod, is_key=False) for n, (_, oid, typmod, _) in KINDS.items())


def condition(draw, depth=3):
    """A condition as a user may write it."""
    kind = draw.choice(["and", "or", "not", *["leaf"] * 3] if depth else ["leaf"])
    if kind in {"and", "or"}:
        return f"({condition(draw, depth - 1)} {kind} {condition(draw, depth - 1)})"
    if kind == "not":
        return f"NOT ({condition(draw, depth - 1)})"
    name = draw.choice([*KINDS])
    if name == "b" and draw.random() < 0.5:
        return draw.choice(["b", "b IS TRUE", "b IS NOT TRUE", "b IS FALSE"])
    literals = [
        v for v in KINDS[name][3] if v.strip("'") not in {"NaN", "Infinity", "-Infinity", "-0"}
    ]
    operator = draw.choice(["=", "<>"] if name in EQUAL_ONLY else ["=", "<>", "<", "<=", ">", ">="])
    form = draw.randrange(6)
    if form == 0:
        return f"{name} IS {draw.choice(['', 'NOT '])}NULL"
    if form == 1 and name != "f4":
        values = ", ".join(draw.choice(literals) for _ in range(3))
        return f"{name} {draw.choice(['', 'NOT '])}IN ({values})"
    if form == 2 and name not in EQUAL_ONLY:
        return f"{name} BETWEEN {draw.choice(literals)} AND {draw.choice(literals)}"
    if form == 3:
        same = next((f for f in FAMILIES if name in f), {name})
        return f"{name} {operator} {draw.choice(sorted(same))}"
    if form == 4:
        return f"{draw.choice(literals)} {operator} {name}"
    return f"{name} {operator} {draw.choice(literals)}"


@pytest.mark.parametrize("number", range(2))
def test_the_same_rows_meet_a_condition_on_both_sides(database, request, number):
    draw = random.Random(request.config.getoption("--seed") + number)
    fields = ", ".join(f"{name} {kind}" for name, (kind, *_) in KINDS.items())
    rows = [", ".join(draw.choice(kind[3]) for kind in KINDS.values()) for _ in range(120)]
    database.execute(
        f"CREATE TABLE t (id int PRIMARY KEY, {fields})",
        *(f"INSERT INTO t VALUES ({n}, {row})" for n, row in enumerate(rows)),
    )
    with connect_pinned(database.dsn) as connection:
        connection.execute("SET TimeZone = 'UTC'; SET extra_float_digits = 1")
        # As its output function writes it; a cast writes a boolean otherwise.
        texts = ", ".join(f"{name}::text" if name != "b" else "left(b::text, 1)" for name in KINDS)
        found = connection.execute(f"SELECT {texts} FROM t ORDER BY id".encode()).fetchall()
        arrays = [
            from_text(pa.array([row[i] for row in found], pa.string()), column_type(oid, typmod))
            for i, (_, oid, typmod, _) in enumerate(KINDS.values())
        ]
        chosen = 0
        for _ in range(400):
            text = condition(draw)
            filter_ = opened(text, COLUMNS, frozenset(), where="t")
            ours = filter_.matches([*KINDS], arrays).nonzero()[0].tolist()
            for each in (text, filter_.sql):
                query = sql.SQL("SELECT id FROM t WHERE {} ORDER BY id").format(sql.SQL(each))
                assert ours == [row[0] for row in connection.execute(query)], each
            chosen += 0 < len(ours) < len(rows)
    assert chosen > 200
