"""Promotions in the middle of the load: a plain pg_recvlogical and our own capture go on from the copies of their slots.

Ours gets each row once, and only what the promoted server has. A plain client, which nothing holds back, lacks nothing of
what that server has; it gets again whole transactions, and only those which its copy had not heard of.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.capture_stack import SLOT, ChangeLog, Load, check_equal
from tests.support.extension import buildable
from tests.support.slot_copies import received, rows
from tests.support.slot_failover import (
    Reader,
    captured,
    positions,
    several,
    transactions,
    until_both,
)
from tests.support.slot_sync import slot_stack
from tests.support.waiting import wait_for
from walsender_bridge.capture.gate.record import decisions

#: The major that most promotions run on, and how many those are: in `make test`, and in `make test-all`.
OFTEN, OFTEN_SHORT, OFTEN_LONG = 15, 2, 20
SHORT, LONG = 1, 5


def runs() -> Iterator[object]:
    for major in buildable():
        short, all_of_them = (OFTEN_SHORT, OFTEN_LONG) if major == OFTEN else (SHORT, LONG)
        for number in range(all_of_them):
            marks = [] if number < short else [pytest.mark.long]
            yield pytest.param(major, number, marks=marks, id=f"pg{major}-{number + 1}")


@pytest.mark.parametrize(("major", "number"), [*runs()])
def test_17_a_promotion_under_load_loses_nothing(
    major: int, number: int, seed: int, tmp_path: Path, log: ChangeLog
) -> None:
    chance = random.Random(f"{seed} {major} {number}")
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.make_slot("kept")
        with (
            Reader(pair.primary, "kept", tmp_path / "plain") as plain,
            captured(stack, log, tmp_path),
            stack.watching() as reports,
        ):
            until_both(stack, reports, "kept", SLOT)
            with Load(several(pair.primary, pair.standby)) as load:
                end = time.monotonic() + chance.uniform(0.5, 3)
                while time.monotonic() < end:
                    stack.load.write_whole()
                    if chance.random() < 0.02:
                        pair.on_primary("CHECKPOINT")
                # A copy that was made while transactions ran has to follow once they have ended.
                until_both(stack, reports, "kept", SLOT)
                pair.primary.stop("immediate")
                read = plain.end()
                shown = log.committed_lsn()
                pair.promote(stop=None)
                copied = positions(pair.standby, "kept")["confirmed_flush_lsn"]
                survived = {n for (n,) in rows(pair.standby, "SELECT id FROM public.shop")}
                again = transactions(pair.standby, "kept")
                after = received(pair.standby, "kept")
                wait_for(lambda: log.committed_lsn() > shown, 60, "capture goes on")
                load.stop()
                found = check_equal(log, pair.standby.dsn())
        # Our own: what had been shown is still part of it, and each key is there once (`check_equal`).
        assert shown in found.ends
        told = [each["decision"] for each in decisions(tmp_path / "gate.jsonl")]
        assert told == ["timeline", "promoted"]
        # The plain one: nothing lost, nothing twice on either server, and again only whole transactions that are new
        # to the copy.
        assert survived <= set(read) | set(after)
        assert len(read) == len(set(read))
        assert after == [row for each in again for row in each.rows]
        assert all(each.commit_lsn >= copied for each in again)
        assert len(after) == len(set(after))
        assert all(len(each.rows) in {0, 3} for each in again)
        repeated = len(set(read) & set(after))
        print(f"{len(found.keys['orders'])} orders; {len(survived)} rows, {repeated} of them again")
