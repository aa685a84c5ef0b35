"""A published table loses its replica identity: PostgreSQL refuses its UPDATEs, and everybody is told so."""

import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import psycopg
import pytest

from tests.support.attached import Attached
from tests.support.servers import MAJORS_IN_TURN, Database
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause
from walsender_bridge.observability.observation import Observer

#: By what is lost: what takes the identity away, and the table, or partition, that is named then.
LOST = {
    "nothing": ("ALTER TABLE orders REPLICA IDENTITY NOTHING", "public.orders"),
    "dropped key": ("ALTER TABLE keyed DROP CONSTRAINT keyed_pkey", "public.keyed"),
    "dropped index": ("DROP INDEX named_by_name", "public.named"),
    "one partition": ("ALTER TABLE parts_low REPLICA IDENTITY NOTHING", "public.parts_low"),
}


def ill(tuskline: Attached) -> list[str]:
    with Observer(load_config(tuskline.config)) as observer:
        return observer.observe().problems


def unready(tuskline: Attached) -> str:
    """The reasons of /readyz; empty when it is ready."""
    try:
        with urllib.request.urlopen(f"http://{tuskline.metrics_listen}/readyz", timeout=15):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return error.read().decode()


def entries(tuskline: Attached) -> int:
    with LogClient(f"grpc://{tuskline.log_listen}") as log:
        return log.status().streams["shop"].end_offset


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)
def test_a_lost_replica_identity_is_named_with_its_repair_and_stops_nobody_else(
    tmp_path: Path, shop: Database
) -> None:
    # The user's own publication, from which nothing is taken out; FOR ALL TABLES also has partitions on every major.
    shop.execute(
        "CREATE TABLE parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE parts_low PARTITION OF parts FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE parts_high PARTITION OF parts FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE keyed (id int PRIMARY KEY)",
        "CREATE TABLE named (name text NOT NULL)",
        "CREATE UNIQUE INDEX named_by_name ON named (name)",
        "ALTER TABLE named REPLICA IDENTITY USING INDEX named_by_name",
        "INSERT INTO orders VALUES (1, 'x')",
        "CREATE PUBLICATION tuskline_shop FOR ALL TABLES",
    )
    with Attached(tmp_path, {"shop": {"dsn": shop.dsn}}, metrics=True) as tuskline:
        tuskline.json("init")
        tuskline.up()
        wait_for(lambda: not ill(tuskline), 60, "everything runs")
        for change, _ in LOST.values():
            shop.execute(change)
        words = ill(tuskline)
        for _, table in LOST.values():
            (word,) = [each for each in words if f"table {table} " in each]
            assert "refuses its UPDATEs and DELETEs" in word
            assert f"ALTER TABLE {table} REPLICA IDENTITY FULL" in word
        assert len(words) == len(LOST)
        assert tuskline.json("status", code=Cause.UNAVAILABLE)["problems"] == words
        told = wait_for(lambda: unready(tuskline), 30, "/readyz says so")
        assert "ALTER TABLE public.orders REPLICA IDENTITY FULL" in told
        report = tuskline.json("doctor", code=Cause.PUBLICATION)
        found = [each for each in report["findings"] if each["severity"] == "error"]
        assert {each["check"] for each in found} == {"replica identity"}
        assert "it is published" in found[0]["what"]
        # The server's own word, and what it still takes, which still arrives.
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            shop.execute("UPDATE orders SET pad = 'y'")
        before = entries(tuskline)
        shop.execute("INSERT INTO orders VALUES (2, 'y')", "INSERT INTO parts VALUES (15)")
        wait_for(lambda: entries(tuskline) > before, 30, "INSERTs arrive")
        # Whatever dies, it is no reason not to come back: the other tables go on.
        tuskline.kill_up()
        tuskline.up()
        wait_for(lambda: ill(tuskline) == words, 60, "it runs again")
        pids = {
            each["process"]: each["pid"] for each in tuskline.json("status", code=19)["processes"]
        }
        os.kill(pids["bridge/capture-shop"], signal.SIGKILL)
        wait_for(lambda: ill(tuskline) == words, 60, "capture streams again")
        shop.execute(*(each["fix_sql"] for each in found))
        wait_for(lambda: not ill(tuskline), 30, "all is well")
        wait_for(lambda: not unready(tuskline), 30, "/readyz too")
        before = entries(tuskline)
        shop.execute("UPDATE orders SET pad = 'z'", "DELETE FROM parts")
        wait_for(lambda: entries(tuskline) > before, 30, "UPDATEs arrive")
        assert tuskline.stop_up() == 0
        tuskline.json("detach")
