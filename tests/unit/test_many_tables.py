"""What many tables cost that do not change: counted, since a driver with a thousand of them must not notice them."""

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from spark_consumers.lake.epoch.packed import PackedTable, TaskTables
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.index.run_format import Run
from spark_consumers.lake.manifest.chain import Chain, Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.delta import BASE
from spark_consumers.lake.manifest.sealed_json import dump, load
from spark_consumers.lake.store.lake_store import Created
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.tables import noticed
from spark_consumers.lake.tables.shape import Publication, Shape
from spark_consumers.lake.writer.retention import _MOST, _OTHERS, Retention
from walsender_bridge.errors import CorruptError, TrimmedError
from walsender_bridge.postgres.protocol.pgoutput import Relation
from walsender_bridge.runtime.steady_clock import SteadyClock

TABLES, CHANGED = 1000, 20


class CountedStore(LocalStore):
    """A lake's folder that counts what is asked of it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.calls: Counter[str] = Counter()
        self.written = 0

    def create(self, name: str, content: bytes) -> Created:
        self.calls["create"] += 1
        self.written += len(content)
        return super().create(name, content)

    def read(self, name: str) -> bytes:
        self.calls["read"] += 1
        return super().read(name)

    def names(self, folder: str) -> list[str]:
        self.calls["names"] += 1
        return super().names(folder)


def table(number: int, snapshot: int = 1) -> TableVersion:
    layout = (("id", 20, -1), ("n", 23, -1), ("v", 25, -1))
    runs = ((f"index/{snapshot}.run", 50),)
    path = f"tables/shop/public/t{number}%t1-{number:012x}"
    return TableVersion(
        *(path, "iceberg", snapshot, "hash", ("id",), (), 5, 1, 50, number),
        layout=layout,
        shape=shape(number).dump(),
        runs=runs,
    )


def shape(number: int) -> Shape:
    columns = ((1, "id", 20, "690"), (2, "n", 23, "690"), (3, "v", 25, "690"))
    return Shape(
        number, number, ("id",), (), columns, "5 600", "insert, update, delete, truncate", ("all",)
    )


def lake(count: int, term: int = 1) -> Manifest:
    tables = {f"shop.public.t{number}": table(number) for number in range(count)}
    streams = {"shop": StreamPosition(1, 100, 7, 3)}
    return Manifest("lake", 1, 1, 0, term, 1000.0, 1000.0, streams=streams, tables=tables)


def epoch(head: Manifest, numbers: Any) -> Manifest:
    """The link after `head`, in which these tables have another snapshot."""
    tables = {**head.tables}
    for number in numbers:
        name = f"shop.public.t{number}"
        before = tables[name]
        at = head.link + 1
        tables[name] = replace(before, snapshot_id=at, stage=f"{at:020d}-t1-a1", rows=at)
    return head.next(head.steady_at + 60.0, epoch=head.epoch + 1, tables=tables)


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    # No power fails here.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    made = Chain(CountedStore(tmp_path / "lake"))
    made.initialise("log", "iceberg")
    return made


def grown(chain: Chain, head: Manifest, links: int, changed: int = CHANGED) -> list[Manifest]:
    """The chain with so many links, in each of which the same tables have changed."""
    chain.publish(head, None)
    made = [head]
    while len(made) < links:
        after = epoch(made[-1], range(changed))
        chain.publish(after, made[-1])
        made.append(after)
    return made


def of(chain: Chain) -> CountedStore:
    assert isinstance(chain.store, CountedStore)
    return chain.store


def is_delta(chain: Chain, link: int) -> bool:
    return BASE in load(chain.store, f"_tuskline/epochs/{link:020d}.json")


# -- links ------------------------------------------------------------------------------------------


def test_a_link_has_the_tables_that_changed_and_is_read_with_one_other(chain: Chain) -> None:
    head = grown(chain, lake(TABLES), 3)[-1]
    whole, store = of(chain).written, of(chain)
    for _ in range(20):
        store.calls.clear()
        store.written = 0
        after = epoch(head, range(CHANGED))
        chain.publish(after, head)
        assert store.written < whole / 20
        assert store.calls["names"] == 0
        assert store.calls["read"] + store.calls["create"] <= 6
        head = after
    reader = Chain(CountedStore(of(chain).folder))
    assert reader.head() == head
    # The record of the newest link, that link, and the full one that it builds on.
    assert of(reader).calls == {"read": 3}
    assert reader.head() == head
    assert of(reader).calls["read"] == 5


def test_what_a_thousand_epochs_write_grows_with_their_changes(chain: Chain) -> None:
    """Other tables each time: now and then there is a full link, and between them deltas that grow."""
    head = lake(TABLES)
    chain.publish(head, None)
    store, choose = of(chain), random.Random(1)
    whole = store.written
    for _ in range(100):
        after = epoch(head, choose.sample(range(TABLES), CHANGED))
        chain.publish(after, head)
        head = after
    assert store.written < 100 * whole / 5
    assert Chain(store).head() == head


def test_every_link_is_read_as_it_was_published(chain: Chain) -> None:
    choose, head = random.Random(7), lake(60)
    chain.publish(head, None)
    made = [head]
    for _ in range(200):
        after = epoch(head, choose.sample(range(20, 60), choose.randrange(4)))
        tables = {**after.tables}
        name = f"shop.public.t{choose.randrange(20)}"
        if name in tables and choose.random() < 0.3:
            del tables[name]
        elif choose.random() < 0.3:
            tables[name] = replace(table(99), state="paused", reason="paused", as_of=after.epoch)
        after = replace(after, tables=tables)
        chain.publish(after, head)
        made.append(after)
        head = after
    assert list(Chain(of(chain)).links()) == made
    deltas = [is_delta(chain, link.link) for link in made]
    assert min(deltas.count(True), deltas.count(False)) > 10


def test_the_links_of_few_tables_and_those_of_takeovers_are_full(chain: Chain) -> None:
    head = grown(chain, lake(32), 3)[-1]
    assert not is_delta(chain, head.link)
    made = epoch(replace(head, tables=lake(100).tables), range(3))
    taken = replace(made, term=2)
    chain.publish(taken, head)
    assert not is_delta(chain, taken.link)
    after = epoch(taken, [1])
    chain.publish(after, taken)
    assert is_delta(chain, after.link)
    again = replace(epoch(after, [2]), term=3)
    Chain(of(chain)).publish(again, after)
    assert not is_delta(chain, again.link)


def test_retention_keeps_what_links_build_on(chain: Chain) -> None:
    made = grown(chain, lake(100), 150, changed=1)
    full = [link.link for link in made if not is_delta(chain, link.link)]
    assert full == [1, 66, 131]
    assert chain.retire(made[99].steady_at) == 65
    assert chain.numbers()[0] == 66
    assert chain.at_epoch(made[80].epoch) == made[80]
    assert chain.retire(made[99].steady_at) == 0
    assert chain.retire(made[149].steady_at) == 65
    assert [link.link for link in Chain(of(chain)).links()] == list(range(131, 151))
    # A reader holds an old one, and with it that one's base.
    assert chain.retire(made[149].steady_at, held_from=140) == 0


def test_retention_keeps_what_links_build_on_behind_a_lost_link(chain: Chain) -> None:
    """It asked for the base of the number after the last that goes, which a gap does not have, and removed that of all."""
    made = grown(chain, lake(100), 40, changed=1)
    of(chain).remove(f"_tuskline/epochs/{11:020d}.json")
    assert chain.retire(made[11].steady_at) == 0
    assert [link.link for link in Chain(of(chain)).links()] == [*range(1, 11), *range(12, 41)]


def test_a_link_after_a_failed_one_is_full_so_that_bases_never_go_back(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full link was there, and one behind it built on a base before it, which retention takes for unneeded."""
    made = grown(chain, lake(32), 2, changed=1)
    really = CountedStore.create

    def fails_behind(self: CountedStore, name: str, content: bytes) -> Created:
        really(self, name, content)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(CountedStore, "create", fails_behind)
        with pytest.raises(OSError, match="Input/output"):
            chain.publish(epoch(made[-1], [1]), made[-1])
    head = chain.head()
    assert head is not None
    assert head.link == 3
    for _ in range(5):
        after = epoch(head, [0])
        after = replace(after, tables={**after.tables, "shop.public.t40": table(40)})
        chain.publish(after, head)
        head = after
    assert not is_delta(chain, 4)
    assert load(chain.store, f"_tuskline/epochs/{5:020d}.json")[BASE]["link"] == 4
    chain.retire(head.steady_at)
    assert Chain(of(chain)).head() == head


@pytest.mark.parametrize("damage", ["lost", "a byte", "another file"])
def test_no_link_builds_on_a_base_that_is_lost_or_damaged(chain: Chain, damage: str) -> None:
    made = grown(chain, lake(100), 5, changed=1)
    store, name = of(chain), f"_tuskline/epochs/{1:020d}.json"
    content = store.read(name)
    store.remove(name)
    if damage != "lost":
        store.create(name, content.replace(b"hash", b"hush", 1) if damage == "a byte" else dump({}))
    after = epoch(made[-1], [1])
    chain.publish(after, made[-1])
    assert not is_delta(chain, after.link)
    assert Chain(store).head() == after


def test_a_removal_that_was_interrupted_goes_on(chain: Chain) -> None:
    made = grown(chain, lake(100), 80, changed=1)
    for link in (1, 2, 3):
        of(chain).remove(f"_tuskline/epochs/{link:020d}.json")
    # What is left of them cannot be read, and nobody needs it.
    assert [link.link for link in Chain(of(chain)).links()] == list(range(66, 81))
    with pytest.raises(TrimmedError):
        Chain(of(chain)).at_epoch(made[10].epoch)
    assert chain.missing() == []
    assert Chain(of(chain)).head() == made[-1]
    assert chain.retire(made[79].steady_at) == 62
    assert chain.numbers()[0] == 66


def test_a_full_link_that_is_damaged_lost_or_another_is_named(chain: Chain) -> None:
    made = grown(chain, lake(100), 10, changed=1)
    file = of(chain).folder / f"_tuskline/epochs/{1:020d}.json"
    content = file.read_bytes()
    other = dump(replace(lake(100), published_at=5.0).to_json())
    for damaged in (content.replace(b"t7%", b"t8%"), other):
        file.write_bytes(damaged)
        with pytest.raises(CorruptError) as found:
            Chain(of(chain)).head()
        assert found.value.where == str(file)
    # Without the ones before it, it is not taken for one that retention has removed.
    file.unlink()
    with pytest.raises(CorruptError, match="link 10 builds on it"):
        Chain(of(chain)).head()
    file.write_bytes(content)
    assert Chain(of(chain)).head() == made[-1]


# -- rounds -----------------------------------------------------------------------------------------


def test_only_tables_that_changed_at_either_side_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    outdated = noticed.outdated

    def counted(table: TableVersion, now: Shape, publication: Publication) -> str | None:
        compared.append(table.relation_id)
        return outdated(table, now, publication)

    monkeypatch.setattr(noticed, "outdated", counted)
    seen: noticed.Seen = {}

    def compare(head: Manifest, shapes: dict[str, Shape]) -> tuple[Manifest, dict[str, str]]:
        compared.clear()
        publication = Publication(shapes, frozenset())
        return noticed.compare(head, "shop", publication, (), holds=True, seen=seen)

    head = lake(TABLES)
    shapes = {f"public.t{number}": shape(number) for number in range(TABLES)}
    assert compare(head, shapes) == (head, {})
    assert len(compared) == TABLES
    # Read again, so none of them is the same object.
    shapes = {f"public.t{number}": shape(number) for number in range(TABLES)}
    after = epoch(head, range(CHANGED))
    assert compare(after, shapes)[0] is after
    assert compared == []
    shapes["public.t5"] = replace(shapes["public.t5"], row_filter="(id > 5)")
    changed, reasons = compare(after, shapes)
    assert (compared, list(reasons)) == ([5], ["shop.public.t5"])
    assert changed.tables["shop.public.t5"].resync == reasons["shop.public.t5"]
    # Other columns in the lake.
    name = "shop.public.t6"
    other = replace(after.tables[name], layout=(("id", 20, -1),))
    compare(replace(after, tables={**after.tables, name: other}), shapes)
    assert set(compared) == {5, 6}


def test_a_task_opens_the_tables_that_it_has_changes_of(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    open_ = PackedTable.open

    def counted(self: PackedTable, stage: str) -> Any:
        opened.append(self.name)
        return open_(self, stage)

    monkeypatch.setattr(PackedTable, "open", counted)
    schema = pa.schema([("id", pa.int64())])
    runs = (Run("index/1.run", 5),)
    packed = [
        PackedTable.of(
            Target(
                *(f"shop.public.t{n}", f"public.t{n}", f"/lake/t{n}/data/", schema, schema),
                *(("id",), 0, n),
                quarantines=n == 3,
            ),
            (runs, 8),
        )
        for n in range(TABLES)
    ]
    tables = TaskTables(packed, "a-stage")
    assert len(tables.relations) == 2 * TABLES
    assert tables.keeping_unrepresentable() == {"3"}
    # Whatever its name was, and whose its name is.
    (target,) = tables.of(Relation(7, "public", "t8", "d", ()))
    assert (target.name, target.prefix) == ("shop.public.t7", "/lake/t7/data/a-stage")
    (other,) = tables.of(Relation(TABLES, "public", "t7", "d", ()))
    assert other == target
    assert tables.index("shop.public.t7") == (runs, 8)
    assert opened == ["shop.public.t7"]


# -- housekeeping -----------------------------------------------------------------------------------


class CountedTables:
    """Tables, and their files that only links name, of which it is counted how many are looked at."""

    def __init__(self) -> None:
        self.expired: list[str] = []
        self.tagged: list[str] = []
        self.swept: list[str] = []
        self.failing: set[str] = set()

    def expire(self, path: str, _: int, kept: set[int]) -> int:
        assert kept
        self.expired.append(path)
        if path in self.failing:
            raise OSError("no answer")
        return 0

    def pin(self, path: str, _: int, tags: dict[str, int], **__: bool) -> None:
        assert not tags
        self.tagged.append(path)

    def sweep_of_links(self, _: Manifest, tables: list[str]) -> int:
        self.swept += tables
        return 0


def test_housekeeping_looks_at_what_changed_and_at_all_others_in_turn(chain: Chain) -> None:
    tables: Any = CountedTables()
    count = 3 * _MOST
    made = grown(chain, lake(count), 5)
    kept = Retention(chain, tables, tables, SteadyClock(made[-1].steady_at))
    for link in made:
        kept.remember(link)
    # Of a takeover everything is new: so much that it is done in parts.
    for _ in range(count // _MOST):
        kept.expire(made[-1], 1e6)
    assert len(set(tables.expired)) == count
    looked = set()
    head = made[-1]
    for _ in range(count // _OTHERS):
        tables.expired.clear()
        tables.tagged.clear()
        tables.swept.clear()
        after = epoch(head, range(CHANGED))
        chain.publish(after, head)
        head = after
        kept.remember(head)
        of(chain).calls.clear()
        kept.expire(head, 1e6)
        assert of(chain).calls["read"] < 20
        assert len(tables.expired) == CHANGED + _OTHERS
        assert sorted(tables.tagged) == sorted(tables.expired)
        assert {f"{chain.root}/{path}" for path in tables.swept} == set(tables.expired)
        looked |= set(tables.swept)
    assert len(looked) == count


def test_tables_behind_one_that_fails_in_housekeeping_are_due_the_next_time(chain: Chain) -> None:
    tables: Any = CountedTables()
    made = grown(chain, lake(3 * _OTHERS), 2)
    kept = Retention(chain, tables, tables, SteadyClock(made[-1].steady_at))
    for link in made:
        kept.remember(link)
    paths = [f"{chain.root}/{version.path}" for version in made[-1].versions]
    tables.failing = {paths[0]}
    with pytest.raises(OSError, match="no answer"):
        kept.expire(made[-1], 1e6)
    assert len(tables.expired) < len(paths)
    tables.failing.clear()
    tables.expired.clear()
    kept.expire(made[-1], 1e6)
    assert set(tables.expired) == set(paths)


def test_a_table_that_is_written_during_its_turn_is_swept_after_that(chain: Chain) -> None:
    """A driver that dies while it brings a table level leaves files there, and the next one begins with the same table."""
    tables: Any = CountedTables()
    (*_, head) = made = grown(chain, lake(_OTHERS), 2)
    kept = Retention(chain, tables, tables, SteadyClock(head.steady_at))
    for link in made:
        kept.remember(link)
    busy, other, *_ = (version.path for version in head.versions)
    kept._unswept = [busy, other]
    swept: list[str] = []

    def sweep(path: str, *_: object) -> int:
        swept.append(path)
        return 0

    tables.sweep = sweep
    for _ in range(3):
        kept.expire(head, 1e6, busy=[busy])
    assert swept == [f"{chain.root}/{other}"]
    # It was listed, and is written before that is carried out.
    kept.expire(head, 1e6)
    kept.expire(head, 1e6, busy=[busy])
    for _ in range(2):
        kept.expire(head, 1e6)
    assert swept == [f"{chain.root}/{other}", f"{chain.root}/{busy}"]
    assert not kept._unswept
