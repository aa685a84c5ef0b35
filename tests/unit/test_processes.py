"""What is said of processes: those that live, those that are gone, and those that nobody has asked for yet."""

import os
import subprocess
import sys

from tests.support.waiting import wait_for
from walsender_bridge.runtime import processes

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


def test_memory_is_of_a_process_and_what_it_has_started_but_for_those_that_are_listed() -> None:
    def one(parent: int, memory: int) -> processes.Stat:
        return processes.Stat("S", parent, 0.0, memory)

    running = {10: one(1, 100), 11: one(10, 10), 12: one(11, 5), 20: one(10, 1000), 21: one(20, 7)}
    assert processes.memory_of(10, running, {20}) == 115
    assert processes.memory_of(20, running, {10}) == 1007
    assert processes.memory_of(99, running, set()) == 0


def test_the_memory_of_a_child_counts() -> None:
    code = "x = bytearray(50 << 20); print('ready', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            running = processes.stats()
            mine = os.getpid()
            alone = processes.memory_of(mine, running, {child.pid})
            assert processes.memory_of(mine, running, set()) - alone > 50 << 20
        finally:
            child.kill()


def test_a_process_is_suspended_if_one_below_it_is_that_is_not_listed_itself() -> None:
    def one(parent: int, state: str) -> processes.Stat:
        return processes.Stat(state, parent, 0.0, 0)

    running = {10: one(1, "S"), 11: one(10, "S"), 12: one(11, "T"), 20: one(1, "t")}
    assert processes.suspended_of(10, running, set()) == 12
    assert processes.suspended_of(10, running, {11}) is None
    assert processes.suspended_of(20, running, set()) == 20
    assert processes.suspended_of(99, running, set()) is None
