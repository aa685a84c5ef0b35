"""A real subscription to a pair's primary, a WAL receiver that is held back, and transactions that change the catalogs."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psycopg

from tests.support.slot_copies import PUBLICATION, rows
from tests.support.slot_sync import SlotStack
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer

#: The tables that are published; `side` goes out of the publication and in again.
TABLES = ("shop", "side")


@contextmanager
def subscriber(stack: SlotStack, slot: str, folder: Path) -> Iterator[LocalServer]:
    """A server of the same major with a subscription to the primary's slot."""
    server = LocalServer.create(
        stack.pair.primary.installation, folder, settings={"fsync": "off", "wal_level": "logical"}
    )
    try:
        server.start()
        for table in TABLES:
            rows(server, f"CREATE TABLE {table} (id bigint PRIMARY KEY, note text)")
        dsn = stack.pair.primary.dsn()
        rows(
            server,
            f"CREATE SUBSCRIPTION sub CONNECTION '{dsn}' PUBLICATION {PUBLICATION}"
            f" WITH (slot_name = {slot}, create_slot = false, copy_data = false)",
        )
        yield server
    except BaseException:
        print(server.log_tail(30))
        raise
    finally:
        server.destroy()


@contextmanager
def receiver_stopped(standby: LocalServer) -> Iterator[None]:
    """The standby's WAL receiver does nothing meanwhile; its connection stays, as on a slow disk or network."""
    ((pid,),) = rows(standby, "SELECT pid FROM pg_stat_wal_receiver")
    suspend(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def disabled(stack: SlotStack, client: LocalServer, slot: str) -> None:
    """Stop the subscription, and wait until nobody has its slot."""
    rows(client, "ALTER SUBSCRIPTION sub DISABLE")
    gone = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    wait_for(lambda: rows(stack.pair.primary, gone, slot) == [(False,)], 30, "the client has gone")


def until_confirmed(stack: SlotStack, slot: str) -> None:
    """Wait until the slot's client has confirmed all that the primary has written."""
    ((end,),) = rows(stack.pair.primary, "SELECT pg_current_wal_lsn()::text")
    query = (
        "SELECT confirmed_flush_lsn >= %s::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
    )
    wait_for(lambda: rows(stack.pair.primary, query, end, slot)[0][0], 60, "its client has all")


class CatalogLoad:
    """Transactions that change the catalogs, outside and inside subtransactions, and write rows around it.

    `side` is a published table beside `shop`. Rows are numbered from `first` on; `written` are those that were
    committed. An older transaction is open now and then, so that records of what runs find one.
    """

    def __init__(self, stack: SlotStack, chance: random.Random, first: int) -> None:
        self._server = stack.pair.primary
        self._chance = chance
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: Exception | None = None
        self._number = first
        self.written: dict[str, list[int]] = {table: [] for table in TABLES}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Finish the transaction that is under way. Raises what went wrong in any."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with (
                psycopg.connect(self._server.dsn()) as session,
                psycopg.connect(self._server.dsn()) as older,
            ):
                while not self._stop.is_set():
                    if self._chance.random() < 0.3:
                        older.commit()
                        older.execute("SELECT txid_current()")
                    self._transaction(session)
                    if self._chance.random() < 0.3:
                        rows(self._server, "CHECKPOINT")
        except Exception as error:
            self._failure = error

    def _transaction(self, session: psycopg.Connection) -> None:
        """One that writes before, between and after its changes of the catalogs."""
        written: list[tuple[str, int]] = []

        def write(table: str) -> None:
            self._number += 1
            session.execute(
                f"INSERT INTO {table} VALUES (%s, %s)".encode(),
                [self._number, f"row-{self._number}"],
            )
            written.append((table, self._number))

        write("shop")
        for _ in range(self._chance.randint(1, 3)):
            inside, kept = self._chance.random() < 0.7, self._chance.random() < 0.8
            if inside:
                session.execute("SAVEPOINT inside")
            changes = self._chance.choice(_CHANGES)
            # PostgreSQL's own decoder may fail at a rewrite that was rolled back: "unexpected duplicate for tablespace".
            kept |= changes is _REWRITE
            for statement in changes:
                session.execute(statement.format(number=self._number).encode())
            before = len(written)
            write("side")
            write("shop")
            if inside and kept:
                session.execute("RELEASE inside")
            elif inside:
                session.execute("ROLLBACK TO inside")
                del written[before:]
            write("side")
        session.commit()
        for table, number in written:
            self.written[table].append(number)


_REWRITE = (
    "ALTER TABLE shop ALTER note TYPE varchar({number})",
    "ALTER TABLE shop ALTER note TYPE text",
)
#: Changes that a decoder needs to have seen for the rows after them: a published table, its file, another table.
_CHANGES = (
    (
        f"ALTER PUBLICATION {PUBLICATION} DROP TABLE side",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE side",
    ),
    _REWRITE,
    ("CREATE TABLE made_{number} (id int PRIMARY KEY)", "INSERT INTO made_{number} VALUES (1)"),
    ("ALTER TABLE side ADD COLUMN more int", "ALTER TABLE side DROP COLUMN more"),
    ("ALTER TABLE side REPLICA IDENTITY FULL", "ALTER TABLE side REPLICA IDENTITY DEFAULT"),
)
