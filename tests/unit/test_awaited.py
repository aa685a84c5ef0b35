"""Which requests of SQL sessions need a round of the driver."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_consumers.lake.awaited import XidSnapshot, asked, unserved
from spark_consumers.lake.flush import passed_not
from spark_consumers.lake.flush_service import NOTIFIES, to_json
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.runtime.sql import load


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "flush",
        "flush ",
        "flush x",
        "flush -1",
        "stop 5",
        "flush " + "9" * 19,
        "flush " + "9" * 30,
        "flush ٣",
        "flush 1 2",
    ],
)
def test_a_payload_of_anyone_is_no_request(payload):
    assert asked(payload.encode()) is None


def test_the_two_requests_are_understood():
    assert asked(b"flush 745") == ("flush", 745)
    assert asked(b"sync 8589934592") == ("sync", 8589934592)


def test_a_snapshot_has_what_had_ended():
    found = XidSnapshot.parse("740:750:742,745")
    assert [xid for xid in range(738, 753) if found.has(xid)] == [
        *(738, 739, 740, 741, 743, 744, 746, 747, 748, 749)
    ]
    assert XidSnapshot.parse("10:10:") == XidSnapshot(10)


@given(st.frozensets(st.integers(1, 40)), st.integers(1, 40), st.frozensets(st.integers(1, 40)))
def test_what_a_reported_snapshot_has_needs_no_round(waiting, xmax, running):
    shown = XidSnapshot(xmax, frozenset(xid for xid in running if xid < xmax))
    left = unserved(waiting, shown)
    assert left == {xid for xid in waiting if not shown.has(xid)}
    assert unserved(waiting, None) == waiting
    # A round whose snapshot was taken later, when they had all committed, leaves nothing.
    assert unserved(waiting, XidSnapshot(41)) == frozenset()


def head(timeline, lsn):
    streams = {"shop": StreamPosition(timeline, lsn, 7, 30)}
    return Manifest("lake", 9, 40, 39, 2, 0.0, streams=streams)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, "no epoch has anything"),
        (head(2, 500), "ends stream shop at 0/1F4"),
        (head(1, 900), "on timeline 1, and the source is on timeline 2"),
        (head(3, 900), "on timeline 3, and the source is on timeline 2"),
        (head(2, 501), ""),
    ],
)
def test_9_an_epoch_is_past_a_position_on_its_timeline_alone(found, said):
    told = passed_not(found, {"shop": WalPosition(2, 500)})
    assert said in told
    assert bool(said) == bool(told)


def test_timelines_are_reported_with_their_ends():
    found = ServerTimelines(3, (WalPosition(1, 0x3000060), WalPosition(2, 0x1_00000028)))
    assert to_json(found) == {"timeline": 3, "ends": {"1": "0/3000060", "2": "1/28"}}


def test_driver_and_functions_agree_from_which_version_on_a_procedure_notifies() -> None:
    """13.5: PostgreSQL's release notes of 2021-11-11. A driver that listened to 13.4 would hear of a wait when it is over."""
    (here,) = re.findall(r"server_version_num'\)::integer < (\d+)", load("flush/functions"))
    assert int(here) == NOTIFIES == 130005
