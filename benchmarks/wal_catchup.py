"""`wal-catchup`: a safekeeper that was away returns, compared with pg_receivewal that reads the same WAL.

The proposer is started again meanwhile, so nothing is in its memory: the WAL comes from the primary's disk on both
sides. CPU seconds are those of the safekeeper, the proposer and the walsenders, by those of pg_receivewal and its own.
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.processes import cpu_seconds, tree_cpu_seconds
from benchmarks.report import Report, Round, load
from benchmarks.wal_sides import PLACE, Own, ask, execute, lsn, most_memory
from walsender_bridge.demo.local_server import LocalServer, by_major
from walsender_bridge.postgres.protocol.lsn import format_lsn, parse_lsn

NAME = "wal-catchup"
_AWAY = "safekeeper-2"
_POLL = 0.02
_PATIENCE = 300.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--postgres", type=int, help="the server's major (the newest here)")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Both sides, in turns."""
    report = Report(NAME)
    found = by_major()
    installation = found[options.postgres or max(found)]
    report.peers = [{"name": "pg_receivewal", "version": installation.version}]
    with tempfile.TemporaryDirectory(prefix="tuskline-bench-", dir=PLACE) as name:
        folder = Path(name)
        folder.chmod(0o755)
        settings = {"max_wal_size": "16GB", "checkpoint_timeout": "1h", "wal_keep_size": "8GB"}
        server = LocalServer.create(
            installation, folder / "server", settings=settings, auth="trust"
        )
        try:
            server.start()
            for number in range(options.rounds):
                _turn(report, server, folder / str(number), options, say)
        finally:
            server.destroy()
    for side in ("own", "receiver"):
        for figure in ("mb_s", "cpu_per_gb", "proposer_rss_mb"):
            report.median(side, "catchup", figure)
    for key, figure in (("mb_s_vs_receiver", "mb_s"), ("cpu_per_gb_vs_receiver", "cpu_per_gb")):
        own, peer = (report.median(side, "catchup", figure) for side in ("own", "receiver"))
        report.ratio(key, own, peer)
    report.ratio("proposer_rss_mb", report.median("own", "catchup", "proposer_rss_mb"), 1.0)
    return report


def _turn(
    report: Report,
    server: LocalServer,
    folder: Path,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    folder.mkdir()
    side = Own(server, folder / "own")
    try:
        side.attach()
        side.stack.kill(_AWAY)
        execute(server, "SELECT pg_create_physical_replication_slot('bench_peer', true)")
        begin = lsn(server)
        wanted = int(options.megabytes * options.scale * 2**20)
        execute(server, "CREATE TABLE IF NOT EXISTS away (filler text)")
        while lsn(server) < begin + wanted:
            execute(
                server,
                "INSERT INTO away SELECT repeat('x', 1000) FROM generate_series(1, 4000)",
            )
        execute(server, "TRUNCATE away")
        side.detach()
        side.stack.kill("proposer")
        end = lsn(server)
        side.stack.start("proposer")
        _wait(lambda: _flushed(side, 2) >= end, "the quorum is back")
        for turn in (_own(server, side, begin, end), _peer(server, folder, begin, end)):
            report.add(turn)
            say(
                f"{turn.side}: {turn.more['mb_s']:,.0f} MiB/s, {turn.more['cpu_per_gb']:.2f} CPU s/GiB"
            )
        _compare(report, side, folder / "receiver")
    finally:
        side.close()


def _flushed(side: Own, count: int) -> int:
    """The WAL that this number of safekeepers has on disk."""
    try:
        reported = side.stack.status().get("safekeepers", [])
    except (OSError, ValueError):
        return 0
    held = sorted((parse_lsn(each["flush_lsn"] or "0/0") for each in reported), reverse=True)
    return held[count - 1] if len(held) >= count else 0


def _wait(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not check():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not in time: {what}")
        time.sleep(_POLL)


def _senders(server: LocalServer) -> dict[int, float]:
    pids = ask(server, "SELECT string_agg(pid::text, ' ') FROM pg_stat_replication").split()
    return {int(pid): cpu_seconds(int(pid)) for pid in pids}


def _own(server: LocalServer, side: Own, begin: int, end: int) -> Round:
    busy = load()
    proposer = side.stack.processes["proposer"].pid
    before, senders = cpu_seconds(proposer), _senders(server)
    began = time.monotonic()
    side.stack.start(_AWAY)
    away = side.stack.data(2) / "wal"
    size = 16 << 20
    timeline = ask(server, "SELECT timeline_id FROM pg_control_checkpoint()")
    number = (end - 1) // size
    last = f"{int(timeline):08X}{number // 256:08X}{number % 256:08X}"
    seen: dict[int, float] = {}

    def there() -> bool:
        seen.update(_senders(server))
        return (away / last).exists() or (away / f"{last}.partial").exists()

    _wait(there, "the safekeeper that was away has it all")
    _wait(lambda: _flushed(side, 3) >= end, "it says so")
    wall = time.monotonic() - began
    cpu = cpu_seconds(proposer) - before
    cpu += tree_cpu_seconds(side.stack.processes[_AWAY].pid)
    cpu += sum(spent - senders.get(pid, 0.0) for pid, spent in seen.items())
    more = _figures(begin, end, wall, cpu) | {"proposer_rss_mb": most_memory(proposer)}
    return Round("own", "catchup", end - begin, wall, cpu, None, busy, more)


def _peer(server: LocalServer, folder: Path, begin: int, end: int) -> Round:
    busy = load()
    place = folder / "receiver"
    place.mkdir()
    tool = server.installation.tool("pg_receivewal")
    command = [
        str(tool),
        "-D",
        str(place),
        "-d",
        server.dsn("postgres"),
        "-S",
        "bench_peer",
        "--no-loop",
    ]
    others = _senders(server)
    began = time.monotonic()
    process = subprocess.Popen([*command, "-E", format_lsn(end)], stderr=subprocess.DEVNULL)
    sender, own = 0.0, 0.0
    while process.poll() is None:
        own = max(own, cpu_seconds(process.pid))
        found = {pid: spent for pid, spent in _senders(server).items() if pid not in others}
        sender = max([sender, *found.values()])
        time.sleep(_POLL)
    wall = time.monotonic() - began
    cpu = own + sender
    drop_slot = "SELECT pg_drop_replication_slot('bench_peer')"
    execute(server, drop_slot)
    return Round(
        "receiver", "catchup", end - begin, wall, cpu, None, busy, _figures(begin, end, wall, cpu)
    )


def _figures(begin: int, end: int, wall: float, cpu: float) -> dict[str, float]:
    size = end - begin
    return {"mb_s": size / 2**20 / wall, "cpu_per_gb": cpu / (size / 2**30)}


def _compare(report: Report, side: Own, receiver: Path) -> None:
    """Both hold the same segments, byte for byte."""
    held = side.stack.segments(2)
    both = [path for path in receiver.iterdir() if path.name in held]
    if not both:
        report.unequal.append("no segment that both hold")
    report.unequal += [
        f"{path.name} differs" for path in both if path.read_bytes() != held[path.name]
    ]
