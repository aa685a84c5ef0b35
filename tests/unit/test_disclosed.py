"""Which renamed tables are not copied, because their earlier names had masks (`spark_consumers.lake.tables.disclosed`)."""

import json
from dataclasses import replace

import pytest

from spark_consumers.lake.epoch.plan import choose
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition
from spark_consumers.lake.manifest.table_version import COPIED, LEFT, LIVE, TableVersion
from spark_consumers.lake.tables.disclosed import disclosed, succeeding
from spark_consumers.lake.tables.shape import Partition, Shape
from walsender_bridge.change_log.client import StreamCut
from walsender_bridge.postgres.column_masks import DROP, HASH, ColumnMask
from walsender_bridge.postgres.table_layout import RowRules

EMAIL, SSN = ColumnMask("email", HASH), ColumnMask("ssn", DROP)


def head(*masks: ColumnMask, state: str = LEFT) -> Manifest:
    table = TableVersion("t", "iceberg", 1, "", ("id",), (), 0, 0, 0, 7, state=state, masks=masks)
    return Manifest("lake", 1, 1, 0, 1, 0.0, tables={"shop.public.people": table})


@pytest.mark.parametrize(
    ("masks", "shown"),
    [
        ((), "email, ssn"),
        ((EMAIL,), "ssn"),
        # Another kind of mask is one.
        ((ColumnMask("email", DROP), SSN), ""),
        ((EMAIL, SSN, ColumnMask("more", HASH)), ""),
    ],
)
@pytest.mark.parametrize("state", [LEFT, LIVE])
def test_14_a_renamed_table_needs_a_mask_for_each_column_that_had_one(masks, shown, state):
    found = disclosed(
        head(EMAIL, SSN, state=state), {"shop.public.persons": 7}, lambda _: RowRules(masks)
    )
    assert bool(found) == bool(shown)
    assert all(f"which had masks on {shown}." in reason for reason in found.values())


@pytest.mark.parametrize("name", ["shop.public.people", "other.public.persons"])
def test_14_the_same_name_and_another_server_are_no_renamed_table(name):
    assert not disclosed(head(EMAIL), {name: 7}, lambda _: RowRules())


def test_14_another_table_and_one_that_had_no_masks_are_copied():
    assert not disclosed(head(EMAIL), {"shop.public.persons": 8}, lambda _: RowRules())
    assert not disclosed(head(), {"shop.public.persons": 7}, lambda _: RowRules())


def test_14_a_table_that_another_has_taken_the_name_of_is_recognized():
    """As in a swap by two renames: people becomes people_old, and people_new people."""
    before = head(EMAIL, SSN, state=LIVE)
    name = "shop.public.people"
    for oid in (8, 9):
        copy = replace(
            before.tables[name], relation_id=oid, state=COPIED, timeline=1, masks=(EMAIL,)
        )
        streams = {"shop": StreamPosition(1, 10, 10, 5)}
        cut = StreamCut("shop", ("grpc://shop",), 5, 5, 10, 10, 1, 1, 500)
        shown = choose(replace(before, streams=streams, copies={name: copy}), 2, {"shop": cut}, {})
        assert shown.tables[name].relation_id == oid
        read = TableVersion.from_json(json.loads(json.dumps(shown.tables[name].to_json())))
        before = replace(before, tables={name: read})
    oids = {name: 9, "shop.public.people_old": 7, "shop.public.people_2": 8}
    found = disclosed(before, oids, lambda _: RowRules())
    assert found.keys() == {"shop.public.people_old", "shop.public.people_2"}
    assert "which had masks on email, ssn" in found["shop.public.people_old"]
    assert "table drop" not in found["shop.public.people_old"]
    # It has the name again.
    assert not disclosed(before, {name: 7}, lambda _: RowRules())


def of_parts(parts: list[Partition]) -> str:
    shape = Shape(7, 0, ("id",), (), ((1, "id", 23, "1"),), "1 1", "insert", ("table 1",))
    return replace(shape, parts=tuple(parts)).dump()


def test_14_a_partition_that_gets_a_name_of_its_own_is_recognized():
    parts = [Partition(oid, 7, "1", oid, f"public.p{oid}") for oid in (20, 21)]
    before = replace(head(EMAIL).tables["shop.public.people"], shape=of_parts(parts))
    name = "shop.public.people"
    oids = {name: 7, "shop.public.p20": 20, "shop.public.other": 22}
    for table in (
        # Its root is not published any more; or was copied again without it, more than once.
        before,
        succeeding(before, one := replace(before, shape=of_parts(parts[1:]))),
        succeeding(succeeding(before, one), one),
    ):
        now = replace(head(), tables={name: table})
        found = disclosed(now, oids, lambda _: RowRules())
        assert list(found) == ["shop.public.p20"]
        assert f"it was {name} before, or a partition of it, which had masks on email" in str(found)
    assert not succeeding(one, before).had_masks
