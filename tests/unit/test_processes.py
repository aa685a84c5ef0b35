"""What is said of processes: those that live, those that are gone, and those that nobody has asked for yet."""

import os
import subprocess
import sys

from tests.support.waiting import wait_for
from walsender_bridge import processes

#: A process with a child; each waits for its input's end.
PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()', 'a) b ('])\n"
    "print(child.pid, flush=True)\n"
    "sys.stdin.read()"
)


def test_a_family_its_numbers_and_its_end():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.family(parent.pid) == [parent.pid, child]
        assert processes.children(child) == []
        assert "a) b (" in processes.command_line(child)
        its = processes.stat(os.getpid())
        assert its is not None
        assert its.runs
        assert its.parent == os.getppid()
        assert its.memory > 1 << 20
        assert its.cpu_seconds > 0
        processes.kill_tree(parent.pid)
        assert not processes.alive(child)
        wait_for(lambda: not processes.alive(parent.pid), 10, "it is a zombie")
        # What a parent has not asked for yet is there, and does not live.
        zombie = processes.stat(parent.pid)
        assert zombie is not None
        assert not zombie.runs
        assert parent.pid not in processes.children(os.getpid())
    assert processes.stat(parent.pid) is None
    assert not processes.alive(parent.pid)
    assert processes.command_line(parent.pid) == ""
