"""An operator's view of a quorum: `tuskline` configured with safekeepers, clients whose commits wait, what the server says."""

import threading
from pathlib import Path

import psycopg

from tests.support.attached import Attached, toml
from tests.support.quorum_stack import QuorumStack
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer


def configured(folder: Path, stack: QuorumStack, dsn: str | None = None) -> Attached:
    """`tuskline` with these safekeepers; its proposer is the stack's."""
    section = {"dsn": dsn or stack.server.dsn(), "tables": ["public.load"]}
    attached = Attached(folder, {"shop": section})
    addresses = [f"127.0.0.1:{port}" for port in stack.ports]
    with attached.config.open("a") as file:
        file.write(f"[safekeepers]\naddresses = {toml(addresses)}\n")
    return attached


class Client(threading.Thread):
    """Inserts one row as an ordinary role; `done` once its COMMIT has returned, without a warning."""

    def __init__(self, server: LocalServer, number: int) -> None:
        super().__init__(daemon=True)
        self._dsn = server.dsn(user="client", password="client")
        self._number = number
        self.done = False
        self.warnings: list[str] = []
        self.start()

    def run(self) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                connection.add_notice_handler(
                    lambda d: self.warnings.append(str(d.message_primary))
                )
                connection.execute("INSERT INTO load VALUES (%s)", [self._number])
                self.done = True
        except psycopg.Error as error:
            self.warnings.append(str(error))


def commit(stack: QuorumStack, number: int, seconds: float = 20) -> None:
    """One commit, which returns."""
    client = Client(stack.server, number)
    wait_for(lambda: client.done, seconds, f"commit {number} returns: {client.warnings}")


def hanging(stack: QuorumStack, *numbers: int) -> list[Client]:
    """Commits that wait for a quorum that is not there."""
    clients = [Client(stack.server, number) for number in numbers]
    wait_for(lambda: waiting(stack) == len(clients), 10, "they wait")
    return clients


def waiting(stack: QuorumStack) -> int:
    """How many commits wait for a standby."""
    return stack.ask("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")[0][0]


def streams(stack: QuorumStack) -> bool:
    """Whether the proposer has told the server of a quorum."""
    return stack.replication("pg_current_wal_flush_lsn() - flush_lsn < 1000") == [(True,)]


def names(stack: QuorumStack) -> str:
    """synchronous_standby_names."""
    return stack.ask("SHOW synchronous_standby_names")[0][0]
