"""Children are restarted, never outlive their supervisor, and are told of by name."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from walsender_bridge.observability.observation import seen_processes
from walsender_bridge.runtime import json_model
from walsender_bridge.runtime.processes import alive
from walsender_bridge.runtime.supervisor import (
    Child,
    ChildState,
    Supervisor,
    SupervisorStates,
    read_states,
)

CHILD = """
import sys, time
from walsender_bridge.runtime.supervisor import exit_with_parent
exit_with_parent()
open(sys.argv[1], "a").write(f"{__import__('os').getpid()}\\n")
time.sleep(600)
"""

PARENT = """
import asyncio, sys
from pathlib import Path
from walsender_bridge.runtime.supervisor import Child, Supervisor, stop_on_signals
async def main():
    stop = asyncio.Event()
    stop_on_signals(stop)
    child = Child("c", [sys.executable, "-c", sys.argv[1], sys.argv[2]])
    await Supervisor("p", [child], run_dir=Path(sys.argv[3])).run(stop)
asyncio.run(main())
"""


def _wait(what, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def _pids(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_a_child_dies_with_a_killed_supervisor(tmp_path):
    told = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(told), str(tmp_path)])
    try:
        pid = _wait(lambda: _pids(told))[0]
        parent.kill()
        parent.wait()
        _wait(lambda: not alive(pid))
    finally:
        parent.kill()
        parent.wait()


def test_a_killed_child_is_started_again_and_stopped_at_the_end(tmp_path):
    told = tmp_path / "pids"

    async def run():
        stop = asyncio.Event()
        child = Child("c", [sys.executable, "-c", CHILD, str(told)], log_file=tmp_path / "c.log")
        supervisor = Supervisor("s", [child], run_dir=tmp_path)
        running = asyncio.create_task(supervisor.run(stop))
        first = (await asyncio.to_thread(_wait, lambda: _pids(told)))[0]
        os.kill(first, signal.SIGKILL)
        second = (await asyncio.to_thread(_wait, lambda: _pids(told)[1:]))[0]

        def restarted():
            # It may write its number before its supervisor has the processor again.
            state = read_states(tmp_path, "s").children["c"]
            return state if state.pid else None

        state = await asyncio.to_thread(_wait, restarted)
        assert state.pid == second
        assert state.restarts == 1
        assert state.exit_code == -signal.SIGKILL
        stop.set()
        await running
        assert not alive(second)
        return read_states(tmp_path, "s").children["c"]

    assert asyncio.run(run()).state == "stopped"


def test_children_that_have_ended_count_as_stopped_after_a_stop(tmp_path: Path) -> None:
    """One waits to be restarted, one has ended for good; `status` listed both after a regular end."""

    async def run() -> None:
        stop = asyncio.Event()
        ends = [sys.executable, "-c", "raise SystemExit(3)"]
        children = [Child("again", ends), Child("final", ends, final={3})]
        running = asyncio.create_task(Supervisor("bridge", children, run_dir=tmp_path).run(stop))

        def both() -> bool:
            states = read_states(tmp_path, "bridge").children
            found = {name: state.state for name, state in states.items()}
            return found == {"again": "restarting", "final": "ended"}

        await asyncio.to_thread(_wait, both)
        assert {each.state for each in seen_processes(tmp_path, None)} == {"restarting", "ended"}
        stop.set()
        await running

    asyncio.run(run())
    assert seen_processes(tmp_path, None) == []


def test_a_child_is_told_which_signal_ended_the_one_before(tmp_path):
    told = tmp_path / "told"
    script = (
        "import os, sys, time; from walsender_bridge.runtime.supervisor import last_signal;"
        "last = last_signal(); open(sys.argv[1], 'a').write(f'{last and last.name} ');"
        "os.kill(os.getpid(), 11) if last is None else time.sleep(600)"
    )

    async def run():
        stop = asyncio.Event()
        child = Child("c", [sys.executable, "-c", script, str(told)])
        running = asyncio.create_task(Supervisor("s", [child], run_dir=tmp_path).run(stop))
        await asyncio.to_thread(_wait, lambda: told.exists() and told.read_text().split()[1:])
        stop.set()
        await running

    asyncio.run(run())
    assert told.read_text().split() == ["None", "SIGSEGV"]


def test_without_children_those_of_an_earlier_supervisor_are_forgotten(tmp_path):
    earlier = SupervisorStates(1, {"c": ChildState(2, "running")})
    (tmp_path / "s.json").write_bytes(json_model.encode(earlier))

    async def run():
        stop = asyncio.Event()
        running = asyncio.create_task(Supervisor("s", [], run_dir=tmp_path).run(stop))
        await asyncio.to_thread(_wait, lambda: read_states(tmp_path, "s").pid == os.getpid())
        assert read_states(tmp_path, "s").children == {}
        stop.set()
        await running

    asyncio.run(run())


def test_a_child_that_ignores_sigterm_is_killed(tmp_path):
    script = "import signal, time, sys; signal.signal(15, 1); open(sys.argv[1], 'w').write('1'); time.sleep(600)"
    told = tmp_path / "told"

    async def run():
        stop = asyncio.Event()
        child = Child("c", [sys.executable, "-c", script, str(told)])
        supervisor = Supervisor("s", [child], run_dir=tmp_path, grace=0.3)
        running = asyncio.create_task(supervisor.run(stop))
        await asyncio.to_thread(_wait, told.exists)
        stop.set()
        await running
        return supervisor.states["c"].exit_code

    assert asyncio.run(run()) == -signal.SIGKILL


def test_36_a_disk_that_takes_no_files_ends_no_child(tmp_path):
    """The folder of its states and of a child's log is on a full disk; so is its standard error (`/dev/full`)."""
    told = tmp_path / "pids"
    # Neither of them can be opened for writing, whoever tries.
    (tmp_path / f"s.{os.getpid()}.tmp").mkdir()
    log_file = tmp_path / "c.log"
    log_file.mkdir()

    async def run():
        stop = asyncio.Event()
        children = [
            Child("other", [sys.executable, "-c", CHILD, str(told)]),
            Child("logged", [sys.executable, "-c", CHILD, str(told)], log_file=log_file),
        ]
        supervisor = Supervisor("s", children, run_dir=tmp_path)
        running = asyncio.create_task(supervisor.run(stop))
        (first,) = await asyncio.to_thread(_wait, lambda: _pids(told))
        os.kill(first, signal.SIGKILL)
        second = (await asyncio.to_thread(_wait, lambda: _pids(told)[1:]))[0]
        await asyncio.to_thread(_wait, lambda: supervisor.states["logged"].restarts > 1)
        assert alive(second)
        # There is room again: it starts, and the states are told without another change.
        log_file.rmdir()
        await asyncio.to_thread(_wait, lambda: _pids(told)[2:])
        (tmp_path / f"s.{os.getpid()}.tmp").rmdir()
        await asyncio.to_thread(_wait, lambda: read_states(tmp_path, "s").pid)
        assert read_states(tmp_path, "s").children["other"].pid == second
        stop.set()
        await running

    asyncio.run(asyncio.wait_for(run(), 60))


def test_states_of_a_supervisor_that_never_ran(tmp_path):
    assert read_states(tmp_path, "none") == SupervisorStates()
    # A power cut leaves a file that was renamed and not synced empty, or full of zeros.
    for content in (b"", bytes(300), b"[]", b"\xff"):
        (tmp_path / "up.json").write_bytes(content)
        assert read_states(tmp_path, "up") == SupervisorStates()


def test_a_child_that_ends_for_good_is_not_started_again(tmp_path):
    marks = tmp_path / "marks"
    code = f"open({str(marks)!r}, 'a').write('x'); raise SystemExit(11)"

    def state():
        return read_states(tmp_path, "s").children.get("c", ChildState())

    async def run():
        stop = asyncio.Event()
        child = Child("c", [sys.executable, "-c", code], final={11})
        supervisor = Supervisor("s", [child], run_dir=tmp_path)
        running = asyncio.create_task(supervisor.run(stop))
        await asyncio.to_thread(_wait, lambda: state().state == "ended")
        await asyncio.sleep(0.5)  # longer than the pause before another start
        assert not running.done()
        stop.set()
        await running

    asyncio.run(asyncio.wait_for(run(), 20))
    assert marks.read_text() == "x"
    assert (state().state, state().exit_code, state().restarts) == ("stopped", 11, 0)


def test_a_stopped_child_of_a_child_is_killed_with_it(tmp_path):
    """As a driver's JVM that is suspended: it cannot see its parent end, and would keep its memory."""
    script = (
        "import os, signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN);"
        "below = subprocess.Popen(['sleep', '600']); os.kill(below.pid, signal.SIGSTOP);"
        "open(sys.argv[1] + '.new', 'w').write(str(below.pid));"
        "os.rename(sys.argv[1] + '.new', sys.argv[1]); time.sleep(600)"
    )
    told = tmp_path / "pid"

    async def run():
        stop = asyncio.Event()
        child = Child("c", [sys.executable, "-c", script, str(told)])
        running = asyncio.create_task(
            Supervisor("s", [child], run_dir=tmp_path, grace=0.3).run(stop)
        )
        await asyncio.to_thread(_wait, told.exists)
        stop.set()
        await running

    asyncio.run(run())
    _wait(lambda: not alive(int(told.read_text())))
