"""Child processes as their supervisor starts them: with their settings on standard input."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import fork_server
from walsender_bridge.runtime import json_model

ROOT = fork_server.ROOT


def start_child(
    module: str, settings: Any, *, log: Path, **environment: str
) -> subprocess.Popen[bytes]:
    """Start `python -m module`, with its output appended to `log`; by a fork, unless it has an environment of its own."""
    receiver, sender = os.pipe()
    with log.open("ab") as output:
        try:
            if module in fork_server.PRELOADED and not environment:
                said = output.fileno()
                process: subprocess.Popen[bytes] = fork_server.start(
                    module, ["test"], stdin=receiver, stdout=said, stderr=said, cwd=ROOT
                )
            else:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, "test"],
                    env={**os.environ, **environment},
                    stdin=receiver,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=ROOT,
                )
        finally:
            os.close(receiver)
    with contextlib.suppress(BrokenPipeError), open(sender, "wb") as stdin:
        stdin.write(json_model.encode(settings))
    return process


def start_tuskline(
    arguments: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `tuskline ARGUMENTS`, with its output appended to `log`; by a fork, unless it has an environment of its own."""
    with open(os.devnull, "rb") as nothing, log.open("ab") as output:
        if env:
            # Mostly a point of failure, for which alone a fork server would be started.
            return subprocess.Popen(
                [sys.executable, "-m", fork_server.COMMAND, *arguments],
                env={**os.environ, **env},
                stdin=nothing,
                stdout=output,
                stderr=output,
            )
        said = output.fileno()
        return fork_server.start(
            fork_server.COMMAND, arguments, stdin=nothing.fileno(), stdout=said, stderr=said
        )


def run_tuskline(
    arguments: Sequence[str], *, env: Mapping[str, str] = {}, seconds: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `tuskline ARGUMENTS`, by a fork, with `env` added to the environment, and return what it said."""
    with (
        open(os.devnull, "rb") as nothing,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        process = fork_server.start(
            fork_server.COMMAND,
            arguments,
            stdin=nothing.fileno(),
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
            environment={**os.environ, **env},
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(process.args, code, stdout.read(), stderr.read())


def run_child(
    module: str, settings: Any, *, seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run one that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", module, "test"],
        input=json_model.encode(settings).decode(),
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=ROOT,
    )
