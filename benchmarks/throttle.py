"""`throttle`: how long appends take while another replica is synchronized from the same log server, against none.

Log servers are processes on the same disk. One is appended to, and is the source of a large stream, too, which each turn
synchronizes with another log server that has nothing. Append by append, the time until it is durable is measured: without a
synchronization (`idle`), then for as long as a throttled one lasts (`throttled`), then an unthrottled one (`unthrottled`).
"""

import argparse
import contextlib
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Self, TypeVar

from benchmarks.processes import cpu_seconds
from benchmarks.report import Report, Round, load
from tests.support.child import start_child
from tests.support.log_entries import SCHEMAS, EntryMaker, append_to
from tests.support.waiting import wait_for
from walsender_bridge.change_log import actions
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.append_writer import AppendWriter
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import TusklineError

NAME = "throttle"
LOG, LARGE, BUSY = "a log", "large", "busy"
#: Bytes of a row of the large stream, and entries of one append.
_ROW, _TOGETHER = 8000, 128
#: Seconds between two appends.
_EVERY = 0.005
_SIDES = ("throttled", "unthrottled")
#: Seconds of a call: a synchronization may rest for most of them.
_LONGEST = 3600.0
_R = TypeVar("_R")
_A = TypeVar("_A")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--megabytes", type=int, default=400, help="of the synchronized stream")
    parser.add_argument("--seconds", type=float, default=4.0, help="of appends without any")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """All rounds: idle, throttled, unthrottled, in turn."""
    report = Report(NAME)
    size = int(options.megabytes * options.scale * 2**20)
    with (
        tempfile.TemporaryDirectory(prefix="tuskline-bench-") as folder,
        LogServerProcess(Path(folder) / "source") as source,
    ):
        say(f"writing {size >> 20} MB")
        _write(source, size)
        with append_to(source.client(), BUSY, 1) as writer:
            appends = _Appends(writer)
            for number, side in product(range(options.rounds), ("idle", *_SIDES)):
                turn = _turn(source, Path(folder), side, appends, options.seconds)
                report.add(turn)
                found = ", ".join(f"{k} {v:.2f}" for k, v in turn.more.items())
                say(f"{number + 1}/{options.rounds} {side}: {found}, load {turn.load}")
    idle = {name: report.median("idle", "appends", name) for name in ("p50_ms", "p99_ms")}
    for side in _SIDES:
        for name, value in idle.items():
            report.ratio(f"{name}_{side}_vs_idle", report.median(side, "appends", name), value)
        report.median(side, "appends", "mb_s")
    return report


class LogServerProcess:
    """A log server of a folder, which ends with the block."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.listen = f"127.0.0.1:{free_port()}"
        settings = ReplicaServerSettings(folder / "data", self.listen)
        self.process = start_child(
            "walsender_bridge.change_log.log_server", settings, log=folder / "log"
        )

    def __enter__(self) -> Self:
        wait_for(self._answers, 30, "the log server")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(TusklineError):
            self.do(m.REPORT, actions.Empty())
            return True
        return False

    def do(self, action: actions.Action[_R, _A], request: _R) -> _A:
        """An action of the repository's."""
        with connect(f"grpc://{self.listen}", None) as client:
            return actions.call(client, self.listen, action, request, _LONGEST)

    def client(self) -> ReplicaClient:
        """A client of it."""
        return ReplicaClient(self.listen, timeout=_LONGEST)


def _write(source: LogServerProcess, size: int) -> None:
    """Both streams, and the entries of the large one."""
    for stream in (LARGE, BUSY):
        source.do(m.CREATE, m.CreateRequest(stream, LOG))
    make, end = EntryMaker(), 1
    with source.client() as client, append_to(client, LARGE, 1) as writer:
        for version in range(1, size // (_ROW * _TOGETHER) + 2):
            entries = [make.whole(size=_ROW) for _ in range(_TOGETHER)]
            writer.send(entries, schemas=list(SCHEMAS.values()))
            assert writer.next_ack(60) is not None
            context = CommitContext(version, end, end, _TOGETHER)
            answer = source.do(
                m.COMMIT, m.CommitRequest({LARGE: (IssuedCommit(context),)}, version)
            )
            assert not answer.refused
            end = context.end


class _Appends:
    """Small appends at a fixed rate, each as soon as it is due or the one before it is durable."""

    def __init__(self, writer: AppendWriter) -> None:
        self._writer, self._make = writer, EntryMaker(2)

    def measure(self, goes_on: Callable[[float], bool]) -> list[float]:
        """Seconds of each append, for as long as `goes_on` after these seconds."""
        began, found = time.monotonic(), []
        while goes_on(time.monotonic() - began):
            at = time.monotonic()
            self._writer.send([self._make.whole()], schemas=list(SCHEMAS.values()))
            assert self._writer.next_ack(60) is not None
            found.append(time.monotonic() - at)
            time.sleep(max(0.0, at + _EVERY - time.monotonic()))
        return found


def _turn(
    source: LogServerProcess, folder: Path, side: str, appends: _Appends, seconds: float
) -> Round:
    busy, cpu, began = load(), cpu_seconds(source.process.pid), time.monotonic()
    rate = 0.0
    if side == "idle":
        found = appends.measure(lambda passed: passed < seconds)
    else:
        with _synchronizing(source, folder / "destination", side == "throttled") as running:
            found = appends.measure(lambda _: running.is_alive())
            rate = running.megabytes / (time.monotonic() - began)
    ordered = sorted(found)
    more = {
        "p50_ms": statistics.median(ordered) * 1000,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1000,
        "appends": float(len(ordered)),
        "mb_s": rate,
    }
    cpu = cpu_seconds(source.process.pid) - cpu
    return Round(side, "appends", len(ordered), time.monotonic() - began, cpu, None, busy, more)


class _Synchronization(threading.Thread):
    """One synchronization. `megabytes`: that were sent, at its end."""

    def __init__(self, source: LogServerProcess, destination: str, throttled: bool) -> None:
        super().__init__(daemon=True)
        self._source, self._request = source, m.SynchronizeRequest(LARGE, destination, throttled)
        self.megabytes = 0.0

    def run(self) -> None:
        status = self._source.do(m.SYNCHRONIZE, self._request)
        self.megabytes = status.bytes_total / 2**20


@contextlib.contextmanager
def _synchronizing(
    source: LogServerProcess, folder: Path, throttled: bool
) -> Iterator[_Synchronization]:
    """A synchronization with a log server that has nothing."""
    with LogServerProcess(folder) as destination:
        destination.do(m.LEARN, m.CreateRequest(LARGE, LOG))
        running = _Synchronization(source, f"grpc://{destination.listen}", throttled)
        running.start()
        yield running
        running.join()
        assert running.megabytes, "the synchronization failed"
    shutil.rmtree(folder)
