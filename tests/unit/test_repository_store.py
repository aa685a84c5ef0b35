"""The repository's file: a restart finds the state as it was; what is damaged or newer is named."""

import contextlib
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.test_repository import report
from walsender_bridge.change_log.protocol import Position, ReplicaReport
from walsender_bridge.change_log.repository.core import (
    ConsumerSeen,
    Created,
    LogServerSeen,
    Record,
    Repository,
    RepositoryTick,
    StreamCreated,
    TermGiven,
    TrimDecided,
    VersionRaised,
    record_from_json,
)
from walsender_bridge.change_log.repository.record_store import FoldedStore
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.errors import ConfigError, CorruptError, NotSupportedError, UnavailableError


def fill(store: FoldedStore, commits: int) -> None:
    if not store.state.log_id:
        store.append(Created("log"))
        store.append(StreamCreated("a", ("k",)))
        store.append(StreamCreated("idle", ("k",)))
    for _ in range(commits):
        last = store.state.streams["a"].last.context
        version, end = store.state.version, last.end
        store.append(RepositoryTick(0.0, (report("a", version, end, 1),)))
        store.append(RepositoryTick(0.0, (report("a", version + 1, end + 1, 0),), issue=False))


@pytest.mark.parametrize("checkpoint_every", [1, 2, 7, 1000])
def test_a_restart_at_any_moment_finds_the_same_state(
    tmp_path: Path, checkpoint_every: int
) -> None:
    path = tmp_path / "repository.sqlite"
    expected: dict[str, object] | None = None
    for _ in range(10):
        store = RepositoryStore(path, checkpoint_every=checkpoint_every)
        if expected is not None:
            assert store.state.to_record() == expected
        fill(store, 3)
        expected = store.state.to_record()
        store.close()
    assert store.state.version == 30


def test_history_that_a_consumer_needs_survives_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "r"
    store = RepositoryStore(path, checkpoint_every=7)
    fill(store, 1)
    store.append(ConsumerSeen("lake", 1, until=100.0))
    fill(store, 30)
    store.append(ConsumerSeen("lake", 20, until=100.0))
    fill(store, 1)
    stream = store.state.streams["a"]
    assert [each.version for each in stream.past] == list(range(20, 32))
    assert [c.context.version for c in stream.history] == [32]
    store.close()
    again = RepositoryStore(path)
    assert again.state.streams["a"] == stream
    again.close()


def test_versions_do_not_grow_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r"
    sizes = []
    for _ in range(3):
        store = RepositoryStore(path, checkpoint_every=20)
        fill(store, 120)
        store.close()
        sizes.append(path.stat().st_size)
    assert sizes[2] <= sizes[0] + 8192


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 3")
    db.close()


def _rubbish(path: Path) -> None:
    path.write_bytes(b"rubbish" * 1000)


def _hole(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("DELETE FROM record WHERE number = 3")
    db.close()


def _wrong(path: Path) -> None:
    with sqlite3.connect(path) as db:
        body = json.dumps({"kind": "No"})
        db.execute("UPDATE record SET body = ?, crc = NULL WHERE number = 3", [body])
    db.close()


def _digit(path: Path) -> None:
    """A record that can be folded, and is not what was written."""
    with sqlite3.connect(path) as db:
        changed = db.execute(
            "UPDATE record SET body = replace(body, '\"term\":1', '\"term\":3') WHERE number = 4"
        )
        assert changed.rowcount == 1
    db.close()


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (_newer, NotSupportedError, "format 3"),
        (_rubbish, CorruptError, "not a database"),
        (_hole, CorruptError, "record 3 is missing"),
        (_wrong, CorruptError, "No"),
        (_digit, CorruptError, "record 4 does not match its checksum"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_named(
    tmp_path: Path, harm: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    path = tmp_path / "r"
    store = RepositoryStore(path)
    fill(store, 5)
    store.close()
    harm(path)
    with pytest.raises(error, match=message) as raised:
        RepositoryStore(path)
    # Nothing is lost by a rebuild; in a new log all tables would be copied again.
    assert ("`tuskline log rebuild`" in str(raised.value)) == (error is CorruptError)


@pytest.mark.parametrize(
    ("table", "column", "message"),
    [
        ("checkpoint", "body", "the checkpoint does not match"),
        ("commits", "position", "commit .* of stream .* does not match"),
        ("commits", "context", "commit .* of stream .* does not match"),
    ],
)
def test_a_digit_that_changed_in_a_checkpoint_is_named(
    tmp_path: Path, table: str, column: str, message: str
) -> None:
    path = tmp_path / "r"
    store = RepositoryStore(path, checkpoint_every=5)
    fill(store, 6)
    store.close()
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE {table} SET {column} = replace({column}, '1', '3')")
    db.close()
    with pytest.raises(CorruptError, match=message) as caught:
        RepositoryStore(path)
    assert "docs/log-lost.md" in caught.value.repair


def test_a_file_of_format_1_is_read_and_gets_checksums(tmp_path: Path) -> None:
    path = tmp_path / "r"
    store = RepositoryStore(path, checkpoint_every=7)
    fill(store, 12)
    state = store.state.to_record()
    store.close()
    with sqlite3.connect(path) as db:
        for table in ("record", "checkpoint", "commits"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            db.execute(f"ALTER TABLE {table} DROP COLUMN crc")
        db.execute("PRAGMA user_version = 1")
    db.close()
    store = RepositoryStore(path, checkpoint_every=7)
    assert store.state.to_record() == state
    fill(store, 1)
    state = store.state.to_record()
    store.close()
    again = RepositoryStore(path)
    assert again.state.to_record() == state
    again.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(crc) FROM record").fetchone()[0]
        assert db.execute("PRAGMA user_version").fetchone()[0] == 2
    db.close()


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


#: Records as earlier releases write them.
RECORDS: list[tuple[Record, str]] = [
    (Created("log"), '{"kind":"Created","log_id":"log"}'),
    (LogServerSeen("k", "h:1"), '{"kind":"LogServerSeen","log_server":"k","address":"h:1"}'),
    (StreamCreated("s", ("k",)), '{"kind":"StreamCreated","stream":"s","replicas":["k"]}'),
    (TermGiven("s", 2), '{"kind":"TermGiven","stream":"s","term":2}'),
    (
        RepositoryTick(
            1.5,
            (ReplicaReport("k", "s", "log", 2, 0, 1, 4, Position(5, 0x100, 7, 8, 1, 40, 11), 1),),
            ({"s": 0x100},),
        ),
        (
            '{"kind":"RepositoryTick","now":1.5,"reports":[{"replica":"k","stream":"s","log_id":"log","term":2,"version":0,'
            '"local_offset":1,"length":4,"position":{"end_offset":5,"end_lsn":256,"commit_time":7,"latest_time":8,'
            '"timeline":1,"bytes_total":40,"crc":11,"history_start":1},"low_offset":1}],"barriers":[{"s":256}],'
            '"issue":true}'
        ),
    ),
    (
        ConsumerSeen("lake", None, 9.5),
        '{"kind":"ConsumerSeen","name":"lake","version":null,"until":9.5}',
    ),
    (VersionRaised(3), '{"kind":"VersionRaised","version":3}'),
]
#: The checkpoint of these records, without its commits; and the commits, a context and a position each.
CHECKPOINT = (
    '{"log_id": "log", "version": 3, "forced_version": 1, "published": 0, "next_global": 5, "clock": 1.5, "log_servers":'
    ' {"k": "h:1"}, "streams": {"s": {"replicas": ["k"], "term": 2, "latest": [3, 5, 5, 0], "applied": {"k": 0},'
    ' "members": ["k"], "sealed": false, "was_sealed": false, "trimmed": 1, "past": []}}, "consumers": {"lake": [null, 9.5]}}'
)
#: Before streams had several replicas.
EARLIER = CHECKPOINT.replace(
    ', "members": ["k"], "sealed": false, "was_sealed": false, "trimmed": 1, "past": []', ""
)
COMMITS = [
    ("[0, 1, 1, 0]", "[1, 0, 0, 0, 0, 0, 0, 1]"),
    ("[1, 1, 1, 4]", "[5, 256, 7, 8, 1, 40, 11, 1]"),
]


def test_records_and_a_checkpoint_of_an_earlier_release_are_read_and_written_byte_for_byte(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r"
    store = RepositoryStore(path)
    for record, body in RECORDS:
        assert store.append(record)
        assert record_from_json(body) == record
    state = store.state.to_record()
    store.close()
    assert rows(path, "SELECT body FROM record ORDER BY number") == [(b,) for _, b in RECORDS]
    store = RepositoryStore(path)
    assert store.state.to_record() == state
    store.checkpoint()
    store.close()
    assert rows(path, "SELECT body FROM checkpoint") == [(CHECKPOINT,)]
    assert rows(path, "SELECT context, position FROM commits ORDER BY version") == COMMITS
    for body in (CHECKPOINT, EARLIER):
        with sqlite3.connect(path) as db:
            db.execute("UPDATE checkpoint SET body = ?, crc = NULL", [body])
        db.close()
        store = RepositoryStore(path)
        assert store.state.to_record() == state
        store.close()


def test_a_trim_that_was_decided_is_known_after_a_restart_and_in_a_checkpoint(
    tmp_path: Path,
) -> None:
    store = RepositoryStore(tmp_path / "r")
    fill(store, 5)
    published = store.state.trim_limit("a", 0.0)
    assert store.append(TrimDecided("a", published, 0.0))
    assert not store.append(TrimDecided("a", published, 0.0)), "it is known"
    for _ in range(2):
        store.close()
        store = RepositoryStore(tmp_path / "r")
        assert store.state.streams["a"].trimmed == published > 1
        store.checkpoint()
    store.close()


@pytest.mark.parametrize(
    "body",
    [
        '{"kind":"TermGiven","stream":"s","term":"2"}',
        '{"kind":"TermGiven","stream":"s"}',
        '{"kind":"StreamCreated","stream":"s","replicas":"k"}',
        '{"kind":"ConsumerDropped","name":"lake","x":1}',
        '["TermGiven"]',
    ],
)
def test_a_record_of_other_fields_is_damage_though_it_has_no_checksum(
    tmp_path: Path, body: str
) -> None:
    path = tmp_path / "r"
    store = RepositoryStore(path)
    fill(store, 5)
    store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE record SET body = ?, crc = NULL WHERE number = 5", [body])
    db.close()
    with pytest.raises(CorruptError, match="could not read the repository"):
        RepositoryStore(path)


def test_two_repositories_never_share_a_file(tmp_path: Path) -> None:
    store = RepositoryStore(tmp_path / "r")
    fill(store, 1)
    with pytest.raises(ConfigError, match="another repository"):
        RepositoryStore(tmp_path / "r")
    store.close()


def test_what_cannot_be_kept_did_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RepositoryStore(tmp_path / "r")
    fill(store, 2)
    before = store.state.to_record()
    loads, load = 0, store._load

    def counted() -> Repository:
        nonlocal loads
        loads += 1
        return load()

    monkeypatch.setattr(store, "_load", counted)
    store._db.execute("PRAGMA query_only = 1")
    with pytest.raises(UnavailableError, match="could not write"):
        fill(store, 1)
    assert store.state.to_record() == before
    assert isinstance(store.state, Repository)
    # And then it costs one load, whoever asks first: the repository's own recovery, or a request.
    with pytest.raises(UnavailableError, match="could not write"):
        fill(store, 1)
    store.reload()
    assert store.state.to_record() == before
    assert loads == 2
    store._db.execute("PRAGMA query_only = 0")
    fill(store, 1)
    assert store.state.version == 3
    store.close()


def test_a_record_is_kept_when_its_checkpoint_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "repository.sqlite"
    store = RepositoryStore(path, checkpoint_every=5)

    def full() -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(store, "checkpoint", full)
        fill(store, 10)
    fill(store, 1)
    state = store.state.to_record()
    assert state["version"] == 11
    store.close()
    again = RepositoryStore(path)
    assert again.state.to_record() == state
    again.close()
