"""The chain of manifests: one writer at a time, epochs that never go back, and what is damaged is named."""

import json
import multiprocessing
import random
import re
import threading
from unittest.mock import Mock

import pytest
from obstore.store import MemoryStore

from spark_consumers.lake import reader
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.format.iceberg_files import refs_in
from spark_consumers.lake.manifest import sealed_json, takeover
from spark_consumers.lake.manifest.chain import (
    COPIED,
    Chain,
    Manifest,
    StreamPosition,
    TableVersion,
    open_chain,
    wait_for_epoch,
)
from spark_consumers.lake.manifest.newest import PublishedLink
from spark_consumers.lake.manifest.newest_record import NewestRecord
from spark_consumers.lake.store.lake_store import LakeStore
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.store.object_store import ObjectStore
from spark_consumers.lake.verify import verify
from spark_consumers.lake.writer.lake_site import LakeSite
from walsender_bridge.errors import (
    CorruptError,
    DeadlineError,
    FencedError,
    LakeError,
    NotSupportedError,
    TrimmedError,
    UnavailableError,
)

FORMAT_1_TABLE = (
    *("path", "format", "snapshot_id", "schema_hash", "key", "text_columns", "start_lsn", "offset"),
    *("rows", "relation_id", "state", "stage"),
)


@pytest.fixture(params=["folder", "bucket"])
def chain(tmp_path, request):
    memory = MemoryStore()
    stores: dict[str, LakeStore] = {
        "folder": LocalStore(tmp_path / "lake"),
        "bucket": ObjectStore("s3://bucket/lake", memory, memory),
    }
    chain = Chain(stores[request.param])
    chain.initialise("log", "iceberg")
    return chain


#: A test of what a lake has in a folder only: tables, drafts, other processes.
in_a_folder = pytest.mark.parametrize("chain", ["folder"], indirect=True)


class Record:
    """A record of the lake, used as a `Path` is: damaged, lost, put back."""

    def __init__(self, chain, name):
        self._store = chain.store
        self._name = f"_tuskline/{name}"

    def __str__(self):
        return self._store.where(self._name)

    def read_bytes(self):
        return self._store.read(self._name)

    def read_text(self):
        return self.read_bytes().decode()

    def write_bytes(self, content):
        self._store.replace(self._name, content)

    def write_text(self, content):
        self.write_bytes(content.encode())

    def unlink(self):
        self._store.remove(self._name)


def table(snapshot, state="live"):
    return TableVersion(
        "tables/s/p/t", "iceberg", snapshot, "hash", ("id",), (), 5, 1, 10, 7, state
    )


def first(**values):
    streams = {"shop": StreamPosition(1, 100, 7, 3)}
    tables = {"shop.public.t": table(1)}
    return Manifest("lake", 1, 0, 0, 1, 1000.0, streams=streams, tables=tables, **values)


def grow(chain, epochs, *, start=1000.0):
    """Publish a link for each epoch, a second apart."""
    head = None
    for number, epoch in enumerate(epochs):
        made = first() if head is None else head.next(1.0)
        made = Manifest(
            **{
                **_fields(made),
                "epoch": epoch,
                "published_at": start + number,
                "steady_at": start + number,
            }
        )
        chain.publish(made, head)
        head = made
    return head


def _fields(manifest):
    return {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}


def test_what_is_published_is_read_again(chain):
    manifest = first(not_copied={"shop.public.x": "why"})
    chain.publish(manifest, None)
    assert chain.head() == manifest
    assert manifest.rows == 10


def test_a_copy_that_is_not_shown_is_no_table_of_the_epoch(chain):
    manifest = first(copies={"shop.public.u": table(2, COPIED)})
    assert list(manifest.readable) == ["shop.public.t"]
    assert manifest.rows == 10
    assert len(manifest.versions) == 2


def test_a_lake_of_format_1_opens_and_its_copies_stand_aside(chain):
    """There a copy stood among the tables, and a table said nothing of columns or reasons."""
    record = first().to_json()
    old = {k: v for k, v in record["tables"]["shop.public.t"].items() if k in FORMAT_1_TABLE}
    tables = {"shop.public.t": old, "shop.public.u": {**old, "state": "copied"}}
    del record["copies"], record["answered"]
    path = Record(chain, "epochs/00000000000000000001.json")
    path.write_text(json.dumps({**record, "format_version": 1, "tables": tables}))
    head = chain.head()
    assert list(head.tables) == ["shop.public.t"]
    assert list(head.copies) == ["shop.public.u"]
    assert head.tables["shop.public.t"].layout == ()
    chain.publish(head.next(1.0), head)
    assert chain.head().copies == head.copies


def test_of_two_writers_one_gets_the_link(chain):
    head = grow(chain, [1, 2])
    chain.publish(head.next(head.steady_at, term=2), head)
    with pytest.raises(FencedError, match="term 2 is at link 3"):
        chain.publish(head.next(head.steady_at, epoch=9), head)
    assert chain.head().term == 2


def _race(root, number, gate, results):
    chain = open_chain(root)
    head = chain.head()
    assert head is not None
    gate.wait()
    try:
        chain.publish(head.next(head.steady_at, term=number + 1), head)
        results.put(number)
    except FencedError:
        results.put(None)


@in_a_folder
def test_of_many_processes_one_gets_the_link(chain):
    grow(chain, [1])
    context = multiprocessing.get_context("spawn")
    gate, results = context.Barrier(4), context.Queue()
    racers = [context.Process(target=_race, args=(chain.root, n, gate, results)) for n in range(4)]
    for racer in racers:
        racer.start()
    won = [results.get(timeout=60) for _ in racers]
    for racer in racers:
        racer.join()
    (winner,) = [n for n in won if n is not None]
    assert chain.head().term == winner + 1


def test_a_writer_that_slept_past_the_retention_is_refused(chain):
    stale = grow(chain, [1, 2])
    head = stale
    for _ in range(3):
        following = head.next(head.steady_at, term=2)
        chain.publish(following, head)
        head = following
    assert chain.retire(head.steady_at) == 4
    with pytest.raises(FencedError):
        chain.publish(stale.next(stale.steady_at, epoch=7), stale)
    assert chain.numbers() == [5]


def test_retention_keeps_what_was_current_then(chain):
    grow(chain, [10, 20, 30, 40])
    assert chain.retire(1001.5) == 1
    assert [m.epoch for m in chain.links()] == [20, 30, 40]
    with pytest.raises(TrimmedError, match="epoch 10 has expired"):
        chain.at_epoch(10)
    with pytest.raises(TrimmedError):
        chain.as_of(1000.5)
    assert chain.as_of(1001.5).epoch == 20


def test_epochs_are_found(chain):
    head = grow(chain, [10, 20, 20, 40])
    assert chain.at_epoch(20).link == 3
    assert chain.at_epoch(40) == head
    assert [m.link for m in chain.newest(2)] == [4, 3]
    for missing in (15, 41):
        with pytest.raises(LakeError, match=f"no epoch {missing}"):
            chain.at_epoch(missing)


def test_links_are_read_newest_first_and_only_those_that_are_asked_for(chain, monkeypatch):
    grow(chain, [10, 20, 20, 40, 50])
    newest = chain.newest_first()
    with monkeypatch.context() as patched:
        # Of a hundred thousand, a list alone takes a while.
        patched.setattr(chain, "numbers", None)
        assert [next(newest).link for _ in range(3)] == [5, 4, 3]
    assert [m.link for m in newest] == [2, 1]
    assert [m.link for m in chain.newest_first(30)] == [3, 2, 1]
    assert [m.link for m in chain.newest_first(20)] == [3, 2, 1]
    assert [m.link for m in chain.newest_first(5)] == []
    chain.store.remove(f"_tuskline/epochs/{3:020}.json")  # lost
    chain.store.remove(f"_tuskline/epochs/{1:020}.json")
    assert [m.link for m in chain.newest_first()] == [5, 4, 2]


def test_the_age_of_a_link_is_not_by_the_wall_clock(chain):
    head = None
    # The wall clock was a month ahead at the third, and in 1970 at the fourth.
    for link, published in enumerate([1e9, 1e9 + 1, 1e9 + 2_600_000, 7.0, 1e9 + 4], 1):
        made = Manifest("lake", link, link, link - 1, 1, published, 1000.0 + link)
        chain.publish(made, head)
        head = made
    assert chain.retire(1001.5) == 0
    assert chain.retire(1002.5) == 1
    assert chain.numbers() == [2, 3, 4, 5]
    assert chain.retire(1004.5) == 2
    assert chain.numbers() == [4, 5]


def test_a_lake_of_format_3_opens_and_its_links_count_from_the_next_one(chain):
    """There only the wall clock's time was recorded, which may have been any."""
    head = grow(chain, [1, 2, 3])
    for number in (1, 2, 3):
        path = Record(chain, f"epochs/{number:020d}.json")
        record = json.loads(path.read_text())
        del record["steady_at"], record["crc"]
        path.write_bytes(sealed_json.dump({**record, "format_version": 3}))
    head = chain.head()
    assert (head.epoch, head.steady_at) == (3, 0.0)
    following = head.next(5000.0, epoch=4)
    chain.publish(following, head)
    assert chain.retire(4999.0) == 0
    assert chain.retire(5000.0) == 3


def test_a_damaged_link_of_format_3_is_found(chain):
    grow(chain, [1])
    path = Record(chain, "epochs/00000000000000000001.json")
    record = json.loads(path.read_text())
    del record["steady_at"], record["crc"]
    old = sealed_json.dump({**record, "format_version": 3})
    path.write_bytes(old)
    assert chain.head().epoch == 1
    path.write_bytes(old.replace(b'"epoch": 1', b'"epoch": 2'))
    with pytest.raises(CorruptError, match="CRC32C"):
        chain.head()


def test_an_epoch_that_would_go_back_is_refused(chain):
    head = grow(chain, [5])
    with pytest.raises(AssertionError):
        chain.publish(head.next(head.steady_at, epoch=4), head)


@in_a_folder
def test_half_written_links_are_not_links(chain):
    grow(chain, [1])
    epochs = chain.root / "_tuskline" / "epochs"
    leftover = epochs / ".00000000000000000002.json.abc.tmp"
    leftover.write_text("{")
    assert chain.numbers() == [1]
    assert chain.head().link == 1


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"streams": {}, "tables": {"a": 1}}'])
def test_a_damaged_link_is_named_and_nothing_older_is_read(chain, content):
    grow(chain, [1, 2])
    path = Record(chain, "epochs/00000000000000000002.json")
    path.write_text(content)
    with pytest.raises(CorruptError, match=r"00000000000000000002\.json"):
        chain.head()


def test_33_a_flipped_bit_in_a_link_is_an_error_that_names_it(chain):
    grow(chain, [1, 2])
    path = Record(chain, "epochs/00000000000000000002.json")
    good = path.read_bytes()
    right = chain.head()
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    for at in choose.sample(range(len(good)), 300):
        bad = bytearray(good)
        bad[at] ^= 1 << choose.randrange(8)
        path.write_bytes(bad)
        try:
            # White space between two members may be any.
            assert chain.head() == right
        except (CorruptError, NotSupportedError) as error:
            found = error.where
            assert found == str(path)


def test_a_link_of_format_2_has_no_checksum(chain):
    grow(chain, [1])
    path = Record(chain, "epochs/00000000000000000001.json")
    record = json.loads(path.read_text())
    del record["crc"]
    path.write_text(json.dumps({**record, "format_version": 2}))
    assert chain.head().epoch == 1
    path.write_text(json.dumps(record))
    with pytest.raises(CorruptError, match="CRC32C"):
        chain.head()


def test_a_lake_of_format_3_opens_and_damage_in_it_is_found(chain):
    """There a table had no shape; the checksum covers what there was."""
    record = first().to_json()
    del record["tables"]["shop.public.t"]["shape"]
    record["format_version"] = 3
    path = Record(chain, "epochs/00000000000000000001.json")
    path.write_bytes(sealed_json.dump(record))
    assert chain.head().tables["shop.public.t"].shape == ""
    path.write_text(path.read_text().replace('"offset": 3', '"offset": 4'))
    with pytest.raises(CorruptError, match="CRC32C"):
        chain.head()


def test_quarantined_rows_of_a_lake_of_format_5_are_found(chain):
    record = first().to_json()
    table = record["tables"]["shop.public.t"]
    for name in ("quarantined_rows", "quarantine_files", "retry_quarantined"):
        del table[name]
    table.update(unfit_rows=3, unfit_files=["unfit/a.parquet"], retry_unfit=True)
    record["format_version"] = 5
    path = Record(chain, "epochs/00000000000000000001.json")
    path.write_bytes(sealed_json.dump(record))
    found = chain.head().tables["shop.public.t"]
    assert (found.quarantined_rows, found.quarantine_files) == (3, ("unfit/a.parquet",))
    assert found.retry_quarantined


def test_tables_of_a_lake_of_format_6_that_were_not_copied_are_found(chain):
    record = first().to_json()
    del record["not_copied"]
    record.update(set_aside={"shop.public.x": "permission denied"}, format_version=6)
    path = Record(chain, "epochs/00000000000000000001.json")
    path.write_bytes(sealed_json.dump(record))
    assert chain.head().not_copied == {"shop.public.x": "permission denied"}


@pytest.mark.parametrize("of", ["tables", "streams", "link"])
def test_a_member_that_only_a_newer_version_knows_is_no_damage(of):
    record = json.loads(json.dumps(first().to_json()))
    inner = record if of == "link" else next(iter(record[of].values()))
    inner["of_a_newer_version"] = 1
    with pytest.raises(NotSupportedError, match="a newer version has written the lake") as caught:
        Manifest.from_json(record, "1.json")
    assert caught.value.repair == "install a newer tuskline"


def test_a_newer_format_is_refused_by_name(chain):
    grow(chain, [1])
    path = Record(chain, "epochs/00000000000000000001.json")
    newer = sealed_json.FORMAT_VERSION + 1
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": newer}))
    with pytest.raises(NotSupportedError, match=f"has format {newer}"):
        chain.head()


def test_a_lake_is_made_once_and_has_one_format(chain):
    assert chain.initialise("another log", "iceberg") == chain.identity()["lake"]
    assert chain.identity()["log_id"] == "log"
    with pytest.raises(LakeError, match="this lake's format is 'iceberg', not 'delta'"):
        chain.initialise("log", "delta")


@pytest.mark.parametrize("store", ["abfs://c/lake", "hdfs://host/lake", "gs://b/l"])
def test_stores_that_are_not_supported_are_refused_by_name(store):
    with pytest.raises(NotSupportedError, match=store.partition(":")[0]):
        open_chain(store)


def test_no_lake_is_an_error(tmp_path):
    with pytest.raises(LakeError, match="no lake"):
        open_chain(tmp_path).identity()


@in_a_folder
def test_waiting_for_an_epoch(chain):
    head = grow(chain, [1])
    with pytest.raises(DeadlineError, match="version 7"):
        wait_for_epoch(chain, 7, timeout=0.1)
    timer = threading.Timer(0.2, lambda: chain.publish(head.next(head.steady_at, epoch=8), head))
    timer.start()
    assert wait_for_epoch(open_chain(f"file://{chain.root}"), 7, timeout=30).epoch == 8
    timer.join()


# -- the newest link is lost --------------------------------------------------------------------------


def lost_link(chain, head):
    return Record(chain, f"epochs/{head.link:020d}.json")


@in_a_folder
def test_a_lost_newest_link_is_told_by_takeover_verify_and_read(chain, monkeypatch):
    one = first()
    chain.publish(one, None)
    second = one.next(1.0, epoch=9)
    chain.publish(second, one)
    third = second.next(1.0, term=2)
    chain.publish(third, second)
    assert chain.recorded_newest() == PublishedLink(3, 9, 2)
    file = lost_link(chain, third)
    kept = file.read_bytes()
    file.unlink()
    told = r"link 3 \(epoch 9\) was published and is lost; .* link 2 \(epoch 9\)"
    site = LakeSite(chain, Mock())
    with pytest.raises(CorruptError, match=told):
        takeover.carry_out(takeover.take_over(lambda *_: pytest.fail("a link is made")), site.do)
    assert re.search(told, str(verify(chain, print).errors[0]))
    monkeypatch.setattr(reader, "_PATIENCE", 0.2)
    with pytest.raises(CorruptError, match=told):
        reader._newest(chain, 0)
    # Its own writer is not fenced by anybody.
    with pytest.raises(CorruptError, match=told):
        chain.publish(third.next(1.0), third)
    # Nor does one of an older term get its number.
    with pytest.raises(FencedError, match="term 2 is at link 3"):
        chain.publish(second.next(1.0), second)
    file.write_bytes(kept)
    assert reader._newest(chain, 0) == third
    assert "lost" not in str(verify(chain, print).errors)


@in_a_folder
def test_the_way_out_of_a_lost_link_is_to_forget_it(chain):
    one = first()
    chain.publish(one, None)
    second = one.next(1.0)
    chain.publish(second, one)
    lost_link(chain, second).unlink()
    Record(chain, "newest.json").unlink()
    site = LakeSite(chain, Mock())
    taken = takeover.carry_out(
        takeover.take_over(lambda _, term: one.next(1.0, term=term)), site.do
    )
    assert taken.head.link == 2


def test_31_a_writer_whose_link_was_lost_and_made_again_by_another_is_refused(chain):
    one = first()
    chain.publish(one, None)
    lost = one.next(1.0)
    chain.publish(lost, one)
    lost_link(chain, lost).unlink()
    Record(chain, "newest.json").unlink()
    chain.publish(one.next(1.0, term=2), one)
    Record(chain, "newest.json").unlink()
    with pytest.raises(FencedError, match="term 1 has ended"):
        chain.publish(lost.next(1.0, epoch=9), lost)
    assert chain.numbers() == [1, 2]


@in_a_folder
@pytest.mark.parametrize(
    "left",
    [
        "tables/s/public/docs%t4-0a/metadata/v7.metadata.json",
        "tables/s/public/docs%t1-0a/data/00000000000000000003-t4-a1.parquet",
        "tables/s/public/docs%t1-0a/quarantine/.00000000000000000003-t4-a1-rows.parquet.0a.tmp",
        "tables/s/public/docs%t4-0a/data/copy-t1-0.parquet",
        "_tuskline/staging/00000000000000000003-t4-a1/0.arrow",
    ],
)
def test_31_a_term_is_never_used_again_though_its_links_are_lost(chain, left):
    one = first()
    chain.publish(one, None)
    (chain.root / left).parent.mkdir(parents=True)
    (chain.root / left).write_text("{}")
    site = LakeSite(chain, Mock(terms=lambda _: []))
    taken = takeover.carry_out(
        takeover.take_over(lambda _, term: one.next(1.0, term=term)), site.do
    )
    assert taken.head.term == 5


@in_a_folder
def test_31_a_branch_in_a_table_shows_a_term_that_was_used(chain):
    chain.publish(first(), None)
    folder = chain.root / "tables/s/public/docs%t1-0a/metadata"
    folder.mkdir(parents=True)
    branch = {"tuskline_t7": {"snapshot-id": 1, "type": "branch"}}
    record = {"snapshots": [{"snapshot-id": 1, "summary": {}}], "refs": branch}
    (folder / "v2.metadata.json").write_text(json.dumps(record))
    tables = Mock(_refs=refs_in)
    site = LakeSite(chain, Mock(terms=lambda path: IcebergFormat.terms(tables, path)))
    assert site.do(takeover.ReadUsedTerm()) == 7


@in_a_folder
def test_a_chain_that_is_gone_as_a_whole_is_not_begun_anew(chain):
    one = first()
    chain.publish(one, None)
    lost_link(chain, one).unlink()
    site = LakeSite(chain, Mock())
    with pytest.raises(CorruptError, match="remaining one is none"):
        takeover.carry_out(takeover.take_over(lambda *_: one), site.do)


@in_a_folder
def test_a_link_that_is_lost_between_others_is_named(chain):
    links = [first()]
    chain.publish(links[0], None)
    for _ in range(4):
        links.append(links[-1].next(links[-1].steady_at + 10))
        chain.publish(links[-1], links[-2])
    chain.retire(links[1].steady_at)
    assert chain.missing() == []
    lost_link(chain, links[3]).unlink()
    assert chain.missing() == [4]
    assert "link 4 was published and is lost" in str(verify(chain, print).errors[0])


@in_a_folder
def test_a_lake_of_an_earlier_version_tells_of_no_link_yet(chain):
    one = first()
    chain.publish(one, None)
    told = Record(chain, "newest.json")
    told.unlink()
    assert chain.recorded_newest() is None
    chain.publish(one.next(1.0), one)
    assert chain.recorded_newest() == PublishedLink(2, one.epoch, one.term)
    # A writer that slept tells nothing older.
    NewestRecord(chain.store).record(one)
    assert chain.recorded_newest() == PublishedLink(2, one.epoch, one.term)
    told.write_bytes(b"{")
    assert "remove it" in verify(chain, print).errors[0].repair


# -- the newest link is found without a listing --------------------------------------------------------


def counted(chain, monkeypatch):
    """How often the records of the chain are listed from now on."""
    listed = []
    names = chain.store.names

    def counting(folder):
        listed.append(folder)
        return names(folder)

    monkeypatch.setattr(chain.store, "names", counting)
    return listed


def test_the_newest_link_is_found_from_the_recorded_one_without_a_listing(chain, monkeypatch):
    head = grow(chain, [1, 2, 3, 4])
    older = Record(chain, "newest.json").read_bytes()
    listed = counted(chain, monkeypatch)
    for epoch in (5, 6, 7):
        following = head.next(head.steady_at, epoch=epoch)
        chain.publish(following, head)
        head = following
    assert chain.head() == head
    # Its writer died between its last links and their record.
    Record(chain, "newest.json").write_bytes(older)
    assert chain.head() == head
    assert listed == []


@pytest.mark.parametrize("record", [None, b"{"], ids=["none", "damaged"])
def test_without_a_record_the_newest_link_is_found_by_a_listing(chain, monkeypatch, record):
    head = grow(chain, [1, 2, 3])
    newest = Record(chain, "newest.json")
    newest.unlink() if record is None else newest.write_bytes(record)
    listed = counted(chain, monkeypatch)
    assert chain.head() == head
    assert len(listed) == 1


def test_a_recorded_link_that_retention_removed_is_not_the_newest(chain):
    """Nor one of that number that a writer which slept has just created again, and will take away."""
    head = grow(chain, [1, 2, 3])
    older, third = Record(chain, "newest.json").read_bytes(), head
    for epoch in (4, 5, 6):
        following = head.next(head.steady_at + 1, epoch=epoch)
        chain.publish(following, head)
        head = following
    assert chain.retire(head.steady_at - 1) == 4
    # It slept before it replaced the record.
    Record(chain, "newest.json").write_bytes(older)
    assert chain.head() == head
    Record(chain, "epochs/00000000000000000003.json").write_bytes(sealed_json.dump(third.to_json()))
    assert chain.head() == head


def test_a_takeover_finds_links_behind_a_gap_that_the_record_is_older_than(chain):
    head = grow(chain, [1, 2])
    older = Record(chain, "newest.json").read_bytes()
    for epoch in (3, 4):
        following = head.next(head.steady_at, epoch=epoch)
        chain.publish(following, head)
        head = following
    Record(chain, "newest.json").write_bytes(older)
    Record(chain, "epochs/00000000000000000003.json").unlink()
    assert LakeSite(chain, Mock()).do(takeover.ReadHead()) == head


# -- the outcome of a publication was not known --------------------------------------------------------


def test_31_a_link_of_ones_own_that_arrived_late_is_no_other_writer_s(chain):
    """The request was given up as lost, and carried out after the writer had built another link."""
    head = grow(chain, [1])
    own = head.next(head.steady_at, epoch=2, writer="mine")
    Record(chain, "epochs/00000000000000000002.json").write_bytes(sealed_json.dump(own.to_json()))
    with pytest.raises(UnavailableError, match="link 2 was published by an earlier attempt"):
        chain.publish(head.next(head.steady_at, epoch=3, writer="mine"), head)
    assert chain.head() == own
    with pytest.raises(FencedError):
        chain.publish(head.next(head.steady_at, epoch=3, writer="another"), head)


def test_31_of_two_takeovers_with_equal_term_and_link_one_has_it(chain):
    head = grow(chain, [1])
    one, other = (head.next(head.steady_at, term=2, writer=name) for name in ("one", "other"))
    chain.publish(one, head)
    with pytest.raises(FencedError):
        chain.publish(other, head)
    assert chain.head() == one
