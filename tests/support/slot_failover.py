"""Clients that live through a failover of a pair with slot copies: a real pg_recvlogical, and our own capture and its gate."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psycopg

from slot_sync.report import SlotReport
from tests.support.capture_stack import SLOT, CaptureProcess, ChangeLog, make_tables
from tests.support.slot_copies import PHYSICAL, PUBLICATION, inspect, rows
from tests.support.slot_sync import STANDBY, SlotStack
from tests.support.waiting import wait_for
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.postgres.client.hosts import primary_dsn
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import parse_lsn

_ROW = re.compile(rb"row-(\d+)")


def several(*servers: LocalServer) -> str:
    """A DSN of one cluster's servers: the one that takes writes is meant."""
    ports = ",".join(str(server.port) for server in servers)
    return primary_dsn(servers[0].dsn(host=",".join(["127.0.0.1"] * len(servers)), port=ports))


@contextmanager
def captured(stack: SlotStack, log: ChangeLog, folder: Path) -> Iterator[CaptureProcess]:
    """Our capture of two tables from whichever of the pair takes writes; its gate waits for the standby."""
    pair = stack.pair
    with psycopg.connect(pair.primary.dsn(), autocommit=True) as connection:
        make_tables(connection)
    dsn = several(pair.primary, pair.standby)
    tables = ("public.orders", "public.audit")
    with CaptureProcess(folder, log, dsn, *tables, gate=Rule((PHYSICAL,))) as capture:
        wait_for(capture.streams, 30, "capture streams")
        yield capture


def until_both(stack: SlotStack, reports: list[SlotReport], *names: str) -> None:
    """Wait until a controller at work calls all of `names` ready, with what lets copies be proven."""

    def ready() -> bool:
        stack.load.write_whole()
        stack.pair.on_primary("CHECKPOINT")
        if not reports or STANDBY not in reports[-1].rounds:
            return False
        found = {each.slot: each.safe for each in reports[-1][STANDBY].expected}
        return bool(reports[-1].ready) and set(names) <= set(found)

    wait_for(ready, 60, f"{names} are ready")


class Reader:
    """A pg_recvlogical of the pair's primary that writes to a file, and ends with its server."""

    def __init__(self, server: LocalServer, slot: str, file: Path) -> None:
        self._file = file
        with file.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    *(server.installation.tool("pg_recvlogical"), "-d", server.dsn()),
                    *("--slot", slot, "--start", "--no-loop", "-F", "1", "-s", "1", "-f", "-"),
                    *("-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}"),
                ],
                stdout=output,
                stderr=subprocess.DEVNULL,
            )
        query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        wait_for(lambda: rows(server, query, slot)[0][0], 20, "the client streams")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> list[int]:
        """The numbers of the rows that it has, once its server has gone."""
        self._process.wait(30)
        return [int(each) for each in _ROW.findall(self._file.read_bytes())]


@dataclass(frozen=True)
class Transaction:
    """What a slot gives of one: where its commit record begins, and the numbers of its rows."""

    commit_lsn: int
    rows: tuple[int, ...]


def transactions(server: LocalServer, slot: str) -> list[Transaction]:
    """All that the slot gives from where it is; it stays there."""
    found: list[Transaction] = []
    numbers: list[int] = []
    for message in peeked(server, slot):
        if message[0] == pgoutput.COMMIT:
            found.append(Transaction(pgoutput.parse_commit(message).commit_lsn, tuple(numbers)))
            numbers = []
        numbers += map(int, _ROW.findall(message))
    return found


def peeked(server: LocalServer, slot: str) -> list[bytes]:
    """The messages that the slot gives; it stays where it is."""
    return [
        bytes(data)
        for (data,) in rows(
            server,
            "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
            " 'proto_version', '1', 'publication_names', %s)",
            slot,
            PUBLICATION,
        )
    ]


def positions(server: LocalServer, slot: str = SLOT) -> dict[str, Any]:
    """A copy, its positions as numbers."""
    found = inspect(server, slot)
    for name in ("restart_lsn", "confirmed_flush_lsn"):
        found[name] = parse_lsn(str(found[name]))
    return found
