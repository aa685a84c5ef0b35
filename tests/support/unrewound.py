"""An old primary that follows the new one without pg_rewind, and what a controller and a commit gate make of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from slot_sync.controller import Controller
from slot_sync.plan import FailoverCandidate, SlotSyncPlan
from slot_sync.resolver.observed import Selection
from tests.support.slot_copies import rows
from tests.support.waiting import wait_for
from tests.support.wal_server import follow
from walsender_bridge.capture.gate.monitor import slots_of
from walsender_bridge.capture.gate.slots import follows
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.runtime.sql import load

NAME = "old"
#: What it logs when it was sent WAL up to the fork, when there is none for it, and when it is in a later segment.
SENT_AWAY = (
    "replication terminated by primary server",
    "no more WAL on requested timeline",
    "could not start WAL streaming",
    "could not receive data from WAL stream",
)
#: Times that it comes to the new primary, is sent WAL up to the fork, and is sent away.
TIMES = 6


@contextmanager
def returned(old: LocalServer, new: LocalServer) -> Iterator[None]:
    """A stopped server as a standby of the one that took over, on the timeline that it was on."""
    rows(new, "SELECT pg_create_physical_replication_slot(%s, true)", NAME)
    follow(old, new.dsn(), primary_slot_name=NAME, hot_standby_feedback="on")
    old.start()
    try:
        yield
    except BaseException:
        print(old.log_tail(30))
        raise
    old.stop("immediate")


def never_counts(old: LocalServer, new: LocalServer, folder: Path) -> None:
    """While it comes again and again no copy on it is safe, and the gate relies on nothing that it reports."""
    plan = SlotSyncPlan(
        new.dsn(), (FailoverCandidate(NAME, old.dsn(), NAME),), Selection(), folder, poll=0.1
    )
    query = load("gate/slots").encode()
    reasons: set[str] = set()
    with Controller(plan) as controller, psycopg.connect(new.dsn(), autocommit=True) as session:

        def has_come_often() -> bool:
            found = controller.once(10)[NAME]
            assert not [str(each) for each in found.transitions if each.safe]
            assert found.ready is not True
            reasons.update(str(each.reason) for each in found.transitions)
            for _ in range(20):
                facts = session.execute(query, {"slots": [NAME]}).fetchone()
                assert facts is not None
                assert not follows(NAME, slots_of(facts[0]).get(NAME))
            log = old.log_tail(500)
            return sum(map(log.count, SENT_AWAY)) >= TIMES

        wait_for(has_come_often, 30, "it comes again and again")
    print(f"un-rewound: {sorted(reasons)}")
