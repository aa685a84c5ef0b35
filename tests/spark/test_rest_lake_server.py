"""A lake in Iceberg's own REST server, its files in a bucket: its driver is killed, suspended and taken over, and engines read it."""

import os
import signal
import threading
import uuid
from contextlib import closing, contextmanager, suppress

import psycopg
import pytest

from spark_consumers import Lakehouse, Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from spark_consumers.spark.lake_catalog import LakeCatalog
from tests.support.bank_load import TABLES, check, transfer
from tests.support.engines import connected
from tests.support.iceberg_server import iceberg_server
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.s3 import BUCKET, KEYS, FaultProxy, options_at
from tests.support.servers import fresh_database
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("s3_keys")]

NAMESPACE = ("lakes", "bank")
PLACES = ("staged", "table-written", "after-manifest", "before-shown", "shown")


class Server:
    """The server's own database, and a proxy before it, by which tests see what is asked."""

    def __init__(self, database, proxy):
        self.database, self.proxy = database, proxy
        self.uri = f"http://127.0.0.1:{proxy.port}"

    def tables(self):
        """The metadata file of each table, by its namespace and name."""
        with psycopg.connect(self.database.dsn) as connection:
            rows = connection.execute(
                "SELECT table_namespace, table_name, metadata_location FROM iceberg_tables"
            ).fetchall()
        return {(space, name): file for space, name, file in rows}


@pytest.fixture
def server(tmp_path, pg_server, s3_port):
    folder = tmp_path / "catalog"
    folder.mkdir()
    s3 = f"http://127.0.0.1:{s3_port}"
    with (
        fresh_database(pg_server) as database,
        iceberg_server(folder, database.dsn, s3) as options,
        FaultProxy(int(options.uri.rpartition(":")[2])).running() as proxy,
    ):
        yield Server(database, proxy)


def settings(server, store):
    place = f'endpoint = "{store.endpoint}"\nregion = "{store.region}"\nallow_http = true\n'
    name = ".".join(NAMESPACE)
    rest = f'type = "rest"\nuri = "{server.uri}"\nnamespace = "{name}"\nallow_http = true\n'
    return f"{place}[lake.catalog]\n{rest}"


@contextmanager
def under_load(database, seed):
    stop = threading.Event()
    load = threading.Thread(target=transfer, args=(database.dsn, stop, seed, 0.05))
    load.start()
    try:
        yield
    finally:
        stop.set()
        load.join()


@pytest.mark.timeout(1800)
def test_a_lake_in_icebergs_own_server_survives_kills_and_a_suspended_driver(
    tmp_path, database, server, spark, seed, s3_port
):
    database.execute(*TABLES)
    store, lake = options_at(s3_port), f"s3://{BUCKET}/{uuid.uuid4().hex}/lake"
    made = Stack(
        tmp_path, {"shop": database.dsn}, epoch_interval=0.5, lake=settings(server, store), uri=lake
    )

    def head():
        return open_chain(lake, store).head()

    with made as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: head() is not None and len(head().readable) == 3, 300, "all tables")
        with under_load(database, seed):
            stack.kill("lake")
            for place in PLACES:
                before = head()
                stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
                assert stack.wait("lake", 300) == -signal.SIGKILL, place
                assert head().term == before.term + 1
                check(read(spark, lake, store=store))
            stack.start("lake")
            after = head().link + 2
            wait_for(lambda: head().link >= after, 300, "epochs go on")
            stopped_and_continued(stack, server, spark, database, head, store)
        stack.start("lake")
        source = Source("shop", database.dsn, "tuskline_shop")
        flush(lake, stack.log_address, [source], timeout=300, store=store)
        assert stack.stop("lake") == 0
    snapshot = read(spark, lake, store=store)
    assert_equal(database.dsn, snapshot)
    assert verify(open_chain(lake, store), lambda *_: None).errors == []
    assert_no_orphans(spark, lake, store)
    engines_read_the_same(server, snapshot, store)


def stopped_and_continued(stack, server, spark, database, head, store):
    """The driver sleeps between its look at the catalog and its commit, while another one takes over."""
    pid, stopped = stack.pid("lake"), threading.Event()

    def seen(method, path):
        if method == "GET" and path.endswith("/tuskline_epochs") and not stopped.is_set():
            os.kill(pid, signal.SIGSTOP)
            stopped.set()

    server.proxy.seen = seen
    assert stopped.wait(120)
    rest = LakeCatalog(server.uri, namespace=NAMESPACE, allow_http=True)
    source = Source("shop", database.dsn, "tuskline_shop")
    newer = Lakehouse(spark, stack.lake, stack.log_address, [source], rest=rest, store=store)
    try:
        newer.run_once(force=True)
        taken, before = head(), server.tables()
        os.kill(pid, signal.SIGCONT)
        assert stack.wait("lake", 180) == Cause.FENCED
        assert server.tables() == before
        assert head() == taken
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        newer.close()


def engines_read_the_same(server, snapshot, store):
    """PyIceberg reads the tables through the catalog by their names in PostgreSQL, and DuckDB by the files that it names.

    DuckDB does not separate the parts of a namespace as this server demands.
    """
    load_catalog = pytest.importorskip("pyiceberg.catalog").load_catalog
    keys = {
        "s3.endpoint": store.endpoint,
        "s3.region": store.region,
        "s3.access-key-id": KEYS["AWS_ACCESS_KEY_ID"],
        "s3.secret-access-key": KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    catalog = load_catalog("lake", type="rest", uri=server.uri, **keys)
    files = server.tables()
    with closing(connected()) as duck:
        duck.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{keys['s3.access-key-id']}', SECRET '{keys['s3.secret-access-key']}', "
            f"ENDPOINT '{store.endpoint.removeprefix('http://')}', REGION '{store.region}', URL_STYLE 'path', USE_SSL false)"
        )
        for table, columns in (("accounts", "id, balance, moves"), ("audit", "account, amount")):
            wanted = sorted(map(tuple, snapshot[table].selectExpr(*columns.split(", ")).collect()))
            there = catalog.load_table((*NAMESPACE, "shop", "public", table))
            rows = there.scan(selected_fields=tuple(columns.split(", "))).to_arrow().to_pylist()
            assert sorted(tuple(row.values()) for row in rows) == wanted
            file = files[".".join((*NAMESPACE, "shop", "public")), table]
            found = duck.execute(f"SELECT {columns} FROM iceberg_scan('{file}')").fetchall()
            assert sorted(found) == wanted
