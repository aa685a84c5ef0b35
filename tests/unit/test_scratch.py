"""A driver's folder ends with it, or with the next driver; never under one that lives."""

import subprocess
import sys

from spark_consumers.spark.scratch import scratch, settings

HOLD = """
import pathlib, sys
from spark_consumers.spark.scratch import scratch
with scratch(pathlib.Path(sys.argv[1])) as folder:
    (folder / "blockmgr-1").mkdir()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_ends_with_its_block(tmp_path):
    root = tmp_path / "log" / "scratch"
    with scratch(root) as one, scratch(root) as other:
        assert one != other
        (one / "spark-1").mkdir()
    assert list(root.iterdir()) == []


def test_what_a_killed_driver_left_goes_with_the_next_and_the_living_keep_theirs(tmp_path):
    drivers = []
    for _ in range(2):
        driver = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdout is not None
        drivers.append((driver, driver.stdout.readline().strip()))
    (dead, left), (alive, kept) = drivers
    try:
        dead.kill()
        dead.communicate()
        # A driver that was killed before it had its lock; and what is no driver's stays.
        (tmp_path / "driver-unlocked").mkdir()
        (tmp_path / "notes.txt").touch()
        (tmp_path / "somebody").mkdir()
        with scratch(tmp_path) as own:
            names = {str(path) for path in tmp_path.glob("[!.]*")}
        assert names == {
            str(own),
            kept,
            str(tmp_path / "notes.txt"),
            str(tmp_path / "somebody"),
        }
        assert left not in names
    finally:
        output, _ = alive.communicate("")
    assert alive.returncode == 0, output


def test_a_cluster_s_executors_keep_their_own_folder(tmp_path):
    assert settings(tmp_path, "local[2]")["spark.local.dir"] == str(tmp_path)
    for master in ("local-cluster[2,1,1024]", "spark://host:7077", "yarn"):
        assert list(settings(tmp_path, master)) == ["spark.driver.defaultJavaOptions"]
