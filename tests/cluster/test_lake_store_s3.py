"""A lake's own records in a bucket of a real server of S3: races, and answers that are lost behind a proxy."""

import logging
import random
import re
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import Outcome
from spark_consumers.lake.manifest.chain import Chain, Manifest
from spark_consumers.lake.manifest.reader_leases import ReaderLease, Readers
from spark_consumers.lake.store.lake_store import Created, StoreOptions
from spark_consumers.lake.store.living import DEAD_AFTER
from spark_consumers.lake.store.object_store import ObjectStore
from spark_consumers.lake.store.place import ObjectPlace, place, reach, remove_tree
from spark_consumers.lake.writer import requests
from spark_consumers.lake.writer.presence import Presence
from tests.support.lake.table_commits import ORDERS, SCHEMA, race_of_writers, snapshots, write
from tests.support.s3 import (
    BUCKET,
    KEYS,
    FaultProxy,
    gateway,
    options_at,
    s3_keys,
    s3_port,
    store_at,
)
from tests.support.waiting import wait_for
from tests.unit.test_manifest import (  # the chain's own tests, on another store
    grow,
    test_31_a_link_of_ones_own_that_arrived_late_is_no_other_writer_s,
    test_31_of_two_takeovers_with_equal_term_and_link_one_has_it,
    test_33_a_flipped_bit_in_a_link_is_an_error_that_names_it,
    test_a_copy_that_is_not_shown_is_no_table_of_the_epoch,
    test_a_lake_is_made_once_and_has_one_format,
    test_a_recorded_link_that_retention_removed_is_not_the_newest,
    test_a_takeover_finds_links_behind_a_gap_that_the_record_is_older_than,
    test_a_writer_that_slept_past_the_retention_is_refused,
    test_epochs_are_found,
    test_of_two_writers_one_gets_the_link,
    test_retention_keeps_what_was_current_then,
    test_the_newest_link_is_found_from_the_recorded_one_without_a_listing,
    test_what_is_published_is_read_again,
    test_without_a_record_the_newest_link_is_found_by_a_listing,
)
from walsender_bridge.errors import CorruptError, FencedError, LakeError, UnavailableError

__all__ = [
    "s3_keys",
    "s3_port",
    "test_31_a_link_of_ones_own_that_arrived_late_is_no_other_writer_s",
    "test_31_of_two_takeovers_with_equal_term_and_link_one_has_it",
    "test_33_a_flipped_bit_in_a_link_is_an_error_that_names_it",
    "test_a_copy_that_is_not_shown_is_no_table_of_the_epoch",
    "test_a_lake_is_made_once_and_has_one_format",
    "test_a_recorded_link_that_retention_removed_is_not_the_newest",
    "test_a_takeover_finds_links_behind_a_gap_that_the_record_is_older_than",
    "test_a_writer_that_slept_past_the_retention_is_refused",
    "test_epochs_are_found",
    "test_of_two_writers_one_gets_the_link",
    "test_retention_keeps_what_was_current_then",
    "test_the_newest_link_is_found_from_the_recorded_one_without_a_listing",
    "test_what_is_published_is_read_again",
    "test_without_a_record_the_newest_link_is_found_by_a_listing",
]

# The server is built once on each machine, which takes minutes.
pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("s3_keys")]
RACES, WRITERS = 100, 8


@pytest.fixture
def prefix() -> str:
    return f"lake-{uuid.uuid4().hex}"


@pytest.fixture
def store(s3_port: int, prefix: str, s3_keys: None) -> ObjectStore:
    return store_at(s3_port, prefix)


@pytest.fixture
def chain(store: ObjectStore) -> Chain:
    made = Chain(store)
    made.initialise("log", "iceberg")
    return made


@pytest.fixture
def proxy(s3_port: int) -> Iterator[FaultProxy]:
    with FaultProxy(s3_port).running() as running:
        yield running


def race(acts: Sequence[Callable[[], object]]) -> list[object]:
    """All at once, each in a thread of its own; what each returned or raised."""
    gate = threading.Barrier(len(acts))

    def run(act: Callable[[], object]) -> object:
        gate.wait()
        try:
            return act()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(acts)) as threads:
        return list(threads.map(run, acts))


def created_at_once(stores: Sequence[ObjectStore], name: str) -> int:
    """All create the record at once, each with its number as the content; which one has won."""
    won = race([partial(store.create, name, b"%d" % n) for n, store in enumerate(stores)])
    assert Counter(won) == {Created.WON: 1, Created.LOST: len(stores) - 1}
    return won.index(Created.WON)


def test_31_of_writers_that_create_one_record_at_once_one_wins(s3_port: int, prefix: str) -> None:
    stores = [store_at(s3_port, prefix) for _ in range(WRITERS)]
    for number in range(RACES):
        name = f"_tuskline/epochs/{number:020d}.json"
        winner = created_at_once(stores, name)
        assert stores[(winner + 1) % WRITERS].read(name) == b"%d" % winner
        assert stores[number % WRITERS].exists(name)
    assert len(stores[0].names("_tuskline/epochs")) == RACES


def test_31_of_takeovers_at_once_under_one_term_one_gets_the_link(
    s3_port: int, chain: Chain
) -> None:
    head = grow(chain, [1])
    prefix = chain.store.location.rpartition("/")[2]
    chains = [Chain(store_at(s3_port, prefix)) for _ in range(WRITERS)]
    for _ in range(10):
        links = [
            head.next(head.steady_at, term=head.term + 1, writer=f"{n}") for n in range(WRITERS)
        ]
        won = race([partial(chains[n].publish, links[n], head) for n in range(WRITERS)])
        assert Counter(type(each) for each in won) == {type(None): 1, FencedError: WRITERS - 1}
        head = links[won.index(None)]
        assert chain.head() == head


@pytest.mark.parametrize("fault", ["500", "503", "drop", "hang", "lost", "twice", "late"])
def test_a_writer_s_own_win_is_a_win_whatever_the_answer(
    proxy: FaultProxy, store: ObjectStore, prefix: str, fault: str
) -> None:
    late = store_at(proxy.port, prefix, answer=1.0)
    proxy.faults = [fault]
    assert late.create("a", b"mine") is Created.WON
    assert store.read("a") == b"mine"
    # Another one's record is there: the same answers, and it has lost.
    proxy.faults = [fault]
    assert late.create("a", b"another's") is Created.LOST
    assert set(proxy.arrive()) <= {412}
    assert store.read("a") == b"mine"


def test_31_a_link_whose_request_arrives_after_it_was_given_up_is_gone_on_from(
    proxy: FaultProxy, chain: Chain, prefix: str
) -> None:
    head = grow(chain, [1])
    mine = Chain(store_at(proxy.port, prefix, answer=1.0, outcome=0.0))
    proxy.faults = ["late"]
    own = head.next(head.steady_at, epoch=2, writer="mine")
    with pytest.raises(UnavailableError, match="not known whether the record was created"):
        mine.publish(own, head)
    assert mine.head() == head
    assert proxy.arrive() == [200]
    with pytest.raises(UnavailableError, match="published by an earlier attempt"):
        mine.publish(head.next(head.steady_at, epoch=3, writer="mine"), head)
    assert mine.head() == own
    mine.publish(own.next(own.steady_at, epoch=3), own)
    assert chain.head() == mine.head()


def test_of_racing_writers_whose_answers_are_lost_one_wins(
    proxy: FaultProxy, s3_port: int, prefix: str
) -> None:
    """Half of them behind the proxy, which loses an answer of each race."""
    ports = [proxy.port, s3_port] * 2
    stores = [store_at(port, prefix, answer=1.0) for port in ports]
    for number in range(20):
        proxy.faults = [["500", "drop", "twice", "lost", "late"][number % 5]]
        winner = created_at_once(stores, f"{number}")
        proxy.arrive()
        assert stores[1].read(f"{number}") == b"%d" % winner


def test_the_newest_link_of_a_long_chain_costs_four_requests(
    proxy: FaultProxy, chain: Chain, prefix: str
) -> None:
    head = grow(chain, range(1, 31))
    reader = Chain(store_at(proxy.port, prefix))
    assert reader.head() == head
    assert proxy.requests == {"GET": 2, "HEAD": 2}


def test_a_bucket_that_is_not_there_and_a_server_that_does_not_answer_are_named(
    s3_port: int,
) -> None:
    nothing = store_at(s3_port, "lake", bucket="nothing-here")
    acts: list[Callable[[], object]] = [
        partial(nothing.create, "a", b"1"),
        partial(nothing.names, "a"),
    ]
    for act in acts:
        with pytest.raises(LakeError, match="the bucket does not exist"):
            act()
    away = store_at(1, "lake", answer=0.5, outcome=0.5)
    with pytest.raises(UnavailableError, match="not known whether"):
        away.create("a", b"1")


def test_refused_access_is_named_and_no_keys_are_shown(
    s3_port: int, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    if gateway() is None:
        pytest.skip("moto checks no signatures")
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-wrong-secret")
    stranger = store_at(s3_port, "lake")
    acts: list[Callable[[], object]] = [
        partial(stranger.create, "a", b"1"),
        partial(stranger.replace, "a", b"1"),
        partial(stranger.read, "a"),
        partial(stranger.names, "a"),
        partial(stranger.exists, "a"),
        partial(stranger.remove, "a"),
    ]
    for act in acts:
        with pytest.raises(LakeError, match="refuses access") as found:
            act()
        assert not any(key in str(found.value) for key in (*KEYS.values(), "a-wrong-secret"))
    assert "a-wrong-secret" not in caplog.text


def test_the_endpoint_and_the_region_may_be_of_the_environment(
    s3_port: int, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    found = ObjectStore.at(f"s3://{BUCKET}/{prefix}", StoreOptions(allow_http=True))
    assert found.create("a", b"1") is Created.WON


def test_readers_drivers_and_requests_meet_in_a_bucket(
    s3_port: int, chain: Chain, prefix: str
) -> None:
    elsewhere = store_at(s3_port, prefix)
    lease = ReaderLease(elsewhere)
    with lease.resolving():
        assert Readers(chain.store).held_from() == 0
        lease.keep(lease, 4)
    now = time.monotonic()
    times = iter([now, now + DEAD_AFTER - 1, now + DEAD_AFTER + 1])
    readers = Readers(chain.store, lambda: next(times))
    assert [readers.held_from() for _ in range(3)] == [4, 4, None]
    mine, other = Presence(chain.store), Presence(elsewhere)
    try:
        mine.claim(5)
        beat = other.others()[mine.name].beat
        wait_for(lambda: other.others()[mine.name].beat != beat, 30, "the next beat")
    finally:
        mine.close()
    assert other.others() == {}
    asked = requests.ask(Chain(elsewhere), "pause", ["shop.public.t"])
    assert list(requests.waiting(chain)) == [asked]


def test_a_chain_of_many_links_is_listed_over_several_pages(chain: Chain) -> None:
    """A listing has 1,000 names a page."""
    link = Manifest("lake", 1, 1, 0, 1, 1000.0)
    chain.publish(link, None)
    content = chain.store.read("_tuskline/epochs/00000000000000000001.json")
    for number in range(2, 1103):
        chain.store.replace(f"_tuskline/epochs/{number:020d}.json", content)
    assert chain.numbers() == list(range(1, 1103))


def test_of_writers_that_commit_to_a_table_at_once_one_wins(s3_port: int, prefix: str) -> None:
    at = f"s3://{BUCKET}/{prefix}"
    reach(at, options_at(s3_port))
    catalog = FolderCatalog(place(at))
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
    for _ in range(RACES // 4):
        race_of_writers(catalog)


@pytest.mark.parametrize("fault", ["500", "503", "drop", "lost", "late", "twice"])
def test_a_commit_whose_answer_is_lost_is_made_once(
    proxy: FaultProxy, prefix: str, fault: str
) -> None:
    at = f"s3://{BUCKET}/{prefix}"
    reach(at, options_at(proxy.port))
    catalog = FolderCatalog(place(at))
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
    there = catalog.load(ORDERS)
    assert there is not None
    commit, snapshot = write(ORDERS, there)
    proxy.faults = [fault]
    assert catalog.commit(commit) is Outcome.WON
    proxy.arrive()
    found = catalog.load(ORDERS)
    assert found is not None
    assert snapshots(found) == [snapshot]
    # A second writer that has loaded the same table is refused, whatever becomes of the answer.
    proxy.faults = [fault]
    assert catalog.commit(write(ORDERS, there)[0]) is Outcome.LOST


def test_a_flipped_bit_in_the_metadata_of_a_table_is_noticed(s3_port, seed):
    at, draw = f"s3://{BUCKET}/{uuid.uuid4().hex}", random.Random(seed)
    reach(at, options_at(s3_port))
    catalog = FolderCatalog(place(at))
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
    there = catalog.load(ORDERS)
    assert there is not None
    file = ObjectPlace(there.location)
    good = file.read_bytes()
    # Without its name and form nothing is compared, and nothing else is wrong.
    seal = re.search(rb'"tuskline.commit":"[^"]*"', good)
    assert seal is not None
    for position in draw.sample([*range(seal.start()), *range(seal.end(), len(good))], 60):
        flipped = bytes([good[position] ^ 1 << draw.randrange(8)])
        file.replace_by(good[:position] + flipped + good[position + 1 :])
        with pytest.raises(CorruptError, match="metadata"):
            catalog.load(ORDERS)
    file.replace_by(good)
    assert catalog.load(ORDERS) == there


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("expired", r"\(ExpiredToken\)\nHINT: .*have expired"),
        ("skewed", r"Skewed\)\nHINT: .*the clock"),
    ],
)
def test_keys_that_expire_and_a_wrong_clock_are_named(s3_port, refusal, said):
    proxy = FaultProxy(s3_port)
    with proxy.running():
        store = store_at(proxy.port, uuid.uuid4().hex)
        store.replace("record", b"1")
        proxy.choose = lambda *_: refusal
        for ask in (
            lambda: store.read("record"),
            lambda: store.replace("record", b"2"),
            lambda: store.create("another", b"3"),
            lambda: store.names(""),
        ):
            with pytest.raises(LakeError, match=said):
                ask()


@pytest.mark.parametrize("prefix", ["a b/100%/lake", "pr%41/l+1&2=3", "日本/ü/lake"])
def test_lakes_of_many_characters_keep_to_themselves(s3_port, prefix):
    root = f"s3://{BUCKET}/{uuid.uuid4().hex}/{prefix}"
    name = "tables/sh op/public/%C3%84rger%2E1%t1-0a/data/1.parquet"
    lakes = [ObjectPlace(root), ObjectPlace(f"{root}2"), ObjectPlace(f"{root} 2")]
    for lake in lakes:
        reach(str(lake), options_at(s3_port))
        assert (lake / name).create(str(lake).encode())
    for lake in lakes:
        assert (lake / name).read_bytes() == str(lake).encode()
        assert [str(file) for file in (lake / name).parent.iterdir()] == [f"{lake}/{name}"]
    remove_tree(lakes[0])
    assert [(lake / name).exists() for lake in lakes] == [False, True, True]


def test_more_names_than_a_page_of_a_listing_has_are_all_found(s3_port):
    store = store_at(s3_port, uuid.uuid4().hex)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: store.create(f"folder/{i}", b"%d" % i), range(1200)))
    assert sorted(map(int, store.names("folder"))) == list(range(1200))
    store.remove_below("folder")
    assert store.names("folder") == []
