"""A capture whose commit gate waits for standbys, the standbys, and what it shows of itself."""

from pathlib import Path

import psycopg

from tests.support.capture_stack import STREAM, CaptureProcess, ChangeLog, wal_end
from tests.support.wal_server import backup, follow, run
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.demo.local_server import LocalServer

TABLES = ("public.orders", "public.audit")
CANDIDATE = "standby_a"


def gated(
    folder: Path,
    log: ChangeLog,
    dsn: str,
    gate: Rule = Rule((CANDIDATE,)),  # noqa: B008  # it is frozen
    commit_page: Path | None = None,
) -> CaptureProcess:
    """A capture whose gate waits for `CANDIDATE`, unless told otherwise."""
    return CaptureProcess(folder, log, dsn, *TABLES, gate=gate, commit_page=commit_page)


def make_slot(dsn: str, name: str = CANDIDATE) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_create_physical_replication_slot(%s, true)", [name])


def holding(capture: CaptureProcess) -> str:
    """Why something waits; empty: nothing does."""
    gate = capture.status().get("gate") or {}
    return "; ".join(gate.get("holding", []))


def logged(log: ChangeLog) -> int:
    """The end LSN of what the log holds, committed or not."""
    return log.replica_status().last_end_lsn


def insert(dsn: str, *keys: int) -> int:
    """Each key in a transaction of its own; an LSN behind them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for key in keys:
            connection.execute("INSERT INTO orders VALUES (%s, 'x')", [key])
        return wal_end(connection)


def make_candidate(
    primary: LocalServer, folder: Path, slot: str = CANDIDATE, **settings: str
) -> LocalServer:
    """A standby that streams from its slot; not started."""
    standby = backup(primary, folder, wal="fetch")
    follow(standby, primary.dsn(), primary_slot_name=slot, hot_standby_feedback="on", **settings)
    return standby


def synced(primary: LocalServer, standby: LocalServer) -> bool:
    # What moves the slot on the primary on, to where the standby can have it.
    run(primary, "SELECT pg_log_standby_snapshot()")
    found = run(
        standby,
        "SELECT synced AND NOT temporary AND invalidation_reason IS NULL"
        f" FROM pg_replication_slots WHERE slot_name = 'tuskline_{STREAM}'",
    )
    return bool(found and found[0][0])
