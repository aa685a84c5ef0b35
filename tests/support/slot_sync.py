"""A pair of servers with a controller of slot copies beside it: as `tuskline slots` would run, and through it."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from slot_sync.controller import Controller
from slot_sync.plan import FailoverCandidate, SlotSyncPlan
from slot_sync.report import SlotReport
from slot_sync.resolver.observed import Selection
from slot_sync.resolver.transitions import CopyState, Transition
from tests.support.attached import Attached, toml
from tests.support.slot_copies import (
    PHYSICAL,
    PUBLICATION,
    Pair,
    received,
    rows,
    running_pair,
)
from tests.support.snapshot_files import lacking, mappings_lacking
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer

STANDBY = "near"


class Load:
    """Rows `row-N` into the table `shop` of a primary, numbered from 1; all that were committed are known."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self.written: list[int] = []

    def write(self, count: int = 1) -> None:
        with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
            for _ in range(count):
                number = len(self.written) + 1
                connection.execute(
                    "INSERT INTO public.shop VALUES (%s, %s)", [number, f"row-{number}"]
                )
                self.written.append(number)

    def write_whole(self, count: int = 3) -> None:
        """The next rows, in one transaction."""
        first = len(self.written) + 1
        numbers = range(first, first + count)
        with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
            connection.execute(
                "INSERT INTO public.shop SELECT n, 'row-' || n FROM generate_series(%s::int, %s::int) AS n",
                [first, first + count - 1],
            )
        self.written += numbers


class SlotStack:
    """A pair, a load, and what a client of slots has read."""

    def __init__(self, pair: Pair, folder: Path) -> None:
        self.pair = pair
        self.folder = folder
        self.load = Load(pair.primary)
        #: By slot: the numbers of the rows that its client was sent, in order.
        self.read: dict[str, list[int]] = {}

    def plan(self, *others: FailoverCandidate, **wanted: Any) -> SlotSyncPlan:
        return SlotSyncPlan(
            self.pair.primary.dsn(),
            (FailoverCandidate(STANDBY, self.pair.standby.dsn(), PHYSICAL), *others),
            Selection(**wanted),
            self.folder / "slots",
            poll=0.1,
        )

    def controller(self, *others: FailoverCandidate, **wanted: Any) -> Controller:
        return Controller(self.plan(*others, **wanted))

    def consume(self, *names: str, server: LocalServer | None = None) -> None:
        """Have a client read each slot to the end and confirm it."""
        for name in names:
            rows = received(server or self.pair.primary, name)
            self.read.setdefault(name, []).extend(rows)

    def turn_over(self, *names: str) -> None:
        """A row, a record of what runs, and the clients at the end: what lets a copy be proven."""
        self.load.write()
        self.pair.on_primary("CHECKPOINT")
        self.consume(*names)

    def clear(self) -> None:
        """Drop every logical slot, start what does not run, and set settings back."""
        for server, drop in (
            (self.pair.primary, "pg_drop_replication_slot(slot_name)"),
            (self.pair.standby, "tuskline_slots.drop(slot_name, any_slot => true)"),
        ):
            server.start()
            rows(server, "ALTER SYSTEM RESET ALL")
            rows(server, "SELECT pg_reload_conf()")
            rows(
                server,
                f"SELECT {drop} FROM pg_replication_slots"
                " WHERE slot_type = 'logical' AND database = current_database()",
            )
        self.read.clear()

    def states(self, controller: Controller) -> dict[str, CopyState]:
        """A round; the state of each slot in it."""
        return {each.slot: each.after for each in controller.once(10)[STANDBY].transitions}

    def found(self, controller: Controller, name: str) -> Transition:
        """A round; what is found of one slot in it."""
        report = controller.once(10)[STANDBY]
        return next(each for each in report.transitions if each.slot == name)

    @contextmanager
    def streaming(self, name: str, server: LocalServer | None = None) -> Iterator[None]:
        """A client that streams from the slot and confirms it each second."""
        where = server or self.pair.primary
        client = subprocess.Popen(
            [
                *(where.installation.tool("pg_recvlogical"), "-d", where.dsn(), "--slot", name),
                *("--start", "--no-loop", "-F", "0", "-s", "1", "-f", "-", "-o", "proto_version=1"),
                *("-o", f"publication_names={PUBLICATION}"),
            ],
            stdout=subprocess.DEVNULL,
        )
        query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        try:
            wait_for(lambda: rows(where, query, name)[0][0], 20, "the client streams")
            yield
        finally:
            client.terminate()
            client.wait(20)
        gone = "SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name = %s"
        wait_for(lambda: rows(where, gone, name) == [(0,)], 20, "the client has gone")

    @contextmanager
    def watching(self, *others: FailoverCandidate, **wanted: Any) -> Iterator[list[SlotReport]]:
        """A controller at work; all that it has told, growing."""
        reports: list[SlotReport] = []
        stop = threading.Event()
        with self.controller(*others, **wanted) as controller:
            thread = threading.Thread(target=controller.watch, args=(stop, reports.append))
            thread.start()
            try:
                yield reports
            finally:
                stop.set()
                thread.join(30)

    def until(self, controller: Controller, state: str, *names: str, seconds: float = 60) -> Any:
        """Rounds, with a life for the slots, until each of `names` is in that state; the last report."""
        deadline = time.monotonic() + seconds
        while True:
            report = controller.once(10)[STANDBY]
            found = {each.slot: each for each in report.transitions}
            if all(name in found and found[name].after.name == state for name in names):
                # What a promoted slot would start with lacks nothing that the primary's has.
                assert lacking(self.pair) == set()
                for name in names if state == "READY" else ():
                    assert mappings_lacking(self.pair, name) == set()
                return report
            assert time.monotonic() < deadline, [str(each) for each in report.transitions]
            self.turn_over(*names)
            self.pair.catch_up()


@contextmanager
def slot_stack(major: int, folder: Path) -> Iterator[SlotStack]:
    """A pair that runs."""
    with running_pair(major) as pair:
        try:
            yield SlotStack(pair, folder)
        finally:
            print(pair.standby.log_tail())  # shown if the test has failed


def attached(stack: SlotStack, folder: Path, **slots: Any) -> Attached:
    """`tuskline` configured with the pair."""
    made = Attached(folder, {"shop": {"dsn": stack.pair.primary.dsn()}})
    lines = [
        "[slots]",
        *(f"{key} = {toml(value)}" for key, value in {"poll": 0.1, **slots}.items()),
    ]
    lines += [f"[slots.candidates.{STANDBY}]", f"dsn = {toml(stack.pair.standby.dsn())}"]
    lines += [f'slot = "{PHYSICAL}"', ""]
    with made.config.open("a") as file:
        file.write("\n".join(lines))
    return made
