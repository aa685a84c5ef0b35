"""The bank: its tables, and clients that transfer money.

A transfer updates two accounts and inserts one transfer and two audit rows in a single transaction, so at
every epoch of the lake, for each database:

- the sum of the balances is that of the opening,
- `moves` over all accounts is twice the number of transfers,
- the audit trail's deltas sum to zero.

A client whose server dies reconnects and continues. Whether the transaction in flight was committed
only the server knows, which the comparison at the end queries.
"""

import asyncio
import random
import time
import uuid
from dataclasses import dataclass, field

import psycopg

from walsender_bridge.runtime.sql import load

SCHEMA = "bank"
TABLES = ("accounts", "transfers", "audit", "cards", "documents", "daily")
ACCOUNTS = 400
OPENING_BALANCE = 1000
CLIENTS = 4


def open_bank(dsn: str) -> None:
    """Create and fill the bank's tables in an empty database."""
    with psycopg.connect(dsn) as connection:
        connection.execute(load("demo/bank"))
        for statement in load("demo/fill").split(";"):
            if statement.strip():
                connection.execute(statement, {"accounts": ACCOUNTS})


@dataclass(slots=True)
class LoadFigures:
    """The figures of the clients of one database."""

    transactions: int = 0
    rolled_back: int = 0
    reconnects: int = 0
    #: (seconds since the Unix epoch when COMMIT returned, an LSN at or past that commit's end).
    commits: list[tuple[float, int]] = field(default_factory=list)


class Clients:
    """Concurrent clients of one database, with `rate` transactions per second in total."""

    def __init__(self, dsn: str, *, rate: float, seed: int) -> None:
        self.figures = LoadFigures()
        self._dsn = dsn
        self._pause = CLIENTS / rate
        self._seed = seed
        self._recent: list[uuid.UUID] = []

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set; every client finishes its current transaction."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(self._client(random.Random(self._seed * 31 + number), stop))

    async def _client(self, dice: random.Random, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                async with await psycopg.AsyncConnection.connect(
                    self._dsn, autocommit=True, connect_timeout=5
                ) as connection:
                    await self._serve(connection, dice, stop)
            except psycopg.OperationalError:
                self.figures.reconnects += 1
                await asyncio.sleep(0.2)

    async def _serve(
        self, connection: psycopg.AsyncConnection, dice: random.Random, stop: asyncio.Event
    ) -> None:
        due = time.monotonic() + dice.random() * self._pause
        while not stop.is_set():
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            # A client that fell behind (a restart, say) does not rush to catch up.
            due = max(due + self._pause, time.monotonic() - 1.0)
            try:
                await self._transaction(connection, dice)
            except (
                psycopg.errors.DeadlockDetected,
                psycopg.errors.UniqueViolation,
                psycopg.errors.LockNotAvailable,
            ):
                self.figures.rolled_back += 1

    async def _transaction(self, connection: psycopg.AsyncConnection, dice: random.Random) -> None:
        roll = dice.random()
        async with connection.transaction(force_rollback=dice.random() < 0.03) as transaction:
            if roll < 0.80:
                await self._transfer(connection, dice)
            elif roll < 0.88:
                await self._card(connection, dice)
            elif roll < 0.94:
                await self._document(connection, dice)
            elif roll < 0.98:
                await self._audit(connection, dice)
            else:
                await self._daily(connection, dice)
        if transaction.force_rollback:
            self.figures.rolled_back += 1
            return
        cursor = await connection.execute(load("flush/position"))
        row = await cursor.fetchone()
        self.figures.transactions += 1
        if row is not None:
            self.figures.commits.append((time.time(), int(row[0])))

    async def _transfer(self, connection: psycopg.AsyncConnection, dice: random.Random) -> None:
        payer, payee = dice.sample(range(1, ACCOUNTS + 1), 2)
        amount = dice.randrange(1, 10_000) / 100
        transfer = uuid.UUID(int=dice.getrandbits(128), version=4)
        moves = sorted([(payer, -amount), (payee, amount)])
        async with connection.pipeline():
            # In the order of their ids, so that two transfers never deadlock.
            for account, delta in moves:
                await connection.execute(
                    "UPDATE bank.accounts SET balance = balance + %s::numeric(14,2), moves = moves + 1"
                    " WHERE id = %s",
                    (delta, account),
                )
            await connection.execute(
                "INSERT INTO bank.transfers (id, from_account, to_account, amount, memo)"
                " VALUES (%s, %s, %s, %s, %s)",
                (transfer, payer, payee, amount, dice.choice([None, "", "rent", "ö\t\\N"])),
            )
            for account, delta in moves:
                await connection.execute(
                    "INSERT INTO bank.audit (transfer, account, delta) VALUES (%s, %s, %s)",
                    (transfer, account, delta),
                )
        self._recent.append(transfer)
        del self._recent[:-200]

    async def _card(self, connection: psycopg.AsyncConnection, dice: random.Random) -> None:
        account, slot = dice.randrange(1, ACCOUNTS + 1), dice.randrange(1, 4)
        roll = dice.random()
        if roll < 0.4:
            await connection.execute(
                "INSERT INTO bank.cards (account, slot, number, credit, pin)"
                " VALUES (%s, %s, %s, %s, %s) ON CONFLICT (account, slot)"
                " DO UPDATE SET credit = excluded.credit, frozen = NOT cards.frozen",
                (account, slot, str(dice.getrandbits(50)), dice.random(), dice.randbytes(8)),
            )
        elif roll < 0.7:
            await connection.execute(
                "UPDATE bank.cards SET slot = slot %% 3 + 1 WHERE account = %s AND slot = %s",
                (account, slot),
            )
        else:
            await connection.execute(
                "DELETE FROM bank.cards WHERE account = %s AND slot = %s", (account, slot)
            )

    async def _document(self, connection: psycopg.AsyncConnection, dice: random.Random) -> None:
        number = dice.randrange(1, ACCOUNTS // 5 + 1)
        if dice.random() < 0.7:
            await connection.execute(
                "UPDATE bank.documents SET title = %s WHERE id = %s",
                (f"revision {dice.getrandbits(30)}", number),
            )
        else:
            await connection.execute(
                "UPDATE bank.documents SET body = repeat(%s, 120), pages = pages || %s WHERE id = %s",
                (f"{dice.getrandbits(64):016x}", [dice.randrange(99)], number),
            )

    async def _audit(self, connection: psycopg.AsyncConnection, dice: random.Random) -> None:
        if self._recent and dice.random() < 0.5:
            # Both rows of a transfer are deleted, so the deltas still sum to zero.
            await connection.execute(
                "DELETE FROM bank.audit WHERE transfer = %s", (dice.choice(self._recent),)
            )
            return
        remark = uuid.UUID(int=dice.getrandbits(128), version=4)
        for _ in range(3):
            await connection.execute(
                "INSERT INTO bank.audit (transfer, account, delta) VALUES (%s, 0, 0)", (remark,)
            )
        await connection.execute(
            "DELETE FROM bank.audit WHERE ctid ="
            " (SELECT ctid FROM bank.audit WHERE transfer = %s LIMIT 1)",
            (remark,),
        )

    async def _daily(self, connection: psycopg.AsyncConnection, dice: random.Random) -> None:
        if dice.random() < 0.3:
            await connection.execute("SET LOCAL lock_timeout = '2s'")
            await connection.execute("TRUNCATE bank.daily")
        for bucket in sorted(dice.sample(range(1, 40), 5)):
            await connection.execute(
                "INSERT INTO bank.daily (bucket, total, seen) VALUES (%s, %s, 1)"
                " ON CONFLICT (bucket) DO UPDATE SET total = daily.total + excluded.total,"
                " seen = (daily.seen + 1) %% 1000",
                (bucket, dice.uniform(-1e6, 1e6)),
            )
