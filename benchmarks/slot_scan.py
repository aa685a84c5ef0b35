"""`slot-scan`: the cost for a primary of copying 500 logical slots to three standbys, compared with pg_failover_slots.

PostgreSQL 17 of Debian with its own package `postgresql-17-pg-failover-slots`; the same primary, the same slots, the same
interval. In each round both sides work in turn for some cycles, in which all slots are moved on again and again. A cycle is
one scan for each of the three standbys. Counted on the primary: statements of the side's role (pg_stat_statements), and CPU
seconds of the processes that serve it, from the connection on. Before a round counts, each standby has the same slots as
the primary, and each is confirmed as far as its slot, and none farther.
"""

import argparse
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psycopg

from benchmarks import slot_sides
from benchmarks.report import Report, Round, load
from benchmarks.slot_sides import (
    Own,
    Peer,
    Primary,
    Servers,
    Shown,
    Side,
    ask,
    logical_slots,
    spent,
    until,
)

NAME = "slot-scan"
WORK = "scan"
_SLOTS = 500
#: A text that only the first statement of each scan of a side has, and the number of such statements in a cycle.
_SCAN = {
    "own": ("FROM pg_stat_replication", 1),
    "peer": ("FROM pg_catalog.pg_replication_slots", 6),
}
#: Seconds for the first synchronization, and for a standby to catch up with the primary.
_FIRST, _CALM = 600.0, 60.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--interval", type=float, default=5.0, help="seconds between two scans")
    parser.add_argument("--cycles", type=int, default=5, help="of each turn")


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Both sides, in turns."""
    report = Report(NAME)
    version, library = slot_sides.prepare()
    report.peers = [{"name": "pg_failover_slots", "version": version}]
    count = max(int(_SLOTS * options.scale), 1)
    with tempfile.TemporaryDirectory(prefix="tuskline-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        servers = stack.enter_context(Servers(folder, count, library))
        servers.start()
        say(f"{count} slots on PostgreSQL {servers.primary.installation.version}")
        primary = stack.enter_context(Primary(servers.primary))
        mover = Mover(servers)
        stack.callback(mover.stop)
        sides: list[Side] = [
            stack.enter_context(Own(servers, options.interval, folder)),
            stack.enter_context(Peer(servers, options.interval)),
        ]
        for side in sides:
            began = time.monotonic()
            _first(side, mover)
            say(f"{side.name}: all slots on all standbys after {time.monotonic() - began:.0f} s")
        for number in range(options.rounds):
            for side in sides:
                turn = _turn(side, primary, mover, options, report)
                report.add(turn)
                figures = ", ".join(f"{key} {value:,.2f}" for key, value in turn.more.items())
                say(f"{number + 1}/{options.rounds} {side.name}: {figures}")
    _ratios(report)
    return report


class Mover:
    """The slots' clients, in one permanent session on the primary."""

    def __init__(self, servers: Servers) -> None:
        self._connection = psycopg.connect(servers.primary.dsn(), autocommit=True)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def move(self, names: list[str] | None = None) -> None:
        """A row, a record of what runs, and the slots (all, unless they are named) read to the end."""
        for statement in (
            "SELECT pg_log_standby_snapshot()",
            "INSERT INTO moved VALUES (1)",
        ):
            ask(self._connection, statement)
        ask(
            self._connection,
            "SELECT pg_replication_slot_advance(slot_name, pg_current_wal_flush_lsn())"
            " FROM pg_replication_slots WHERE slot_type = 'logical' AND NOT active"
            " AND (%s::text[] IS NULL OR slot_name = ANY (%s::text[]))",
            *(names, names),
        )

    def slots(self) -> Shown:
        """The slots of the primary."""
        return logical_slots(self._connection)

    def start(self, interval: float) -> None:
        """Advance all of them at each interval, until `stop`."""
        self._ended.clear()

        def work() -> None:
            while not self._ended.wait(interval):
                self.move()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop advancing them."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _first(side: Side, mover: Mover) -> None:
    """The first synchronization. A slot that a side waits for is advanced immediately."""
    side.resume()
    last = 0.0

    def done() -> bool:
        nonlocal last
        side.own_cpu()  # raises if it has ended
        missing = side.missing()
        waiting = sorted({slot for _, slot, begun in missing if begun})
        if waiting and side.name == "peer":
            mover.move(waiting)
        elif time.monotonic() - last > 2:
            mover.move()
            last = time.monotonic()
        return not missing

    until(f"{side.name} has all slots on all standbys", done, _FIRST)
    side.pause()


def _turn(
    side: Side, primary: Primary, mover: Mover, options: argparse.Namespace, report: Report
) -> Round:
    """Some cycles of one side, from one scan to another."""
    busy = load()
    text, per_cycle = _SCAN[side.name]

    def scans() -> int:
        return primary.statements(side.name, text)

    def next_scan() -> float:
        now = scans()
        until(f"{side.name} scans", lambda: scans() >= now + per_cycle, 20 * options.interval)
        return time.monotonic()

    side.resume()
    mover.start(options.interval)
    next_scan()
    next_scan()
    # Between two scans of either side.
    time.sleep(options.interval / 2)
    statements, first, pids = primary.statements(side.name), scans(), primary.pids(side.name)
    cpu, standby_cpu, own_cpu = primary.cpu(side.name), side.standby_cpu(), side.own_cpu()
    began = time.monotonic()
    time.sleep(options.interval * options.cycles)
    wall = time.monotonic() - began
    cpu_used = spent(cpu, primary.cpu(side.name, pids))
    cycles = (scans() - first) / per_cycle
    statements = primary.statements(side.name) - statements
    more = {
        "cycles": cycles,
        "statements_per_cycle": statements / cycles,
        "cpu_ms_per_cycle": 1000 * cpu_used / cycles,
        "standbys_cpu_ms_per_cycle": 1000 * (side.standby_cpu() - standby_cpu) / cycles,
        "controller_cpu_ms_per_cycle": 1000 * (side.own_cpu() - own_cpu) / cycles,
    }
    mover.stop()
    result = _same(side, mover, report)
    side.pause()
    return Round(side.name, WORK, round(cycles), wall, cpu_used, result, busy, more)


def _same(side: Side, mover: Mover, report: Report) -> str:
    """The copies of all standbys, for comparison with the other side's; faults are added to the report."""
    there = mover.slots()

    def all_there() -> bool:
        return all(
            copies.keys() == there.keys() and all(copies[n][4] == there[n][4] for n in there)
            for copies in side.copies()
        )

    began = time.monotonic()
    try:
        until("each copy is where its slot is", all_there, _CALM)
    except RuntimeError as error:
        report.unequal.append(f"{side.name}: {error}")
    report.absolute[f"{side.name}_seconds_to_be_level"] = round(time.monotonic() - began, 1)
    kinds = []
    for number, copies in enumerate(side.copies()):
        ahead = [
            name for name, copy in copies.items() if name in there and copy[4] > there[name][4]
        ]
        if ahead:
            report.unequal.append(f"{side.name}: {len(ahead)} copies ahead on standby {number}")
        kinds.append(sorted((name, *copy[:3]) for name, copy in copies.items()))
    return hashlib.sha256(repr(kinds).encode()).hexdigest()


def _ratios(report: Report) -> None:
    figures = {
        side: {
            name: report.median(side, WORK, name)
            for name in (
                "cycles",
                "statements_per_cycle",
                "cpu_ms_per_cycle",
                "standbys_cpu_ms_per_cycle",
                "controller_cpu_ms_per_cycle",
            )
        }
        for side in ("own", "peer")
    }
    for key, name in (
        ("statements_vs_peer", "statements_per_cycle"),
        ("cpu_vs_peer", "cpu_ms_per_cycle"),
    ):
        report.ratio(key, figures["own"][name], figures["peer"][name])
