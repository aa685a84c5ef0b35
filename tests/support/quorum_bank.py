"""A bank whose clients know which of their transfers were acknowledged, and go on through every fault."""

import random
import threading

import psycopg

from tests.support.wal_server import run
from walsender_bridge.demo.local_server import LocalServer

ACCOUNTS = 50
TABLES = (
    "CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL)",
    f"INSERT INTO accounts SELECT g, 100 FROM generate_series(1, {ACCOUNTS}) g",
    "CREATE TABLE transfers (id bigint PRIMARY KEY, giver int, taker int, amount int)",
)


class Client:
    """Transfers between accounts of the server that `bank` names now, each in a transaction of its own."""

    def __init__(self, bank: "Bank", number: int) -> None:
        self._bank = bank
        self._draw = random.Random(f"{bank.seed} {number}")
        self._number = number * 1_000_000_000
        self.acknowledged: set[int] = set()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._bank.stopped.is_set():
            try:
                with psycopg.connect(self._bank.server.dsn(), autocommit=True) as connection:
                    while not self._bank.stopped.is_set():
                        self._transfer(connection)
            except psycopg.Error:
                self._bank.stopped.wait(0.1)

    def _transfer(self, connection: psycopg.Connection) -> None:
        self._number += 1
        giver, taker = self._draw.sample(range(1, ACCOUNTS + 1), 2)
        amount = self._draw.randint(1, 9)
        with connection.transaction():
            for account, change in sorted([(giver, -amount), (taker, amount)]):
                connection.execute(
                    "UPDATE accounts SET balance = balance + %s WHERE id = %s", [change, account]
                )
            connection.execute(
                "INSERT INTO transfers VALUES (%s, %s, %s, %s)",
                [self._number, giver, taker, amount],
            )
        self.acknowledged.add(self._number)


class Bank:
    """See the module. `clients` at once; `server` may be exchanged while they run."""

    def __init__(self, server: LocalServer, seed: int, clients: int = 8) -> None:
        self.server = server
        self.seed = seed
        self.stopped = threading.Event()
        run(server, *TABLES)
        self.clients = [Client(self, number) for number in range(clients)]

    @property
    def acknowledged(self) -> int:
        """How many transfers' commits have returned."""
        return sum(len(client.acknowledged) for client in self.clients)

    def stop(self) -> None:
        """No more transfers."""
        self.stopped.set()
        for client in self.clients:
            client.thread.join(30)
            assert not client.thread.is_alive(), "a commit hangs"

    def check(self, server: LocalServer) -> None:
        """Every acknowledged transfer is there, and the sums hold."""
        found = {number for (number,) in run(server, "SELECT id FROM transfers")}
        missing = set().union(*(client.acknowledged for client in self.clients)) - found
        assert not missing, f"seed {self.seed}: {len(missing)} acknowledged transfers are missing"
        assert run(server, "SELECT sum(balance) FROM accounts") == [(100 * ACCOUNTS,)]
        wrong = run(
            server,
            "SELECT id FROM accounts a WHERE balance <> 100"
            " + (SELECT coalesce(sum(amount), 0) FROM transfers WHERE taker = a.id)"
            " - (SELECT coalesce(sum(amount), 0) FROM transfers WHERE giver = a.id)",
        )
        assert not wrong, f"seed {self.seed}: accounts {wrong} do not add up"
