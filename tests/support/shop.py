"""Two databases of one server that are kept in one lake, and what a person sees who looks after it."""

import json
import urllib.error
import urllib.request
from typing import Any

import psycopg
from pyspark.sql import SparkSession

from spark_consumers import read
from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.manifest.table_version import LEFT
from tests.support.attached import Attached
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server.server import LocalServer
from walsender_bridge.errors import Cause

SLOT = "tuskline_shop"
TABLES = {"shop": "shop.public.orders", "billing": "billing.public.bills"}


def sql(server: LocalServer, database: str, *statements: str) -> None:
    with psycopg.connect(server.dsn(database), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def make_databases(server: LocalServer) -> dict[str, dict[str, object]]:
    """The databases with their tables; the configuration's sources."""
    sql(server, "postgres", "CREATE DATABASE shop", "CREATE DATABASE billing")
    sql(server, "shop", "CREATE TABLE orders (id int PRIMARY KEY, note int)")
    sql(server, "billing", "CREATE TABLE bills (id int PRIMARY KEY)")
    return {name: {"dsn": server.dsn(name)} for name in TABLES}


def begun_again(before: Manifest, after: Manifest) -> set[str]:
    """The tables that begin at another LSN: they were copied, or brought level there."""
    lsns = {name: table.start_lsn for name, table in before.tables.items()}
    return {name for name, table in after.tables.items() if lsns.get(name) != table.start_lsn}


def copied(before: Manifest, after: Manifest) -> set[str]:
    """The tables that have another copy."""
    paths = {name: table.path for name, table in before.tables.items()}
    return {name for name, table in after.tables.items() if paths.get(name) != table.path}


class Shop:
    """`shop` is the database that things happen to; `billing` is to go on meanwhile."""

    def __init__(
        self,
        tuskline: Attached,
        server: LocalServer,
        spark: SparkSession,
        servers: list[LocalServer],
    ) -> None:
        """`servers`: those that are destroyed when the installation ends."""
        self.tuskline, self.server, self.spark = tuskline, server, spark
        self.servers = servers
        self.changes = 0

    def change(self) -> None:
        """Rows of each kind of change, in both databases."""
        self.changes += 1
        n = self.changes
        sql(
            self.server,
            "shop",
            f"INSERT INTO orders SELECT g, {n} FROM generate_series({100 * n}, {100 * n + 9}) AS g",
            f"UPDATE orders SET note = {n} WHERE id % 3 = 0",
            f"DELETE FROM orders WHERE id = {100 * n + 5}",
        )
        sql(self.server, "billing", f"INSERT INTO bills VALUES ({n})")

    def head(self) -> Manifest:
        found = open_chain(self.tuskline.lake).head()
        assert found is not None
        return found

    def flush(self) -> None:
        """Changes of both databases arrive."""
        self.change()
        done = self.tuskline.run("flush", "--timeout", "150", seconds=200)
        assert done.returncode == 0, done.stderr + self.tuskline.logs()

    def rows_of(self, table: str) -> list[tuple[Any, ...]]:
        """What the server has, of a table by its name in the lake."""
        database, _, name = table.partition(".")
        with psycopg.connect(self.server.dsn(database)) as connection:
            return connection.execute(f"SELECT * FROM {name} ORDER BY 1".encode()).fetchall()

    def healthy(self) -> None:
        """The tables are equal, and nothing is wrong. One that has left keeps its rows, and may be gone here."""
        self.flush()
        snapshot = read(self.spark, str(self.tuskline.lake))
        for table in snapshot:
            if snapshot.manifest.tables[table].state == LEFT:
                continue
            expected = self.rows_of(table)
            assert sorted(map(tuple, snapshot[table].collect())) == expected
            assert snapshot.manifest.tables[table].rows == len(expected)
        assert set(snapshot) >= {*TABLES.values()}
        wait_for(lambda: not self.problems(), 240, "all is well")

    def problems(self) -> str:
        """What `status` says is wrong, in one line."""
        done = self.tuskline.run("status")
        assert done.returncode in {0, Cause.UNAVAILABLE}, done.stderr
        return " ".join(done.stderr.split()) if done.returncode else ""

    def doctor(self) -> str:
        """What `doctor` says where it finds an error, in one line; empty where it finds none."""
        done = self.tuskline.run("doctor")
        return " ".join((done.stdout + done.stderr).split()) if done.returncode else ""

    def unready(self) -> str:
        """Why /readyz does not answer 200, in one line; empty when it does, or nobody answers."""
        url = f"http://{self.tuskline.metrics_listen}/readyz"
        try:
            with urllib.request.urlopen(url, timeout=30):
                return ""
        except urllib.error.HTTPError as error:
            with error:
                return " ".join(json.load(error)["reasons"])
        except OSError:
            return ""


def free_slot(shop: Shop) -> None:
    """End whoever streams from the slot, and drop it."""

    def gone() -> bool:
        with psycopg.connect(shop.server.dsn("shop"), autocommit=True) as connection:
            names = {"slot": SLOT}
            connection.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %(slot)s",
                names,
            )
            try:
                connection.execute("SELECT pg_drop_replication_slot(%(slot)s)", names)
            except psycopg.errors.ObjectInUse:
                return False
            return True

    wait_for(gone, 60, "the slot is free and dropped")
