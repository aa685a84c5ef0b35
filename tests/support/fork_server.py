"""Starts processes of Tuskline by forking one that has imported most of what they need.

A process spends most of a short life in imports, and tests start thousands. For each module of `PRELOADED`, one server is
started in each test process, with `python -m tests.support.fork_server MODULE`; each child is a fork of it, and runs the module
as `python -m` does. The server has one thread, opens no connection, and ends with the test process, and its children with it.

What differs from an `exec` and can be seen is set in the child (`_become`), or makes another server (`_READ_EARLY`). Two
differences remain: the children of one server share the seed of `hash()`, and their parent is the server.

Tests that start each of these as users do, by `exec`: commands in `tests/unit/test_cli.py`; `up` in
`tests/cluster/test_machines_up.py`; its parts, as its children, in `tests/cluster/test_up.py`; safekeeper, proposer and WAL server,
as children of their supervisor, in `tests/cluster/test_quorum_up.py`; capture and log server in `tests/cluster/test_port_scan.py`.
"""

import atexit
import contextlib
import ctypes
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
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

COMMAND: Final = "walsender_bridge.cli.app"
_RUNTIME: Final = "walsender_bridge.runtime"
_SUBCOMMANDS: Final = (
    *("attach", "certs", "doctor", "epochs", "flush", "lake_verify", "log_backup"),
    *("log_rebuild", "log_status", "log_tail", "log_trim", "log_verify", "members"),
    *("quarantine", "quorum", "reattach", "safekeeper", "slots", "status", "table", "up", "wait"),
)
#: By module: what its processes import first. Not what reads its settings as it is loaded, as Arrow does in a log server, and not
#: the module itself, which `runpy` loads anew.
PRELOADED: Final = {
    COMMAND: (
        # What the module itself imports: its subcommands.
        *(f"walsender_bridge.cli.{name}" for name in _SUBCOMMANDS),
        "walsender_bridge.config",
        "walsender_bridge.doctor.etcd",
        "walsender_bridge.doctor.log",
        "walsender_bridge.doctor.machine",
        "walsender_bridge.doctor.parts",
        "walsender_bridge.doctor.server",
        "walsender_bridge.observability.observation",
        "walsender_bridge.observability.quorum_view",
        "walsender_bridge.provisioning.init",
        "walsender_bridge.provisioning.detach",
        "walsender_bridge.provisioning.quorum",
        "walsender_bridge.provisioning.stats_grant",
    ),
    "walsender_bridge.capture": (
        "walsender_bridge.capture.driver",
        "walsender_bridge.capture.gate.monitor",
        "walsender_bridge.capture.settings",
        f"{_RUNTIME}.child_process",
    ),
    "walsender_bridge.quorum.safekeeper": (
        "walsender_bridge.quorum.safekeeper.data_dir",
        "walsender_bridge.quorum.safekeeper.driver",
        "walsender_bridge.quorum.safekeeper.status",
        f"{_RUNTIME}.child_process",
    ),
    "walsender_bridge.quorum.proposer": (
        "walsender_bridge.quorum.proposer.configured_membership",
        "walsender_bridge.quorum.proposer.driver",
        "walsender_bridge.quorum.proposer.first_membership",
        "walsender_bridge.quorum.proposer.member_changes",
        "walsender_bridge.quorum.proposer.quorum_id_record",
        f"{_RUNTIME}.child_process",
    ),
    "walsender_bridge.quorum.wal_server": (
        "walsender_bridge.quorum.wal_server.service",
        f"{_RUNTIME}.child_process",
    ),
    "walsender_bridge.change_log.log_server": (
        "numpy",
        "google_crc32c",
        "walsender_bridge.change_log.replica.settings",
        "walsender_bridge.postgres.protocol.lsn",
        f"{_RUNTIME}.arrow_memory",
        f"{_RUNTIME}.child_process",
        f"{_RUNTIME}.malloc_trim",
        f"{_RUNTIME}.supervisor",
        f"{_RUNTIME}.tcp_connections",
    ),
}
#: What is read when the interpreter starts or a module is loaded: a server has it from its own environment.
_READ_EARLY: Final = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TUSKLINE_FAIL_POINT")
#: Room for the arguments of a child, which it shows in the place of its server's.
_ROOM: Final = " " * 512
_STATUS: Final = struct.Struct("<i")
ROOT: Final = Path(__file__).resolve().parents[2]
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


def _early(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in environment.items() if k.startswith(_READ_EARLY)))


@functools.cache
def _server(module: str, owner: int, early: tuple[tuple[str, str], ...]) -> socket.socket:
    """The connection to a module's server, which is started by the first call in the process `owner`."""
    del owner
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = "tests.support.fork_server"
    with there:
        process = subprocess.Popen(
            [sys.executable, "-m", name, module, str(there.fileno()), _ROOM],
            pass_fds=[there.fileno()],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            # Where numpy's library starts no threads, the server has one.
            env={**os.environ, **dict(early), "OPENBLAS_NUM_THREADS": "1"},
        )

    def end() -> None:
        here.close()
        process.wait()

    atexit.register(end)
    return here


def start(
    module: str,
    arguments: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ForkedProcess:
    """Start `python -m MODULE ARGUMENTS`, in the environment and the folder of this process unless others are given."""
    environment = dict(os.environ) if environment is None else dict(environment)
    argv = [sys.executable, "-m", module, *arguments]
    request = {
        "env": environment,
        "cwd": str(cwd or Path.cwd()),
        "argv": argv,
        "umask": _umask(),
    }
    receiver, sender = os.pipe()
    try:
        with _LOCK:
            server = _server(module, os.getpid(), _early(environment))
            message = json.dumps(request).encode()
            socket.send_fds(server, [message], [stdin, stdout, stderr, sender])
            pid = int(server.recv(32))
    finally:
        os.close(sender)
    return ForkedProcess(argv, pid, receiver)


def _umask() -> int:
    """This process's; `os.umask` would change it for its other threads meanwhile."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("Umask:")[2].split(maxsplit=1)[0], 8)


def _serve(module: str, requests: socket.socket) -> None:
    """Fork for each request. Returns in the children alone."""
    for name in PRELOADED.get(module, ()):
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
    time.tzset()
    os.umask(request["umask"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    sys.argv[1:] = request["argv"][3:]
    sys.orig_argv[:] = request["argv"]
    _show(request["argv"])
    random.seed()


def _show(argv: Sequence[str]) -> None:
    """Have `ps` show these arguments, where there were the server's."""
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    shown = "\0".join(argv).encode()[: end - first - 1]
    ctypes.memmove(first, shown.ljust(end - first, b"\0"), end - first)


if __name__ == "__main__":
    module_to_run = sys.argv[1]
    _serve(module_to_run, socket.socket(fileno=int(sys.argv[2])))
    runpy.run_module(module_to_run, run_name="__main__", alter_sys=True)
