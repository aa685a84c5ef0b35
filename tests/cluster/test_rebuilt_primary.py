"""A primary whose data directory is gone comes back: a base backup, and the safekeepers' WAL up to VCL."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import pq

from tests.support.failover_stack import FailoverStack
from tests.support.quorum_bank import Bank
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import backup, current_lsn, follow, run
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.quorum.failover.plan import FailoverStep


@pytest.fixture
def primary(make_server: MakeServer) -> LocalServer:
    server = make_server(wal_level="replica")
    server.start()
    return server


@pytest.fixture
def stack(tmp_path: Path, primary: LocalServer) -> Iterator[FailoverStack]:
    with FailoverStack(tmp_path, primary) as stack:
        stack.start()
        stack.attach()
        stack.serve(0, 1)
        yield stack


def keep_wal(stack: FailoverStack) -> None:
    """A slot on each safekeeper: from now on it keeps the WAL that a backup will need."""
    for server in stack.wal_servers:
        connection = pq.PGconn.connect(server.dsn().encode())
        try:
            result = connection.exec_(b"CREATE_REPLICATION_SLOT rebuild PHYSICAL (RESERVE_WAL)")
            assert result.status == pq.ExecStatus.TUPLES_OK, result.get_error_message()
        finally:
            connection.finish()


def test_14_a_primary_whose_data_directory_is_deleted_under_load_is_rebuilt(
    stack, primary, seed
) -> None:
    bank = Bank(primary, seed)
    keep_wal(stack)
    wait_for(lambda: bank.acknowledged > 100, 30, "commits return")
    rebuilt = backup(primary, primary.folder.with_name("rebuilt"))
    stack.standbys.append(rebuilt)
    before = bank.acknowledged
    run(primary, "SELECT pg_switch_wal()", "CHECKPOINT")
    wait_for(lambda: bank.acknowledged > before + 200, 30, "more commits return")
    primary.destroy()
    bank.server = rebuilt
    stack.kill("proposer")
    # The safekeeper whose WAL it gets first is away meanwhile, and so is one process of the others.
    stack.kill("safekeeper-2")
    follow(rebuilt, stack.upstream)
    rebuilt.start()
    acknowledged = bank.acknowledged
    steps = stack.fail_over(rebuilt)
    assert steps[-1] == FailoverStep.DONE
    stack.switch_to(rebuilt)
    wait_for(lambda: bank.acknowledged > acknowledged + 50, 30, "the bank goes on")
    bank.stop()
    bank.check(rebuilt)
    # Who was away follows: its log is that of the others.
    stack.start("safekeeper-2")
    lsn = current_lsn(rebuilt)
    wait_for(
        lambda: [each.flush_lsn >= lsn for each in stack.greetings(rebuilt)] == [True] * 3,
        30,
        "all three have it all",
    )
