"""Copies that are made, moved and proven while transactions with changes of the catalogs run, and servers restart within.

What a decoder of a copy knows of such a transaction it has from a snapshot on the standby: a wrong one leaves rows out,
or fails. One slot stays where it is, so that its copy decodes everything at the end.
"""

from pathlib import Path

import psycopg
import pytest

from slot_sync.controller import Controller
from tests.support.extension import ONE
from tests.support.slot_copies import PUBLICATION, received, rows, running_pair
from tests.support.slot_failover import transactions
from tests.support.slot_sync import STANDBY, SlotStack
from tests.support.waiting import wait_for


class Changing:
    """A transaction that makes a table and writes to it; then changes the table and writes again."""

    def __init__(self, stack: SlotStack, number: int) -> None:
        self.table = f"made_{number}"
        self.rows = [number + 1, number + 2]
        self._connection = psycopg.connect(stack.pair.primary.dsn())
        self.do(
            f"CREATE TABLE {self.table} (id int PRIMARY KEY, note text)",
            f"INSERT INTO {self.table} VALUES ({number + 1}, 'row-{number + 1}')",
        )

    def do(self, *statements: str) -> None:
        for statement in statements:
            self._connection.execute(statement.encode())

    def change(self) -> None:
        """The second part."""
        number = self.rows[1]
        self.do(
            f"ALTER TABLE {self.table} ADD COLUMN more int DEFAULT 7, ALTER note TYPE varchar(40)",
            f"INSERT INTO {self.table} VALUES ({number}, 'row-{number}')",
        )

    def commit(self) -> None:
        self._connection.commit()
        self._connection.close()

    def prepare(self, name: str) -> None:
        self.do(f"PREPARE TRANSACTION '{name}'")
        self._connection.close()

    def forget(self) -> None:
        """Its server has crashed."""
        self._connection.close()


@pytest.mark.parametrize("major", ONE)
def test_12_a_snapshot_after_restarts_inside_running_transactions(
    major: int, tmp_path: Path
) -> None:
    with running_pair(major, max_prepared_transactions="5") as pair:
        stack = SlotStack(pair, tmp_path)
        # A decoder then asks the catalogs of each transaction's own time which tables are published.
        pair.on_primary(
            f"DROP PUBLICATION {PUBLICATION}", f"CREATE PUBLICATION {PUBLICATION} FOR ALL TABLES"
        )
        pair.make_slot("kept")
        pair.make_slot("still")
        # Records of what runs: from one of them a copy is to begin, from a later one the transactions below.
        stack.turn_over("kept", "still")
        for _ in range(3):
            stack.load.write()
            pair.on_primary("CHECKPOINT")
        # The copies are made while it runs.
        first = Changing(stack, 100_000)
        with stack.controller() as controller:
            ready(stack, controller, "kept", "still")
            stood = set(stack.load.written)
            first.change()
            # 1: the standby restarts within it, and the copy goes on from what is on its disk.
            pair.standby.restart()
            ready(stack, controller, "kept")
            first.commit()
            ready(stack, controller, "kept")
            # 2: the primary crashes within one, which leaves no trace of its end, and one that is prepared stays.
            lost = Changing(stack, 200_000)
            prepared = Changing(stack, 300_000)
            prepared.change()
            prepared.prepare("left")
            lost.change()
            stack.turn_over("kept")
            pair.catch_up()
            assert controller.once(10)[STANDBY].standby is not None
            pair.primary.kill()
            lost.forget()
            pair.primary.start()
            ready(stack, controller, "kept")
            # 3: both restart within one, in order.
            last = Changing(stack, 400_000)
            stack.turn_over("kept")
            pair.standby.restart()
            ready(stack, controller, "kept")
            rows(pair.primary, "COMMIT PREPARED 'left'")
            last.change()
            stack.turn_over("kept")
            last.commit()
            again = Changing(stack, 500_000)
            stack.turn_over("kept")
            again.forget()  # rolled back
            pair.primary.restart()
            ready(stack, controller, "kept")
            stack.load.write_whole(5)
            pair.catch_up()
            report = controller.once(10)[STANDBY]
            assert report.ready, report.problems
            assert {each.slot for each in report.expected} == {"kept", "still"}
        tables = [each.table for each in (first, prepared, last)]
        expected = {*first.rows, *prepared.rows, *last.rows, *stack.load.written}
        pair.promote()
        there = {
            number
            for table in ("shop", *tables)
            for (number,) in rows(pair.standby, f"SELECT id FROM {table}")
        }
        assert there == expected
        # The copy that stayed gives all since then, the other what its client lacks, each whole and once.
        given = [row for each in transactions(pair.standby, "still") for row in each.rows]
        assert len(given) == len(set(given))
        assert expected - stood <= set(given) <= expected
        rest = received(pair.standby, "kept")
        # (From the primary it got some again, which forgot in its crash what had been confirmed.)
        assert set(stack.read["kept"]) | set(rest) == expected
        assert len(rest) == len(set(rest))
        whole = {len(each.rows) for each in transactions(pair.standby, "still")}
        assert whole <= {0, 1, 2, 5}
        print(
            f"{len(given)} of {len(expected)} rows from where it stood, {len(rest)} to the client"
        )


def ready(stack: SlotStack, controller: Controller, *names: str) -> None:
    """The standby is, with all of its copies; the clients of `names` read on."""
    stack.until(controller, "READY", *names)

    def all_ready() -> bool:
        stack.turn_over(*names)
        stack.pair.catch_up()
        return bool(controller.once(10)[STANDBY].ready)

    wait_for(all_ready, 60, "all copies are ready")
