"""A long run that was stopped goes on where it was: what has passed is recorded and not run again.

`pytest --resume FOLDER --seed N` keeps one file for each seed and state of the source, so a change of the
code starts over. Only passes count: a failure runs again.
"""

import json
import os
import subprocess
from hashlib import blake2b
from pathlib import Path

import pytest

#: The environment variable that carries `--seed` to randomized tests and the processes that they start.
SEED = "TUSKLINE_TEST_SEED"
_ROOT = Path(__file__).resolve().parent.parent.parent


def state_of_source() -> str:
    """A name for the commit and what was changed on top of it."""
    parts = [
        subprocess.run(["git", *command], cwd=_ROOT, capture_output=True, check=True).stdout
        for command in (["rev-parse", "HEAD"], ["diff", "HEAD"])
    ]
    return blake2b(b"".join(parts), digest_size=6).hexdigest()


class Resume:
    """Deselects the tests that `record` says have passed, and adds those that pass.

    `writes` is false in a worker: the process that owns the terminal hears of every test.
    """

    def __init__(self, record: Path, *, writes: bool = True) -> None:
        self._record = record
        self._writes = writes
        self._passed = set()
        if record.exists():
            # A line without its end was cut off by what ended that run; its test runs again.
            lines = record.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            if writes and whole != lines:
                record.write_text("".join(whole))
            self._passed = {json.loads(line)["test"] for line in whole}

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        done = [item for item in items if item.nodeid in self._passed]
        if done:
            config.hook.pytest_deselected(items=done)
            items[:] = [item for item in items if item.nodeid not in self._passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or not report.passed or not self._writes:
            return
        with self._record.open("a") as record:
            entry = {"test": report.nodeid, "seconds": round(report.duration, 3)}
            record.write(json.dumps(entry) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self._passed:
            session.exitstatus = pytest.ExitCode.OK


def add_options(parser: pytest.Parser) -> None:
    """The options of this plugin."""
    group = parser.getgroup("tuskline")
    group.addoption("--seed", type=int, default=int(os.environ.get(SEED, "1")))
    group.addoption("--resume", metavar="FOLDER", help="skip what passed in an earlier run")


def configure(config: pytest.Config) -> None:
    """Set the seed, and resume if that was asked for."""
    seed: int = config.getoption("--seed")
    os.environ[SEED] = str(seed)
    if folder := config.getoption("--resume"):
        record = Path(folder) / f"seed-{seed}-{state_of_source()}.jsonl"
        record.parent.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Resume(record, writes=not hasattr(config, "workerinput")))
