"""`memory`: the memory of every process of an installation under load, with a stopped consumer, a dead log server and a dead safekeeper.

`tuskline up` with three log servers and three safekeepers, all on this machine; commits wait for the quorum. A consumer has taken
a lease and never comes back. Once all is warm, one log server and one safekeeper are stopped for good, as if their machines hung,
and a bulk of rows fills what the proposer may keep for the safekeeper that lags (`max_queue_bytes`). From then on each process's
resident memory is sampled: a straight line is fitted, and its slope is the figure; the peer is the process itself. What a process
has mapped of its files is counted in `max_slope_mb_per_min`, and not in `max_own_slope_mb_per_min`: the kernel takes it back when it
needs the memory. Meanwhile the slot's confirmed position has to follow the server, and its WAL has to stay small.
"""

import argparse
import itertools
import os
import signal
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from benchmarks.processes import tree
from benchmarks.report import Report, Round, load
from tests.support import quorum_up
from tests.support.attached import Attached
from tests.support.listeners import of_process
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.demo.local_server import LocalServer, by_major, free_port

NAME = "memory"
#: Connections that write, and bytes of a row.
_WRITERS, _ROW = 4, 200
#: Seconds between two samples.
_EVERY = 2.0
_LEASE = 86_400.0
#: Of WAL, at the least, that fills the proposer's queue: twice `max_queue_bytes`.
_BULK = 128 << 20
#: Of WAL that the primary keeps for the dead safekeeper: the least, so that pg_wal shows soon whether anything else holds it.
_LAGGARD = 64 << 20
_SLOT = "SELECT pg_current_wal_lsn() - min(confirmed_flush_lsn) FROM pg_replication_slots WHERE slot_type = 'logical'"
_WAL = "SELECT sum(size) FROM pg_ls_waldir()"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--seconds", type=float, default=900.0, help="of the samples")
    parser.add_argument("--warm-seconds", type=float, default=180.0, help="before them")
    parser.add_argument("--postgres", type=int, help="the server's major (the newest here)")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """One long round, whatever `--rounds` says."""
    report = Report(NAME)
    majors = by_major()
    version = majors[options.postgres or max(majors)]
    report.peers.append({"name": "itself, once warm", "version": str(version.major)})
    with tempfile.TemporaryDirectory(prefix="tuskline-bench-") as folder:
        settings = {"fsync": "off", "max_wal_size": "256MB", "min_wal_size": "80MB"}
        server = LocalServer.create(version, Path(folder) / "primary", settings=settings)
        server.start()
        try:
            with _installation(Path(folder), server) as tuskline:
                seen = _watch(tuskline, server, options, say)
        finally:
            server.stop()
    _report(report, seen)
    return report


def _installation(folder: Path, server: LocalServer) -> Attached:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE load (number bigint PRIMARY KEY, filler text)")
    tuskline = quorum_up.hosting(folder, server, 3, max_laggard_bytes=_LAGGARD)
    with tuskline.config.open("a") as config:
        for number in (2, 3):
            config.write(
                f'[[log_server]]\ndata_dir = "log-server-{number}"\nlisten = "127.0.0.1:{free_port()}"\n'
            )
    return tuskline


@dataclass
class _Seen:
    """Samples: by process, seconds and MB, all of it and its own alone; of the slot, how far it is behind, and the size of pg_wal, both in MB."""

    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    own: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    behind: list[float] = field(default_factory=list)
    wal: list[float] = field(default_factory=list)
    rows: int = 0
    wall: float = 0.0
    busy: float = 0.0


def _watch(
    tuskline: Attached, server: LocalServer, options: argparse.Namespace, say: Callable[[str], None]
) -> _Seen:
    quorum_up.up(tuskline)
    assert tuskline.process is not None
    with LogClient(tuskline.log_listen) as log:
        log.register_consumer("stopped", log.status().version, _LEASE)
    writers = _Writers(server)
    say("warming up")
    time.sleep(options.warm_seconds / 2)
    names = {pid: _name(pid) for pid in tree(tuskline.process.pid)}
    stopped = [_first(names, "change_log.log_server"), _first(names, "safekeeper")]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    say(f"stopped {', '.join(names[pid] for pid in stopped)}")
    try:
        _bulk(server)
        time.sleep(options.warm_seconds / 2)
        return _samples(tuskline.process.pid, server, options.seconds, writers, say)
    finally:
        writers.stop()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def _samples(
    root: int, server: LocalServer, seconds: float, writers: "_Writers", say: Callable[[str], None]
) -> _Seen:
    seen, began, first = _Seen(busy=load()), time.monotonic(), writers.rows
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for number in itertools.count(1):
            now = time.monotonic() - began
            if now > seconds:
                break
            for pid in tree(root):
                for kind, samples in (("VmRSS", seen.memory), ("RssAnon", seen.own)):
                    samples[f"{_name(pid)}_{pid}"].append((now, of_process(pid, kind) / 1024))
            for query, values in ((_SLOT, seen.behind), (_WAL, seen.wal)):
                [found] = connection.execute(query.encode()).fetchone() or [0]
                values.append(float(found or 0) / 2**20)
            if number % 15 == 0:
                most = max(values[-1][1] for values in seen.memory.values())
                say(
                    f"{now:.0f} s: most {most:.0f} MB, slot {seen.behind[-1]:.1f} MB behind, pg_wal {seen.wal[-1]:.0f} MB"
                )
            time.sleep(_EVERY)
    seen.rows, seen.wall = writers.rows - first, time.monotonic() - began
    return seen


def _bulk(server: LocalServer) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        begin = connection.execute("SELECT pg_current_wal_lsn()").fetchone()
        while True:
            connection.execute(
                "INSERT INTO load SELECT -n, repeat('x', %s) FROM generate_series(1, 10000) n",
                [_ROW],
            )
            connection.execute("DELETE FROM load WHERE number < 0")
            [written] = connection.execute(
                "SELECT pg_current_wal_lsn() - %s::pg_lsn", begin
            ).fetchone() or [0]
            if written > _BULK:
                return


def _report(report: Report, seen: _Seen) -> None:
    slopes = {name: _slope(values) for name, values in seen.memory.items() if len(values) > 5}
    own = {name: _slope(seen.own[name]) for name in slopes}
    most = {name: max(mb for _, mb in seen.memory[name]) for name in slopes}
    more = {"behind_mb": max(seen.behind), "wal_mb": max(seen.wal)}
    more |= {f"slope_{name}": value for name, value in slopes.items()}
    more |= {f"own_slope_{name}": value for name, value in own.items()}
    more |= {f"rss_{name}": value for name, value in most.items()}
    report.add(Round("own", "load", seen.rows, seen.wall, 0.0, None, seen.busy, more))
    report.ratios["max_slope_mb_per_min"] = round(max(slopes.values()), 3)
    report.ratios["max_own_slope_mb_per_min"] = round(max(own.values()), 3)
    report.ratios["max_rss_mb"] = round(max(most.values()), 1)
    for name in more:
        report.absolute[name] = round(more[name], 3)
    report.median("own", "load", "rows_s")


def _slope(values: list[tuple[float, float]]) -> float:
    """MB a minute, by least squares."""
    mean_at = sum(at for at, _ in values) / len(values)
    mean = sum(mb for _, mb in values) / len(values)
    above = sum((at - mean_at) * (mb - mean) for at, mb in values)
    return 60 * above / sum((at - mean_at) ** 2 for at, _ in values)


def _name(pid: int) -> str:
    """What a process runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "ended"
    modules = [word.decode() for word in words if word.startswith(b"walsender_bridge.")]
    return modules[0].removeprefix("walsender_bridge.") if modules else "up"


def _first(names: dict[int, str], part: str) -> int:
    return next(pid for pid, name in names.items() if part in name)


class _Writers:
    """Connections that insert and delete without a pause: the table stays small, and its changes do not end."""

    def __init__(self, server: LocalServer) -> None:
        self.rows = 0
        self._server, self._stop = server, threading.Event()
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._write, daemon=True) for _ in range(_WRITERS)]
        for each in self._threads:
            each.start()

    def _write(self) -> None:
        while not self._stop.is_set():
            with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
                while not self._stop.is_set():
                    number = next(self._numbers)
                    connection.execute("INSERT INTO load VALUES (%s, %s)", [number, "x" * _ROW])
                    connection.execute("DELETE FROM load WHERE number = %s", [number])
                    self.rows += 2

    def stop(self) -> None:
        """End them."""
        self._stop.set()
        for each in self._threads:
            each.join(30)
