"""Commits to tables: what is required of the metadata, what the updates make of it, and the catalog in a folder."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.requirements import unmet
from spark_consumers.lake.catalog.table_catalog import (
    Outcome,
    TableCommit,
    TableId,
    assert_ref,
    assert_uuid,
    remove_ref,
    set_ref,
)
from spark_consumers.lake.catalog.updates import applied, created
from tests.support.lake.table_commits import (
    LINES,
    ORDERS,
    SCHEMA,
    added,
    main_of,
    raced,
    snapshots,
    write,
)
from walsender_bridge.errors import CorruptError, NotSupportedError


@pytest.fixture
def catalog(tmp_path):
    catalog = FolderCatalog(tmp_path)
    assert catalog.create(ORDERS, SCHEMA, {"a": "1"}) is Outcome.WON
    return catalog


def made(catalog, *updates, table=ORDERS):
    """The table after these updates."""
    there = catalog.load(table)
    assert catalog.commit(TableCommit(table, [], updates, there.location)) is Outcome.WON
    return catalog.load(table)


def put(catalog, branch="main", **more):
    """One more snapshot of the branch; its id."""
    commit, snapshot = write(ORDERS, catalog.load(ORDERS), branch, **more)
    assert catalog.commit(commit) is Outcome.WON
    return snapshot


# -- requirements -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("required", "is_met"),
    [
        (assert_uuid("u"), True),
        (assert_uuid("v"), False),
        (assert_ref("main", 7), True),
        (assert_ref("main", 8), False),
        (assert_ref("main", None), False),
        (assert_ref("other", None), True),
        (assert_ref("other", 7), False),
        ({"type": "assert-current-schema-id", "current-schema-id": 2}, True),
        ({"type": "assert-current-schema-id", "current-schema-id": 1}, False),
        ({"type": "assert-last-assigned-field-id", "last-assigned-field-id": 9}, True),
        ({"type": "assert-last-assigned-field-id", "last-assigned-field-id": 8}, False),
    ],
)
def test_a_requirement_is_compared_with_the_metadata(required, is_met):
    metadata = {
        "table-uuid": "u",
        "refs": {"main": {"snapshot-id": 7, "type": "branch"}},
        "current-schema-id": 2,
        "last-column-id": 9,
    }
    assert (unmet(metadata, [required]) is None) is is_met
    assert unmet(metadata, [assert_uuid("u"), required]) == (None if is_met else required)


def test_a_requirement_that_is_not_known_is_never_taken_for_met():
    with pytest.raises(NotSupportedError, match="assert-the-weather"):
        unmet({}, [{"type": "assert-the-weather"}])


# -- updates ----------------------------------------------------------------------------------------


def test_an_update_that_is_not_known_is_refused_by_name(catalog):
    there = catalog.load(ORDERS)
    with pytest.raises(NotSupportedError, match="set-location"):
        catalog.commit(TableCommit(ORDERS, [], [{"action": "set-location"}], there.location))
    assert catalog.load(ORDERS) == there


def test_current_snapshot_and_its_log_follow_main(catalog):
    first, second = put(catalog), put(catalog)
    elsewhere = put(catalog, "tuskline_t1")
    there = catalog.load(ORDERS).metadata
    assert (there["current-snapshot-id"], there["last-sequence-number"]) == (second, 3)
    assert [each["snapshot-id"] for each in there["snapshot-log"]] == [first, second]
    there = made(catalog, {"action": "remove-snapshots", "snapshot-ids": [first]}).metadata
    assert [each["snapshot-id"] for each in there["snapshot-log"]] == [second]
    there = made(catalog, remove_ref("main")).metadata
    assert (there["current-snapshot-id"], there["snapshot-log"]) == (None, [])
    assert snapshots(catalog.load(ORDERS)) == [second, elsewhere]


def test_the_log_of_current_snapshots_begins_after_the_last_one_that_was_removed(catalog):
    _, second, third = [put(catalog) for _ in range(3)]
    there = made(catalog, {"action": "remove-snapshots", "snapshot-ids": [second]}).metadata
    assert [each["snapshot-id"] for each in there["snapshot-log"]] == [third]


def test_references_to_removed_snapshots_go_with_them(catalog):
    first, second = put(catalog), put(catalog)
    made(catalog, set_ref("kept", second, "tag"), set_ref("gone", first, "tag"))
    there = made(catalog, {"action": "remove-snapshots", "snapshot-ids": [first]})
    assert set(there.metadata["refs"]) == {"main", "kept"}


@pytest.mark.parametrize("member", ["statistics", "partition-statistics"])
def test_statistics_of_users_expire_with_their_snapshot(member):
    metadata = {
        **created("u", "/t", SCHEMA, {}, 0),
        member: [{"snapshot-id": 5}, {"snapshot-id": 6}],
    }
    for update in (
        {"action": f"remove-{member}", "snapshot-id": 5},
        {"action": "remove-snapshots", "snapshot-ids": [5]},
    ):
        assert applied(metadata, [update], 0, "/t/v1")[member] == [{"snapshot-id": 6}]


def test_a_reference_to_a_snapshot_that_is_not_there_is_refused(catalog):
    there = catalog.load(ORDERS)
    commit = TableCommit(ORDERS, [], [set_ref("main", 5, "branch")], there.location)
    with pytest.raises(CorruptError, match="snapshot 5"):
        catalog.commit(commit)


@pytest.mark.parametrize(
    ("member", "value", "said"),
    [("sequence-number", 1, "sequence number 1"), ("first-row-id", 0, "numbers rows from 0")],
)
def test_a_snapshot_of_another_state_of_the_table_is_refused(catalog, member, value, said):
    put(catalog, rows=3)
    there = catalog.load(ORDERS)
    update, _ = added(there, "main")
    update["snapshot"][member] = value
    with pytest.raises(CorruptError, match=said):
        catalog.commit(TableCommit(ORDERS, [], [update], there.location))


def test_a_clock_that_was_set_back_makes_no_table_older():
    metadata = created("u", "/t", SCHEMA, {}, 1000)
    assert applied(metadata, [], 900, "/t/v1")["last-updated-ms"] == 1000


def test_a_table_names_as_many_earlier_files_as_its_property_says(catalog):
    limit = {"write.metadata.previous-versions-max": "2"}
    for _ in range(4):
        there = made(catalog, {"action": "set-properties", "updates": limit})
    names = [Path(each["metadata-file"]).name for each in there.metadata["metadata-log"]]
    assert names == ["v3.metadata.json", "v4.metadata.json"]


def test_columns_are_numbered_to_the_innermost():
    assert created("u", "/t", SCHEMA, {}, 0)["last-column-id"] == 3


def test_a_table_of_version_2_can_become_version_3_but_not_return():
    old = created("u", "/t", SCHEMA, {"format-version": "2"}, 0)
    assert (old["current-snapshot-id"], old["properties"]) == (-1, {})
    upgrade = {"action": "upgrade-format-version", "format-version": 3}
    new = applied(old, [upgrade], 0, "/t/v1")
    assert (new["format-version"], new["next-row-id"]) == (3, 0)
    with pytest.raises(CorruptError, match="cannot become 2"):
        applied(new, [{**upgrade, "format-version": 2}], 0, "/t/v2")


# -- the folder -------------------------------------------------------------------------------------


def test_a_table_is_created_once_in_a_folder(catalog):
    assert catalog.create(ORDERS, SCHEMA, {"a": "2"}) is Outcome.LOST
    assert catalog.load(ORDERS).metadata["properties"] == {"a": "1"}


def test_a_table_that_is_not_there_is_none(catalog):
    assert catalog.load(LINES) is None


def test_a_commit_is_lost_if_anything_was_committed_since(catalog):
    there = catalog.load(ORDERS)
    early, _ = write(ORDERS, there)
    late, _ = write(ORDERS, there, "tuskline_t1")
    assert catalog.commit(early) is Outcome.WON
    # Its own branch is where it was: the folder compares the whole table.
    assert catalog.commit(late) is Outcome.LOST
    assert catalog.load(ORDERS).metadata["refs"].keys() == {"main"}


def test_a_commit_is_lost_if_a_requirement_does_not_hold(catalog):
    commit, _ = write(ORDERS, catalog.load(ORDERS))
    wrong = replace(commit, requirements=[assert_ref("tuskline_t1", 1)])
    assert catalog.commit(wrong) is Outcome.LOST
    assert catalog.load(ORDERS).metadata["refs"] == {}


def test_a_commit_to_metadata_that_was_removed_is_lost(catalog):
    there = catalog.load(ORDERS)
    commit, _ = write(ORDERS, there)
    put(catalog)
    Path(there.location).unlink()
    assert catalog.commit(commit) is Outcome.LOST


def test_of_writers_that_meet_one_has_the_commit(catalog):
    """100 races of 8 writers that have loaded the same table."""
    for _ in range(100):
        there = catalog.load(ORDERS)
        commits = [write(ORDERS, there) for _ in range(8)]
        outcomes = raced(commits, catalog.commit)
        (won,) = (snapshot for snapshot, how in outcomes.items() if how is Outcome.WON)
        assert main_of(catalog.load(ORDERS)) == won


def test_damaged_metadata_is_an_error_and_not_another_writers(catalog):
    there = catalog.load(ORDERS)
    commit, _ = write(ORDERS, there)
    file = Path(there.location)
    file.write_bytes(file.read_bytes().replace(b'"a":"1"', b'"a":"2"'))
    # Where it was loaded, the content that was checked is what a commit uses.
    another = FolderCatalog(catalog._root)
    with pytest.raises(CorruptError, match="checksum"):
        another.commit(commit)
    with pytest.raises(CorruptError, match="checksum"):
        another.load(ORDERS)


def test_metadata_that_another_writer_has_compressed_is_followed(catalog):
    there = catalog.load(ORDERS)
    file = Path(there.location)
    compressed = file.with_name("v2.gz.metadata.json")
    compressed.write_bytes(gzip.compress(json.dumps(there.metadata).encode()))
    commit, snapshot = write(ORDERS, replace(there, location=str(compressed)))
    # Found by the number that it follows, whatever form that file has.
    file.with_name("v2.metadata.json").write_bytes(b"")
    assert catalog.commit(commit) is Outcome.WON
    assert main_of(catalog.load(ORDERS)) == snapshot


def test_several_tables_are_not_committed_at_once_in_a_folder(catalog):
    commit, _ = write(ORDERS, catalog.load(ORDERS))
    assert not catalog.supports_multi_table
    with pytest.raises(NotSupportedError, match="one table at a time"):
        catalog.commit_all([commit, replace(commit, table=LINES)])
    assert catalog.commit_all([commit]) is Outcome.WON


def test_a_dropped_table_is_gone_with_its_files(catalog):
    catalog.drop(ORDERS)
    assert catalog.load(ORDERS) is None
    assert not catalog.folder(ORDERS).exists()
    catalog.drop(ORDERS)


def test_a_table_is_named_by_the_last_three_folders_of_its_path():
    assert TableId.at("/srv/lake/tables/shop/public/orders%t1-0a") == ORDERS
