"""A primary and a standby with the extension, and what the tests of slot copies do with them."""

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import dict_row

from tests.support import extension
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from tests.support.wal_server import backup, follow, promote
from walsender_bridge.demo.local_server import LocalServer, by_major
from walsender_bridge.demo.local_server.server import StopMode
from walsender_bridge.postgres.protocol.lsn import parse_lsn

PHYSICAL = "standby_a"
PUBLICATION = "pub"
#: A record of what runs, and the slot on the primary read up to it.
MOVE = ("CHECKPOINT", "SELECT pg_replication_slot_advance('kept', pg_current_wal_lsn())")
_ROW = re.compile(rb"row-(\d+)")


class Fields(NamedTuple):
    """What a logical slot remembers, as texts."""

    restart_lsn: str
    confirmed_flush_lsn: str
    catalog_xmin: str


class Pair:
    """`primary` and `standby` of one major, with feedback and a physical slot; both run."""

    def __init__(
        self, major: int, folder: Path, *, fail_points: bool = False, **settings: str
    ) -> None:
        self.major = major
        self.library = extension.build(major, fail_points=fail_points)
        settings = {
            **extension.settings(major, self.library),
            "fsync": "off",
            "autovacuum": "off",
            **({"wal_keep_size": "64MB"} if major >= 13 else {"wal_keep_segments": "4"}),
            **settings,
        }
        self.primary = LocalServer.create(
            by_major()[major],
            folder / "primary",
            settings=settings,
        )
        self.primary.start()
        extension.create_extension(self.primary, self.library)
        self.on_primary(
            "CREATE TABLE shop (id bigint PRIMARY KEY, note text)",
            f"CREATE PUBLICATION {PUBLICATION} FOR TABLE shop",
            f"SELECT pg_create_physical_replication_slot('{PHYSICAL}', true)",
        )
        self.standby = backup(self.primary, folder / "standby", wal="fetch")
        follow(
            self.standby,
            self.primary.dsn(),
            primary_slot_name=PHYSICAL,
            hot_standby_feedback="on",
        )
        self.standby.start()
        self.catch_up()

    def on_primary(self, *statements: str) -> None:
        with psycopg.connect(self.primary.dsn(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def on_standby(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return rows(self.standby, query, *arguments)

    def catch_up(self) -> None:
        """Wait until the standby has applied what the primary has written."""
        with psycopg.connect(self.primary.dsn(), autocommit=True) as connection:
            end = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        assert end is not None
        position = parse_lsn(end[0])

        def applied() -> bool:
            found = rows(self.standby, "SELECT pg_last_wal_replay_lsn()::text")[0][0]
            return found is not None and parse_lsn(found) >= position

        wait_for(applied, 60, "the standby has applied")

    def make_slot(self, name: str) -> None:
        self.on_primary(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")

    def slot(self, name: str) -> Fields:
        """The slot on the primary."""
        return fields(self.primary, name)

    def reserve(self, name: str, source: str) -> None:
        """Reserve a copy of the primary's slot `source`."""
        self.catch_up()
        found = self.slot(source)
        self.on_standby(
            "SELECT tuskline_slots.reserve(%s, 'pgoutput', %s, %s)",
            name,
            found.restart_lsn,
            found.confirmed_flush_lsn,
        )

    def advance(self, name: str, source: str) -> None:
        """Move the primary's slot to the end of its WAL after a checkpoint, and the copy after it."""
        self.on_primary(
            "CHECKPOINT",
            f"SELECT pg_replication_slot_advance('{source}', pg_current_wal_lsn())",
        )
        self.catch_up()
        to = self.slot(source).confirmed_flush_lsn
        self.on_standby("SELECT tuskline_slots.advance(%s, %s)", name, to)

    def prove(self, name: str, source: str) -> None:
        """Advance a copy until a decoder's snapshot for it is on the standby."""

        def proven() -> bool:
            self.on_primary("INSERT INTO shop SELECT least(min(id), 0) - 1, 'proof' FROM shop")
            self.advance(name, source)
            return bool(inspect(self.standby, name)["snapshot_present"])

        wait_for(proven, 30, f"{name} is proven")
        self.on_standby("SELECT tuskline_slots.restore_mappings(%s)", name)

    def promote(self, stop: StopMode | None = "immediate") -> None:
        """End the primary, unless it is to go on, and let the standby take its place."""
        if stop is not None:
            self.primary.stop(stop)
        promote(self.standby)

    def destroy(self) -> None:
        for server in (self.standby, self.primary):
            server.destroy()


@contextmanager
def running_pair(major: int, *, fail_points: bool = False, **settings: str) -> Iterator[Pair]:
    """A pair in a folder of its own, which goes with it; `settings` are both servers'."""
    with tempfile.TemporaryDirectory(prefix="tuskline-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        pair = Pair(major, folder, fail_points=fail_points, **settings)
        try:
            yield pair
        finally:
            pair.destroy()


@contextmanager
def without_background_writer(server: LocalServer) -> Iterator[None]:
    """No records of running transactions but those of checkpoints: the background writer adds one every 15 seconds."""
    kind = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'background writer'"
    ((pid,),) = wait_for(lambda: rows(server, kind), 10, "the background writer")
    suspend(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def rows(server: LocalServer, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        cursor = connection.execute(query.encode(), arguments or None)
        return cursor.fetchall() if cursor.description else []


def fields(server: LocalServer, name: str) -> Fields:
    found = rows(
        server,
        "SELECT restart_lsn::text, confirmed_flush_lsn::text, catalog_xmin::text"
        " FROM pg_replication_slots WHERE slot_name = %s",
        name,
    )
    return Fields(*found[0])


def slot_names(server: LocalServer) -> set[str]:
    """The logical slots."""
    found = rows(server, "SELECT slot_name FROM pg_replication_slots WHERE slot_type = 'logical'")
    return {name for (name,) in found}


def inspect(server: LocalServer, name: str) -> dict[str, Any]:
    """What `inspect` says of one slot."""
    with psycopg.connect(server.dsn(), autocommit=True, row_factory=dict_row) as connection:
        found = connection.execute("SELECT * FROM tuskline_slots.inspect(%s)", [name]).fetchone()
    assert found is not None, name
    return found


def decoded(server: LocalServer, name: str) -> list[int]:
    """The numbers of the rows noted `row-N` that the slot gives; it stays where it is."""
    found = rows(
        server,
        "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
        " 'proto_version', '1', 'publication_names', %s)",
        name,
        PUBLICATION,
    )
    return [int(each) for (data,) in found for each in _ROW.findall(bytes(data))]


def received(server: LocalServer, name: str) -> list[int]:
    """The same by pg_recvlogical, as any client would take it: to the end of the WAL, and confirmed."""
    end = rows(server, "SELECT pg_current_wal_lsn()::text")[0][0]
    done = subprocess.run(
        [
            *(server.installation.tool("pg_recvlogical"), "-d", server.dsn(), "--slot", name),
            *("--start", "--no-loop", "--endpos", end, "-s", "1", "-f", "-"),
            *("-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}"),
        ],
        capture_output=True,
        timeout=60,
        check=True,
    )
    return [int(each) for each in _ROW.findall(done.stdout)]
