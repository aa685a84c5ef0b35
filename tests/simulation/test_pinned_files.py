"""Files of a pinned epoch, while an older writer cleans up that was suspended before any look at the lake, or any removal.

Meanwhile a newer one takes over, pins an epoch, and removes its link from the chain; then the older one goes on. The chain,
the sweep, the retention, the pins and the catalog in a folder are the real ones; what Iceberg's library does is done on
the metadata. Of the pinned epoch there has to be the copy of its link, its table, and its file of quarantined rows.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import (
    Outcome,
    TableCommit,
    TableId,
    Update,
    remove_ref,
    set_ref,
)
from spark_consumers.lake.format.iceberg_files import refs_in
from spark_consumers.lake.format.iceberg_refs import (
    PINS,
    branch_of,
    fenced_by,
    of_users,
    pin_changes,
    term_of,
)
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion
from spark_consumers.lake.manifest.pin import PINNED, tag_of
from spark_consumers.lake.manifest.pinned_links import at_pin
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.writer import retention
from spark_consumers.lake.writer.lake_site import LakeSite
from spark_consumers.lake.writer.pins import Pins
from spark_consumers.lake.writer.requests import Request
from spark_consumers.lake.writer.retention import Retention
from walsender_bridge.errors import FencedError
from walsender_bridge.runtime.steady_clock import SteadyClock

NAME, OLD, NEW = "s.p.t", "tables/s/p/t%t1-0a", "tables/s/p/t%t1-0b"
#: The epoch that is pinned, and how long epochs are retained, in seconds.
EPOCH, RETENTION = 5, 40.0
ROWS = f"quarantine/{1:020d}-t1-a1-rows.parquet"
LATER_ROWS = f"quarantine/{2:020d}-t1-a1-rows.parquet"


class Suspended(LocalStore):
    """A folder before whose nth look or removal another writer comes."""

    def __init__(self, root: Path, place: int, other: Callable[[], None]) -> None:
        super().__init__(root)
        self.place, self.other, self.calls = place, other, 0

    def count(self) -> None:
        self.calls += 1
        if self.calls == self.place:
            self.other()

    def read(self, name: str) -> bytes:
        self.count()
        return super().read(name)

    def names(self, folder: str) -> list[str]:
        self.count()
        return super().names(folder)

    def remove(self, name: str) -> None:
        self.count()
        super().remove(name)


class Tables:
    """What a format does, on the metadata in the folders."""

    def __init__(self, root: Path, before: Callable[[], None] = lambda: None) -> None:
        self._catalog = FolderCatalog(root)
        self._before = before

    def make(self, path: str, snapshot: int) -> None:
        field = {"id": 1, "name": "id", "required": False, "type": "long"}
        schema = {"type": "struct", "schema-id": 0, "fields": [field]}
        self._catalog.create(TableId.at(path), schema, {})
        made = {
            "snapshot-id": snapshot,
            "sequence-number": 1,
            "timestamp-ms": 1,
            "manifest-list": "x",
            "schema-id": 0,
            "summary": {"operation": "append"},
            "first-row-id": 0,
            "added-rows": 0,
        }
        refs = [set_ref(name, snapshot, "branch") for name in ("main", branch_of(1))]
        self._commit(path, [{"action": "add-snapshot", "snapshot": made}, *refs])

    def _commit(self, path: str, updates: list[Update]) -> None:
        loaded = self._catalog.load(TableId.at(path))
        assert loaded is not None
        done = self._catalog.commit(TableCommit(TableId.at(path), [], updates, loaded.location))
        assert done is Outcome.WON

    def take_over(self, path: str, snapshot: int, term: int, _: int) -> None:
        older = fenced_by(refs_in(path), term, path)
        self._commit(path, [*map(remove_ref, older), set_ref(branch_of(term), snapshot, "branch")])

    def pin(self, path: str, term: int, tags: Mapping[str, int], **how: bool) -> None:
        self._before()
        refs = refs_in(path)
        changes = pin_changes(refs, tags, term, path, **how)
        if changes is None:
            return
        updates = [remove_ref(name) for name in changes.remove]
        updates += [set_ref(name, at, "tag") for name, at in changes.tags.items()]
        if changes.needs_branch:
            updates.append(set_ref(branch_of(term), refs["main"].snapshot, "branch"))
        recorded = {"action": "set-properties", "updates": {PINS: json.dumps(dict(tags))}}
        self._commit(path, [*updates, recorded])

    def expire(self, path: str, term: int, _: object) -> int:
        self._before()
        fenced_by(refs_in(path), term, path)
        return 0

    def sweep(self, *_: object) -> int:
        return 0

    def users_refs(self, path: str) -> list[str]:
        self._before()
        return of_users(refs_in(path))

    def drop(self, path: str) -> None:
        self._before()
        self._catalog.drop(TableId.at(path))

    def terms(self, path: str) -> list[int]:
        self._before()
        found = [term_of(name, ref) for name, ref in refs_in(path).items()]
        return [term for term in found if term is not None]


class World:
    """A lake whose table was copied again after `EPOCH`, or went on; both have quarantined rows at that epoch."""

    def __init__(self, root: Path, *, copied_again: bool) -> None:
        self.root, self.first = root, OLD if copied_again else NEW
        chain, tables = Chain(LocalStore(root)), Tables(root)
        lake = chain.initialise("log", "iceberg")
        chain.staging.mkdir(parents=True, exist_ok=True)
        for number, path in enumerate({self.first, NEW}, 11):
            tables.make(str(root / path), number)
            (root / path / "quarantine").mkdir()
            for rows in (ROWS, LATER_ROWS):
                (root / path / rows).touch()
        self.table = self.version(self.first, (ROWS,))
        head = Manifest(lake, 1, EPOCH, 0, 1, 1.0, 1.0, tables={NAME: self.table}, writer="older")
        chain.publish(head, None)
        for number, at in ((1, 50.0), (2, 99.0)):
            after = {NAME: self.version(NEW, (LATER_ROWS,))}
            following = head.next(at, epoch=EPOCH + number, tables=after)
            chain.publish(following, head)
            head = following
        self.head = head

    def version(self, path: str, files: tuple[str, ...]) -> TableVersion:
        snapshot = refs_in(str(self.root / path))["main"].snapshot
        made = TableVersion(path, "iceberg", snapshot, "", ("id",), (), 0, 0, 1, 1)
        return replace(made, quarantine_files=files)

    def newer(self, term: int) -> None:
        """Take over, pin the epoch if it is there, remove what is past its retention."""
        chain, tables = Chain(LocalStore(self.root)), Tables(self.root)
        before = chain.listed_head()
        assert before is not None
        head = before.next(101.0, term=term, writer="newer")
        chain.publish(head, before)
        for table in head.written:
            tables.take_over(str(self.root / table.path), table.snapshot_id, term, head.epoch)
        pins = Pins(chain, cast("Any", tables))
        wanted = pins.carry_out(head, Request("1", "pin", (), pin="a", epoch=EPOCH), 101.0)
        for _ in range(2):
            after = head.next(102.0, pins=wanted.pins, answered=wanted.answered)
            chain.publish(after, head)
            head, wanted = after, pins.settled(after)
        chain.retire(102.0 - RETENTION)

    def check(self) -> bool:
        """Whether the epoch is pinned; if it is, it is whole."""
        chain = Chain(LocalStore(self.root))
        head = chain.head()
        assert head is not None
        pin = head.pins.get("a")
        if pin is None:
            return False
        assert (pin.epoch, pin.state) == (EPOCH, PINNED)
        assert at_pin(chain, "a").tables == {NAME: self.table}
        refs = refs_in(str(self.root / self.first))
        assert refs[tag_of("a")].snapshot == self.table.snapshot_id
        assert (self.root / self.first / ROWS).exists()
        return True


# -- what the older writer does ---------------------------------------------------------------------


def sweeps(world: World, chain: Chain, tables: Tables) -> None:
    """A writer that took over under term 2 removes what is left."""
    takeover.carry_out(takeover.sweep(world.head), LakeSite(chain, cast("Any", tables)).do)


def cleans(world: World, chain: Chain, tables: Tables) -> None:
    """The writer of the head in its housekeeping, with the same retention as the newer one."""
    kept(chain, tables).expire(world.head, RETENTION)


def keeps_longer(world: World, chain: Chain, tables: Tables) -> None:
    """The writer of the head in its housekeeping, which removes no link."""
    kept(chain, tables).expire(world.head, 1e6)


def has_its_turn_later(world: World, chain: Chain, tables: Tables) -> None:
    """As `cleans`, but the table that goes on, where the newer writer has its branch, is not looked at this time."""
    made = kept(chain, tables)
    made._due.clear()
    made.expire(world.head, RETENTION)


def keeps_longer_and_has_its_turn_later(world: World, chain: Chain, tables: Tables) -> None:
    """As `keeps_longer`, and the same."""
    made = kept(chain, tables)
    made._due.clear()
    made.expire(world.head, 1e6)


def kept(chain: Chain, tables: Tables) -> Retention:
    site, clock = LakeSite(chain, cast("Any", tables)), SteadyClock(100.0)
    return Retention.begin(chain, cast("Any", tables), site, clock)


WORK = (sweeps, cleans, keeps_longer, has_its_turn_later, keeps_longer_and_has_its_turn_later)


@pytest.mark.parametrize("copied_again", [True, False])
@pytest.mark.parametrize("work", WORK)
def test_31_an_older_writer_removes_no_file_of_a_pinned_epoch(
    tmp_path, monkeypatch, work, copied_again
):
    # No power fails here.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(retention, "_OTHERS", 0)
    found = set()
    place, is_over = 1, False
    while not is_over:
        world = World(tmp_path / str(place), copied_again=copied_again)
        if work is sweeps:
            taken = world.head.next(100.0, term=2, writer="older")
            Chain(LocalStore(world.root)).publish(taken, world.head)
            world.head = taken
        store = Suspended(world.root, place, partial(world.newer, 3))
        with contextlib.suppress(FencedError):
            work(world, Chain(store), Tables(world.root, store.count))
        try:
            found.add(world.check())
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"suspended before look {place}: {error!r}") from error
        is_over = store.calls < place
        place += 1
    print(f"{place} places")
    assert place > 10
    assert True in found
