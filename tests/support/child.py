"""Child processes as their supervisor starts them: with their settings on standard input."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import fork_server
from walsender_bridge.runtime import json_model

ROOT = Path(__file__).resolve().parents[2]


def start_child(
    module: str, settings: Any, *, log: Path, **environment: str
) -> subprocess.Popen[bytes]:
    """Start `python -m module`, with its output appended to `log`; with an environment of its own not by a fork."""
    receiver, sender = os.pipe()
    with log.open("ab") as output:
        try:
            if module in fork_server.PRELOADED and not environment:
                process: subprocess.Popen[bytes] = fork_server.start(
                    module, receiver, output.fileno()
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
