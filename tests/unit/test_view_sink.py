"""Attempts of tasks that stage a view's changes: one that goes on, or has failed half way, is in no other's way."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_consumers.lake.epoch.stage import Staged
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.epoch.view_sink import StageChanges, collected

COLUMNS = pa.schema([("id", pa.int32()), ("t", pa.string())])
ROWS = [(1, "a", 1), (2, "b", -1), (3, "c", 1), (3, "c", 1), (4, "d", -1), (4, "d", 1)]


def staged(folder: Path, rows: list[tuple[int, str, int]], attempt: str) -> Staged | None:
    target = Target("s.views.v", "views.v", f"{folder}/data/stage", COLUMNS, COLUMNS, (), 0, 1)
    columns = [pa.array(each) for each in zip(*rows, strict=True)]
    columns = [columns[0].cast(pa.int32()), *columns[1:2], columns[2].cast(pa.int32())]
    batch = pa.RecordBatch.from_arrays(columns, ["id", "t", "sign"])
    return StageChanges(target, str(folder / "scratch"), 100).run(iter([batch]), attempt)


def content(made: Staged) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    def of(files: tuple[object, ...], names: list[str]) -> list[tuple[object, ...]]:
        tables = [pq.read_table(file.path) for file in files]  # type: ignore[attr-defined]
        return sorted(
            tuple(row[name] for name in names) for table in tables for row in table.to_pylist()
        )

    return of(made.rows, ["id", "t"]), of(made.removals, ["c0", "c1", "n"])


def test_37_a_task_that_is_tried_again_stages_its_rows_in_another_order(tmp_path: Path) -> None:
    """What the tasks before have shuffled arrives in any order."""
    first = staged(tmp_path, ROWS, "0-7")
    again = staged(tmp_path, ROWS[::-1], "0-8")
    assert first is not None
    assert again is not None
    assert content(first) == content(again) == ([(1, "a"), (3, "c"), (3, "c")], [(2, "b", 1)])
    names = [{each.path for each in (*made.rows, *made.removals)} for made in (first, again)]
    assert not names[0] & names[1]
    # Each says of its own files how long they are.
    for made in (first, again):
        for file in (*made.rows, *made.removals):
            assert Path(file.path).stat().st_size == file.size


def test_rows_that_take_each_other_away_stage_nothing(tmp_path: Path) -> None:
    assert staged(tmp_path, [(1, "a", 1), (1, "a", -1)], "0-1") is None
    assert not list(tmp_path.rglob("*.parquet"))


class Counted:
    """A task that has as many rows as it says."""

    def run(self, batches: Iterator[pa.RecordBatch], attempt: str) -> int:
        assert attempt
        return sum(len(batch) for batch in batches)


@pytest.mark.parametrize(
    ("rows", "known", "made"),
    [(0, None, [0]), (3, None, [3]), (4, None, None), (3, 3, [3]), (0, 4, None)],
)
def test_the_driver_takes_no_more_rows_than_it_may(
    rows: int, known: int | None, made: list[int] | None
) -> None:
    """Of rows that nobody has counted, it asks for one more than it may have; known to be more, for none."""
    frame = MagicMock()
    there = pa.table({"id": pa.array(range(rows), pa.int32())})
    frame.toArrow.return_value = there
    frame.limit.side_effect = lambda most: MagicMock(toArrow=lambda: there.slice(0, most))
    assert collected(frame, Counted(), 3, known) == made
    assert frame.toArrow.called == (known == 3)
    assert [call.args for call in frame.limit.call_args_list] == ([] if known else [(4,)])
