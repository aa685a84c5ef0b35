"""A relay that runs as another account of this machine: whatever a test sends through it comes from there.

It starts as root, which the tests' interpreter may need to be read, and gives that up before it opens a socket.
"""

import contextlib
import encodings.idna  # noqa: F401  # for `socket`, while it can be read
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.child import ROOT
from tests.support.relay import Relay

NOBODY = pwd.getpwnam("nobody").pw_uid
#: Another account's process takes root.
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as nobody")


@contextlib.contextmanager
def through_nobody(port: int) -> Iterator[int]:
    """The port of a relay to `port` of 127.0.0.1, by a process of the account `nobody`."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.support.other_account", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def _main(port: int) -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    with Relay(port) as relay:
        print(relay.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
