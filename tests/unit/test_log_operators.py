"""`tuskline log status|verify|trim|tail` on running services: two log servers, whose replicas of one stream are both written."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import pgoutput_messages as pm
from tests.support import stored_log
from tests.support.log_entries import ACCOUNTS, AUDIT, HASHES, SCHEMAS, EntryMaker
from tests.support.waiting import wait_for
from walsender_bridge.change_log import entry, repository_messages, verification
from walsender_bridge.change_log.append_writer import AppendWriter
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.log_server_messages import (
    TRIM,
    ReplicaDescription,
    ReplicasAnswer,
)
from walsender_bridge.change_log.operator_client import OperatorLog, OperatorReplica
from walsender_bridge.change_log.protocol import START, CommitContext, ReplicaStatus
from walsender_bridge.change_log.replica import commit_rows
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository import operator_trim, status
from walsender_bridge.change_log.repository.core import (
    ConsumerSeen,
    Created,
    Repository,
    StreamCommit,
    StreamCreated,
)
from walsender_bridge.change_log.repository.log_server_link import LogServerLink
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.change_log.repository_messages import (
    RegisterConsumerRequest,
    ReplicaPlace,
    StreamDescription,
)
from walsender_bridge.change_log.transactions import LoggedRow, LoggedTransaction, TransactionReader
from walsender_bridge.change_log.verification import EntryRow, StatedReplica
from walsender_bridge.cli import app as cli
from walsender_bridge.cli.log_trim import duration
from walsender_bridge.errors import (
    Cause,
    ConfigError,
    CorruptError,
    MalformedMessageError,
    NotLeaderError,
    TrimmedError,
    UnavailableError,
    UnknownStreamError,
    UsageError,
)
from walsender_bridge.observability import log_tail, log_verify, log_view
from walsender_bridge.observability.log_tail import TailOptions
from walsender_bridge.postgres.protocol import pgoutput_rows
from walsender_bridge.postgres.protocol.pgoutput_rows import Unchanged, parse_row
from walsender_bridge.runtime.output import Output

STREAM = "shop"


class Log:
    """Two log servers and a repository in this process; each commit is on both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers = [ReplicaServer(folder / name, "127.0.0.1:0") for name in ("a", "b")]
        self.repository = RepositoryServer(
            folder / "repository",
            "127.0.0.1:0",
            log_servers=[each.address for each in self.servers],
            retention=3600.0,
            tick=0.02,
            replication=ReplicationPolicy(2, 2, 60.0),
        )
        self.repository.start()
        self.stopped: list[ReplicaServer] = []
        self.makers: dict[str, EntryMaker] = {}
        self.writers: dict[str, list[AppendWriter]] = {}

    def create(self, stream: str = STREAM) -> None:
        ids = tuple(each.log_server_id for each in self.servers)
        with self.repository._changed:
            self.repository._record(StreamCreated(stream, ids))
        with self.client() as log:
            log.create_stream(stream)
            term = log.writer_term(stream).term
        self.makers[stream] = EntryMaker()
        self.writers[stream] = [
            AppendWriter(each.address, stream, term, 10) for each in self.servers
        ]

    def append(self, *entries: bytes, stream: str = STREAM, to: int = 2) -> None:
        for writer in self.writers[stream][:to]:
            writer.send(entries, schemas=list(SCHEMAS.values()))
            assert writer.next_ack(20) is not None

    def commit(self, *entries: bytes, stream: str = STREAM) -> int:
        """Append to both, and wait until it can be read; the version."""
        self.append(*entries, stream=stream)
        with self.client() as log:
            log.barrier({stream: self.makers[stream].end_lsn}, 20)
        # The barrier's may be a later one.
        return self.repository._state.streams[stream].last.context.version

    def fill(self, count: int, stream: str = STREAM, size: int = 20) -> list[int]:
        return [
            self.commit(self.makers[stream].whole(size=size), stream=stream) for _ in range(count)
        ]

    def client(self) -> LogClient:
        return LogClient(self.repository.address)

    def operator(self) -> OperatorLog:
        return OperatorLog(self.repository.address)

    def summary(self) -> dict[str, Any]:
        return log_view.summary(log_view.observe(self.repository.address))

    def verify(self, *streams: str) -> log_verify.VerifyReport:
        return log_verify.verify_running(self.repository.address, streams, Output(as_json=True))

    def tail(self, **options: Any) -> list[dict[str, Any]]:
        made = TailOptions(**{"stream": STREAM, **options})
        return [
            log_tail.record(each) for each in log_tail.tail(self.repository.address, made, print)
        ]

    def close(self) -> None:
        self.repository.stop()
        for server in self.servers:
            self.stop(server)

    def stop(self, server: ReplicaServer) -> None:
        if server not in self.stopped:
            self.stopped.append(server)
            for writers in self.writers.values():
                # A log server that stops waits for open appends.
                writers[self.servers.index(server)].close()
            server.stop()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with contextlib.closing(Log(tmp_path)) as made:
        made.create()
        yield made


@pytest.fixture
def run(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`tuskline log ...` in this process."""
    listen = log.repository.address.removeprefix("grpc://")
    config = tmp_path / "tuskline.toml"
    config.write_text(
        f'[log]\ndata_dir = "repository"\nlisten = "{listen}"\n'
        '[[log_server]]\nlisten = "127.0.0.1:1"\ndata_dir = "a"\n[[source]]\nname = "s"\ndsn = ""\n'
    )
    monkeypatch.setenv("TUSKLINE_CONFIG", str(config))
    return lambda *arguments: CliRunner().invoke(cli.app, ["log", *arguments])


# -- status -----------------------------------------------------------------------------------------


def test_status_shows_every_replica_with_offsets_bytes_and_lag(log: Log) -> None:
    versions = log.fill(3, size=1000)
    shown = log.summary()
    (stream,) = shown["streams"]
    assert shown["version"] >= shown["published"] >= stream["version"] == versions[-1]
    assert (stream["end_offset"], stream["published_end"], stream["trim_limit"]) == (4, 4, 4)
    assert [row["address"] for row in stream["replicas"]] == [s.address for s in log.servers]
    for row, server in zip(stream["replicas"], log.servers, strict=True):
        offsets = [row[name] for name in ("low_offset", "committed_end", "end_offset")]
        assert (row["state"], row["log_server"], offsets) == (
            *("appendable", server.log_server_id),
            [1, 4, 4],
        )
        assert row["bytes"] == stream["bytes_total"] > 3000
        assert row["disk_bytes"] > row["bytes"]
        assert (row["lag_entries"], row["lag_bytes"], row["reason"]) == (0, 0, None)
    assert (shown["consumers"], shown["holding"], shown["faults"]) == ([], [], [])


def test_status_names_what_holds_back_trimming_and_how_much(log: Log) -> None:
    with log.client() as client:
        # From the first: history that nobody needs is forgotten.
        client.register_consumer("new", None, 600)
        versions = log.fill(4, size=1000)
        client.register_consumer("lake", versions[1], 600)
        client.register_consumer("done", versions[3], 600)
    shown = log.summary()
    total = shown["streams"][0]["bytes_total"]
    assert [(r["holder"], r["version"], r["entries"]) for r in shown["holding"]] == [
        ("consumer new", None, 4),
        ("consumer lake", versions[1], 2),
    ]
    assert [row["bytes"] for row in shown["holding"]] == [total, total // 2]
    assert {row["consumer"]: row["version"] for row in shown["consumers"]} == {
        "lake": versions[1],
        "new": None,
        "done": versions[3],
    }
    assert all(590 < row["lease_seconds"] <= 600 for row in shown["consumers"])
    # What the status names is what the repository would trim.
    with log.operator() as operator:
        (stream,) = operator.describe().streams
        needs = [each.needs[STREAM].offset for each in operator.describe().consumers]
    assert stream.trim_limit == min(needs) == 1


def test_status_shows_a_replica_that_lags_one_that_is_sealed_and_one_that_is_learning(
    log: Log,
) -> None:
    log.fill(2)
    second = log.servers[1].replica(STREAM)
    second.seal(3, 99, 99)
    shown = log.summary()
    assert [row["state"] for row in shown["streams"][0]["replicas"]] == ["appendable", "sealed"]
    assert shown["faults"] == []
    with second._lock:
        second._core.damage("/disk/data.mdb: it cannot be read")
    shown = log.summary()
    row = shown["streams"][0]["replicas"][1]
    assert (row["state"], row["committed_end"], row["bytes"]) == ("learning", 3, None)
    assert row["reason"] == "/disk/data.mdb: it cannot be read"
    (fault,) = shown["faults"]
    assert fault["code"] == "INVALID_REPLICA"
    assert f"stream {STREAM}, log server {log.servers[1].address}" in fault["where"]
    assert "a replica in sync replaces what is damaged" in fault["repair"]


def test_status_says_of_a_replica_being_synchronized_from_where(log: Log) -> None:
    log.fill(2)
    second = log.servers[1].replica(STREAM)
    source = log.servers[0]
    with second._lock:
        second._core.damage("gone")
    # What a source offers is durable, and an empty commit becomes so within a second.
    of_source = source.replica(STREAM)
    wait_for(
        lambda: of_source.sync_offer("").durable.version >= second.status().version,
        20,
        "the source has what the destination has",
    )
    offer = of_source.sync_offer(source.log_server_id)
    second.sync_init(offer, offer.durable.log_id)
    row = log.summary()["streams"][0]["replicas"][1]
    assert row["state"] == "learning"
    assert f"synchronized with log server {source.log_server_id}" in row["reason"]
    report = log.verify()
    assert report.violations == []
    assert "synchronized" in report.notes[0]


def test_status_goes_on_without_a_log_server_that_does_not_answer(log: Log) -> None:
    log.fill(1)
    log.stop(log.servers[1])
    shown = log.summary()
    states = [row["state"] for row in shown["streams"][0]["replicas"]]
    assert states == ["appendable", "unknown"]
    assert shown["streams"][0]["replicas"][1]["reason"] == "service does not answer"
    assert shown["faults"]


def test_status_shows_a_replica_whose_record_cannot_be_read(log: Log) -> None:
    log.fill(2)
    listen = log.servers[1].address.removeprefix("grpc://")
    log.stop(log.servers[1])
    data = log.folder / "b" / "streams" / STREAM / "segment-00000000000000000001" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b'"term": 1', b'"term": 7'))
    log.servers[1] = ReplicaServer(log.folder / "b", listen)
    row = log.summary()["streams"][0]["replicas"][1]
    assert (row["state"], row["low_offset"], row["bytes"]) == ("learning", None, None)
    assert "the replica's record is damaged" in row["reason"]
    (violation,) = log.verify().violations
    assert (violation.invariant, violation.cause) == ("I13", Cause.INVALID_REPLICA)
    assert "record is damaged" in violation.what
    with log.operator() as operator:
        wait_for(
            lambda: all(p.answers for p in operator.describe().streams[0].replicas), 20, "back"
        )
        first, second = operator.trim_stream(STREAM, None, None).replicas
    assert (first.error, first.entries) == (None, 2)
    assert second.error is not None
    assert "cannot be read" in second.error.what


def test_status_names_a_log_server_that_has_lost_its_replica(log: Log) -> None:
    log.fill(1)
    listen = log.servers[1].address.removeprefix("grpc://")
    log.stop(log.servers[1])
    log.servers[1] = ReplicaServer(log.folder / "c", listen)
    row = log.summary()["streams"][0]["replicas"][1]
    assert row["state"] == "unknown"
    assert row["reason"] == f"the log server there has no replica of stream {STREAM}"
    assert log.verify().violations[0].cause == Cause.CORRUPT


def described(
    *, version: int = 4, answers: str = "k", committed_end: int = 5
) -> tuple[log_view.LogView, StreamDescription]:
    """A stream that ends at 9 with byte 90; its replica on log server `k` is at `version`."""
    place = ReplicaPlace("k", "grpc://k:1", True, version, True)
    stream = StreamDescription(STREAM, 1, 7, 9, 90, 1, 1, 5, 50, 5, 2, (place,))
    status = ReplicaStatus(
        *(STREAM, "log", "appendable", 1, 1, 9, committed_end, version, 1, 1, 1, 1, 1, None, 50),
        None,
    )
    replica = ReplicaDescription(STREAM, "appendable", "", "", status, None, None, 0, 100)
    answer = repository_messages.DescribeAnswer("log", 7, 4, 0, 9, 1.0, (stream,), (), {})
    return log_view.LogView(answer, {"grpc://k:1": ReplicasAnswer(answers, (replica,))}), stream


def test_a_replica_that_lags_holds_back_what_it_lacks() -> None:
    seen, stream = described()
    assert log_view.holding(seen, stream) == [
        {
            "stream": STREAM,
            "holder": "replica grpc://k:1",
            "version": 4,
            "entries": 4,
            "bytes": 40,
        }
    ]
    (row,) = log_view.summary(seen)["streams"][0]["replicas"]
    assert (row["lag_entries"], row["lag_bytes"]) == (4, 40)
    seen, stream = described(version=7, committed_end=9)
    assert log_view.holding(seen, stream) == []


def test_another_log_server_at_the_address_is_no_replica() -> None:
    seen, _ = described(answers="other")
    (fault,) = log_view.faults(seen)
    assert isinstance(fault, ConfigError), "nothing is damaged"
    assert fault.what == "another log server, other, answers there"


def test_leases_that_have_ended_hold_nothing() -> None:
    state = Repository()
    for record in (
        Created("log"),
        StreamCreated(STREAM, ("k",)),
        ConsumerSeen("ended", None, 10.0),
        ConsumerSeen("live", None, 30.0),
    ):
        state.apply(record)
    state.streams[STREAM].history.append(
        StreamCommit(CommitContext(3, 1, 1, 4), replace(START, end_offset=5, bytes_total=40))
    )
    state.version = state.published = 3
    shown = status.describe(state, {}, {}, [], 20.0, 1.0)
    assert [(each.name, each.lease_seconds) for each in shown.consumers] == [("live", 10.0)]
    assert [place.answers for place in shown.streams[0].replicas] == [False]
    request = repository_messages.TrimStreamRequest(STREAM, None, None)
    order = operator_trim.decide(state, request, 20.0)
    assert (order.up_to, [each.consumer for each in order.held_by]) == (1, ["live"])
    order = operator_trim.decide(state, request, 30.0)
    assert (order.up_to, order.held_by) == (5, ())


def test_status_has_the_exit_code_of_the_first_fault(log: Log, run: Callable[..., Any]) -> None:
    log.fill(1)
    done = run("status")
    assert done.exit_code == 0, done.output
    for name in ("published", "appendable", "no consumers", "trim limit", log.servers[1].address):
        assert name in done.output
    second = log.servers[1].replica(STREAM)
    with second._lock:
        second._core.damage("it cannot be read")
    done = run("status", "--json")
    assert done.exit_code == Cause.INVALID_REPLICA
    assert json.loads(done.stdout.splitlines()[-1])["faults"][0]["code"] == "INVALID_REPLICA"


# -- verify -----------------------------------------------------------------------------------------


def test_a_running_log_is_verified_over_all_its_replicas_and_streams(log: Log) -> None:
    log.create("other")
    for _ in range(3):
        log.fill(1)
        log.fill(1, "other")
    report = log.verify()
    assert report.violations == []
    assert report.version is not None
    assert [(row["stream"], row["entries"], row["whole"]) for row in report.rows] == [
        *[("other", 3, True)] * 2,
        *[(STREAM, 3, True)] * 2,
    ]
    one = log.verify(STREAM)
    assert (one.rows, one.violations) == (report.rows[2:], [])
    with pytest.raises(UnknownStreamError, match="existing streams: other, shop"):
        log.verify("nowhere")


def test_what_is_trimmed_while_it_is_verified_is_left_out(log: Log) -> None:
    versions = log.fill(6)

    class Trimmed(log_verify.RunningReplica):
        """Trimmed between its description and the first read."""

        def entries(self, stated: StatedReplica) -> Iterator[EntryRow]:
            with log.operator() as operator:
                operator.trim_stream(STREAM, versions[3], None)
            return super().entries(stated)

    sources = [Trimmed(OperatorReplica(each.address), STREAM) for each in log.servers]
    found = [*verification.verify_stream(sources)]
    assert not [each for each in found if isinstance(each, verification.Violation)]
    assert [each.offset for each in found] == [5, 5, 6, 6]


def test_a_replica_whose_entry_is_damaged_is_named_by_a_running_log(log: Log) -> None:
    written = []
    for _ in range(3):
        written.append(log.makers[STREAM].whole(size=300))
        log.commit(written[-1])
    file = log.folder / "b" / "streams" / STREAM / "segment-00000000000000000001" / "data.mdb"
    content = file.read_bytes()
    changed = bytearray(written[1])
    changed[-9] ^= 1
    assert written[1] in content
    with file.open("r+b") as opened:
        # In place: the log server has the file open.
        for at in _places(content, written[1]):
            opened.seek(at)
            opened.write(changed)
    report = log.verify()
    (violation,) = report.violations
    assert (violation.invariant, violation.offset) == ("I3", 2)
    assert violation.replica == log.servers[1].address
    assert violation.cause == Cause.CORRUPT
    assert "CRC32C" in violation.what
    assert str(file) in violation.what


def _places(content: bytes, data: bytes) -> Iterator[int]:
    at = content.find(data)
    while at >= 0:
        yield at
        at = content.find(data, at + 1)


def test_a_replica_that_is_learning_or_away_is_a_violation(
    log: Log, run: Callable[..., Any]
) -> None:
    log.fill(1)
    second = log.servers[1].replica(STREAM)
    with second._lock:
        second._core.damage("it cannot be read")
    (violation,) = log.verify().violations
    assert (violation.invariant, violation.cause) == ("I13", Cause.INVALID_REPLICA)
    log.stop(log.servers[1])
    done = run("verify", "--json")
    assert done.exit_code == Cause.UNAVAILABLE
    (shown,) = json.loads(done.stdout.splitlines()[-1])["violations"]
    assert shown["invariant"] is None
    assert "could not be verified" in shown["what"]
    assert shown["replica"] == log.servers[1].address


def test_a_replica_that_lacks_a_commit_of_the_repository_is_named(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.fill(2)
    real = log_view.observe(log.repository.address)
    (stream,) = real.log.streams
    ahead = replace(real.log, streams=(replace(stream, end_offset=5),))
    seen = replace(real, log=ahead)
    monkeypatch.setattr(log_view, "observe", lambda _: seen)
    violations = log.verify().violations
    assert [(each.invariant, each.offset) for each in violations] == [("I6", 3)] * 2
    # One was left out while it did not answer: it answers again, and nobody has sealed it yet.
    first, second = stream.replicas
    left_out = replace(stream, end_offset=5, replicas=(first, replace(second, in_sync=False)))
    seen = replace(real, log=replace(real.log, streams=(left_out,)))
    report = log.verify()
    assert [each.replica for each in report.violations] == [first.address]
    assert report.notes == [
        f"stream {STREAM}, replica {second.address}: it is not in sync, and ends at 3; the stream ends at 5"
    ]


def test_a_gap_between_the_streams_of_a_running_log_is_named(log: Log) -> None:
    """Both replicas of a stream agree, and the stream alone is consistent."""
    log.create("other")
    log.fill(2)
    log.fill(1, "other")
    log.repository._store.state.next_global += 7
    log.fill(1)
    violation = log.verify().violations[0]
    assert (violation.invariant, violation.stream, violation.offset) == ("I4", STREAM, 3)
    assert "offsets from 11 on, and 4 is next" in violation.what


def test_a_row_of_the_index_arrives_as_it_is() -> None:
    with contextlib.suppress(FileNotFoundError):
        numbers = (*range(1, 13), 14, 15)
        assert commit_rows.values(commit_rows.of_values(numbers)) == numbers
    with pytest.raises(MalformedMessageError, match="3 numbers"):
        commit_rows.of_values((1, 2, 3))


def test_the_index_is_read_in_pages_up_to_an_end(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = log.fill(5)
    monkeypatch.setattr("walsender_bridge.change_log.operator_client._PAGE", 2)
    with OperatorReplica(log.servers[0].address) as replica:
        rows = [*replica.commits(STREAM, 1, 4)]
        assert [row.context.version for row in rows] == versions[:3]
        assert [*replica.commits(STREAM, 6, 7)] == []
        assert [*replica.commits(STREAM, 2**64 - 1, 2**64)] == []
        assert rows[0].context == CommitContext(versions[0], 1, 1, 1)
        with log.operator() as operator:
            operator.trim_stream(STREAM, versions[1], None)
        with pytest.raises(TrimmedError):
            [*replica.commits(STREAM, 1, 5)]


# -- trim -------------------------------------------------------------------------------------------


def test_trim_removes_what_no_lease_holds_and_says_what_it_freed(log: Log) -> None:
    with log.operator() as operator:
        operator.register_consumer("lake", None, 600)
        versions = log.fill(4, size=1000)
        total = log.summary()["streams"][0]["bytes_total"]
        operator.register_consumer("lake", versions[2], 600)
        answer = operator.trim_stream(STREAM, None, None)
        assert answer.up_to == 4
        assert [(each.low_offset, each.entries, each.bytes) for each in answer.replicas] == [
            (4, 3, total * 3 // 4)
        ] * 2
        assert [(h.consumer, h.version, h.offset) for h in answer.held_by] == [
            ("lake", versions[2], 4)
        ]
        operator.drop_consumer("lake")
        answer = operator.trim_stream(STREAM, None, None)
        assert [each.entries for each in answer.replicas] == [1, 1]
        assert answer.held_by == ()
    assert [row["low_offset"] for row in log.summary()["streams"][0]["replicas"]] == [5, 5]


def test_trim_names_a_log_server_that_does_not_answer_with_a_hint(log: Log) -> None:
    log.fill(1)
    log.stop(log.servers[1])
    with log.operator() as operator:
        wait_for(
            lambda: not all(p.answers for p in operator.describe().streams[0].replicas), 20, "away"
        )
        first, second = operator.trim_stream(STREAM, None, None).replicas
    assert first.error is None
    assert second.error is not None
    assert "check that `tuskline log-server run` is running" in second.error.repair


def test_trim_refuses_by_name_what_a_lease_holds_and_trims_nothing(log: Log) -> None:
    with log.operator() as operator:
        operator.register_consumer("new", None, 600)
        versions = log.fill(3)
        operator.register_consumer("lake", versions[0], 600)
        with pytest.raises(UsageError, match=r"consumer 'new' has published nothing yet") as caught:
            operator.trim_stream(STREAM, versions[1], None)
        assert "and 1 other consumers" in caught.value.what
        assert "600 s from now" in caught.value.repair.replace("599", "600")
        operator.drop_consumer("new")
        with pytest.raises(UsageError, match=f"'lake' has published version {versions[0]} only"):
            operator.trim_stream(STREAM, versions[1], None)
        assert {row["low_offset"] for row in log.summary()["streams"][0]["replicas"]} == {1}
        answer = operator.trim_stream(STREAM, versions[0], None)
        assert [each.low_offset for each in answer.replicas] == [2, 2]
        with pytest.raises(UsageError, match="cannot be read yet"):
            operator.trim_stream(STREAM, versions[2] + 1000, None)
        with pytest.raises(UnknownStreamError):
            operator.trim_stream("nowhere", None, None)
        for older_than in (float("nan"), float("inf"), -1.0):
            with pytest.raises(UsageError, match="not between"):
                operator.trim_stream(STREAM, None, older_than)


class Between:
    """Runs `then` behind the first trim of a log server, and before the second one's. `low`: of the replicas."""

    def __init__(self, log: Log, patch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
        self.log, self.then = log, then
        self.trims = 0
        self.really = LogServerLink.call

        def call(link: LogServerLink, *arguments: Any, **options: Any) -> Any:
            return self.call(link, *arguments, **options)

        patch.setattr(LogServerLink, "call", call)

    def call(self, link: LogServerLink, action: Any, request: Any, **options: Any) -> Any:
        answer = self.really(link, action, request, **options)
        if action is TRIM:
            self.trims += 1
            if self.trims == 1:
                self.then()
        return answer

    def low(self) -> list[int]:
        return [each.replica(STREAM).status().low_offset for each in self.log.servers]


@pytest.mark.parametrize("by", ["an operator", "age"])
@pytest.mark.parametrize("what", ["a lease was granted", "another repository leads"])
def test_26_each_replica_is_trimmed_by_leases_and_leader_of_that_moment(
    log: Log, monkeypatch: pytest.MonkeyPatch, by: str, what: str
) -> None:
    """One log server may take seconds to answer: what was decided before it is not what holds behind it."""
    log.fill(3)
    server = log.repository

    def then() -> None:
        if what == "a lease was granted":
            server.register_consumer(RegisterConsumerRequest("late", None, 60.0))
            return

        def confirm() -> None:
            raise NotLeaderError("another repository leads")

        monkeypatch.setattr(server._store, "confirm", confirm)

    with server._changed:
        # No step of its own comes between.
        server._trim_at = time.monotonic() + 3600
    between = Between(log, monkeypatch, then)
    if by == "age":
        server._retention = 0.0
        server._trim_at = 0.0
        wait_for(lambda: between.trims and between.low() != [1, 1], 20, "a trim")
        time.sleep(0.3)
    else:
        with contextlib.suppress(NotLeaderError):
            server.trim_stream(repository_messages.TrimStreamRequest(STREAM, None, None))
    assert sorted(between.low()) == [1, 4]


def test_26_a_lease_covers_what_the_cut_shows_whatever_trim_is_on_its_way(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network may hold a trim that was sent before the lease was granted."""
    log.fill(3)
    server, really = log.repository, LogServerLink.call
    shown: list[int] = []
    with server._changed:
        # No step of its own comes between.
        server._trim_at = time.monotonic() + 3600

    def held(link: LogServerLink, action: Any, request: Any, **options: Any) -> Any:
        if action is TRIM and not shown:
            server.register_consumer(RegisterConsumerRequest("late", None, 60.0))
            shown.append(server.status().streams[STREAM].low_offset)
        return really(link, action, request, **options)

    monkeypatch.setattr(LogServerLink, "call", held)
    server.trim_stream(repository_messages.TrimStreamRequest(STREAM, None, None))
    lows = sorted(each.replica(STREAM).status().low_offset for each in log.servers)
    assert (lows, shown) == ([1, 4], [4])


def test_trim_by_age_keeps_what_is_younger(log: Log) -> None:
    log.fill(2)
    with log.operator() as operator:
        assert [r.entries for r in operator.trim_stream(STREAM, None, 3600).replicas] == [0, 0]
        between = time.monotonic() + 0.5
        time.sleep(1.0)
        log.fill(1)
        age = time.monotonic() - between
        assert [r.entries for r in operator.trim_stream(STREAM, None, age).replicas] == [2, 2]


def test_trim_knows_a_version_that_the_repository_has_forgotten(log: Log) -> None:
    versions = log.fill(4)
    history = log.repository._state.streams[STREAM].history
    assert history[0].context.version > versions[1]
    with log.operator() as operator:
        answer = operator.trim_stream(STREAM, versions[1], None)
        assert [each.low_offset for each in answer.replicas] == [3, 3]


def test_trim_of_one_replica_is_told_from_trim_of_all(log: Log, run: Callable[..., Any]) -> None:
    log.fill(2)
    log.stop(log.servers[1])
    wait_for(lambda: len(log.repository._log_servers.answering()) == 1, 20, "it is away")
    done = run("trim", STREAM, "--json")
    assert done.exit_code == Cause.UNAVAILABLE
    first, second = json.loads(done.stdout.splitlines()[-1])["replicas"]
    assert (first["entries"], first["error"]) == (2, None)
    assert second["error"]["code"] == "UNAVAILABLE"
    log.stop(log.servers[0])
    wait_for(lambda: not log.repository._log_servers.answering(), 20, "both are away")
    with log.operator() as operator, pytest.raises(UnavailableError, match="no log server"):
        operator.trim_stream(STREAM, None, None)


def test_the_command_names_the_consumer_safely(log: Log, run: Callable[..., Any]) -> None:
    log.fill(1)
    with log.client() as client:
        client.register_consumer("lake\x1b[2J\n", None, 600)
    done = run("trim", STREAM)
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.output
    assert r"for consumer lake\x1b[2J\n: it has published nothing" in done.output
    assert isinstance(
        run("trim", STREAM, "--to-version", "1", "--older-than", "1h").exception, UsageError
    )


def test_durations() -> None:
    assert [duration(text) for text in ("30", "90min", "1h", "1.5 d")] == [30, 5400, 3600, 129600]
    for text in ("", "h", "1 week", "-1h", "1h30"):
        with pytest.raises(UsageError, match="not a duration"):
            duration(text)


def test_an_order_is_of_the_replicas_of_its_stream(log: Log) -> None:
    log.fill(1)
    request = repository_messages.TrimStreamRequest(STREAM, None, None)
    order = operator_trim.decide(log.repository._state, request, 0.0)
    assert order.replicas == {each.log_server_id: each.address for each in log.servers}


# -- tail -------------------------------------------------------------------------------------------


def changes(maker: EntryMaker, *messages: bytes) -> bytes:
    """An entry of one transaction with these messages."""
    lsn = maker._next()
    return maker._build(pm.transaction(lsn, maker.xid, list(messages), maker.time))


def test_tail_shows_transactions_with_counts_by_table(log: Log) -> None:
    maker = log.makers[STREAM]
    first = changes(
        maker,
        pm.insert(ACCOUNTS, [b"1", b"a"]),
        pm.insert(ACCOUNTS, [b"2", b"b"]),
        pm.update(ACCOUNTS, [b"1", b"c"]),
        pm.delete(AUDIT, [b"x"]),
        pm.truncate(AUDIT, ACCOUNTS),
    )
    versions = [log.commit(first), log.commit(maker.whole(2, table=AUDIT))]
    shown = log.tail()
    assert [each["kind"] for each in shown] == ["transaction"] * 3
    assert shown[0] == {
        "kind": "transaction",
        "version": versions[0],
        "offset": 1,
        "xid": 701,
        "end_lsn": "0/1130",
        "commit_time": "2024-01-01T00:00:00.001Z",
        "timeline": 1,
        "counts": {
            "public.accounts": {"insert": 2, "update": 1, "truncate": 1},
            "public.audit": {"delete": 1, "truncate": 1},
        },
    }
    assert log.tail(from_version=versions[1]) == shown[1:]
    assert log.tail(relations=frozenset({"public.accounts"})) == [
        {**shown[0], "counts": {"public.accounts": shown[0]["counts"]["public.accounts"]}}
    ]
    with pytest.raises(UsageError, match="not published yet"):
        log.tail(from_version=versions[1] + 1000)
    with pytest.raises(UnknownStreamError):
        log.tail(stream="nowhere")


def test_tail_shows_rows_before_their_transaction_and_nothing_moves_a_terminal(
    log: Log, run: Callable[..., Any]
) -> None:
    maker = log.makers[STREAM]
    log.commit(
        changes(
            maker,
            pm.insert(ACCOUNTS, [b"1", b"it's\x1b[2J\n\xff"]),
            pm.delete(ACCOUNTS, [b"1", None]),
        )
    )
    row, deleted, transaction = log.tail(rows=True)
    assert row["new"] == {"id": "1", "v": "it's\x1b[2J\n\\xff"}
    assert (deleted["operation"], deleted["key"]) == ("delete", {"id": "1"})
    assert row["xid"] == transaction["xid"]
    done = run("tail", STREAM, "--rows")
    assert done.exit_code == 0, done.output
    assert r"public.accounts insert  new: id='1' v='it''s\x1b[2J\n\xff'" in done.stdout
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) == 3
    lines = run("tail", STREAM, "--rows", "--json").stdout.splitlines()
    assert [json.loads(each)["kind"] for each in lines] == ["row", "row", "transaction"]
    assert isinstance(run("tail", STREAM, "--relations", "accounts").exception, UsageError)
    assert isinstance(run("tail", STREAM, "--seconds", "1").exception, UsageError)


def test_tail_follows_through_a_restart_of_the_repository(log: Log) -> None:
    log.fill(1)
    notes: list[str] = []
    options = TailOptions(STREAM, follow=True, seconds=30)
    followed = log_tail.tail(log.repository.address, options, notes.append)
    listen = log.repository.address.removeprefix("grpc://")

    found: list[int] = []

    def follow() -> None:
        for each in followed:
            assert isinstance(each, LoggedTransaction)
            found.append(each.offset)
            if len(found) == 2:
                return

    thread = threading.Thread(target=follow)
    thread.start()
    time.sleep(0.5)
    log.fill(1)
    wait_for(lambda: found == [2], 20, "the first that is new")
    log.repository.stop()
    wait_for(lambda: bool(notes), 20, "it waits")
    log.repository = RepositoryServer(
        log.folder / "repository",
        listen,
        log_servers=[each.address for each in log.servers],
        tick=0.02,
    )
    log.repository.start()
    log.fill(1)
    thread.join(30)
    assert found == [2, 3]
    assert len(notes) == 1


def test_tail_says_that_it_begins_behind_what_was_trimmed(log: Log) -> None:
    versions = log.fill(3)
    with log.operator() as operator:
        operator.trim_stream(STREAM, versions[1], None)
    notes: list[str] = []
    options = TailOptions(STREAM, from_version=versions[0])
    (left,) = log_tail.tail(log.repository.address, options, notes.append)
    assert isinstance(left, LoggedTransaction)
    assert left.version == versions[2]
    assert notes == ["the entries below offset 3 have been trimmed"]
    assert [each["version"] for each in log.tail()] == [versions[2]]


def test_tail_ends_after_its_seconds(log: Log) -> None:
    log.fill(2)
    start = time.monotonic()
    assert len(log.tail(from_version=1, follow=True, seconds=1.5)) == 2
    assert 1.4 < time.monotonic() - start < 15


def test_a_transaction_of_many_entries_is_counted_whole_and_its_rows_are_not_kept() -> None:
    maker = EntryMaker()
    entries = [
        maker.start(rows=3),
        *(maker.middle(rows=5, table=AUDIT) for _ in range(200)),
        maker.end(rows=2),
    ]
    records = {HASHES[oid]: record for oid, record in SCHEMAS.items()}
    asked: list[bytes] = []

    def schemas(digests: Any) -> dict[bytes, bytes]:
        asked.extend(digests)
        return {digest: records[digest] for digest in digests}

    reader = TransactionReader(schemas)
    found = [each for n, data in enumerate(entries, 1) for each in reader.read(n, 7, data)]
    (transaction,) = found
    assert isinstance(transaction, LoggedTransaction)
    assert transaction.counts == {
        "public.accounts": {"insert": 5},
        "public.audit": {"insert": 1000},
    }
    assert (transaction.offset, transaction.version) == (202, 7)
    assert len(asked) == 2
    with pytest.raises(MalformedMessageError, match="in no transaction"):
        [*TransactionReader(schemas).read(2, 7, entries[1])]
    damaged = bytearray(entries[0])
    damaged[-1] ^= 1
    with pytest.raises(CorruptError, match="CRC32C"):
        [*TransactionReader(schemas).read(1, 7, bytes(damaged))]
    rows = TransactionReader(schemas, relations=frozenset({"public.audit"}), rows=True)
    kinds = [type(each) for n, data in enumerate(entries, 1) for each in rows.read(n, 7, data)]
    assert kinds == [LoggedRow] * 1000 + [LoggedTransaction]


def test_a_row_is_parsed_with_its_key_and_what_was_not_sent() -> None:
    toast = b"\0\x02" + b"t\0\0\0\x011" + b"u"
    message = b"U" + ACCOUNTS.to_bytes(4, "big") + b"K" + pm.row([b"9", None]) + b"N" + toast
    change = parse_row(message)
    assert (change.old, change.new, change.key) == (
        (b"9", None),
        (b"1", Unchanged.VALUE),
        True,
    )
    relation = pgoutput_relation()
    shown = log_tail.record(LoggedRow(7, relation, change))
    assert (shown["key"], shown["new"], shown["unchanged"]) == ({"id": "9"}, {"id": "1"}, ["v"])
    binary = b"I" + ACCOUNTS.to_bytes(4, "big") + b"N" + b"\0\x01b\0\0\0\x02\x00\xff"
    assert log_tail.record(LoggedRow(7, relation, parse_row(binary)))["new"] == {"id": r"\x00ff"}


@pytest.mark.parametrize("length", range(1, 20))
def test_a_row_that_is_cut_is_malformed(length: int) -> None:
    message = pm.insert(ACCOUNTS, [b"12345678"])
    assert parse_row(message).new == (b"12345678",)
    with pytest.raises(MalformedMessageError):
        parse_row(message[:length])
    with pytest.raises(MalformedMessageError):
        parse_row(message + message[5:])
    with pytest.raises(MalformedMessageError, match="columns"):
        parse_row(message[:6] + b"\xff\xff" + message[8:])


def pgoutput_relation():
    from walsender_bridge.postgres.protocol.pgoutput import parse_relation

    return parse_relation(entry.split_schema_record(SCHEMAS[ACCOUNTS])[0])


def test_offline_reads_what_the_running_log_has_written(log: Log, run: Callable[..., Any]) -> None:
    log.fill(3)
    done = run("verify", "--offline")
    assert type(done.exception).__name__ == "RunningError"
    for server in log.servers:
        log.stop(server)
    report = log_verify.verify_stopped(
        [log.folder / "a", log.folder / "b"], (), Output(as_json=True)
    )
    assert report.violations == []
    assert [row["entries"] for row in report.rows] == [3, 3]
    assert stored_log.STREAM == STREAM
    assert pgoutput_rows.Unchanged.VALUE is Unchanged.VALUE
