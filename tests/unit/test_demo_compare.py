"""The comparison that the demo trusts finds what it must, and nothing else."""

from datetime import UTC, datetime
from decimal import Decimal

import pytest

from spark_consumers.lake.manifest.chain import Manifest, StreamPosition
from walsender_bridge.demo.compare import TableShape, comparable, difference
from walsender_bridge.demo.run import _print_snippet
from walsender_bridge.demo.verify import broken_sums, freshness
from walsender_bridge.runtime.output import Output

KEYED = TableShape("bank.accounts", ("id", "balance"), (None, None), (0,))
BAG = TableShape("bank.audit", ("account", "delta"), (None, None), ())


def test_the_lines_that_read_the_lake_can_be_pasted(capsys):
    _print_snippet(Output(as_json=False), "/lake")
    lines = capsys.readouterr().err.splitlines()
    assert "    from tuskline import read, session" in lines
    assert not any("\\n" in line for line in lines)


def test_equal_in_any_order():
    rows = [(1, Decimal("1.00")), (2, Decimal("2.00"))]
    assert difference(KEYED, rows, rows[::-1]).equal
    assert difference(BAG, rows, rows[::-1]).equal


@pytest.mark.parametrize(
    ("lake", "missing", "extra", "different"),
    [
        ([(1, 5)], 1, 0, 0),
        ([(1, 5), (2, 6), (3, 7)], 0, 1, 0),
        ([(1, 5), (2, 7)], 0, 0, 1),
        ([(1, 5), (2, 6), (2, 6)], 0, 1, 0),
        ([], 2, 0, 0),
    ],
)
def test_what_differs_by_key(lake, missing, extra, different):
    found = difference(KEYED, [(1, 5), (2, 6)], lake)
    assert (found.missing, found.extra, found.different) == (missing, extra, different)
    assert not found.equal
    assert found.examples


def test_bags_count_equal_rows():
    found = difference(BAG, [(1, 5), (1, 5), (1, 5)], [(1, 5), (1, 5), (2, 0)])
    assert (found.missing, found.extra) == (1, 1)


def test_nan_equals_nan_and_lists_compare_by_value():
    assert comparable([float("nan"), [1, None, [2]]]) == comparable([float("nan"), [1, None, [2]]])
    assert comparable([float("nan")]) != comparable([0.0])
    utc = datetime(2026, 1, 1, tzinfo=UTC)
    assert comparable([utc]) == (utc,)


def test_broken_sums_name_the_rule():
    good = {"accounts": 400, "balance": Decimal(400_000), "moves": 8, "transfers": 4, "delta": 0}
    assert broken_sums(good) == []
    assert "balances" in broken_sums(good | {"balance": Decimal("399999.99")})[0]
    assert "moves" in broken_sums(good | {"transfers": 3})[0]
    assert "audit" in broken_sums(good | {"delta": Decimal("0.01")})[0]
    assert "accounts" in broken_sums(good | {"accounts": 399})[0]
    assert len(broken_sums({})) >= 3


def test_freshness_is_to_the_first_epoch_that_holds_the_commit():
    epochs = [
        Manifest(
            "lake", link, link, link - 1, 1, at, streams={"north": StreamPosition(1, lsn, 0, 1)}
        )
        for link, at, lsn in ((1, 10.0, 100), (2, 14.0, 200))
    ]
    delays = freshness(epochs, {"north": [(9.0, 100), (9.5, 101), (13.0, 200), (13.5, 201)]})
    # The commit at 201 is in no epoch yet.
    assert delays.tolist() == [[9.0, 1.0], [9.5, 4.5], [13.0, 1.0]]
    assert freshness([], {"north": [(1.0, 1)]}).tolist() == []
