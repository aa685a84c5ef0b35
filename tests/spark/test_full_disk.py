"""The lake's disk fills while the job runs: everybody is told where and why, and it goes on once there is room."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import psycopg
import pytest

from spark_consumers import read
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import Attached
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.small_disk import fill, mounted
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

BIG = "INSERT INTO one SELECT g, md5(g::text) FROM generate_series({}, {}) AS g"


def reasons(tuskline: Attached) -> list[str] | None:
    """Why /readyz does not answer 200; empty when it does, None when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{tuskline.metrics_listen}/readyz", timeout=15):
            return []
    except urllib.error.HTTPError as error:
        with error:
            return list(json.loads(error.read())["reasons"])
    except OSError:
        return None


def told_by_the_job(tuskline: Attached) -> str:
    """What the job itself says of its rounds, without a look at the disk."""
    path = tuskline.run_dir / "lake.status.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    return json.dumps(record.get("error"))


def epoch(tuskline: Attached) -> int:
    head = open_chain(tuskline.lake).head()
    return head.epoch if head is not None and head.readable else 0


@pytest.mark.timeout(800)
def test_a_disk_that_fills_is_named_and_nothing_is_lost_once_there_is_room(
    tmp_path: Path, database, spark
) -> None:
    database.execute("CREATE TABLE one (id int PRIMARY KEY, note text)", BIG.format(1, 1000))
    lake = tmp_path / "lake"
    lake.mkdir()
    source = {"dsn": database.dsn, "tables": ["public.one"]}
    # Room for a restart, and no more than a test can fill.
    with mounted(lake, "-o", "size=200m"):
        with Attached(tmp_path, {"shop": source}, lake=True, metrics=True) as tuskline:
            tuskline.json("init")
            tuskline.up()
            wait_for(lambda: epoch(tuskline), 180, "the first epoch\n" + tuskline.logs())
            wait_for(lambda: tuskline.run("status").returncode == 0, 240, "all is well")
            ballast = lake / "tables" / "ballast"
            assert fill(ballast) > 100 << 20
            before = epoch(tuskline)
            database.execute(BIG.format(1001, 20_000), "UPDATE one SET note = 'x' WHERE id < 100")
            wait_for(
                lambda: "No space left on device" in told_by_the_job(tuskline),
                90,
                "the job says so",
            )
            assert str(lake) in told_by_the_job(tuskline)
            (told,) = [
                word
                for word in tuskline.json("status", code=Cause.UNAVAILABLE)["problems"]
                if word.startswith("lake: ")
            ]
            assert "full" in told
            assert str(lake) in told
            assert "free disk space" in told
            (reason,) = wait_for(lambda: reasons(tuskline), 30, "/readyz says so")
            assert "free disk space" in reason
            # Nobody sees a part; and the primary keeps no WAL for it, for the log has it.
            assert epoch(tuskline) == before
            assert read(spark, lake)["public.one"].count() == 1000
            with psycopg.connect(database.dsn) as connection:
                count = connection.execute("SELECT count(*) FROM one").fetchone()
            assert count == (20_000,)
            ballast.unlink()
            done = tuskline.run("flush", "--timeout", "120")
            assert done.returncode == 0, done.stderr + tuskline.logs()
            wait_for(lambda: tuskline.run("status").returncode == 0, 240, "all is well again")
            wait_for(lambda: reasons(tuskline) == [], 30, "/readyz too")
            assert tuskline.stop_up() == 0
            # A driver that is started on a full disk says the same before it starts Spark.
            fill(ballast)
            assert "free disk space" in tuskline.error_plain("lake", "run", code=Cause.LAKE)
            ballast.unlink()
        assert_equal(database.dsn, read(spark, lake))
        assert_no_orphans(spark, lake)
        assert not list(lake.rglob("*.tmp"))
