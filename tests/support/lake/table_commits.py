"""Commits for tests of catalogs, without data files: snapshots are numbers, and nothing reads their manifests."""

import itertools
import threading
import time

from spark_consumers.lake.catalog.table_catalog import (
    Outcome,
    TableCommit,
    TableId,
    assert_ref,
    assert_uuid,
    set_ref,
)

SCHEMA = {
    "type": "struct",
    "schema-id": 0,
    "fields": [
        {"id": 1, "name": "id", "required": False, "type": "long"},
        {
            "id": 2,
            "name": "tags",
            "required": False,
            "type": {
                "type": "list",
                "element-id": 3,
                "element": "string",
                "element-required": False,
            },
        },
    ],
}
ORDERS = TableId(("shop", "public"), "orders%t1-0a")
LINES = TableId(("shop", "public"), "lines%t1-0b")

_ids = itertools.count(time.time_ns())


def added(there, branch, *, rows=1, parent=None, summary=None):
    """The update that adds the next snapshot, for the branch; and its id. `there`: the table as it was loaded."""
    metadata = there.metadata
    snapshot = next(_ids)
    ref = metadata.get("refs", {}).get(branch)
    parent = parent if parent is not None else ref and ref["snapshot-id"]
    record = {
        "snapshot-id": snapshot,
        "sequence-number": metadata["last-sequence-number"] + 1,
        "timestamp-ms": time.time_ns() // 1_000_000,
        "manifest-list": f"{metadata['location']}/metadata/snap-{snapshot}.avro",
        "schema-id": 0,
        "summary": {"operation": "append", "total-records": str(rows), **(summary or {})},
    }
    if parent is not None:
        record["parent-snapshot-id"] = parent
    if metadata["format-version"] >= 3:
        record |= {"first-row-id": metadata["next-row-id"], "added-rows": rows}
    return {"action": "add-snapshot", "snapshot": record}, snapshot


def write(table, there, branch="main", **more):
    """A commit of one more snapshot to the branch of the table as it was loaded; and the snapshot's id."""
    update, snapshot = added(there, branch, **more)
    ref = there.metadata.get("refs", {}).get(branch)
    required = [
        assert_uuid(there.metadata["table-uuid"]),
        assert_ref(branch, ref and ref["snapshot-id"]),
    ]
    updates = [update, set_ref(branch, snapshot, "branch")]
    return TableCommit(table, required, updates, there.location), snapshot


def main_of(there):
    """The snapshot that plain readers see."""
    ref = there.metadata.get("refs", {}).get("main")
    return ref and ref["snapshot-id"]


def snapshots(there):
    """The ids of all snapshots, in their order."""
    return [each["snapshot-id"] for each in there.metadata.get("snapshots", [])]


def raced(commits, commit):
    """The outcome of each of these (commit, name), made at once, by its name."""
    outcomes = {}
    start = threading.Barrier(len(commits))

    def run(made, name):
        start.wait()
        outcomes[name] = commit(made)

    threads = [threading.Thread(target=run, args=each) for each in commits]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def race_of_writers(catalog):
    """Of 8 writers that have loaded the same table and commit at once, one has the commit."""
    there = catalog.load(ORDERS)
    outcomes = raced([write(ORDERS, there) for _ in range(8)], catalog.commit)
    (won,) = (snapshot for snapshot, how in outcomes.items() if how is Outcome.WON)
    assert set(outcomes.values()) == {Outcome.WON, Outcome.LOST}
    assert main_of(catalog.load(ORDERS)) == won
