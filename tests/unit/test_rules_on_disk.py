"""Epochs of a table that keeps deleted rows, and of one with a row filter, in files on a disk, by the functions of the executors."""

from dataclasses import replace

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spark_consumers.fold.kept import fold_kept
from spark_consumers.fold.keyed import fold
from spark_consumers.lake.epoch.stage import write_fold
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import Stage
from spark_consumers.lake.layout.arrangement import Arrangement, Field
from spark_consumers.lake.tables.row_condition import opened
from tests.support.lake.table_on_disk import TableOnDisk
from tests.unit.test_fold import KEY, TYPES, batches, histories
from tests.unit.test_kept_fold import MARKS, expected, timed
from walsender_bridge.postgres.protocol.pgoutput import Column
from walsender_bridge.postgres.table_layout import SOFT_DELETE, SortField

NAMES = ["id", "a", "b", "f"]
COLUMNS = pa.schema(list(zip(NAMES, TYPES, strict=True)))
KEPT = pa.schema([*COLUMNS, pa.field("_deleted_at", MARKS[0]), pa.field("_deleted_lsn", MARKS[1])])
SENT = tuple(
    Column(name, kind, -1, is_key=False)
    for name, kind in zip(NAMES, (20, 25, 25, 701), strict=True)
)
FILTER = opened("a = 'ä' OR f >= 0.5", SENT, frozenset(), where="t")
ARRANGED = Arrangement(1, (Field(1000, "id", "bucket", 2),), 1, (SortField("a", False, False),))


def target(folder, number, schema, **changes):
    prefix = f"{folder}/t/data/{Stage(number, 1, 1)}"
    made = Target("shop.public.t", "public.t", prefix, schema, schema, ("id",), 0, 1)
    return replace(made, **changes)


def rows_of(disk, schema):
    rows = [tuple(row.values()) for row in disk.rows(schema).to_pylist()]
    assert disk.count == len(rows)
    assert len({row[0] for row in rows}) == len(rows)
    return sorted(map(repr, rows))


def inserted(table):
    return [(ord("I"), row, (), None, None) for row in table.values()]


@given(histories(size=25), st.lists(st.integers(0, 100), max_size=4), st.booleans(), st.booleans())
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_a_table_keeps_deleted_rows(tmp_path_factory, history, cuts, arranged, on_write):
    table, events, _ = history
    events = [*inserted(table), *events]
    folder = tmp_path_factory.mktemp("kept")
    disk = TableOnDisk(folder / "t")
    parts = timed(batches(events, [len(table), *cuts]))
    done = 0
    for number, part in enumerate(parts):
        made = target(
            folder,
            number,
            KEPT,
            mode=SOFT_DELETE,
            copy_on_write=on_write,
            **({"arrangement": ARRANGED} if arranged else {}),
        )
        scratch = f"{folder}/scratch-{number}"
        disk.apply(made, write_fold(made, fold_kept([part], KEY), scratch, 0, 1), scratch)
        done += len(part.events)
        after = expected({}, events[:done]).values()
        rows = disk.rows(KEPT)
        rows = rows.set_column(4, "_deleted_at", rows.column(4).cast(pa.int64()))
        found = [tuple(row.values()) for row in rows.to_pylist()]
        assert sorted(map(repr, found)) == sorted(map(repr, after))
        assert disk.count == len(found)


@given(histories(size=25), st.lists(st.integers(0, 100), max_size=4), st.booleans())
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_a_table_has_the_rows_that_meet_its_filter(tmp_path_factory, history, cuts, arranged):
    table, events, _ = history
    events = [*inserted(table), *events]
    folder = tmp_path_factory.mktemp("filtered")
    disk = TableOnDisk(folder / "t")
    done = 0
    for number, part in enumerate(batches(events, [len(table), *cuts])):
        made = target(
            folder,
            number,
            COLUMNS,
            row_filter=FILTER,
            **({"arrangement": ARRANGED} if arranged else {}),
        )
        scratch = f"{folder}/scratch-{number}"
        disk.apply(made, write_fold(made, fold([part], KEY), scratch, 0, 1), scratch)
        if disk.lacks:
            assert "moved a row into its row filter" in disk.lacks
            # The table is copied again.
            return
        done += len(part.events)
        # As the source has them: what the model of kept rows has that is not deleted.
        living = [row[:4] for row in expected({}, events[:done]).values() if row[4] is None]
        arrays = [pa.array([row[i] for row in living], kind) for i, kind in enumerate(TYPES)]
        meets = FILTER.matches(NAMES, arrays)
        wanted = [row for row, ok in zip(living, meets, strict=True) if ok]
        assert rows_of(disk, COLUMNS) == sorted(map(repr, wanted))
