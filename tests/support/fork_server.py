"""Starts `tuskline` by forking a process that has imported most of what it needs.

A command spends most of its short life in imports, and tests start many. One server is started in each test process, with
`python -m tests.support.fork_server`; each command is a fork of it, and runs as with `python -m`. The server has one thread,
opens no connection, and ends with the test process, and its children with it.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_MODULE: Final = "walsender_bridge.cli.app"
#: What is imported first: not the module itself, which `runpy` loads anew.
_PRELOADED: Final = (
    "walsender_bridge.cli.attach",
    "walsender_bridge.cli.doctor",
    "walsender_bridge.cli.status",
    "walsender_bridge.doctor.server",
    "walsender_bridge.observability.quorum_view",
    "walsender_bridge.provisioning.init",
    "walsender_bridge.provisioning.detach",
    "walsender_bridge.provisioning.quorum",
    "walsender_bridge.provisioning.stats_grant",
)
_STATUS: Final = struct.Struct("<i")
#: One request at a time: an answer is the next one's.
_LOCK = threading.Lock()


class ForkedProcess(subprocess.Popen[bytes]):
    """A child of a fork server, with the methods of a process that was started here."""

    _child_created = False  # the server reaps it

    def __init__(self, argv: Sequence[str], pid: int, status: int) -> None:
        self.args = argv
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._status = status
        self._waitpid_lock = threading.Lock()
        weakref.finalize(self, os.close, status)

    def _internal_poll(self, **_: Any) -> int | None:
        return self._wait(timeout=0)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            with self._waitpid_lock:
                if self.returncode is None:
                    # Nothing is in it if the server has ended, and its children with it.
                    code = os.read(self._status, _STATUS.size)
                    self.returncode = _STATUS.unpack(code)[0] if code else -signal.SIGKILL
        if self.returncode is None and timeout != 0:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


@functools.cache
def _server(owner: int) -> socket.socket:
    """The connection to the server, which is started by the first call in the process `owner`."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(there.fileno())],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            # Where numpy's library starts no threads, the server has one.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def start(arguments: Sequence[str], *, stdin: int, stdout: int, stderr: int) -> ForkedProcess:
    """Start `tuskline ARGUMENTS`, in the folder and the environment of this process."""
    request = {"env": dict(os.environ), "cwd": str(Path.cwd()), "arguments": [*arguments]}
    receiver, sender = os.pipe()
    try:
        with _LOCK:
            server = _server(os.getpid())
            message = json.dumps(request).encode()
            socket.send_fds(server, [message], [stdin, stdout, stderr, sender])
            pid = int(server.recv(32))
    finally:
        os.close(sender)
    return ForkedProcess([sys.executable, "-m", _MODULE, *arguments], pid, receiver)


def _serve(requests: socket.socket) -> None:
    """Fork for each request. Returns in the children alone."""
    for name in _PRELOADED:
        importlib.import_module(name)
    # jemalloc, which Arrow brings, starts its own thread again in a child.
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert not threads - {"python", "jemalloc_bg_thd"}, f"a fork would miss {threads}"
    gc.collect()
    gc.freeze()
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, int] = {}
    while True:
        ready = select.select([requests.fileno(), wake], [], [])[0]
        if wake in ready:
            os.read(wake, 1 << 16)
            _reap(running)
        if requests.fileno() in ready:
            message, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            *standard, status = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (requests.detach(), wake, woken, status, *running.values()):
                    os.close(descriptor)
                _become(json.loads(message), standard)
                return
            running[pid] = status
            for descriptor in standard:
                os.close(descriptor)
            requests.send(str(pid).encode())


def _reap(running: dict[int, int]) -> None:
    """Report the ends of children."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        report = running.pop(pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(report, _STATUS.pack(os.waitstatus_to_exitcode(status)))
        os.close(report)


def _become(request: dict[str, Any], standard: Sequence[int]) -> None:
    """Take on what an `exec` would have given."""
    for target, descriptor in enumerate(standard):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[1:] = request["arguments"]
    random.seed()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)
