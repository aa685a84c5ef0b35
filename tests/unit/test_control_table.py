"""Whole epochs in a catalog with a commit of several tables: all tables or none, and of the newest writer only."""

import pytest

from spark_consumers.lake.catalog.rest_catalog import RestCatalog
from spark_consumers.lake.catalog.rest_http import NoReplyError
from spark_consumers.lake.catalog.table_catalog import Outcome, TableCommit
from tests.support.lake.controlled import (
    CONTROL,
    TABLES,
    Writer,
    control_of,
    mains,
    make_tables,
    new_snapshot,
    race_of_takeovers,
)
from tests.support.lake.table_commits import ORDERS, snapshots, write
from tests.support.rest_catalog import RestServer
from walsender_bridge.errors import FencedError, LakeError


@pytest.fixture
def server():
    with RestServer().running() as server:
        yield server


@pytest.fixture
def catalog(server):
    catalog = RestCatalog.opened(server.options(), ("shop",))
    make_tables(catalog)
    return catalog


def test_epochs_of_one_writer_follow_one_another(catalog):
    writer = Writer(catalog, "a")
    for epoch in (1, 2, 3):
        whole, made = writer.prepared()
        assert writer.publish(whole) is Outcome.WON
        assert mains(catalog) == made
        control = control_of(catalog)
        assert (control.term, control.writer, control.epoch) == (1, "a", epoch)


def test_a_stale_writers_epoch_is_refused_and_changes_no_table(catalog):
    old = Writer(catalog, "a")
    whole, made = old.prepared()
    assert old.publish(whole) is Outcome.WON
    stale, _ = old.prepared()
    # It has not come to any table yet.
    newer = Writer(catalog, "b")
    before = [catalog.load(table) for table in (CONTROL, *TABLES)]
    assert old.publish(stale) is Outcome.LOST
    assert [catalog.load(table) for table in (CONTROL, *TABLES)] == before
    assert mains(catalog) == made
    whole, made = newer.prepared()
    assert newer.publish(whole) is Outcome.WON
    assert mains(catalog) == made
    assert (control_of(catalog).term, control_of(catalog).epoch) == (2, 2)


@pytest.mark.parametrize("fault", ["500 after", "503 after", "dropped after", "twice", "delayed"])
def test_an_epoch_whose_answer_was_lost_is_published_once(catalog, server, fault):
    writer = Writer(catalog, "a")
    whole, made = writer.prepared()
    server.faults.append(fault)
    assert writer.publish(whole) is Outcome.WON
    assert server.arrive() in ([], [409])
    assert mains(catalog) == made
    assert len(snapshots(catalog.load(CONTROL))) == 2
    assert control_of(catalog).has("a", 1)


def test_an_epoch_of_unknown_outcome_is_found_in_the_control_table(server):
    catalog = RestCatalog.opened(server.options(), ("shop",), outcome=0.5)
    make_tables(catalog)
    writer = Writer(catalog, "a")
    whole, made = writer.prepared()
    server.faults += ["delayed", *["500 before"] * 20]
    assert writer.publish(whole) is Outcome.UNKNOWN
    assert not control_of(catalog).has("a", 1)
    server.faults.clear()
    assert server.arrive() == [200]
    assert control_of(catalog).has("a", 1)
    assert not control_of(catalog).has("b", 1)
    assert mains(catalog) == made


def test_an_epoch_that_arrives_after_a_takeover_changes_nothing(catalog, server):
    old = Writer(catalog, "a")
    # Another table than the newer writer's, so the control table alone is in its way.
    whole, _ = old.prepared([ORDERS])
    server.faults.append("delayed")
    body = {"table-changes": [_change(commit) for commit in whole]}
    with pytest.raises(NoReplyError, match="500"):
        catalog._client.send("POST", catalog._client.path("transactions/commit"), body)
    Writer(catalog, "b")
    assert server.arrive() == [409]
    assert mains(catalog) == [None, None]


def _change(commit):
    name = {"namespace": list(commit.table.namespace), "name": commit.table.name}
    required, updates = list(commit.requirements), list(commit.updates)
    return {"identifier": name, "requirements": required, "updates": updates}


def test_of_writers_that_take_over_at_once_one_has_the_lake(catalog):
    for _ in range(10):
        race_of_takeovers(catalog)


def test_a_takeover_under_a_term_that_is_over_is_refused(catalog):
    control = Writer(catalog, "a").control
    with pytest.raises(FencedError, match="term 1"):
        control.taken_over(1, "b", new_snapshot(control))


def test_epochs_never_go_back(catalog):
    writer = Writer(catalog, "a")
    for _ in range(2):
        assert writer.publish(writer.prepared()[0]) is Outcome.WON
    # Tables that were not shown with the others are, at the same epoch.
    again = writer.control.published(2, [], new_snapshot(writer.control))
    assert writer.publish(again) is Outcome.WON
    with pytest.raises(ValueError, match="epoch 1 is before epoch 2"):
        writer.control.published(1, [], new_snapshot(writer.control))


def test_the_control_table_does_not_grow_with_its_epochs(catalog):
    writer = Writer(catalog, "a")
    for _ in range(30):
        control = writer.control
        assert set(control.lists()).isdisjoint(control.expired())
        assert writer.publish(writer.prepared()[0]) is Outcome.WON
    found = snapshots(catalog.load(CONTROL))
    assert len(found) == 20
    assert writer.control.snapshot in found
    assert writer.control.has("a", 30)
    assert not writer.control.has("a", 1)


def test_commits_of_other_programs_to_the_control_table_fence_nobody_and_are_no_takeover(catalog):
    old = Writer(catalog, "a")
    whole, _ = old.prepared()
    assert old.publish(whole) is Outcome.WON
    newer = Writer(catalog, "b")
    theirs, _ = write(CONTROL, catalog.load(CONTROL))
    assert catalog.commit(theirs) is Outcome.WON
    assert (control_of(catalog).term, control_of(catalog).writer) == (2, "b")
    with pytest.raises(FencedError):
        control_of(catalog).taken_over(2, "c", new_snapshot(control_of(catalog)))
    # As a driver does before each epoch.
    newer.control = control_of(catalog)
    whole, made = newer.prepared()
    assert newer.publish(whole) is Outcome.WON
    assert mains(catalog) == made
    # What was there when the epoch was prepared is required: nothing of theirs is lost between the two.
    stale, _ = newer.prepared()
    theirs, _ = write(CONTROL, catalog.load(CONTROL))
    assert catalog.commit(theirs) is Outcome.WON
    assert newer.publish(stale) is Outcome.LOST


def test_a_control_table_without_a_snapshot_of_a_driver_is_named(catalog):
    theirs, number = write(CONTROL, catalog.load(CONTROL))
    assert catalog.commit(theirs) is Outcome.WON
    there = catalog.load(CONTROL)
    others = [s["snapshot-id"] for s in there.metadata["snapshots"] if s["snapshot-id"] != number]
    gone = {"action": "remove-snapshots", "snapshot-ids": others}
    if others:
        assert catalog.commit(TableCommit(CONTROL, [], [gone])) is Outcome.WON
    with pytest.raises(LakeError, match="which driver writes the lake"):
        control_of(catalog)
