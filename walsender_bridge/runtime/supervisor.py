"""Runs child processes, restarts those that end, and publishes their states.

Invariant: a child never outlives its supervisor. Each child inherits the read end of a pipe whose write
end only the supervisor holds; when the supervisor ends, for whatever reason, the pipe closes and
`exit_with_parent` ends the child. So a restarted supervisor never encounters a second copy of its children.

A child that ends, other than with a code in `Child.final`, is restarted after a pause that grows from 0.2 s to 15 s and is
reset after a minute of running. So is one that cannot be started because a disk is full or there are too many processes.

The states are written to `<run_dir>/<name>.json` at each change (name, pid, state, restarts, last exit code of each
child), by rename, so a reader sees a complete file. Failure to write it ends no child, which may use other disks;
the file is written as soon as possible.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from walsender_bridge.runtime import json_model, logs, status_file
from walsender_bridge.runtime.private_folder import private_file

PARENT_FD = "TUSKLINE_PARENT_FD"
#: To a child: the signal that ended its predecessor, by name.
LAST_SIGNAL = "TUSKLINE_LAST_SIGNAL"
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 15.0
GOOD_LIFE = 60.0
#: Seconds between two tries to write the states.
AGAIN_SECONDS = 1.0

_log = logs.logger()


@dataclass(frozen=True, slots=True)
class Child:
    """A process to keep running. `stdin`: what it finds on its standard input, at each start (`child_process`)."""

    name: str
    argv: Sequence[str]
    #: Passwords may be in it.
    stdin: bytes = field(default=b"", repr=False)
    #: File to which stdout and stderr are appended; None: those of the supervisor.
    log_file: Path | None = None
    #: Exit codes after which it is not restarted, since a restart would do harm or fail in the same way.
    final: Collection[int] = ()


@dataclass(slots=True)
class ChildState:
    """The supervisor's state of one child."""

    pid: int | None = None
    state: str = "starting"
    restarts: int = 0
    exit_code: int | None = None
    started_at: float = 0.0
    #: Consecutive runs shorter than `GOOD_LIFE`.
    failures: int = 0


@dataclass(frozen=True, slots=True)
class SupervisorStates:
    """The states that a supervisor publishes. `pid`: its own; 0: it has published none. `children`: by name."""

    pid: int = 0
    children: Mapping[str, ChildState] = field(default_factory=dict)


class Supervisor:
    """Keeps children running until `stop` is set; then stops them, with SIGTERM first.

    `grace` is the seconds a child has between SIGTERM and SIGKILL.
    """

    def __init__(
        self, name: str, children: Sequence[Child], *, run_dir: Path, grace: float = 20.0
    ) -> None:
        self.name = name
        self.states = {child.name: ChildState() for child in children}
        self._children = children
        self._run_dir = run_dir
        self._grace = grace
        #: Why the states could not be written; empty if they were.
        self._unwritten = ""

    async def run(self, stop: asyncio.Event) -> None:
        """Run all children until `stop` is set."""
        self._run_dir.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        if not self._children:
            # No child's start does; and those of an earlier supervisor are gone.
            self._write()
        try:
            async with asyncio.TaskGroup() as tasks:
                for child in self._children:
                    tasks.create_task(self._keep(child, read_end, stop))
                tasks.create_task(self._retry_write(stop))
        finally:
            os.close(read_end)
            os.close(write_end)
            if stop.is_set():
                # Also those that waited to be restarted, or had ended for good.
                for state in self.states.values():
                    state.state = "stopped"
            self._write()

    async def _keep(self, child: Child, read_end: int, stop: asyncio.Event) -> None:
        state = self.states[child.name]
        pause = FIRST_PAUSE
        while not stop.is_set():
            born = time.monotonic()
            try:
                process = await self._start(child, read_end)
            except OSError as error:
                state.exit_code = None
                _log.error("could not start child", child=child.name, reason=str(error))
            else:
                state.pid, state.state, state.started_at = process.pid, "running", time.time()
                self._write()
                await self._wait(process, stop)
                state.pid, state.exit_code = None, process.returncode
            state.state = "stopped" if stop.is_set() else "restarting"
            self._write()
            if stop.is_set():
                return
            if state.exit_code in child.final:
                state.state = "ended"
                self._write()
                _log.error("child ended for good", child=child.name, exit_code=state.exit_code)
                # The others continue, and the state shows that this one does not.
                await stop.wait()
                return
            if time.monotonic() - born > GOOD_LIFE:
                pause, state.failures = FIRST_PAUSE, 0
            state.restarts += 1
            state.failures += 1
            _log.warning(
                "child ended",
                child=child.name,
                exit_code=state.exit_code,
                **({"signal": name} if (name := _signal_of(state.exit_code)) else {}),
                again=pause,
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _start(self, child: Child, read_end: int) -> asyncio.subprocess.Process:
        environment = {**os.environ, PARENT_FD: str(read_end)}
        environment[LAST_SIGNAL] = _signal_of(self.states[child.name].exit_code)
        with contextlib.ExitStack() as opened:
            log = None
            if child.log_file is not None:
                child.log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                private_file(child.log_file)
                log = opened.enter_context(child.log_file.open("ab"))
            process = await asyncio.create_subprocess_exec(
                *child.argv,
                env=environment,
                pass_fds=(read_end,),
                stdin=subprocess.PIPE if child.stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                start_new_session=True,
            )
        if process.stdin is not None:
            # Written as the child reads, and never waited for: it may hang, or have ended.
            process.stdin.write(child.stdin)
            process.stdin.close()
        return process

    async def _wait(self, process: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
        ended = asyncio.create_task(process.wait())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            done, _ = await asyncio.wait({ended}, timeout=self._grace)
            if not done:
                # Its whole group: what it has started may be suspended, and then would outlive it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        await ended

    async def _retry_write(self, stop: asyncio.Event) -> None:
        """Retry writing the states."""
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), AGAIN_SECONDS)
            if self._unwritten:
                self._write()

    def _write(self) -> None:
        """Write the states if possible."""
        path = self._run_dir / f"{self.name}.json"
        try:
            status_file.replace(path, json_model.encode(SupervisorStates(os.getpid(), self.states)))
        except OSError as error:
            if not self._unwritten:
                _log.error("could not write state file", where=str(path), reason=str(error))
            self._unwritten = str(error)
        else:
            self._unwritten = ""


def read_states(run_dir: Path, name: str) -> SupervisorStates:
    """The states last written by the supervisor `name`; none if there is no valid file."""
    return status_file.read(run_dir / f"{name}.json", SupervisorStates) or SupervisorStates()


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`, in the running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def _signal_of(exit_code: int | None) -> str:
    """The name of the signal that ended a process; empty if none did."""
    if exit_code is None or exit_code >= 0:
        return ""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def last_signal() -> signal.Signals | None:
    """In a supervised process: the signal that killed its predecessor."""
    name = os.environ.pop(LAST_SIGNAL, "")
    return signal.Signals[name] if name in signal.Signals.__members__ else None


def exit_with_parent() -> None:
    """In a supervised process: exit immediately when the supervisor ends. Does nothing elsewhere.

    A thread, because a process may be blocked in the JVM, in gRPC or in libpq at that moment.
    """
    text = os.environ.pop(PARENT_FD, "")
    if not text:
        return
    descriptor = int(text)
    # The process's own children must not inherit the read end of the pipe.
    os.set_inheritable(descriptor, False)

    def watch() -> None:
        with contextlib.suppress(OSError):
            os.read(descriptor, 1)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()
