"""The chain of manifests: one writer at a time, epochs that never go back, and what is damaged is named."""

import json
import multiprocessing
import random
import threading
import time

import pytest

from spark_consumers.lakehouse.manifest import (
    COPIED,
    Manifest,
    StreamPosition,
    TableVersion,
    open_chain,
    wait_for_epoch,
)
from walsender_bridge.errors import (
    CorruptError,
    DeadlineError,
    FencedError,
    LakeError,
    NotSupportedError,
    TrimmedError,
)

FORMAT_1_TABLE = (
    *("path", "format", "snapshot_id", "schema_hash", "key", "text_columns", "start_lsn", "offset"),
    *("rows", "relation_id", "state", "stage"),
)


@pytest.fixture
def chain(tmp_path):
    chain = open_chain(tmp_path / "lake")
    chain.initialise("log", "iceberg")
    return chain


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
        made = first() if head is None else head.next()
        made = Manifest(**{**_fields(made), "epoch": epoch, "published_at": start + number})
        chain.publish(made, head)
        head = made
    return head


def _fields(manifest):
    return {name: getattr(manifest, name) for name in manifest.__dataclass_fields__}


def test_what_is_published_is_read_again(chain):
    manifest = first(set_aside={"shop.public.x": "why"})
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
    path = chain.root / "_tuskline" / "epochs" / "00000000000000000001.json"
    path.write_text(json.dumps({**record, "format_version": 1, "tables": tables}))
    head = chain.head()
    assert list(head.tables) == ["shop.public.t"]
    assert list(head.copies) == ["shop.public.u"]
    assert head.tables["shop.public.t"].layout == ()
    chain.publish(head.next(), head)
    assert chain.head().copies == head.copies


def test_of_two_writers_one_gets_the_link(chain):
    head = grow(chain, [1, 2])
    chain.publish(head.next(term=2), head)
    with pytest.raises(FencedError, match="term 2 is at link 3"):
        chain.publish(head.next(epoch=9), head)
    assert chain.head().term == 2


def _race(root, number, gate, results):
    chain = open_chain(root)
    head = chain.head()
    assert head is not None
    gate.wait()
    try:
        chain.publish(head.next(term=number + 1), head)
        results.put(number)
    except FencedError:
        results.put(None)


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
        following = head.next(term=2)
        chain.publish(following, head)
        head = following
    assert chain.retire(time.time() + 100) == 4
    with pytest.raises(FencedError):
        chain.publish(stale.next(epoch=7), stale)
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


def test_links_of_a_wrong_clock_keep_no_older_ones(chain):
    head = None
    # The third was published while the clock was a month ahead.
    for link, published in enumerate([1000.0, 1001.0, 2_600_000.0, 1003.0, 1004.0], 1):
        made = Manifest("lake", link, link, link - 1, 1, published)
        chain.publish(made, head)
        head = made
    assert chain.retire(1002.5, 1004.0) == 1
    assert chain.numbers() == [2, 3, 4, 5]
    assert chain.retire(1003.5, 1005.0) == 2
    assert chain.numbers() == [4, 5]


def test_an_epoch_that_would_go_back_is_refused(chain):
    head = grow(chain, [5])
    with pytest.raises(AssertionError):
        chain.publish(head.next(epoch=4), head)


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
    path = chain.root / "_tuskline" / "epochs" / "00000000000000000002.json"
    path.write_text(content)
    with pytest.raises(CorruptError, match=r"00000000000000000002\.json"):
        chain.head()


def test_33_a_flipped_bit_in_a_link_is_an_error_that_names_it(chain):
    grow(chain, [1, 2])
    path = chain.root / "_tuskline" / "epochs" / "00000000000000000002.json"
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
    path = chain.root / "_tuskline" / "epochs" / "00000000000000000001.json"
    record = json.loads(path.read_text())
    del record["crc"]
    path.write_text(json.dumps({**record, "format_version": 2}))
    assert chain.head().epoch == 1
    path.write_text(json.dumps(record))
    with pytest.raises(CorruptError, match="CRC32C"):
        chain.head()


def test_a_newer_format_is_refused_by_name(chain):
    grow(chain, [1])
    path = chain.root / "_tuskline" / "epochs" / "00000000000000000001.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 4}))
    with pytest.raises(NotSupportedError, match="format is 4"):
        chain.head()


def test_a_lake_belongs_to_one_log(chain):
    assert chain.initialise("log", "iceberg") == chain.identity()["lake"]
    with pytest.raises(LakeError, match="log_id"):
        chain.initialise("another", "iceberg")


@pytest.mark.parametrize("store", ["s3://bucket/lake", "hdfs://host/lake", "gs://b/l"])
def test_stores_that_are_not_supported_are_refused_by_name(store):
    with pytest.raises(NotSupportedError, match=store.partition(":")[0]):
        open_chain(store)


def test_no_lake_is_an_error(tmp_path):
    with pytest.raises(LakeError, match="no lake"):
        open_chain(tmp_path).identity()


def test_waiting_for_an_epoch(chain):
    head = grow(chain, [1])
    with pytest.raises(DeadlineError, match="version 7"):
        wait_for_epoch(chain.root, 7, timeout=0.1)
    timer = threading.Timer(0.2, lambda: chain.publish(head.next(epoch=8), head))
    timer.start()
    assert wait_for_epoch(f"file://{chain.root}", 7, timeout=30).epoch == 8
    timer.join()
