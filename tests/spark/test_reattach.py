"""Sources whose stream cannot go on: named with the cause, and one command goes on under the same names."""

import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.support.attached import Attached
from tests.support.servers import MakeServer
from tests.support.shop import (
    SLOT,
    TABLES,
    Shop,
    begun_again,
    copied,
    free_slot,
    make_databases,
    sql,
)
from tests.support.waiting import wait_for


def reattached(shop: Shop, cause: str, *sources: str) -> None:
    """The cause is named with the command; it is followed, and only the tables of these sources begin again."""

    def is_named() -> bool:
        problems = shop.problems()
        return cause in problems and "tuskline reattach shop" in problems

    wait_for(is_named, 90, cause)
    assert "tuskline reattach shop" in shop.doctor()
    before = shop.head()
    looked = shop.tuskline.json("reattach", "--dry-run")["reattached"]
    assert [row["source"] for row in looked] == [*sources]
    assert all(cause in row["reason"] for row in looked)
    done = shop.tuskline.json("reattach", *sources)
    assert done["reattached"] == looked
    shop.healthy()
    after = shop.head()
    assert after.epoch > before.epoch
    assert begun_again(before, after) == {TABLES[source] for source in sources}
    if "publication" not in cause:
        # With its publication gone, a table may have left before.
        assert not copied(before, after), "each was brought level"
    assert shop.tuskline.json("reattach")["reattached"] == []


def dropped(shop: Shop) -> None:
    free_slot(shop)
    shop.change()


def made_by_hand(shop: Shop) -> None:
    free_slot(shop)
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
    "made by hand": (made_by_hand, "the slot was recreated or moved", "shop"),
    "detached": (detached, "the slot is gone", "shop"),
    # The limit is the server's, for all slots.
    "invalidated": (invalidated, "the server has removed WAL that the slot needs", *TABLES),
    "no publication": (unpublished, "publication 'tuskline_shop' was dropped", "shop"),
}


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_source_that_cannot_go_on_begins_again_under_its_name(
    tmp_path: Path, make_server: MakeServer, spark
) -> None:
    server = make_server(fsync="off", max_wal_size="32MB", min_wal_size="32MB")
    server.start()
    with Attached(tmp_path, make_databases(server), lake=True) as tuskline:
        tuskline.json("init")
        tuskline.up()
        shop = Shop(tuskline, server, spark, [])
        shop.healthy()
        assert tuskline.json("reattach")["reattached"] == []
        for name, (happens, cause, *sources) in STATES.items():
            began = time.monotonic()
            happens(shop)
            reattached(shop, cause, *sources)
            print(f"{name}: {time.monotonic() - began:.1f} s")
        assert tuskline.stop_up() == 0
