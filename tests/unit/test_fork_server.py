"""A process that was started by a fork is to itself, its parent and the kernel as one that was started by `exec`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server

FACTS = "tests.support.process_facts"


def by_exec(output: Path, *arguments: str) -> dict[str, Any]:
    with output.open("wb") as file:
        subprocess.run(
            [sys.executable, "-m", FACTS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=fork_server.ROOT,
            # Libraries of the test process add to what it inherits.
            env=dict(os.environ),
            check=True,
            timeout=60,
        )
    return dict(json.loads(output.read_text()))


def by_fork(output: Path, *arguments: str) -> dict[str, Any]:
    with output.open("wb") as file, open(os.devnull, "rb") as nothing:
        process = fork_server.start(
            FACTS,
            arguments,
            stdin=nothing.fileno(),
            stdout=file.fileno(),
            stderr=file.fileno(),
            cwd=fork_server.ROOT,
        )
        assert process.wait(60) == 0, output.read_text()
    return dict(json.loads(output.read_text()))


@pytest.mark.parametrize("attempt", ["the first", "a later one"])
def test_a_forked_process_sees_what_an_executed_one_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: str
) -> None:
    """Neither the server's own state nor its other children show, and what changed here since it was started does."""
    by_fork(tmp_path / "output")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("TUSKLINE_OF_THIS_TEST", attempt)
    mask = os.umask(0o027)
    try:
        expected = by_exec(tmp_path / "output", attempt)
        found = by_fork(tmp_path / "output", attempt)
        assert found["environment"] == expected["environment"]
        assert found == expected
    finally:
        os.umask(mask)


def test_what_is_read_at_the_start_of_python_is_that_of_the_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_fork(tmp_path / "output")
    monkeypatch.setenv("PYTHONPATH", f"{fork_server.ROOT}:{tmp_path}")
    assert by_fork(tmp_path / "output") == by_exec(tmp_path / "output")


def test_a_killed_child_ends_by_its_signal(tmp_path: Path) -> None:
    receiver, sender = os.pipe()
    try:
        with (tmp_path / "output").open("wb") as file:
            process = fork_server.start(
                "walsender_bridge.quorum.safekeeper",
                ["test"],
                stdin=receiver,
                stdout=file.fileno(),
                stderr=file.fileno(),
            )
        assert process.poll() is None  # it waits for its settings
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
        process.kill()  # as of any process that has ended: nothing
    finally:
        os.close(receiver)
        os.close(sender)
