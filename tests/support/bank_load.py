"""A load of transactions over three tables, and the sums that hold between any two of them."""

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

ACCOUNTS = 50
TABLES = (
    "CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL, moves int NOT NULL, note text)",
    "ALTER TABLE accounts ALTER note SET STORAGE EXTERNAL",
    f"INSERT INTO accounts SELECT g, 100, 0, repeat('n', 3000) FROM generate_series(1, {ACCOUNTS}) g",
    "CREATE TABLE moves (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, amount int NOT NULL)",
    "CREATE TABLE audit (account int, amount int)",
    "ALTER TABLE audit REPLICA IDENTITY FULL",
)


def transfer(dsn, stop, seed, pause=0.01):
    """Transactions over three tables, each of which keeps every sum that `check` knows.

    `pause` is the seconds between two of them.
    """
    draw = random.Random(seed)
    with psycopg.connect(dsn, autocommit=True) as connection:
        while not stop.is_set():
            giver, taker = draw.sample(range(1, ACCOUNTS + 1), 2)
            amount = draw.randint(1, 9)
            with connection.transaction():
                for account, change in sorted([(giver, -amount), (taker, amount)]):
                    connection.execute(
                        "UPDATE accounts SET balance = balance + %s, moves = moves + 1 WHERE id = %s",
                        [change, account],
                    )
                    connection.execute("INSERT INTO audit VALUES (%s, %s)", [account, change])
                connection.execute("INSERT INTO moves (amount) VALUES (%s)", [amount])
            stop.wait(pause)


@contextmanager
def load(dsn, seed) -> Iterator[None]:
    """The load, for as long as the block lasts."""
    stop = threading.Event()
    thread = threading.Thread(target=transfer, args=(dsn, stop, seed))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def check(snapshot):
    """The sums that hold in any state between two transactions, and in none inside one."""
    # One query: three of them take twice as long, and tests check each epoch.
    rows = snapshot["accounts"].selectExpr("'accounts' AS name", "balance AS amount", "moves")
    for name in ("moves", "audit"):
        rows = rows.unionAll(snapshot[name].selectExpr(f"'{name}'", "amount", "NULL"))
    found = defaultdict(list)
    for row in rows.coalesce(1).toArrow().to_pylist():
        found[row["name"]].append(row)
    accounts, moves, audit = (found[name] for name in ("accounts", "moves", "audit"))
    assert len(accounts) == ACCOUNTS
    assert sum(row["amount"] for row in accounts) == 100 * ACCOUNTS
    assert sum(row["moves"] for row in accounts) == 2 * len(moves) == len(audit)
    assert sum(row["amount"] for row in audit) == 0
