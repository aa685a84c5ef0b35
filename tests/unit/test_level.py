"""What makes rows of the lake equal to those of their source, and when a table is copied instead."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_consumers.lake.comparison.chunks import Chunks
from spark_consumers.lake.comparison.level import (
    FEW,
    MOST,
    Level,
    is_too_much,
    level,
    misfit,
    twice,
)
from spark_consumers.lake.comparison.leveled import Counts, Leveled, read_leveled, record_leveled
from spark_consumers.lake.comparison.sums import differing
from spark_consumers.lake.copy.compared import in_groups
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.manifest.table_version import (
    COPIED,
    HELD,
    LIVE,
    PAUSED,
    STALE,
    TableVersion,
)
from walsender_bridge.observability import level_view
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.postgres.table_layout import SOFT_DELETE

TABLE = TableVersion(
    *("tables/s/public/a%t1-0", "iceberg", 7, "hash", ("id",), (), 100, 5, 3, 16384),
    state=HELD,
    layout=(("id", 23, -1), ("t", 25, -1)),
)


def digest(value: object) -> bytes:
    return repr(value).encode().rjust(16, b".")[-16:]


KEYED = st.dictionaries(st.integers(0, 9), st.integers(0, 2))
BAGS = st.lists(st.integers(0, 5))


@given(KEYED, KEYED)
def test_what_is_written_makes_a_table_with_a_key_equal(
    source: dict[int, int], lake: dict[int, int]
) -> None:
    def rows(table: dict[int, int]) -> dict[tuple[tuple[str, ...], bytes], int]:
        return {((str(key),), digest((key, value))): 1 for key, value in table.items()}

    differences = differing(rows(source), rows(lake))
    found = level(differences)
    ours, theirs = (Counter({d: 1 for (_, d) in rows(t)}) for t in (source, lake))
    assert theirs - found.gone + found.wanted == ours
    assert found.rows == len(set(source.items()) ^ set(lake.items()))
    assert not twice(differences)


@given(BAGS, BAGS)
def test_what_is_written_makes_a_table_without_a_key_equal(
    source: list[int], lake: list[int]
) -> None:
    ours, theirs = (Counter(map(digest, rows)) for rows in (source, lake))
    differences = differing(
        {((), d): n for d, n in ours.items()}, {((), d): n for d, n in theirs.items()}
    )
    found = level(differences)
    assert theirs - found.gone + found.wanted == ours
    assert not found.gone & found.wanted, "no row goes that is added"
    assert not twice(differences)


def test_a_key_that_is_there_twice_is_seen() -> None:
    a, b = digest("a"), digest("b")
    assert twice(differing({(("1",), a): 1}, {(("1",), a): 1, (("1",), b): 1}))
    assert twice(differing({(("1",), a): 1}, {(("1",), a): 2}))


def test_a_table_of_which_most_rows_differ_is_copied() -> None:
    def found(rows: int) -> Level:
        return Level(Counter({digest(0): rows}), Counter({digest(1): rows}))

    assert not is_too_much(found(FEW), FEW)
    assert is_too_much(found(FEW + 1), FEW + 1)
    assert not is_too_much(found(FEW + 1), 3 * FEW)
    assert not is_too_much(found(MOST), 100 * MOST)
    assert is_too_much(found(MOST + 1), 100 * MOST)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"state": LIVE}, "it is live"),
        ({"state": PAUSED}, "it is paused"),
        ({"masks": (ColumnMask("t", "drop"),)}, "masked"),
        ({"mode": SOFT_DELETE}, "by its mode or row filter"),
        ({"quarantined_rows": 1}, "quarantined"),
        ({"quarantine_files": ("quarantine/x",)}, "quarantined"),
        ({"snapshot_id": 0}, "earlier version"),
        ({"layout": ()}, "earlier version"),
    ],
)
def test_a_table_whose_rows_are_of_no_use_is_copied(other: dict[str, object], reason: str) -> None:
    assert TABLE.unfit is None
    assert replace(TABLE, state=STALE).unfit is None
    assert reason in (replace(TABLE, **other).unfit or "")  # type: ignore[arg-type]  # the members' types differ


def test_a_table_with_other_columns_or_another_key_is_copied() -> None:
    assert misfit(TABLE, replace(TABLE, relation_id=1, system_id=2, timeline=3)) is None
    wider = (("id", 20, -1), ("t", 25, -1))
    assert "columns" in (misfit(TABLE, replace(TABLE, layout=wider)) or "")
    assert "key" in (misfit(TABLE, replace(TABLE, key=())) or "")
    masked = replace(TABLE, masks=(ColumnMask("t", "drop"),))
    assert "by its masks" in (misfit(TABLE, masked) or "")


def test_the_range_of_a_form_is_that_of_its_key() -> None:
    ints = Chunks("id", (-5, 10))
    assert [ints.of_form(form) for form in ("-6", "-5", "9", "10")] == [0, 1, 1, 2]
    uuids = Chunks("id", (0,), is_uuid=True)
    assert uuids.of_form("7fffffff-ffff-ffff-ffff-ffffffffffff") == 0
    assert uuids.of_form("80000000-0000-0000-0000-000000000000") == 1


def test_differing_chunks_are_read_in_groups_of_bounded_size() -> None:
    assert in_groups([1, 4, 5, 9], [3, 3, 9, 1], 6) == [[1, 4], [5], [9]]
    assert in_groups([], [], 6) == []


def test_a_takeover_takes_a_leveled_table_once_as_readers_see_it() -> None:
    leveled = replace(TABLE, snapshot_id=8, state=COPIED)
    copy = replace(TABLE, path="tables/s/public/b%t1-0", snapshot_id=9, state=COPIED)
    names = {"s.public.a": leveled, "s.public.b": copy}
    head = Manifest("lake", 3, 5, 4, 1, 0.0, tables={"s.public.a": TABLE}, copies=names)
    taken = []

    def do(effect: takeover.Effect) -> object:
        match effect:
            case takeover.ReadHead():
                return head
            case takeover.ReadUsedTerm():
                return 1
            case takeover.TakeTable():
                taken.append((effect.path, effect.snapshot))
        return None

    def propose(before: Manifest | None, term: int) -> Manifest:
        assert before is not None
        return before.next(0.0, term=term)

    takeover.carry_out(takeover.take_over(propose), do)
    assert taken == [(TABLE.path, 7), (copy.path, 9)]


def test_status_shows_what_bringing_tables_level_took(tmp_path: Path) -> None:
    chain = open_chain(tmp_path / "lake")
    chain.initialise("log", "iceberg")
    assert read_leveled(chain) == {}
    assert level_view.summary(read_leveled(chain)) is None
    record_leveled(chain, "s.public.a", Leveled(50.0, 7, 1.5, Counts(20, 2, 900, 80, 3, 4)))
    record_leveled(chain, "s.public.b", Leveled(60.0, 7, 0.5, copied="its key has changed"))
    record_leveled(chain, "s.public.a", Leveled(70.0, 9, 1.5, Counts(10, 1, 800, 80, 5, 6)))
    shown = level_view.summary(read_leveled(chain))
    assert shown == {
        "ended_at": "1970-01-01T00:01:10.000Z",
        "tables": 1,
        "chunks": 10,
        "different_chunks": 1,
        "rows": 800,
        "added": 5,
        "removed": 6,
        "copied": {"s.public.b": "its key has changed"},
    }
    assert level_view.line(shown) == (
        "tables brought level: 1; 5 rows added and 6 removed, of 800 that were compared; 1 of 10 chunks differed;"
        " copied instead: s.public.b; 1970-01-01T00:01:10.000Z"
    )
