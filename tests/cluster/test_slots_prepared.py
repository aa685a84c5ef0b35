"""Transactions that are prepared before a promotion and end after it: for a client of `two_phase`, and for our own capture."""

import re
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from slot_sync.controller import Controller
from tests.support.capture_stack import SLOT, ChangeLog, check_equal
from tests.support.extension import ONE
from tests.support.slot_copies import PUBLICATION, rows, running_pair
from tests.support.slot_failover import captured, positions
from tests.support.slot_sync import STANDBY, SlotStack
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer

#: pgoutput decodes prepared transactions at PREPARE from 15 on.
TWO_PHASE = [each for each in ONE if each.values[0] >= 15]
_ROW = re.compile(rb"row-(\d+)")
#: By the first byte of a message of protocol 3: what it ends, and where the name of a prepared transaction begins in it.
_ENDS = {
    b"C": ("commit", None),
    b"P": ("prepare", 30),
    b"K": ("commit prepared", 30),
    b"r": ("rollback prepared", 38),
}


class End(NamedTuple):
    """A message that ends something: what, the name of the prepared transaction, and its rows."""

    what: str
    gid: str
    rows: tuple[int, ...]


def consume(server: LocalServer) -> list[End]:
    """As a client that knows protocol 3 takes it: to the end, and confirmed."""
    found: list[End] = []
    numbers: list[int] = []
    for (data,) in rows(
        server,
        "SELECT data FROM pg_logical_slot_get_binary_changes('both', NULL, NULL,"
        " 'proto_version', '3', 'two_phase', 'on', 'publication_names', %s)",
        PUBLICATION,
    ):
        message = bytes(data)
        numbers += map(int, _ROW.findall(message))
        if message[:1] in _ENDS:
            what, at = _ENDS[message[:1]]
            gid = "" if at is None else message[at:-1].decode()
            found.append(End(what, gid, tuple(numbers)))
            numbers = []
    return found


def prepare(server: LocalServer, gid: str, number: int) -> None:
    with psycopg.connect(server.dsn()) as connection:
        note = f"row-{number}"
        connection.execute("INSERT INTO shop VALUES (%s, %s)", [number, note])
        connection.execute("INSERT INTO orders VALUES (%s, 'x')", [number])
        connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())


@pytest.mark.parametrize("major", TWO_PHASE)
def test_16_and_30_what_was_prepared_before_a_promotion_is_delivered_after_it(
    major: int, tmp_path: Path, log: ChangeLog
) -> None:
    with running_pair(major, max_prepared_transactions="9") as pair:
        stack = SlotStack(pair, tmp_path)
        pair.on_primary(
            "SELECT pg_create_logical_replication_slot('both', 'pgoutput', false, true)"
        )
        with captured(stack, log, tmp_path):
            with stack.controller() as controller:
                got = follow(stack, controller)
                # Its PREPARE is with the client, and the copy knows that.
                for gid, number in (("early", 900_001), ("undone", 900_002)):
                    prepare(pair.primary, gid, number)
                got += follow(stack, controller)
                there = positions(pair.standby, "both")
                assert there["two_phase_at"] == positions(pair.primary, "both")["two_phase_at"]
                # With the client, and the copy has not heard of it.
                prepare(pair.primary, "heard", 900_003)
                got += consume(pair.primary)
                # With nobody.
                for gid, number in (("unsent", 900_004), ("unsent_undone", 900_005)):
                    prepare(pair.primary, gid, number)
                pair.catch_up()
                assert [e.gid for e in got if e.what == "prepare"] == ["early", "undone", "heard"]
            shown = log.committed_lsn()
            pair.promote()
            for end, gid in (
                ("COMMIT", "early"),
                ("ROLLBACK", "undone"),
                ("COMMIT", "heard"),
                ("COMMIT", "unsent"),
                ("ROLLBACK", "unsent_undone"),
            ):
                rows(pair.standby, f"{end} PREPARED '{gid}'")
            after = consume(pair.standby)
            wait_for(lambda: log.committed_lsn() > shown, 60, "capture goes on")
            found = check_equal(log, pair.standby.dsn())
        # Of the change log: whole, and once; nothing of what was rolled back.
        assert [key for key in found.keys["orders"] if key > 900_000] == [900_001, 900_003, 900_004]
        # Of the client: what it had not, and again what its copy had not heard of; each whole.
        assert [each for each in after if each.what != "commit"] == [
            End("prepare", "heard", (900_003,)),
            End("prepare", "unsent", (900_004,)),
            End("prepare", "unsent_undone", (900_005,)),
            End("commit prepared", "early", ()),
            End("rollback prepared", "undone", ()),
            End("commit prepared", "heard", ()),
            End("commit prepared", "unsent", ()),
            End("rollback prepared", "unsent_undone", ()),
        ]
        assert applied([*got, *after]) == set(stack.load.written) | {900_001, 900_003, 900_004}


def applied(ends: list[End]) -> set[int]:
    """What a client has in the end that takes a PREPARE again for the one that it has, as PostgreSQL's own does."""
    done: list[int] = []
    waiting: dict[str, tuple[int, ...]] = {}
    for each in ends:
        match each.what:
            case "commit":
                done += each.rows
            case "prepare":
                assert waiting.setdefault(each.gid, each.rows) == each.rows
            case "commit prepared":
                done += waiting.pop(each.gid)
            case _:
                del waiting[each.gid]
    assert not waiting
    assert len(done) == len(set(done))
    return set(done)


def follow(stack: SlotStack, controller: Controller) -> list[End]:
    """Rounds, with a life, until both copies are ready and the client's stands where its slot does; what the client got."""
    got: list[End] = []

    def follows() -> bool:
        stack.load.write()
        stack.pair.on_primary("CHECKPOINT")
        got.extend(consume(stack.pair.primary))
        stack.pair.catch_up()
        report = controller.once(10)[STANDBY]
        if not report.ready or {each.slot for each in report.expected} != {"both", SLOT}:
            return False
        confirmed = positions(stack.pair.primary, "both")["confirmed_flush_lsn"]
        return bool(positions(stack.pair.standby, "both")["confirmed_flush_lsn"] == confirmed)

    wait_for(follows, 60, "the copies follow")
    return got
