"""Sources whose stream cannot go on: named with the cause, and one command goes on under the same names."""

import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from pyspark.sql import SparkSession

from spark_consumers import read
from spark_consumers.lakehouse.manifest import Manifest, open_chain
from tests.support.attached import Attached
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause
from walsender_bridge.local_server.server import LocalServer

SLOT = "tuskline_shop"
TABLES = {"shop": "shop.public.orders", "billing": "billing.public.bills"}


def sql(server: LocalServer, database: str, *statements: str) -> None:
    with psycopg.connect(server.dsn(database), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


def free_slot(server: LocalServer) -> None:
    """End whoever streams from the slot, and drop it."""

    def gone() -> bool:
        with psycopg.connect(server.dsn("shop"), autocommit=True) as connection:
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


def head(tuskline: Attached) -> Manifest:
    found = open_chain(tuskline.lake).head()
    assert found is not None
    return found


def ill(tuskline: Attached) -> str:
    """What `status` says is wrong, in one line."""
    done = tuskline.run("status")
    assert done.returncode in {0, Cause.UNAVAILABLE}, done.stderr
    return " ".join(done.stderr.split()) if done.returncode else ""


class Shop:
    """Two databases of one server in one lake; `shop` is the one that things happen to."""

    def __init__(self, tuskline: Attached, server: LocalServer, spark: SparkSession) -> None:
        self.tuskline, self.server, self.spark = tuskline, server, spark
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

    def healthy(self) -> None:
        """Changes of both databases arrive, and nothing is wrong."""
        self.change()
        done = self.tuskline.run("flush", "--timeout", "150", seconds=200)
        assert done.returncode == 0, done.stderr + self.tuskline.logs()
        snapshot = read(self.spark, str(self.tuskline.lake))
        for table in TABLES.values():
            database, _, name = table.partition(".")
            with psycopg.connect(self.server.dsn(database)) as connection:
                expected = connection.execute(f"SELECT * FROM {name} ORDER BY id").fetchall()
            assert sorted(map(tuple, snapshot[table].collect())) == expected
            assert snapshot.manifest.tables[table].rows == len(expected)
        wait_for(lambda: not ill(self.tuskline), 60, "all is well")

    def reattached(self, cause: str, *sources: str) -> None:
        """The cause is named with the command; it is followed, and only these sources are copied again."""
        wait_for(lambda: cause in ill(self.tuskline), 90, f"{cause}\n{self.tuskline.logs()}")
        assert "tuskline reattach shop" in ill(self.tuskline)
        doctor = self.tuskline.run("doctor")
        assert doctor.returncode != 0
        assert "tuskline reattach shop" in doctor.stdout + doctor.stderr
        before = head(self.tuskline)
        looked = self.tuskline.json("reattach", "--dry-run")["reattached"]
        assert [row["source"] for row in looked] == [*sources]
        assert all(cause in row["reason"] for row in looked)
        done = self.tuskline.json("reattach", *sources)
        assert done["reattached"] == looked
        self.healthy()
        after = head(self.tuskline)
        assert after.epoch > before.epoch
        assert copied(before, after) == {TABLES[source] for source in sources}
        assert self.tuskline.json("reattach")["reattached"] == []


def copied(before: Manifest, after: Manifest) -> set[str]:
    """The tables that have another copy."""
    paths = {name: table.path for name, table in before.tables.items()}
    return {name for name, table in after.tables.items() if paths[name] != table.path}


def dropped(shop: Shop) -> None:
    free_slot(shop.server)
    shop.change()


def made_by_hand(shop: Shop) -> None:
    free_slot(shop.server)
    shop.change()
    sql(shop.server, "shop", f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')")


def detached(shop: Shop) -> None:
    assert shop.tuskline.stop_up() == 0
    shop.tuskline.json("detach", "--source", "shop")
    shop.change()
    shop.tuskline.up()


def unpublished(shop: Shop) -> None:
    sql(shop.server, "shop", f"DROP PUBLICATION {SLOT}")
    shop.change()


def invalidated(shop: Shop) -> None:
    assert shop.tuskline.stop_up() == 0
    sql(
        shop.server,
        "shop",
        "ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'",
        "SELECT pg_reload_conf()",
    )

    def lost() -> bool:
        sql(shop.server, "shop", "SELECT pg_switch_wal()", "CHECKPOINT")
        shop.change()
        with psycopg.connect(shop.server.dsn("shop")) as connection:
            row = connection.execute(
                f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{SLOT}'"
            ).fetchone()
        return row == ("lost",)

    wait_for(lost, 120, "the slot is lost")
    sql(shop.server, "shop", "ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")
    shop.tuskline.up()


STATES: dict[str, tuple[Callable[[Shop], None], str, *tuple[str, ...]]] = {
    "dropped": (dropped, "the slot is gone", "shop"),
    "made by hand": (made_by_hand, "the slot was made anew or moved", "shop"),
    "detached": (detached, "the slot is gone", "shop"),
    # The limit is the server's, for all slots.
    "invalidated": (invalidated, "the server has removed WAL that it needs", *TABLES),
    "no publication": (unpublished, "publication 'tuskline_shop' was dropped", "shop"),
}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["made by hand"], id="one state"),
        pytest.param([*STATES], id="each state", marks=pytest.mark.long),
    ],
)
def test_a_source_that_cannot_go_on_begins_again_under_its_name(
    tmp_path: Path, make_server: MakeServer, spark, names: list[str]
) -> None:
    server = make_server(fsync="off", max_wal_size="32MB", min_wal_size="32MB")
    server.start()
    sql(server, "postgres", "CREATE DATABASE shop", "CREATE DATABASE billing")
    sql(server, "shop", "CREATE TABLE orders (id int PRIMARY KEY, note int)")
    sql(server, "billing", "CREATE TABLE bills (id int PRIMARY KEY)")
    databases = {name: {"dsn": server.dsn(name)} for name in TABLES}
    with Attached(tmp_path, databases, lake=True) as tuskline:
        tuskline.json("init")
        tuskline.up()
        shop = Shop(tuskline, server, spark)
        shop.healthy()
        assert tuskline.json("reattach")["reattached"] == []
        for name in names:
            happens, cause, *sources = STATES[name]
            began = time.monotonic()
            happens(shop)
            shop.reattached(cause, *sources)
            print(f"{name}: {time.monotonic() - began:.1f} s")
        assert tuskline.stop_up() == 0
