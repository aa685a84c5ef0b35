"""A writer of whole epochs for tests of catalogs: a control table, and tables whose snapshots are numbers."""

import itertools
import time

from spark_consumers.lake.catalog.control_table import Control, NewSnapshot
from spark_consumers.lake.catalog.table_catalog import Outcome, TableId
from tests.support.lake.table_commits import LINES, ORDERS, SCHEMA, main_of, raced, write

CONTROL = TableId(("shop", "public"), "tuskline_epochs")
TABLES = (ORDERS, LINES)

_ids = itertools.count(time.time_ns() + 10**12)


def make_tables(catalog):
    """The tables of a lake, empty."""
    for table in (CONTROL, *TABLES):
        assert catalog.create(table, SCHEMA, {}) is Outcome.WON


def control_of(catalog):
    """The control table as it is now."""
    return Control.of(CONTROL, catalog.load(CONTROL).metadata)


def mains(catalog):
    """What plain readers see of each table."""
    return [main_of(catalog.load(table)) for table in TABLES]


def new_snapshot(control):
    """The next snapshot of the control table."""
    snapshot = next(_ids)
    where = f"{control.metadata['location']}/metadata/snap-{snapshot}.avro"
    return NewSnapshot(snapshot, where, time.time_ns() // 1_000_000)


class Writer:
    """One driver, which takes the lake over when it is made."""

    def __init__(self, catalog, name):
        self.catalog = catalog
        control = control_of(catalog)
        commit = control.taken_over(control.term + 1, name, new_snapshot(control))
        assert catalog.commit(commit) is Outcome.WON
        self.control = control_of(catalog)

    def prepared(self, tables=TABLES):
        """The next epoch, with everything ready: its commits, and what plain readers would see of the tables."""
        made = [write(table, self.catalog.load(table)) for table in tables]
        commits = [commit for commit, _ in made]
        epoch = self.control.epoch + 1
        whole = self.control.published(epoch, commits, new_snapshot(self.control))
        return whole, [snapshot for _, snapshot in made]

    def publish(self, whole):
        """Make an epoch; how it ended."""
        outcome = self.catalog.commit_all(whole)
        if outcome is Outcome.WON:
            self.control = control_of(self.catalog)
        return outcome


def race_of_takeovers(catalog):
    """Of four writers that take over at once, one has the lake."""
    control = control_of(catalog)
    commits = [
        (control.taken_over(control.term + 1, name, new_snapshot(control)), name) for name in "abcd"
    ]
    outcomes = raced(commits, catalog.commit)
    (won,) = (name for name, how in outcomes.items() if how is Outcome.WON)
    assert control_of(catalog).writer == won
