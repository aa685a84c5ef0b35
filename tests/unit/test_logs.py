"""What a part does when its log cannot be written: nothing else than before."""

import subprocess
import sys
from pathlib import Path

import pytest

from walsender_bridge.errors import Cause

SAYS = """
import sys, structlog
from walsender_bridge.runtime import logs
from walsender_bridge.errors import FencedError
logs.configure()
for number in range(2000):
    structlog.get_logger().info("a line", number=number)
error = FencedError("displaced", repair="none")
logs.say_error(error)
open(sys.argv[1], "w").write("went on")
sys.exit(error.cause)
"""


@pytest.mark.parametrize("form", ["console", "json"])
def test_36_a_full_disk_under_the_log_changes_no_exit_code(tmp_path, form):
    """A supervisor tells by the code whether another start would do harm."""
    mark = tmp_path / "mark"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", SAYS, str(mark)],
            stdout=full,
            stderr=full,
            env={"TUSKLINE_LOGS__FORMAT": form},
            check=False,
            timeout=60,
        )
    assert mark.read_text() == "went on"
    assert done.returncode == Cause.FENCED
