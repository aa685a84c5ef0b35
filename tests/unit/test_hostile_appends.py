"""Appends of a holder of the right role that are none: the log server's process lives, and nothing durable changes."""

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.support.child import ROOT
from tests.support.log_entries import append_to
from tests.support.log_server_process import REQUEST, LogServer
from tests.support.tls import Authority, TlsLog
from tests.support.waiting import wait_for
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log import protocol
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.service import _ReplicaService
from walsender_bridge.errors import MalformedMessageError, UsageError
from walsender_bridge.runtime.arrow_memory import LIMIT_BYTES
from walsender_bridge.runtime.tls_files import with_files


@pytest.fixture(scope="module")
def log_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LogServer]:
    with LogServer.running(tmp_path_factory.mktemp("hostile")) as found:
        yield found


def batch_of(data: Any, kinds: list[int | None] | None = None) -> pa.RecordBatch:
    found = [0] * len(data) if kinds is None else kinds
    return pa.record_batch([pa.array(found, pa.uint8()), data], schema=protocol.APPEND_SCHEMA)


def out_of_range(*offsets: int) -> pa.RecordBatch:
    """A batch whose 64 bytes of data have these offsets, which Arrow does not check when it is sent."""
    buffers = [None, pa.py_buffer(np.array(offsets, np.int64)), pa.py_buffer(bytes(64))]
    return batch_of(pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers))


@pytest.mark.parametrize(
    "offsets",
    [(0, 300_000, 64), (0, 1 << 30, 64), (0, 1 << 40, 64), (64, 0, 64), (0, -(1 << 40), 64)],
)
def test_38_offsets_beyond_the_data_do_not_end_the_process(
    log_server: LogServer, offsets: tuple[int, ...]
) -> None:
    assert "malformed batch in an append" in log_server.attack(partial(out_of_range, *offsets)).what
    assert log_server.process.poll() is None
    log_server.append(log_server.maker.whole())


BINARY = pa.array([b"x"], pa.large_binary())


@pytest.mark.parametrize(
    ("batch", "request_bytes", "what"),
    [
        (batch_of(pa.array([None], pa.large_binary())), REQUEST, "must not have null values"),
        (batch_of(BINARY, [None]), REQUEST, "must not have null values"),
        (batch_of(BINARY, [7]), REQUEST, "a row of an unknown kind"),
        (batch_of(BINARY), None, "has no metadata"),
        (batch_of(BINARY), b"junk", "AppendRequest is not a JSON object"),
        (batch_of(BINARY), REQUEST, "too short"),
        (pa.record_batch({"kind": BINARY, "data": BINARY}), REQUEST, "must have the columns"),
    ],
)
def test_38_a_batch_that_is_no_append_is_refused(
    log_server: LogServer, batch: pa.RecordBatch, request_bytes: bytes | None, what: str
) -> None:
    assert what in log_server.attack(lambda: batch, request=request_bytes).what


def test_38_a_compressed_bomb_costs_little_and_changes_nothing(log_server: LogServer) -> None:
    bomb = batch_of(protocol.binary_array([bytes(LIMIT_BYTES + (64 << 20))]))
    before = log_server.peak()
    for codec in ("zstd", "lz4"):
        log_server.attack(lambda: bomb, options=pa.ipc.IpcWriteOptions(compression=codec))
    assert log_server.peak() - before < 100 << 20
    log_server.append(log_server.maker.whole())


@pytest.mark.parametrize("ahead", [(1 << 32) + 1, 1 << 62, 1 << 63, 10**19 - 1])
def test_38_a_term_far_ahead_fences_nobody(log_server: LogServer, ahead: int) -> None:
    before = log_server.status()
    term = min(before.term + ahead, 10**19 - 1)
    too_far = pytest.raises(MalformedMessageError, match="is too far beyond the last one")
    with log_server.client(log_server.writer) as client, too_far:
        append_to(client, "shop", term)
    assert log_server.status() == before
    log_server.append(log_server.maker.whole())


@pytest.mark.parametrize("version", [(1 << 62) + 1, 1 << 63, (1 << 64) - 1])
def test_38_a_commit_of_a_version_far_ahead_is_refused(log_server: LogServer, version: int) -> None:
    before = log_server.status()
    commit = CommitContext(version, before.committed_end, before.committed_end, 0)
    with log_server.client(log_server.repository) as client:
        answer = client._call(m.COMMIT, m.CommitRequest({"shop": (IssuedCommit(commit),)}, 1))
    assert "too large" in answer.refused["shop"].what
    assert log_server.status() == before


def test_38_versions_far_ahead_are_not_skipped(log: TlsLog) -> None:
    before = log.repository._state.version
    with log.log(log.authority.issue("lake")) as client:
        for version in (before + (1 << 41), 1 << 62, 1 << 63, (1 << 64) - 1):
            with pytest.raises(UsageError, match="is too far beyond the newest one"):
                client.raise_version(version)
        log.append("shop")
        assert before < client.status().version < before + 1000


# -- clients that leave -----------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[TlsLog]:
    found = TlsLog(tmp_path, Authority(tmp_path))
    yield found
    found.stop()


CLIENT = """
import sys, threading
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.append_writer import AppendWriter
_, log, log_server, stream, term = sys.argv
writer = AppendWriter(log_server, stream, int(term), 10)
print("open", flush=True)
LogClient(log).barrier({stream: 1 << 40}, 600)
"""


def test_39_a_barrier_and_an_append_end_with_their_client(
    log: TlsLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside: list[str] = []
    put = _ReplicaService.do_put

    def counted(self: Any, *arguments: Any) -> None:
        inside.append("append")
        try:
            put(self, *arguments)
        finally:
            inside.remove("append")

    monkeypatch.setattr(_ReplicaService, "do_put", counted)
    addresses = [
        with_files(each.address, log.operator) for each in (log.repository, log.log_server)
    ]
    term = log.status()["shop"][2]
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *addresses, "shop", str(term)], cwd=ROOT
    )
    try:
        wait_for(log.repository.barriers.unforced, 20, "the barrier")
        assert inside == ["append"]
    finally:
        client.kill()
        client.wait()
    wait_for(lambda: not log.repository.barriers.unforced(), 10, "the end of the barrier")
    wait_for(lambda: not inside, 10, "the end of the append")
    log.append("shop")
