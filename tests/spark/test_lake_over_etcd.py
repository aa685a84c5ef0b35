"""From PostgreSQL to the lake over two repositories in etcd, whose leader is killed under load."""

from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark_consumers import read
from tests.support.capture_stack import Load, check_equal, server_with_tables
from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.lake_check import assert_equal
from tests.support.servers import MakeServer
from tests.support.several_bridges import SeveralBridges


@needs_etcd
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.iceberg_only("is of the log, and makes its configuration by itself")
def test_25_log_and_lake_are_equal_when_the_leading_repository_is_killed_under_load(
    spark: SparkSession, make_server: MakeServer, tmp_path: Path
) -> None:
    """With all that runs on its machine, each machine once: each transaction is in log and lake once."""
    server = server_with_tables(make_server, 15, fsync="off", wal_sender_timeout="5s")
    lake = '[lake]\nuri = "lake"\nepoch_interval = 0.5\n'
    with (
        EtcdCluster(tmp_path) as etcd,
        psycopg.connect(server.dsn(), autocommit=True) as connection,
        SeveralBridges.running(
            tmp_path, etcd, server.dsn(), third=', "lake"', more=lake
        ) as machines,
    ):
        machines.active()

        def flush() -> None:
            done = machines.third.run("flush", "--timeout", "200", seconds=240)
            assert done.returncode == 0, done.stderr + machines.third.logs()

        with Load(server.dsn(), pause=0.02):
            flush()
            for _ in range(2):
                machines.settled()
                leader = machines.leader()
                machines.machines[leader].kill()
                machines.active(1 - leader)
                machines.goes_on(connection)
                flush()
                machines.machines[leader].up()
        flush()
        found = check_equal(machines.log, server.dsn())
        assert len(found.ends) > 100
        flush()
        snapshot = read(spark, str(machines.third.folder / "lake"))
        assert len(snapshot.tables) == 2
        assert_equal(server.dsn(), snapshot)
