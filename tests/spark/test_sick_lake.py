"""A lake that cannot work: named in `status` at every look while its job ends again and again, and by `flush`; and the way out."""

import time

import pytest

from spark_consumers import read
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import Attached
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause
from walsender_bridge.runtime.supervisor import read_states


def restarts(tuskline: Attached) -> int:
    found: int = read_states(tuskline.run_dir, "up").children["lake"].restarts
    return found


def ill(tuskline: Attached) -> list[str]:
    done = tuskline.run("status")
    assert done.returncode in {0, Cause.UNAVAILABLE}, done.stderr
    return done.stderr.splitlines() if done.returncode else []


@pytest.mark.long
@pytest.mark.timeout(800)
def test_a_lake_of_another_log_is_named_all_the_time_and_another_folder_is_a_way_out(
    tmp_path, database, spark
):
    database.execute("CREATE TABLE orders (id int PRIMARY KEY)", "INSERT INTO orders VALUES (1)")
    source = {"dsn": database.dsn, "tables": ["public.orders"]}
    with Attached(tmp_path, {"shop": source}, lake=True) as tuskline:
        tuskline.lake.mkdir()
        open_chain(tuskline.lake).initialise("another log", "iceberg")
        tuskline.json("init")
        tuskline.up()

        def named() -> bool:
            text = " ".join(" ".join(ill(tuskline)).split())
            return "this lake belongs to another log" in text

        wait_for(named, 120, "the cause in `status`\n" + tuskline.logs())
        before = restarts(tuskline)
        while restarts(tuskline) < before + 1:
            assert named(), "also while it is being started again"
        began = time.monotonic()
        failed = tuskline.run("flush")
        assert failed.returncode == Cause.LAKE, failed.stderr
        assert "another log" in failed.stderr
        assert time.monotonic() - began < 60
        # The hint: another folder.
        assert tuskline.stop_up() == 0
        plain = tuskline.config.read_text()
        tuskline.config.write_text(plain.replace('uri = "lake"', 'uri = "second"'))
        tuskline.up()
        flushed = tuskline.run("flush", seconds=240)
        assert flushed.returncode == 0, flushed.stderr + tuskline.logs()
        wait_for(lambda: not ill(tuskline), 240, "all is well")
        assert read(spark, tmp_path / "second")["orders"].count() == 1
        assert tuskline.stop_up() == 0
