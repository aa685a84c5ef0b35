"""A lake's records in an object store: what answers mean, and processes that show by beats that they live."""

import gc
import os
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from spark_consumers.lake.manifest import reader_leases
from spark_consumers.lake.manifest.chain import Chain
from spark_consumers.lake.manifest.reader_leases import ReaderLease, Readers
from spark_consumers.lake.status import LakeStatus, read_status
from spark_consumers.lake.store.lake_store import Created, StoreOptions
from spark_consumers.lake.store.living import AT_ONCE, DEAD_AFTER, LAPSE, Living, Silence
from spark_consumers.lake.store.object_store import ObjectStore
from spark_consumers.lake.writer import requests
from spark_consumers.lake.writer.presence import DRIVERS, Presence
from spark_consumers.spark import buckets
from walsender_bridge.errors import (
    CorruptError,
    LakeError,
    NotSupportedError,
    UnavailableError,
    UsageError,
)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def store():
    memory = MemoryStore()
    return ObjectStore("s3://bucket/lake", memory, memory)


def with_answers(monkeypatch, *faults):
    """Each creation is carried out, and then answered by the next of `faults`."""
    put, left = obstore.put, list(faults)

    def faulty(*given: Any, mode: Any = None, **how: Any) -> Any:
        try:
            return put(*given, mode=mode, **how)
        finally:
            if mode == "create" and left:
                raise left.pop(0)

    monkeypatch.setattr(obstore, "put", faulty)


def test_a_record_is_read_listed_replaced_put_aside_and_removed(store):
    assert store.create("a/1", b"one") is Created.WON
    assert store.create("a/1", b"two") is Created.LOST
    assert (store.read("a/1"), store.read_range("a/1", 1, 5)) == (b"one", b"ne")
    store.replace("a/2", b"2")
    store.replace("a/2/x", b"not of this folder")
    assert sorted(store.names("a")) == ["1", "2"]
    assert store.names("nothing") == []
    store.put_aside("a/1", "a/1.corrupt")
    assert (store.exists("a/1"), store.exists("a/1.corrupt")) == (False, True)
    store.remove("a/2")
    store.remove("a/2")
    with pytest.raises(FileNotFoundError, match="s3://bucket/lake/a/2"):
        store.read("a/2")


def test_a_win_whose_answer_was_lost_is_a_win(store, monkeypatch):
    with_answers(monkeypatch, GenericError("timed out"))
    assert store.create("a", b"mine") is Created.WON
    with_answers(monkeypatch, GenericError("timed out"))
    assert store.create("a", b"another's") is Created.LOST


def test_an_outcome_that_stays_unknown_is_an_error_and_may_be_repeated(store, monkeypatch):
    silent = ObjectStore(store.location, store._once, store._repeating, outcome=0.3)
    with monkeypatch.context() as cut:

        def silence(*_: Any, **__: Any) -> Any:
            raise GenericError("no route to host")

        cut.setattr(obstore, "put", silence)
        cut.setattr(obstore, "get", silence)
        with pytest.raises(UnavailableError, match=r"not known whether .* no route") as found:
            silent.create("a", b"mine")
        assert found.value.where == "s3://bucket/lake/a"
    assert silent.create("a", b"mine") is Created.WON


def test_a_server_that_replaces_instead_of_creating_is_refused(store, monkeypatch):
    put = obstore.put

    def unconditionally(*given: Any, **how: Any) -> Any:
        return put(*given, **{**how, "mode": "overwrite"})

    monkeypatch.setattr(obstore, "put", unconditionally)
    with pytest.raises(NotSupportedError, match="ignores If-None-Match"):
        Chain(store).initialise("log", "iceberg")
    assert store.names("_tuskline") == []


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3:///prefix",
        "https://bucket/lake",
        "s3://bucket/a?versionId=1",
        "s3://bucket/a//b",
        "s3://bucket/./b",
        "s3://bucket/a/..",
        "s3://[bucket/a",
    ],
)
def test_what_is_no_url_of_a_lake_in_a_bucket_is_refused(url):
    with pytest.raises(UsageError, match="not the URL of a lake in a bucket"):
        ObjectStore.at(url, StoreOptions())


@pytest.mark.parametrize(
    ("endpoint", "why"),
    [
        ("127.0.0.1:9000", "not a URL"),
        ("https://user:secret@host", "not a URL"),
        ("http://host:9000", "does not use TLS"),
    ],
)
def test_an_endpoint_that_cannot_be_used_is_refused_before_it_is_tried(endpoint, why):
    with pytest.raises(UsageError, match=why) as found:
        ObjectStore.at("s3://bucket/lake", StoreOptions(endpoint))
    assert "secret" not in str(found.value)


def test_keys_in_a_url_are_refused_and_not_shown():
    with pytest.raises(UsageError, match="must not contain keys") as found:
        ObjectStore.at("s3://key:secret@bucket/lake", StoreOptions())
    assert "secret" not in str(found.value)
    assert ObjectStore.at("s3://bucket/lake/", StoreOptions()).location == "s3://bucket/lake"


def test_a_forked_child_does_not_hang(store, monkeypatch):
    store.replace("a", b"1")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(NotSupportedError, match="forked"):
        store.read("a")


def test_a_lake_that_was_copied_to_another_prefix_is_refused(store):
    Chain(store).initialise("log", "iceberg")
    copy = ObjectStore("s3://bucket/copy", store._once, store._repeating)
    with pytest.raises(LakeError, match="this lake belongs at s3://bucket/lake"):
        Chain(copy).identity()
    assert str(Chain(store).root) == "s3://bucket/lake"


def test_requests_and_the_status_are_records_too(store):
    chain = Chain(store)
    chain.initialise("log", "iceberg")
    made = [requests.ask(chain, kind, ["s.a.b"]) for kind in ("pause", "resume")]
    store.replace("_tuskline/requests/0.json", b"{")
    assert list(requests.waiting(chain)) == made
    assert store.exists("_tuskline/requests/0.corrupt")
    with pytest.raises(CorruptError, match="could not be read"):
        requests.wait(chain, requests.Request("0", "pause", ()), timeout=0.0)
    requests.forget(chain, made[0])
    assert list(requests.waiting(chain)) == made[1:]
    assert read_status(chain) == LakeStatus()


# -- beats --------------------------------------------------------------------------------------------


def test_silence_is_counted_from_the_first_sight_of_a_content():
    silence = Silence()
    assert silence.of({"a": b"1"}, 10.0) == {"a": 0.0}
    assert silence.of({"a": b"1", "b": b"1"}, 15.0) == {"a": 5.0, "b": 0.0}
    assert silence.of({"a": b"2"}, 20.0) == {"a": 0.0}
    # One that was gone meanwhile is another one.
    assert silence.of({"a": b"2", "b": b"1"}, 30.0) == {"a": 10.0, "b": 0.0}


def test_a_reader_counts_as_dead_when_it_was_silent_for_long_by_the_housekeeper_s_clock(
    store, clock
):
    reader = ReaderLease(store)
    with reader.resolving():
        reader.keep(reader, 7)
    readers = Readers(store, clock)
    for _ in range(3):
        clock.now += DEAD_AFTER - 1
        assert readers.held_from() == 7
        reader.refresh()
    assert readers.held_from() == 7
    clock.now += DEAD_AFTER - 1
    assert readers.held_from() == 7
    # A housekeeper that has just begun knows nothing of its silence.
    assert Readers(store, clock).held_from() == 7
    clock.now += 1
    assert readers.held_from() is None
    assert store.names("_tuskline/readers") == []


def test_a_reader_that_slept_for_long_holds_another_record(store, clock):
    """Its old one may have been found silent, and be removed at any moment."""
    reader = ReaderLease(store, clock)
    (old,) = store.names("_tuskline/readers")
    clock.now += LAPSE
    with reader.resolving():
        assert sorted(store.names("_tuskline/readers")) != [old]
        store.remove(f"_tuskline/readers/{old}")
        assert Readers(store).held_from() == 0
        reader.keep(reader, 3)
    assert Readers(store).held_from() == 3
    assert len(store.names("_tuskline/readers")) == 1


def test_a_beat_that_took_long_is_repeated_under_another_name(store, clock, monkeypatch):
    reader = ReaderLease(store, clock)
    write = reader._record.write

    def slowly(content: bytes) -> None:
        clock.now += LAPSE
        write(content)

    monkeypatch.setattr(reader._record, "write", slowly)
    reader.refresh()
    assert len(store.names("_tuskline/readers")) == 2


def test_after_a_beat_that_failed_the_record_has_another_name(store, clock, monkeypatch):
    """A request that was given up may be carried out later, over a newer one that holds more."""
    reader = ReaderLease(store, clock)
    (old,) = store.names("_tuskline/readers")

    def lost(_: bytes) -> None:
        raise UnavailableError("no answer")

    monkeypatch.setattr(reader._record, "write", lost)
    with reader.resolving():
        store.replace(f"_tuskline/readers/{old}", b"9" * 20)  # it arrives now
        assert Readers(store).held_from() == 0
        reader.keep(reader, 4)
    assert Readers(store).held_from() == 4


def test_a_reader_without_permission_to_write_reads_without_a_lease(store, monkeypatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise LakeError("the object store refuses access")

    monkeypatch.setattr(reader_leases, "_leases", {})
    monkeypatch.setattr(store, "replace_once", refuse)
    assert reader_leases.lease_on(store) is None


def test_what_nobody_needs_any_more_is_given_up(store, monkeypatch):
    monkeypatch.setattr(reader_leases, "HOLD", 0.0)
    reader = ReaderLease(store)

    class Snapshot:
        pass

    snapshot = Snapshot()
    reader.keep(snapshot, 5)
    reader.refresh()
    assert Readers(store).held_from() == 5
    del snapshot
    gc.collect()
    reader.refresh()
    assert Readers(store).held_from() == 10**20 - 1


def test_drivers_see_each_other_and_a_dead_one_s_sign_goes(store, clock):
    older, newer = Presence(store), Presence(store)
    older.claim(3)
    sign = newer.others()[older.name]
    assert (sign.term, sign.is_dead) == (3, False)
    older.claim(3)
    assert newer.others()[older.name].beat != sign.beat
    dead = store.read(f"{DRIVERS}/{older.name}")
    older.close()
    assert newer.others() == {}
    store.replace(f"{DRIVERS}/dead", dead)
    living = Living(store, DRIVERS, clock, believed_after=lambda _: AT_ONCE)
    assert [record.name for record in living.records()] == ["dead"]
    clock.now += DEAD_AFTER
    assert living.records() == []
    assert store.names(DRIVERS) == []


def test_the_environment_may_allow_an_endpoint_without_tls(monkeypatch):
    for name, value in {"ENDPOINT_URL": "http://127.0.0.1:1", "ACCESS_KEY_ID": "me"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
    asks = (
        lambda: ObjectStore.at("s3://b/lake", StoreOptions(region="here")).replace_once("a", b""),
        lambda: buckets.read("s3://b/lake", "a", None, "here"),
    )
    for ask in asks:
        monkeypatch.setenv("AWS_ALLOW_HTTP", "")
        with pytest.raises(UsageError, match=r"AWS_ENDPOINT_URL: .*does not use TLS"):
            ask()
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with pytest.raises(UnavailableError, match="error sending request"):
            ask()
