"""`wal`: the cost of a commit for two of three copies of its WAL, compared with pg_receivewal and with standbys.

One primary with fsync; in turns it waits for our quorum (three safekeepers), for `ANY 2` of three real
`pg_receivewal --synchronous`, and for `ANY 2` of three real standbys. pgbench measures TPC-B with 1, 8 and 32 clients,
tiny transactions with 1 and 32; then one transaction writes in bulk. CPU seconds are those of the copies' processes and
of the walsenders that serve them. Before a round counts, what the copies hold is compared with the primary's WAL.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psycopg

from benchmarks import workload
from benchmarks.report import Report, Round, load
from benchmarks.wal_sides import PLACE, Own, OwnTls, Receivers, Side, Standbys, execute, lsn
from tests.support.stack import Stack
from walsender_bridge.capture import source
from walsender_bridge.demo.local_server import LocalServer, by_major

NAME = "wal"
_SETTINGS = {
    "autovacuum": "off",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "512MB",
    "max_wal_senders": "20",
    "wal_keep_size": "4GB",
}
#: Work: its clients. TPC-B is pgbench's own.
_PGBENCH = {"tpcb_c1": 1, "tpcb_c8": 8, "tpcb_c32": 32, "tiny_c1": 1, "tiny_c32": 32}
_TINY = "INSERT INTO tiny VALUES (1);\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--seconds", type=float, default=5.0, help="of each pgbench")
    parser.add_argument("--bulk-rows", type=int, default=1_000_000)
    parser.add_argument(
        "--sides", default="own,receivers,standbys", help="or own-tls: ours, with mutual TLS"
    )
    parser.add_argument("--works", help="only these, with commas between")
    parser.add_argument("--postgres", type=int, help="the server's major (the newest here)")
    parser.add_argument("--capture", action="store_true", help="with capture of the same primary")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """All works on all sides, in turns."""
    report = Report(NAME)
    found = by_major()
    installation = found[options.postgres or max(found)]
    with (
        tempfile.TemporaryDirectory(prefix="tuskline-bench-", dir=PLACE) as name,
        ExitStack() as stack,
    ):
        folder = Path(name)
        folder.chmod(0o755)
        settings = _SETTINGS | ({"wal_level": "logical"} if options.capture else {})
        server = LocalServer.create(
            installation, folder / "server", settings=settings, auth="trust"
        )
        stack.callback(server.destroy)
        server.start()
        workload.pgbench(server, "-i", "-q", "-s", str(max(int(50 * options.scale), 1)))
        execute(server, "CREATE TABLE tiny (number int)")
        if options.capture:
            stack.enter_context(_captured(server, folder))
        for number in range(options.rounds):
            for side_name in options.sides.split(","):
                _turn(report, server, folder, number, side_name, options, say)
    version = installation.version
    report.peers = [
        {"name": f"ANY 2 of 3 {peer}", "version": version} for peer in ("pg_receivewal", "standbys")
    ]
    _ratios(report)
    return report


def _captured(server: LocalServer, folder: Path) -> Stack:
    """Log server and bridge that capture the primary."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for table in ("pgbench_history", "tiny"):
            connection.execute(f"ALTER TABLE {table} REPLICA IDENTITY FULL")
        slot = f"tuskline_{workload.STREAM}"
        source.prepare(connection, source.CaptureSource(workload.STREAM, server.dsn(), slot, slot))
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
    place = folder / "capture"
    place.mkdir()
    stack = Stack(place, {workload.STREAM: server.dsn()})
    stack.start("log-server", "bridge")
    return stack


def _turn(
    report: Report,
    server: LocalServer,
    folder: Path,
    number: int,
    name: str,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> None:
    busy = load()
    works = options.works.split(",") if options.works else [*_PGBENCH, "bulk"]
    with _side(name, server, folder, number) as side:
        side.attach()
        measured = []
        for work in works:
            began = time.monotonic()
            before = side.cpu()
            figures, rows = (
                _bulk(server, options)
                if work == "bulk"
                else _pgbench(server, folder, work, options)
            )
            wall = time.monotonic() - began
            measured.append(Round(name, work, rows, wall, side.cpu() - before, None, busy, figures))
            text = ", ".join(f"{key} {value:,.1f}" for key, value in figures.items())
            say(
                f"{number + 1}/{options.rounds} {name} {work}: {text}, {measured[-1].cpu:.2f} CPU s"
            )
        difference = side.differs()
        if difference is not None:
            report.unequal.append(f"{name}, round {number + 1}: {difference}")
        for turn in measured:
            report.add(turn)
        side.detach()


def _side(name: str, server: LocalServer, folder: Path, number: int) -> Side:
    if name in {Own.name, OwnTls.name}:
        own = Own if name == Own.name else OwnTls
        return own(server, folder / f"{name}-{number}")
    if name == "receivers":
        return Receivers(server, folder / f"receivers-{number}")
    return Standbys(server, folder)


def _pgbench(
    server: LocalServer, folder: Path, work: str, options: argparse.Namespace
) -> tuple[dict[str, float], int]:
    """One run; latencies are in milliseconds, of each transaction."""
    clients = _PGBENCH[work]
    log = folder / "latency"
    script = folder / "tiny.sql"
    script.write_text(_TINY)
    own = ["-f", str(script)] if work.startswith("tiny") else []
    seconds = max(round(options.seconds * min(options.scale, 1.0)), 1)
    arguments = ["-n", "-M", "prepared", "-c", str(clients), "-j", str(min(clients, 2)), *own]
    workload.pgbench(server, *arguments, "-T", str(seconds), "-l", "--log-prefix", str(log))
    times: list[int] = []
    for path in folder.glob("latency.*"):
        times += [int(line.split()[2]) for line in path.read_text().splitlines()]
        path.unlink()
    times.sort()
    figures = {
        "tps": len(times) / seconds,
        "p50_ms": statistics.median(times) / 1000,
        "p99_ms": times[int(len(times) * 0.99)] / 1000,
    }
    return figures, len(times)


def _bulk(server: LocalServer, options: argparse.Namespace) -> tuple[dict[str, float], int]:
    """One large transaction. Returns MiB of WAL per second until its COMMIT returns."""
    rows = max(int(options.bulk_rows * options.scale), 1)
    execute(server, "DROP TABLE IF EXISTS bulk")
    execute(server, "CREATE TABLE bulk (number int, filler text)")
    before = lsn(server)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        began = time.monotonic()
        connection.execute(
            "INSERT INTO bulk SELECT n, repeat('x', 150) FROM generate_series(1, %s) n", [rows]
        )
        wall = time.monotonic() - began
    written = (lsn(server) - before) / 2**20
    return {"mb_s": written / wall, "wal_mb": written}, rows


def _ratios(report: Report) -> None:
    for side in ("own", "receivers", "standbys"):
        for work in _PGBENCH:
            for name in ("tps", "p50_ms", "p99_ms"):
                report.median(side, work, name)
            spent = report.values(side, work, "cpu")
            rows = report.values(side, work, "rows")
            if spent:
                each = [1e6 * cpu / max(done, 1) for cpu, done in zip(spent, rows, strict=True)]
                report.absolute[f"{side}_cpu_us_per_commit_{work}"] = round(
                    statistics.median(each), 1
                )
        for name in ("mb_s", "cpu"):
            report.median(side, "bulk", name)

    def by(key: str, figure: str, peer: str) -> None:
        absolute = report.absolute
        report.ratio(key, absolute.get(f"own_{figure}", 0.0), absolute.get(f"{peer}_{figure}", 0.0))

    by("p50_c1_vs_receivers", "p50_ms_tpcb_c1", "receivers")
    by("p50_c8_vs_receivers", "p50_ms_tpcb_c8", "receivers")
    by("tps_c8_vs_receivers", "tps_tpcb_c8", "receivers")
    by("tps_c32_vs_receivers", "tps_tpcb_c32", "receivers")
    by("tps_c32_vs_standbys", "tps_tpcb_c32", "standbys")
    by("bulk_mb_s_vs_receivers", "mb_s_bulk", "receivers")
    by("cpu_per_commit_c32_vs_receivers", "cpu_us_per_commit_tpcb_c32", "receivers")
    by("tiny_p50_c1_vs_receivers", "p50_ms_tiny_c1", "receivers")
    by("tiny_tps_c32_vs_receivers", "tps_tiny_c32", "receivers")
