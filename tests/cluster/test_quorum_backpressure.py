"""A primary that writes faster than the quorum takes it: memory stays, and nothing is lost."""

import time

import psycopg

from tests.cluster.test_quorum import primary, quorum
from tests.support.listeners import of_process
from tests.support.waiting import wait_for

__all__ = ["primary", "quorum"]


def resident_mb(pid: int) -> float:
    return of_process(pid, "VmRSS") / 1024


def test_8_a_fast_primary_waits_for_the_quorum_and_not_in_our_memory(quorum):
    quorum.insert(1)
    proposer = quorum.processes["proposer"].pid
    before = resident_mb(proposer)
    for name in quorum.names:
        quorum.pause(name)
    with psycopg.connect(quorum.server.dsn(), autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute(
            "CREATE TABLE fast AS SELECT repeat('x', 1000) FROM generate_series(1, 120000)"
        )
    lsn = quorum.flush_lsn()
    assert resident_mb(proposer) - before < 60
    for name in quorum.names:
        quorum.resume(name)
    quorum.insert(2, timeout_ms=60_000)
    wait_for(lambda: quorum.committed_to(lsn), 30, "the quorum has it all")
    assert resident_mb(proposer) - before < 60


def test_20_a_primary_that_is_held_back_without_a_quorum_still_shuts_down_promptly(quorum):
    quorum.insert(1)
    for name in quorum.names:
        quorum.pause(name)
    with psycopg.connect(quorum.server.dsn(), autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute(
            "CREATE TABLE fast AS SELECT repeat('x', 1000) FROM generate_series(1, 60000)"
        )
    began = time.monotonic()
    quorum.server.stop("fast")
    assert time.monotonic() - began < 9
