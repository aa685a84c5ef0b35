"""A view's `avg` has PostgreSQL's digits, on every major."""

import random

from spark_consumers.lake.views.average import average


def test_27_averages_are_postgresqls_digit_by_digit(database, seed):
    draw = random.Random(seed)
    cases = []
    for _ in range(3000):
        scale = draw.choice([0, 0, 1, 2, 3, 4, 5, 8, 9, 20])
        units = draw.choice([0, draw.randint(-20, 20), draw.randint(-(10**30), 10**30)])
        units //= 10 ** draw.randint(0, 28)
        count = draw.choice([1, 2, 3, 7, draw.randint(1, 99), draw.randint(1, 10**9)])
        figures = str(abs(units)).rjust(scale + 1, "0")
        total = f"{figures[:-scale]}.{figures[-scale:]}" if scale else figures
        cases.append((f"-{total}" if units < 0 else total, count, scale))
    with database.connect() as connection:
        # What `avg` divides: a numeric of this scale by a bigint.
        rows = connection.execute(
            "SELECT (t.total::numeric / t.count)::text FROM unnest(%s::text[], %s::bigint[]) WITH ORDINALITY t(total, count, n) ORDER BY n",
            [[total for total, _, _ in cases], [count for _, count, _ in cases]],
        ).fetchall()
        (own,) = connection.execute(
            "SELECT avg(x)::text FROM (VALUES (1.125), (2.000), (-7.5), (NULL)) v(x)"
        ).fetchone()
    for (total, count, scale), (expected,) in zip(cases, rows, strict=True):
        assert average(total, count, scale) == expected, (total, count, scale)
    assert average("-4.375", 3, 3) == own
