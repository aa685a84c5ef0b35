"""Promotions with changes of the catalogs under way, a real subscription, and a client ahead of its standby for a while.

What is called ready loses nothing: after the promotion the subscriber has what the promoted server has, row by row. On 17
and later the slot becomes PostgreSQL's own to copy and ours again meanwhile. Every second primary dies in the middle of
its transactions. Half of them return as standbys without pg_rewind, with WAL that only they have.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psycopg
import pytest

from slot_sync.report import SlotReport
from slot_sync.resolver.transitions import CopyState
from tests.support.extension import buildable
from tests.support.servers import DEFAULT
from tests.support.slot_copies import PUBLICATION, rows
from tests.support.slot_subscriber import (
    TABLES,
    CatalogLoad,
    disabled,
    receiver_stopped,
    subscriber,
    until_confirmed,
)
from tests.support.slot_sync import STANDBY, SlotStack, slot_stack
from tests.support.snapshot_files import lacking
from tests.support.unrewound import never_counts, returned
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer

#: Promotions on each major in `make test-all`; in `make test` one, on one major.
PROMOTIONS = 20
#: The first major that copies slots by itself.
NATIVE = 17
#: Bytes of WAL that only the old primary has: more than the new one writes in the test, and less than a segment.
LOST = 4 << 20


def runs() -> Iterator[object]:
    for major in buildable():
        for number in range(1, PROMOTIONS + 1):
            marks = [] if (major, number) == (DEFAULT, 1) else [pytest.mark.long]
            yield pytest.param(major, number, marks=marks, id=f"pg{major}-{number}")


def ids(server: LocalServer, table: str) -> list[int]:
    return [number for (number,) in rows(server, f"SELECT id FROM {table} ORDER BY id")]


@pytest.mark.parametrize(("major", "number"), [*runs()])
def test_46_a_promotion_with_catalog_changes_loses_nothing(
    major: int, number: int, seed: int, tmp_path: Path
) -> None:
    chance = random.Random(f"{seed} {major} {number}")
    cut, diverges = number % 2 == 0, number % 4 in {1, 2}
    with slot_stack(major, tmp_path / "pair") as stack:
        pair = stack.pair
        pair.on_primary(
            "CREATE TABLE side (id bigint PRIMARY KEY, note text)",
            f"ALTER PUBLICATION {PUBLICATION} ADD TABLE side",
        )
        pair.make_slot("kept")
        if major >= NATIVE:
            rows(pair.standby, "ALTER SYSTEM SET sync_replication_slots = on")
            rows(pair.standby, "SELECT pg_reload_conf()")
        with subscriber(stack, "kept", tmp_path / "subscriber") as client:
            written = _until_promoted(stack, client, chance, cut=cut, diverges=diverges)
            for table in TABLES:
                assert written[table] <= {*ids(pair.standby, table)}, table
                assert cut or written[table] == {*ids(pair.standby, table)}, table
            rows(client, f"ALTER SUBSCRIPTION sub CONNECTION '{pair.standby.dsn()}'")
            rows(client, "ALTER SUBSCRIPTION sub ENABLE")
            rows(pair.standby, "INSERT INTO side VALUES (5000000, 'row-5000000') RETURNING id")
            rows(pair.standby, "INSERT INTO shop VALUES (5000001, 'row-5000001') RETURNING id")
            try:
                wait_for(
                    lambda: ids(client, "shop")[-1:] == [5000001], 60, "the subscription goes on"
                )
            except AssertionError:
                pair.primary.start()
                assert _fails_there_too(pair.primary)
                return
            for table in TABLES:
                assert ids(client, table) == ids(pair.standby, table), table
        if diverges:
            with returned(pair.primary, pair.standby):
                never_counts(pair.primary, pair.standby, tmp_path / "slots")
        print(f"{sum(map(len, written.values()))} rows")


def _fails_there_too(primary: LocalServer) -> bool:
    """Whether the old primary cannot decode its own WAL either.

    PostgreSQL keeps what a subtransaction that is rolled back did to a row of a catalog by the row's place, also when the
    transaction has another row there later. A decoder may then see two rows of one table, and fail with this error.
    """
    query = "SELECT count(*) FROM pg_logical_slot_peek_binary_changes('kept', NULL, NULL, 'proto_version', '1', "
    try:
        rows(primary, f"{query} 'publication_names', '{PUBLICATION}')")
    except psycopg.Error as error:
        print(f"the old primary: {error}")
        return "unexpected duplicate for tablespace" in str(error)
    print("the old primary decodes all of it")
    return False


def _until_promoted(
    stack: SlotStack, client: LocalServer, chance: random.Random, *, cut: bool, diverges: bool
) -> dict[str, set[int]]:
    """Load until the standby is promoted, at a moment at which it was ready; rows that it has to have, by table.

    `cut`: the primary dies with transactions open. `diverges`: it has WAL that the standby was never sent.
    """
    pair = stack.pair
    with stack.watching() as reports:

        def since() -> Callable[[], bool]:
            """Whether a look that begins from now on finds the copy ready."""
            seen = len(reports)
            return lambda: len(reports) > seen + 1 and bool(reports[-1].ready)

        def moving(ready: Callable[[], bool]) -> bool:
            stack.load.write()
            pair.on_primary("CHECKPOINT")
            return ready()

        ready = since()
        wait_for(lambda: moving(ready), 60, "the copy is ready")
        with CatalogLoad(stack, chance, 1_000_000) as load:
            _with_the_client_ahead(stack, reports, chance)
            if pair.major >= NATIVE:
                _toggled(stack, client, chance)
            load.end()
        # The last part of the load the client gets from the promoted server.
        again = since()
        wait_for(lambda: moving(again), 120, "the copy is ready again")
        until_confirmed(stack, "kept")
        disabled(stack, client, "kept")
        last = CatalogLoad(stack, chance, 2_000_000)
        with suppress(*([psycopg.OperationalError] if cut else [])), last:
            time.sleep(chance.uniform(0.2, 1))
            if not cut:
                last.end()
                pair.catch_up()
            wait_for(since(), 120, "the copy is ready")
            if diverges:
                # What only the primary gets is in the segment that both begin.
                pair.on_primary("SELECT pg_switch_wal()")
                if not cut:
                    pair.catch_up()
                pair.standby.stop("immediate" if cut else "fast")
                pair.on_primary(
                    f"SELECT pg_logical_emit_message(true, 'lost', repeat('x', {LOST}))"
                )
            pair.primary.stop("immediate")
    assert lacking(pair) == set()
    pair.standby.start()
    pair.promote(stop=None)
    found = {table: {*load.written[table]} for table in TABLES}
    found["shop"] |= {*stack.load.written}
    return found if cut else {table: found[table] | {*last.written[table]} for table in TABLES}


def _with_the_client_ahead(
    stack: SlotStack, reports: list[SlotReport], chance: random.Random
) -> None:
    """For a while the client has what the standby lacks, and the controller says so."""

    def state() -> CopyState | None:
        found = reports[-1].rounds.get(STANDBY)
        return found.transitions[0].after if found is not None else None

    time.sleep(chance.uniform(0.5, 2))
    with receiver_stopped(stack.pair.standby):
        stack.load.write_whole()
        wait_for(lambda: state() is CopyState.CLIENT_AHEAD, 30, "the client is ahead")
    time.sleep(chance.uniform(0.5, 2))


def _toggled(stack: SlotStack, client: LocalServer, chance: random.Random) -> None:
    """The subscription's slot is PostgreSQL's to copy, and ours again, some times over."""
    for number in range(chance.randint(1, 4)):
        disabled(stack, client, "kept")
        rows(client, f"ALTER SUBSCRIPTION sub SET (failover = {number % 2 == 0})")
        rows(client, "ALTER SUBSCRIPTION sub ENABLE")
        time.sleep(chance.uniform(0, 2))
