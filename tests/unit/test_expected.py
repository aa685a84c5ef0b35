"""Columns that the catalog has before the log tells of them (`spark_consumers.lake.tables.expected`)."""

from dataclasses import replace

import pytest

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import (
    HELD,
    LIVE,
    PAUSED,
    StreamPosition,
    TableVersion,
)
from spark_consumers.lake.tables import noticed
from spark_consumers.lake.tables.expected import UNRECORDED, Expected
from spark_consumers.lake.tables.schema_change import Evolution
from spark_consumers.lake.tables.shape import Publication, Shape, columns_in

NAME, TRIGGER = "shop.public.t", "1 2 3"
BEFORE = ((1, "id", 23, "5"), (2, "a", 25, "5"))
RENAMED = ((1, "id", 23, "5"), (2, "b", 25, "9"))


def shape(columns: tuple[tuple[int, str, int, str], ...], recorded: str = TRIGGER) -> Shape:
    return Shape(
        oid=7,
        file=1,
        identity=("id",),
        unsent=(),
        columns=columns,
        publication="1 1",
        operations="insert, update, delete, truncate",
        members=("table 7",),
        natts=2,
        recorded=recorded,
    )


def head(
    lsn: int, columns: tuple[tuple[int, str, int, str], ...] = BEFORE, state: str = LIVE
) -> Manifest:
    layout = tuple((name, kind, -1) for _, name, kind, _ in columns)
    table = TableVersion("tables/t", "iceberg", 1, "", ("id",), (), 0, 0, 0, 7, layout=layout)
    table = replace(table, shape=shape(columns).dump(), state=state)
    position = {"shop": StreamPosition(1, lsn, 0, lsn)}
    return Manifest("lake", 9, 40, 39, 2, 0.0, streams=position, tables={NAME: table})


def compared(
    expected: Expected, start: Manifest, now: Shape, lsn: int
) -> tuple[Manifest, dict[str, str]]:
    look = Publication({"public.t": now}, frozenset(), lsn)
    return noticed.compare(start, "shop", look, (), holds=True, expected=expected)


def test_14_a_change_that_the_log_is_to_tell_is_no_reason_for_a_copy():
    expected = Expected()
    after, reasons = compared(expected, head(100), shape(RENAMED), 150)
    assert not reasons
    # What the table has is as of what the lake has read.
    assert columns_in(Shape.load(after.tables[NAME].shape)) == columns_in(shape(BEFORE))
    # The epoch that has it.
    evolution = Evolution((), (), ("id",), steps=(columns_in(shape(RENAMED)),))
    told = head(160, RENAMED)
    expected.written(told, {"tables/t": evolution})
    assert not compared(expected, told, shape(RENAMED), 170)[1]


def test_14_a_change_that_no_record_has_told_where_it_was_due_is_a_reason():
    expected = Expected()
    assert not compared(expected, head(100), shape(RENAMED), 150)[1]
    # Later looks do not put it off.
    assert not compared(expected, head(149), shape(RENAMED), 900)[1]
    after, reasons = compared(expected, head(150), shape(RENAMED), 950)
    assert reasons == {NAME: UNRECORDED}
    assert after.tables[NAME].state == HELD


def test_14_another_change_meanwhile_does_not_stand_for_it():
    expected = Expected()
    assert not compared(expected, head(100), shape(RENAMED), 150)[1]
    other = ((1, "id", 23, "5"), (2, "c", 25, "11"))
    told = head(200, other)
    expected.written(told, {"tables/t": Evolution((), (), (), steps=(columns_in(shape(other)),))})
    assert compared(expected, told, shape(other), 210)[1] == {NAME: UNRECORDED}


def test_14_what_is_expected_of_a_table_is_that_under_its_new_name():
    expected = Expected()
    assert not compared(expected, head(100), shape(RENAMED), 150)[1]
    other = ((1, "id", 23, "5"), (2, "c", 25, "11"))
    told = head(200, other)
    told = replace(told, tables={"shop.public.u": told.tables[NAME]})
    expected.written(told, {"tables/t": Evolution((), (), (), steps=(columns_in(shape(other)),))})
    look = Publication({"public.u": shape(other)}, frozenset(), 210)
    _, reasons = noticed.compare(told, "shop", look, (), holds=True, expected=expected)
    assert reasons == {"shop.public.u": UNRECORDED}


@pytest.mark.parametrize("now", ["", "1 2 4"])
def test_14_nothing_is_expected_of_a_trigger_that_was_not_there_all_the_time(now):
    _, reasons = compared(Expected(), head(100), shape(RENAMED, now), 150)
    assert "renamed to 'b'" in reasons[NAME]
    # Without a change of columns, it is there from now on.
    after, reasons = compared(Expected(), head(100), shape(BEFORE, now), 150)
    assert not reasons
    assert Shape.load(after.tables[NAME].shape).recorded == now


def test_14_a_table_that_has_stopped_is_told_when_it_follows_again():
    expected = Expected()
    paused = head(900, state=PAUSED)
    assert not compared(expected, paused, shape(RENAMED), 150)[1]
    assert not compared(expected, paused, shape(RENAMED), 950)[1]
    told = head(960, RENAMED, state=LIVE)
    evolution = Evolution((), (), (), steps=(columns_in(shape(RENAMED)),))
    expected.written(told, {"tables/t": evolution})
    assert not compared(expected, told, shape(RENAMED), 970)[1]


def test_14_other_changes_of_the_table_count_at_once():
    now = replace(shape(RENAMED), row_filter="(id > 1)")
    assert "row filter" in compared(Expected(), head(100), now, 150)[1][NAME]
