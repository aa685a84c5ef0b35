"""Which renamed tables are not copied, because their earlier names had masks (`spark_consumers.lake.tables.disclosed`)."""

import pytest

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import LEFT, LIVE, TableVersion
from spark_consumers.lake.tables.disclosed import disclosed
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
