"""Executors that are processes of their own: who decodes, and what happens when one of them dies."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spark_consumers
import tests
from spark_consumers.spark import java
from tests.support import probe
from tests.support.capture_stack import ChangeLog
from tests.support.change_entries import Table, insert
from tests.support.log_writer import LogWriter
from tests.support.spark_jvm import SHORT, in_pysparks_home, work_removed
from tests.support.waiting import wait_for

ORDERS = Table(1, "orders", (("id", 23, -1), ("note", 25, -1)))
#: Each is a commit, a partition and a task; the probe lets none end before the test says so.
COMMITS, ROWS = 12, 50
EXECUTOR = "CoarseGrainedExecutorBackend"


def executor_of(line: dict[str, Any]) -> int:
    """The executor's JVM above a process that decoded; 0 if there is none."""
    return next((pid for pid, command in line["ancestors"] if EXECUTOR in command), 0)


@pytest.mark.long
def test_16_executors_decode_never_the_driver_and_one_may_be_killed(tmp_path: Path) -> None:
    report = tmp_path / "decoded.jsonl"

    def decoded() -> list[dict[str, Any]]:
        # A reader may find the file in the middle of an append: what follows the last newline is not a line.
        whole = report.read_text().rpartition("\n")[0] if report.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    with ChangeLog(tmp_path) as log, contextlib.ExitStack() as stack:
        writer = LogWriter(log, "shop")
        stack.callback(writer.close)
        for commit in range(COMMITS):
            ids = range(commit * ROWS, (commit + 1) * ROWS)
            writer.commit([ORDERS], [insert(ORDERS, [i, f"note {i}"]) for i in ids])
        root = Path(tests.__path__[0]).parent
        folders = [Path(probe.__path__[0]), root, Path(spark_consumers.__path__[0]) / "discovery"]
        environment = {
            **in_pysparks_home(os.environ),
            "JAVA_HOME": str(java.find().home),
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "SPARK_LOCAL_DIRS": str(tmp_path / "local"),
            "TUSKLINE_TEST_JAVA": f"{SHORT} -XX:-UsePerfData -Djava.io.tmpdir={tmp_path}",
            "TUSKLINE_TEST_PROBE": str(report),
        }
        job = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.support.executor_job"),
                *(log.address, str(tmp_path / "checkpoint")),
            ],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=stack.enter_context((tmp_path / "job.log").open("wb")),
            start_new_session=True,
        )
        stack.enter_context(work_removed())
        stack.callback(end, job)
        # Both executors are at work; then one of them dies in the middle of a task.
        wait_for(lambda: len({executor_of(line) for line in decoded()}) == 2, 240, "two executors")
        victim = executor_of(decoded()[-1])
        os.kill(victim, signal.SIGKILL)
        before = len(decoded())
        report.with_name(f"{report.name}.go").touch()
        output, _ = job.communicate(timeout=400)
        assert job.returncode == 0, (tmp_path / "job.log").read_text()[-4000:]

    answer = json.loads(output.splitlines()[-1])
    assert answer["rows"] == [[i, f"note {i}"] for i in range(COMMITS * ROWS)]
    assert len(decoded()) > before, "the job was over when the executor was killed"
    assert len(decoded()) > COMMITS, "a task of the dead executor was not done again"
    for line in decoded():
        assert executor_of(line), "decoded outside of an executor"
        assert line["pid"] != answer["driver"]
    assert victim not in {executor_of(line) for line in decoded()[before + 1 :]}


def end(job: subprocess.Popen[bytes]) -> None:
    """End the job with everything that it started, and let its files go."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    if job.stdout is not None:
        job.stdout.close()


pytestmark = pytest.mark.timeout(600)
