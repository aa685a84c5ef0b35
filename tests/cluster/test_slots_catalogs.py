"""Promotions with changes of the catalogs under way, a real subscription, and a client ahead of its standby for a while.

What is called ready loses nothing: after the promotion the subscriber has what the promoted server has, row by row.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slot_sync.resolver.transitions import State
from tests.support.extension import buildable, remove_built
from tests.support.servers import DEFAULT
from tests.support.slot_copies import PUBLICATION, rows
from tests.support.slot_subscriber import (
    TABLES,
    CatalogLoad,
    receiver_stopped,
    subscriber,
    until_confirmed,
)
from tests.support.slot_sync import STANDBY, SlotStack, slot_stack
from tests.support.waiting import wait_for
from walsender_bridge.local_server import LocalServer

#: Promotions on each major in `make test-all`; in `make test` one, on one major.
PROMOTIONS = 20


def runs() -> Iterator[object]:
    for major in buildable():
        for number in range(1, PROMOTIONS + 1):
            marks = [] if (major, number) == (DEFAULT, 1) else [pytest.mark.long]
            yield pytest.param(major, number, marks=marks, id=f"pg{major}-{number}")


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    yield
    remove_built()


def ids(server: LocalServer, table: str) -> list[int]:
    return [number for (number,) in rows(server, f"SELECT id FROM {table} ORDER BY id")]


@pytest.mark.parametrize(("major", "number"), [*runs()])
def test_46_a_promotion_with_catalog_changes_loses_nothing(
    major: int, number: int, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(f"{seed} {major} {number}")
    with slot_stack(major, tmp_path / "pair") as stack:
        pair = stack.pair
        pair.on_primary(
            "CREATE TABLE side (id bigint PRIMARY KEY, note text)",
            f"ALTER PUBLICATION {PUBLICATION} ADD TABLE side",
        )
        pair.make_slot("kept")
        with subscriber(stack, "kept", tmp_path / "subscriber") as client:
            written = _prepared(stack, client, chance)
            pair.promote()
            for table in TABLES:
                assert ids(pair.standby, table) == written[table], table
            rows(client, f"ALTER SUBSCRIPTION sub CONNECTION '{pair.standby.dsn()}'")
            rows(pair.standby, "INSERT INTO side VALUES (5000000, 'row-5000000') RETURNING id")
            rows(pair.standby, "INSERT INTO shop VALUES (5000001, 'row-5000001') RETURNING id")
            wait_for(lambda: ids(client, "shop")[-1] == 5000001, 60, "the subscription goes on")
            for table in TABLES:
                assert ids(client, table) == ids(pair.standby, table), table
        print(f"{sum(map(len, written.values()))} rows")


def _prepared(stack: SlotStack, client: LocalServer, chance: random.Random) -> dict[str, list[int]]:
    """Load until the copy is ready, with the client ahead of the standby meanwhile; the rows at the end, by table."""
    pair = stack.pair
    with stack.watching() as reports:

        def is_ready() -> bool:
            stack.load.write()
            pair.on_primary("CHECKPOINT")
            return bool(reports and reports[-1].rounds and reports[-1].ready)

        def state() -> State | None:
            found = reports[-1].rounds.get(STANDBY)
            return found.transitions[0].after if found is not None else None

        wait_for(is_ready, 60, "the copy is ready")
        with CatalogLoad(stack, chance, 1_000_000) as load:
            time.sleep(chance.uniform(0.5, 2))
            with receiver_stopped(pair.standby):
                stack.load.write_whole()
                wait_for(lambda: state() is State.CLIENT_AHEAD, 30, "the client is ahead")
            time.sleep(chance.uniform(0.5, 2))
            load.end()
        # The last part of the load the client gets from the promoted server.
        wait_for(is_ready, 60, "the copy is ready again")
        until_confirmed(stack, "kept")
        rows(client, "ALTER SUBSCRIPTION sub DISABLE")
        gone = "SELECT active FROM pg_replication_slots WHERE slot_name = 'kept'"
        wait_for(lambda: rows(pair.primary, gone) == [(False,)], 30, "the client has gone")
        with CatalogLoad(stack, chance, 2_000_000) as last:
            time.sleep(chance.uniform(0.2, 1))
            last.end()
        pair.catch_up()
        seen = len(reports)
        wait_for(lambda: len(reports) > seen + 1 and reports[-1].ready, 60, "the copy is ready")
        pair.primary.stop("immediate")
    rows(client, "ALTER SUBSCRIPTION sub ENABLE")
    return {
        table: sorted(
            [
                *load.written[table],
                *last.written[table],
                *(stack.load.written if table == "shop" else []),
            ]
        )
        for table in TABLES
    }
