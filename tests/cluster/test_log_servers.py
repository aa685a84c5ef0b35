"""Capture to three log servers under load, each of which is killed, stopped, or loses its disk."""

import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.capture_stack import (
    STREAM,
    CaptureProcess,
    ChangeLog,
    Load,
    check_equal,
    server_with_tables,
)
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.demo.local_server import LocalServer

POLICY = ReplicationPolicy(replicas=3, min_replicas=2, silence=2.0)


@pytest.fixture
def server(make_server: MakeServer) -> LocalServer:
    return server_with_tables(make_server, 15, fsync="off", wal_sender_timeout="10s")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ChangeLog]:
    with ChangeLog(tmp_path, POLICY) as log:
        yield log


def entries(log: ChangeLog, number: int) -> list[tuple[int, int, int, bytes]]:
    with ReplicaClient(log.listens[number]) as replica:
        status = replica.stream_status(STREAM)
        found = replica.read(STREAM, status.low_offset, status.committed_end)
        return [(e.offset, e.version, e.global_offset, bytes(e.data)) for e in found]


def check_whole(log: ChangeLog, server: LocalServer) -> None:
    """Nothing is lost or doubled, and all three hold the same, byte for byte."""
    wait_for(lambda: log.members() == [0, 1, 2], 60, "all log servers are in sync")
    check_equal(log, server.dsn())
    first = entries(log, 0)
    assert first
    for number in (1, 2):
        wait_for(partial(is_equal, log, number, first), 20, f"log server {number} is equal")


def is_equal(log: ChangeLog, number: int, first: list[tuple[int, int, int, bytes]]) -> bool:
    return entries(log, number) == first


def grows(log: ChangeLog, connection: psycopg.Connection[Any]) -> None:
    """A row that is written now is committed in the log."""
    row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    wait_for(lambda: log.committed_lsn() > int(row[0]), 40, "the log goes on")


@pytest.mark.timeout(300)
def test_23_each_log_server_fails_under_load_and_comes_back_equal(
    log: ChangeLog, server: LocalServer, tmp_path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    with (
        CaptureProcess(tmp_path, log, server.dsn(), "public.orders", "public.audit") as capture,
        psycopg.connect(server.dsn(), autocommit=True) as connection,
        ExitStack() as load,
    ):
        wait_for(capture.streams, 30, "capture streams")
        load.enter_context(Load(server.dsn()))
        order = [0, 1, 2]
        choose.shuffle(order)
        killed, stopped, wiped = order
        log.kill_log_server(killed)
        grows(log, connection)
        assert killed not in log.members()
        log.start_log_server(killed)
        wait_for(lambda: log.members() == [0, 1, 2], 60, "the killed one is in sync")
        log.signal_log_server(signal.SIGSTOP, stopped)
        try:
            grows(log, connection)
            assert stopped not in log.members()
        finally:
            log.signal_log_server(signal.SIGCONT, stopped)
        wait_for(lambda: log.members() == [0, 1, 2], 60, "the stopped one is in sync")
        log.kill_log_server(wiped)
        shutil.rmtree(log.place(wiped))
        grows(log, connection)
        log.start_log_server(wiped)
        wait_for(lambda: log.members() == [0, 1, 2], 60, "the wiped one is in sync")
        log.stop_repository()
        log.start_repository()
        grows(log, connection)
    with CaptureProcess(tmp_path, log, server.dsn(), "public.orders", "public.audit"):
        check_whole(log, server)


def test_23_one_transaction_is_committed_though_a_log_server_hangs(
    log: ChangeLog, server: LocalServer, tmp_path: Path
) -> None:
    """Nothing follows it that would tell capture, which waits for that log server, that the others go on."""
    with (
        CaptureProcess(tmp_path, log, server.dsn(), "public.orders", "public.audit") as capture,
        psycopg.connect(server.dsn(), autocommit=True) as connection,
    ):
        wait_for(capture.streams, 30, "capture streams")
        log.signal_log_server(signal.SIGSTOP, 1)
        try:
            before = log.committed_lsn()
            connection.execute("INSERT INTO orders VALUES (-1, 'x')")
            wait_for(lambda: log.committed_lsn() > before, 60, "it is committed")
            assert log.members() == [0, 2]
        finally:
            log.signal_log_server(signal.SIGCONT, 1)
        check_whole(log, server)
