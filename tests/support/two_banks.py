"""Two banks, each on a server of its own, whose customers also send money from one bank to the other.

A wire is two transactions, one on each server, so it is in flight between them. What holds for each bank by itself holds
between any two of its transactions (`wrongs`); what holds for both together does once no wire is in flight (`wrongs_between`).
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from tests.support import bank_load
from tests.support.bank_load import ACCOUNTS
from tests.support.servers import MakeServer

BANKS = ("north", "south")
NAMES = ("accounts", "audit", "moves", "wires")
TABLES = (
    *bank_load.TABLES,
    "CREATE TABLE wires (id bigint PRIMARY KEY, amount int NOT NULL)",
)
#: What of a bank is told: one row, whose sums are compared.
Figures = dict[str, int]


def servers(make_server: MakeServer) -> dict[str, str]:
    """A server for each bank, with its tables: how it is connected to, by the bank."""
    dsns = {}
    for bank in BANKS:
        server = make_server(fsync="off")
        server.start()
        dsns[bank] = server.dsn()
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for statement in TABLES:
                connection.execute(statement.encode())
    return dsns


def figures_of(snapshot: Any) -> dict[str, Figures]:
    """The sums of each bank of a snapshot, by one query."""
    from functools import reduce

    frames = []
    for bank in BANKS:
        for name, sums in {
            "accounts": ("count(*)", "sum(balance)", "sum(moves)"),
            "audit": ("count(*)", "sum(amount)", "0"),
            "moves": ("count(*)", "0", "0"),
            "wires": ("count(*)", "sum(amount)", "0"),
        }.items():
            columns = (f"'{bank}.{name}' AS name", *(f"coalesce({s}, 0)" for s in sums))
            frames.append(snapshot[f"{bank}.public.{name}"].selectExpr(*columns))
    found: dict[str, Figures] = {bank: {} for bank in BANKS}
    for name, rows, first, second in reduce(
        lambda one, other: one.unionAll(other), frames
    ).collect():
        bank, _, table = name.partition(".")
        found[bank] |= {table: rows, f"{table} sum": first, f"{table} moves": second}
    return found


def wrongs(bank: str, found: Figures) -> list[str]:
    """Which of the sums that hold between any two transactions of a bank do not."""
    held = {
        "accounts": found["accounts"] == ACCOUNTS,
        "balances": found["accounts sum"] == 100 * ACCOUNTS + found["wires sum"],
        "moves": found["accounts moves"] == 2 * found["moves"] + found["wires"] == found["audit"],
        "audit": found["audit sum"] == found["wires sum"],
    }
    return [f"{bank}: {what}: {found}" for what, holds in held.items() if not holds]


def wrongs_between(found: dict[str, Figures]) -> list[str]:
    """Which of the sums over both banks do not hold, once no wire is in flight."""
    one, other = (found[bank] for bank in BANKS)
    held = {
        "wires": one["wires"] == other["wires"] > 0,
        "money": one["accounts sum"] + other["accounts sum"] == 200 * ACCOUNTS,
    }
    return [f"{what}: {found}" for what, holds in held.items() if not holds]


def wire(dsns: dict[str, str], stop: threading.Event, seed: int, pause: float) -> None:
    """Send money from one bank to the other, a wire at a time; the last one arrives, too."""
    draw = random.Random(seed)
    number = 0
    connections = {bank: psycopg.connect(dsn, autocommit=True) for bank, dsn in dsns.items()}
    try:
        while not stop.is_set():
            number += 1
            amount = draw.randint(1, 9)
            giver, taker = draw.sample(BANKS, 2)
            for bank, change in ((giver, -amount), (taker, amount)):
                account, connection = draw.randint(1, ACCOUNTS), connections[bank]
                with connection.transaction():
                    connection.execute("INSERT INTO wires VALUES (%s, %s)", [number, change])
                    connection.execute("INSERT INTO audit VALUES (%s, %s)", [account, change])
                    connection.execute(
                        "UPDATE accounts SET balance = balance + %s, moves = moves + 1 WHERE id = %s",
                        [change, account],
                    )
            stop.wait(pause)
    finally:
        for connection in connections.values():
            connection.close()


@contextmanager
def load(dsns: dict[str, str], seed: int, pause: float = 0.03) -> Iterator[None]:
    """Transfers in each bank and wires between them, for as long as the block lasts; `pause` is seconds between two of each."""
    stop = threading.Event()
    threads = [threading.Thread(target=wire, args=(dsns, stop, seed, pause))]
    threads += [
        threading.Thread(target=bank_load.transfer, args=(dsn, stop, f"{seed} {bank}", pause))
        for bank, dsn in dsns.items()
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
