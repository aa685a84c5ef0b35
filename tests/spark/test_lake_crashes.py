"""The lake's driver is killed at every stage of an epoch, under load: real processes, SIGKILL."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import tests
from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.format.data_files import orphans
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.bank_load import TABLES, check, transfer
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.stack import Stack
from tests.support.table_format import DELTA
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause, LakeError
from walsender_bridge.runtime.processes import children, command_line


def _head(stack):
    return open_chain(stack.lake).head()


def _shown(stack):
    head = _head(stack)
    return head is not None and len(head.readable) == 3 and head


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "places",
    [
        ("before-manifest", "after-manifest"),
        pytest.param(
            ("staged", "table-written", "before-manifest", "after-manifest"), marks=pytest.mark.long
        ),
    ],
    ids=["some", "all"],
)
def test_3_4_5_6_a_driver_killed_anywhere_leaves_whole_epochs(
    tmp_path, database, spark, seed, places, table_format
):
    database.execute(*TABLES)
    stop = threading.Event()
    with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5) as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: _shown(stack), 120, "the first epoch")
        # Enough for every epoch, and most of the processor for the drivers that start.
        load = threading.Thread(target=transfer, args=(database.dsn, stop, seed, 0.05))
        load.start()
        try:
            stack.kill("lake")
            # 4: the executors die in the middle of their ranges, and then the driver, which waits.
            before = _head(stack)
            stack.start("lake", env={"TUSKLINE_FAIL_POINT": "staging"})
            wait_for(lambda: _head(stack).link > before.link, 240, "the takeover")
            wait_for(lambda: "round failed" in stack.logs(), 240, "a task's death")
            stack.kill("lake")
            assert _head(stack).epoch == before.epoch
            check(read(spark, stack.lake))
            # 5, 6: before and after the tables are written, and on both sides of the manifest.
            for place in places:
                before = _head(stack)
                stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
                assert stack.wait("lake", 240) == -9
                # One link for the takeover, and the epoch's own only if the manifest was reached.
                published = place == "after-manifest"
                assert _head(stack).link == before.link + 1 + published
                assert (_head(stack).epoch > before.epoch) == published
                shown = None
                if table_format == DELTA and published:
                    # The versions of the Delta logs are behind the manifest: the next driver makes them.
                    with pytest.raises(LakeError, match="does not show"):
                        check(read(spark, stack.lake))
                    shown = before.epoch
                check(read(spark, stack.lake, epoch=shown))
            stack.start("lake")
            after = _head(stack).link + 3
            wait_for(lambda: _head(stack).link >= after, 240, "epochs go on")
        finally:
            stop.set()
            load.join()
        flush(
            stack.lake,
            stack.log_address,
            [Source("shop", database.dsn, "tuskline_shop")],
            timeout=240,
        )
        assert stack.stop("lake") == 0
        assert list((tmp_path / "log" / "scratch").iterdir()) == []
        assert_equal(database.dsn, read(spark, stack.lake))
        # A takeover's link repeats its epoch.
        for epoch in {m.epoch for m in open_chain(stack.lake).links() if len(m.readable) == 3}:
            check(read(spark, stack.lake, epoch=epoch))
        assert_no_orphans(spark, stack.lake)


def temporary_files(pid):
    """What a process has open or mapped below the system's temporary folder."""
    mapped = [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    opened = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        # It opens and closes files while it is looked at.
        with contextlib.suppress(FileNotFoundError):
            opened.append(str(fd.readlink()))
    found = {Path(name) for name in (*mapped, *opened) if name.startswith(tempfile.gettempdir())}
    # A checkout may lie there as well, with the environment and the archive of classes that this runs with.
    own = (Path(sys.prefix), Path(tests.__path__[0]).parent)
    return {path for path in found if not any(path.is_relative_to(each) for each in own)}


@pytest.mark.timeout(200)
def test_a_driver_whose_jvm_dies_ends_with_an_error(tmp_path, database):
    database.execute("CREATE TABLE one (id int PRIMARY KEY)")
    with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5) as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: _head(stack) is not None, 120, "the first link")
        (jvm,) = [pid for pid in children(stack.pid("lake")) if "java" in command_line(pid)]
        # A JVM that is killed can remove nothing: so all that it makes is where somebody else does.
        (place,) = (tmp_path / "log" / "scratch").iterdir()
        made = temporary_files(jvm)
        assert made
        assert [path for path in made if not path.is_relative_to(tmp_path)] == []
        assert list(place.glob("blockmgr-*"))
        os.kill(jvm, signal.SIGKILL)
        database.execute("INSERT INTO one VALUES (1)")
        assert stack.wait("lake", 60) == Cause.UNAVAILABLE
        # Py4J logs what it meets; the command's own last words are these.
        last = (tmp_path / "lake.log").read_text().splitlines()[-2:]
        assert last == ["error: lake: its JVM has ended", "HINT:  start the driver again"]
        assert not place.exists()


@pytest.mark.timeout(200)
def test_37_a_task_that_is_killed_in_mid_write_is_run_again_and_succeeds(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.retry_job", str(tmp_path)],
        env={**os.environ, "SPARK_LOCAL_DIRS": str(tmp_path / "local")},
        cwd=Path(tests.__path__[0]).parent,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout.splitlines()[-1])
    assert [file["rows"] for file in made] == [1000, 1000]
    for file in made:
        assert pq.read_table(file["path"]).num_rows == 1000
    # What the first attempts had begun is garbage by its name. Checksums go with their files.
    found = {path for path in (tmp_path / "data").iterdir() if path.suffix != ".crc"}
    left = found - {Path(file["path"]) for file in made}
    assert set(orphans(tmp_path, {0: "", 1: ""}, 1)) == {*left, *(Path(f["path"]) for f in made)}
