"""`capture`: from the walsender to a durable, compressed log, against pg_recvlogical and Debezium.

All read the same WAL, each from a copy of one slot. The clock runs from the moment the server says that
the slot is in use to the moment the load's last transaction is there: in the log server's durable log, or at
the end of pg_recvlogical, which writes to /dev/null. CPU seconds are those of the readers' own processes:
log server, bridge and capture together, and of each process; the walsender's are reported separately. Each round begins with
another side.

With `--log-servers 3`, also to three log servers, until the load is durable on each of them, without and with TLS. `three_replicas_vs_one` has TLS
on, and the one log server has not.

Debezium's rate is that of the second half of its rows, by its own process's CPU seconds.
"""

import argparse
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg

from benchmarks import debezium, log_reader, recvlogical, workload
from benchmarks.processes import child_name, cpu_seconds, tree, wait_cpu_seconds
from benchmarks.report import Report, Round, load
from benchmarks.workload import SLOT, STREAM, Workload
from tests.support.stack import Stack
from tests.support.tls import Authority
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.errors import TusklineError, UnavailableError, UnknownStreamError
from walsender_bridge.runtime.tls_files import TlsFiles, with_files

NAME = "capture"
#: Seconds between two polls of a reader's progress: each costs the log server a call.
_POLL = 0.02
#: How the figures of one process end.
_CPU = "_cpu"
#: Seconds within which a load must have been captured.
_PATIENCE = 600.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--transactions", type=int, default=220_000, help="of TPC-B")
    parser.add_argument("--wide-rows", type=int, default=2_000_000)
    parser.add_argument("--work", choices=["tpcb", "wide"], help="only one of the two loads")
    parser.add_argument("--postgres", type=int, help="the server's major (the newest here)")
    parser.add_argument("--no-debezium", action="store_true")
    parser.add_argument("--log-servers", type=int, default=1, help="more than one: also to so many")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Both loads, one after the other."""
    report = Report(NAME)
    transactions = max(int(options.transactions * options.scale), 1)
    rows = max(int(options.wide_rows * options.scale), 1)
    loads = {
        "tpcb": partial(workload.tpcb, transactions, major=options.postgres),
        "wide": partial(workload.wide, rows, major=options.postgres),
    }
    with_debezium = not options.no_debezium and debezium.available()
    for name, make in loads.items():
        if options.work in {None, name}:
            say(f"{name}: writing the load")
            with make() as work, tempfile.TemporaryDirectory(prefix="tuskline-bench-") as folder:
                _rounds(report, work, Path(folder), options, with_debezium, say)
    report.peers = [{"name": "pg_recvlogical", "version": report.peers[0]["version"]}]
    if with_debezium:
        report.peers.append({"name": "Debezium", "version": debezium.VERSION})
    return report


def _rounds(
    report: Report,
    work: Workload,
    folder: Path,
    options: argparse.Namespace,
    with_debezium: bool,
    say: Callable[[str], None],
) -> None:
    report.peers.append({"name": "pg_recvlogical", "version": recvlogical.version(work)})
    tls = _certificate(folder) if options.log_servers > 1 else None
    for number in range(options.rounds):
        place = folder / str(number)
        place.mkdir()
        written = place / "written" if number == 0 else None
        turns = [partial(_own, work, place, written, report), partial(_peer, work)]
        if with_debezium:
            turns.append(partial(debezium.turn, work, place))
        if tls is not None:
            for side, files in (("replicated", None), ("replicated_tls", tls)):
                (place / side).mkdir()
                sides = _Own(side, options.log_servers, files)
                turns.append(partial(_own, work, place / side, None, report, sides))
        first = number % len(turns)
        for take in turns[first:] + turns[:first]:
            turn = take()
            report.add(turn)
            say(
                f"{work.name} {number + 1}/{options.rounds} {turn.side}: {turn.rows / turn.wall:,.0f} rows/s, "
                f"{turn.cpu:.2f} CPU s{_by_process(turn)}, load {turn.load}"
            )
    _ratios(report, work.name)


def _by_process(turn: Round) -> str:
    """The CPU seconds of each process, for the progress."""
    found = [
        f"{name.removesuffix(_CPU).replace('_', ' ')} {seconds:.2f}"
        for name, seconds in turn.more.items()
        if name.endswith(_CPU)
    ]
    return f" ({', '.join(found)})"


def _certificate(folder: Path) -> TlsFiles:
    """One for all parts."""
    roles = ("log-server", "repository", "writer", "operator")
    return Authority(folder).issue(*roles, hosts=("127.0.0.1",))


def _ratios(report: Report, work: str) -> None:
    one, plain, tls = (
        report.median(side, work, "rows_s") for side in ("own", "replicated", "replicated_tls")
    )
    report.ratio(f"three_replicas_vs_one_{work}", tls, one)
    report.ratio(f"tls_vs_plain_{work}", tls, plain)
    for side in ("own", "pg_recvlogical", "debezium", "replicated", "replicated_tls"):
        for name in ("rows_s", "wall", "cpu", "rows_cpu_s", *_processes(report, side, work)):
            report.median(side, work, name)
    own, peer = (report.median(side, work, "rows_s") for side in ("own", "pg_recvlogical"))
    report.ratio(f"wall_rate_vs_pg_recvlogical_{work}", own, peer)
    own, peer = (report.median(side, work, "rows_cpu_s") for side in ("own", "debezium"))
    report.ratio(f"rows_per_cpu_vs_debezium_{work}", own, peer)


def _processes(report: Report, side: str, work: str) -> list[str]:
    """The names of the CPU seconds of each process, as in the rounds of a side."""
    turns = [turn for turn in report.rounds if (turn.side, turn.work) == (side, work)]
    return [name for turn in turns[:1] for name in turn.more if name.endswith(_CPU)]


class _Watch:
    """Observes a slot's walsender while a reader works. Created when the reader is started."""

    def __init__(self, work: Workload, slot: str) -> None:
        self.pid = 0
        self.cpu = 0.0
        self.began = time.monotonic()
        self._question = (
            "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s AND active"
        )
        self._work, self._slot = work, slot

    def wait_active(self, alive: Callable[[], bool]) -> None:
        """Wait until the slot is in use, and set `began`; it remains the start of a reader that ended unobserved."""
        with psycopg.connect(self._work.dsn, autocommit=True) as connection:
            while True:
                row = connection.execute(self._question.encode(), [self._slot]).fetchone()
                if row is not None:
                    self.began, self.pid = time.monotonic(), int(row[0])
                    return
                if not alive():
                    return
                time.sleep(_POLL / 2)

    def poll(self) -> None:
        """Record the walsender's CPU seconds, which are readable while it lives."""
        if self.pid:
            self.cpu = max(self.cpu, cpu_seconds(self.pid))


def _peer(work: Workload) -> Round:
    busy = load()
    with work.slot("bench_peer") as slot:
        watch = _Watch(work, slot)
        process = recvlogical.start(work, slot, "/dev/null")
        watch.wait_active(lambda: _runs(process))
        while _runs(process):
            watch.poll()
            time.sleep(_POLL)
        ended = time.monotonic()
        cpu = wait_cpu_seconds(process)
    if process.returncode:
        raise RuntimeError(f"pg_recvlogical failed: {process.returncode}")
    # What it reads is compared once, byte for byte: see `_own`.
    more = {"walsender_cpu": watch.cpu}
    return Round("pg_recvlogical", work.name, work.rows, ended - watch.began, cpu, None, busy, more)


def _runs(process: "subprocess.Popen[bytes]") -> bool:
    """Whether the process runs, without reaping it."""
    try:
        return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class _Own:
    """How Tuskline runs."""

    side: str = "own"
    log_servers: int = 1
    tls: TlsFiles | None = None


_ALONE = _Own()


def _own(
    work: Workload, folder: Path, written: Path | None, report: Report, how: _Own = _ALONE
) -> Round:
    """Log servers and a bridge as users run them; with `written`, the log is compared with the peer's output."""
    busy = load()
    made = Stack(folder, {STREAM: work.dsn}, log_servers=how.log_servers, tls=how.tls)
    with ExitStack() as opened:
        stack = opened.enter_context(made)
        opened.enter_context(work.slot(SLOT))
        stack.start("log-server")
        replicas = _connected(stack, opened, how.tls)
        stack.start("bridge")
        watch = _Watch(work, SLOT)
        watch.wait_active(lambda: True)
        before = _spent(stack)
        _wait_durable(stack, replicas, work, watch)
        ended, after = time.monotonic(), _spent(stack)
        watch.poll()
        _check_replicated(stack)
        wait_committed(stack, work)
        found = log_reader.content(stack.log_address, STREAM)
        report.same_bytes(work.name, found.digest)
        if written is not None:
            _compare(work, stack, written, report)
            written.unlink()
        stack.stop("bridge")
    cpu = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
    more = {
        **{name + _CPU: seconds for name, seconds in cpu.items()},
        "walsender_cpu": watch.cpu,
        "messages": found.messages,
        "raw_mb": found.raw_bytes / 2**20,
        "stored_mb": found.stored_bytes / 2**20,
    }
    wall = ended - watch.began
    return Round(how.side, work.name, work.rows, wall, sum(cpu.values()), found.rows, busy, more)


def _spent(stack: Stack) -> dict[str, float]:
    """The CPU seconds of each process so far: of log servers, capture and the bridge, which has the repository."""
    log_servers, bridge = stack.pid("log-server"), stack.pid("bridge")
    roles = {log_servers: "supervisor", bridge: "repository"}
    found: defaultdict[str, float] = defaultdict(float)
    for pid in (*tree(log_servers), *tree(bridge)):
        name = roles.get(pid) or child_name(pid).replace("-", "_")
        found[name] += cpu_seconds(pid)
    return dict(found)


def start(stack: Stack) -> None:
    """Start log server and bridge, and wait until the log knows the stream."""
    stack.start("log-server", "bridge")
    while True:
        try:
            with LogClient(stack.log_address) as log:
                if STREAM in log.status().streams:
                    return
        except TusklineError:
            time.sleep(_POLL)


def _connected(stack: Stack, opened: ExitStack, tls: TlsFiles | None) -> list[ReplicaClient]:
    """A client of each log server, once it answers: a handshake within the measured time would count for TLS alone."""
    found = []
    for listen in stack.listens:
        address = with_files(f"grpc://{listen}", tls)
        replica = opened.enter_context(ReplicaClient(address))
        found.append(replica)
        while True:
            try:
                replica.stream_status(STREAM)
            except UnavailableError:
                time.sleep(_POLL)
            except UnknownStreamError:
                break
    return found


def _wait_durable(
    stack: Stack, replicas: Sequence[ReplicaClient], work: Workload, watch: _Watch
) -> None:
    """Until the whole load is on the disk of each log server."""
    deadline = time.monotonic() + _PATIENCE
    for replica in replicas:
        while not _has_all(replica, work):
            if time.monotonic() > deadline:
                raise RuntimeError(f"capture did not get to the end:\n{stack.logs()}")
            watch.poll()
            time.sleep(_POLL)


def _check_replicated(stack: Stack) -> None:
    with LogClient(stack.log_address) as log:
        addresses = log.status().streams[STREAM].addresses
    if len(addresses) < len(stack.listens):
        raise RuntimeError(f"the stream is on {addresses} only")


def _has_all(replica: ReplicaClient, work: Workload) -> bool:
    try:
        return replica.stream_status(STREAM).last_end_lsn >= work.end_lsn
    except TusklineError:
        return False


def wait_committed(stack: Stack, work: Workload) -> None:
    """Wait until the repository has committed the whole load."""
    with LogClient(stack.log_address) as log:
        while log.status().streams[STREAM].last_end_lsn < work.end_lsn:
            time.sleep(_POLL)


def _compare(work: Workload, stack: Stack, written: Path, report: Report) -> None:
    with work.slot("bench_check") as slot:
        process = recvlogical.start(work, slot, str(written))
        if process.wait():
            raise RuntimeError("pg_recvlogical failed")
    found = recvlogical.differs(written, log_reader.payloads(stack.log_address, STREAM))
    if found is not None:
        report.unequal.append(f"{work.name}: {found}")
