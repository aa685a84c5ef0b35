"""Iceberg's library refuses one table: it is suspended by its name, and the others go on. It refuses all: none is."""

import json
from pathlib import Path

import pytest

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import Outcome, TableCommit, TableId, assert_uuid
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.iceberg_files import newest_metadata, version_of
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal

DOCS, PAIRS, BAG = (f"{STREAM}.public.{name}" for name in ("docs", "pairs", "bag"))
#: Iceberg reads it as a number when a commit is built.
OPTION = "commit.manifest.target-size-bytes"


def alter(pipeline, name, update):
    """Commit a change of another program to a table."""
    catalog = FolderCatalog(pipeline.lake)
    table = TableId.at(pipeline.head().tables[name].path)
    there = catalog.load(table)
    assert there is not None
    required = [assert_uuid(there.metadata["table-uuid"])]
    commit = TableCommit(table, required, [update], there.location)
    assert catalog.commit(commit) is Outcome.WON


def spoil(pipeline, name):
    alter(pipeline, name, {"action": "set-properties", "updates": {OPTION: "as much as there is"}})


def repair(pipeline, name):
    alter(pipeline, name, {"action": "remove-properties", "removals": [OPTION]})


def resume(pipeline, name):
    request = requests.ask(open_chain(pipeline.lake), "resume", [name])
    while requests.finished(pipeline.head(), request) is None:
        pipeline.flush()


def test_12_a_table_that_the_library_refuses_to_commit_to_stops_alone(pipeline, database):
    spoil(pipeline, DOCS)
    database.execute("UPDATE docs SET n = n + 1", "UPDATE pairs SET tags = '{7}' WHERE b = 'x'")
    shown = pipeline.flush()
    assert shown["pairs"].where("b = 'x'").first().tags == [7]
    table = pipeline.head().tables[DOCS]
    assert table.state == "stale"
    for word in ("NumberFormatException", "as much as", "undo", f"table resume {DOCS}"):
        assert word in table.reason
    assert DOCS not in shown.tables
    # Housekeeping, and what shows tables to other engines, go on beside it.
    pipeline.house._writer.kept.expire(pipeline.head(), 0.0)
    repair(pipeline, DOCS)
    resume(pipeline, DOCS)
    assert_equal(database.dsn, pipeline.flush())


def test_what_the_library_refuses_for_all_tables_suspends_none(pipeline, database):
    for name in (DOCS, PAIRS, BAG):
        spoil(pipeline, name)
    database.execute(
        "UPDATE docs SET n = n + 1", "UPDATE pairs SET tags = '{7}'", "DELETE FROM bag WHERE a = 1"
    )
    with pytest.raises(Exception, match="as much as there is"):
        pipeline.flush()
    assert {table.state for table in pipeline.head().tables.values()} == {"live"}
    for name in (DOCS, PAIRS, BAG):
        repair(pipeline, name)
    assert_equal(database.dsn, pipeline.flush())


def test_a_refused_table_that_changes_alone_is_suspended_since_others_open(pipeline, database):
    spoil(pipeline, BAG)
    database.execute("DELETE FROM bag WHERE a = 1")
    pipeline.flush()
    assert pipeline.head().tables[BAG].state == "stale"


def test_a_table_that_the_library_cannot_load_does_not_keep_a_driver_from_taking_over(
    pipeline, database
):
    """Another engine has upgraded it to a version of the format that this library does not know."""
    pipeline.flush()
    pipeline.house.close()
    newest = newest_metadata(pipeline.lake / pipeline.head().tables[DOCS].path)
    assert isinstance(newest, Path)
    later = newest.with_name(f"v{version_of(newest) + 1}.metadata.json")
    later.write_text(json.dumps({**json.loads(newest.read_bytes()), "format-version": 99}))
    checksums.seal(later)
    pipeline.house = pipeline.lakehouse()
    database.execute("UPDATE docs SET n = n + 1", "UPDATE pairs SET tags = '{8}'")
    shown = pipeline.flush()
    assert {tuple(row.tags) for row in shown["pairs"].collect()} == {(8,)}
    table = pipeline.head().tables[DOCS]
    assert table.state == "stale"
    assert "version" in table.reason
    checksums.remove(later)
    resume(pipeline, DOCS)
    assert_equal(database.dsn, pipeline.flush())
