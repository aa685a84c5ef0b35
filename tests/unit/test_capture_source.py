"""Whether a slot continues a log: every rule of `evaluate`, each broken alone."""

from dataclasses import replace

import pytest

from walsender_bridge.capture.source import Fork, LogPosition, evaluate
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.postgres.protocol.replication import ServerTimelines, SystemIdentity

LOG = LogPosition(timeline=2, last_end_lsn=900, confirmed_to=WalPosition(2, 800))
IDENTITY = SystemIdentity(system_id=1, timeline=3, flush_lsn=2000, database="db")
HISTORY = ServerTimelines(3, (WalPosition(1, 500), WalPosition(2, 1000)))


def test_a_slot_behind_its_log_on_the_same_history_goes_on() -> None:
    assert evaluate(LOG, 800, IDENTITY, HISTORY) is None
    assert evaluate(LOG, 100, IDENTITY, HISTORY) is None


def test_an_idle_log_may_be_confirmed_past_its_last_transaction() -> None:
    assert evaluate(LogPosition(1, 400, WalPosition(2, 990)), 990, IDENTITY, HISTORY) is None


def test_a_new_log_takes_any_slot_and_none() -> None:
    new = LogPosition(0, 0, None)
    assert evaluate(new, None, IDENTITY, HISTORY) is None
    assert evaluate(new, 5000, IDENTITY, HISTORY) is None


def test_29_another_cluster_is_refused_wherever_it_stands() -> None:
    # Further ahead on the same timeline, with an older slot of that name: no position is wrong.
    log = LogPosition(timeline=2, last_end_lsn=900, confirmed_to=WalPosition(2, 800), system_id=7)
    assert evaluate(log, 800, replace(IDENTITY, system_id=7), HISTORY) is None
    fork = evaluate(log, 800, IDENTITY, HISTORY)
    assert fork is not None
    assert "system identifier 7" in fork.reason
    assert "pg_upgrade" in fork.reason


def test_a_log_that_does_not_know_its_cluster_yet_takes_the_servers() -> None:
    assert evaluate(LOG, 800, replace(IDENTITY, system_id=7), HISTORY) is None


@pytest.mark.parametrize(
    ("log", "slot", "flush", "history", "fork_at", "word"),
    [
        # 29: dropped; dropped and made again (or moved by somebody).
        (LOG, None, 2000, HISTORY, (2, 800), "gone"),
        (LOG, 801, 2000, HISTORY, (2, 800), "recreated or moved"),
        # A failover that lost the end of the log, and one that lost more.
        (
            LOG,
            700,
            2000,
            ServerTimelines(3, (WalPosition(1, 500), WalPosition(2, 850))),
            (2, 850),
            "left at",
        ),
        (
            LOG,
            700,
            2000,
            ServerTimelines(3, (WalPosition(1, 500), WalPosition(2, 750))),
            (2, 750),
            "left at",
        ),
        # Another server: never on that timeline.
        (LOG, 700, 2000, ServerTimelines(1), (2, 0), "never"),
        # Restored from an old copy: the same timeline, but behind the log.
        (LogPosition(3, 900, WalPosition(3, 800)), 700, 850, HISTORY, (3, 850), "restored"),
        (LogPosition(3, 600, WalPosition(3, 900)), 700, 850, HISTORY, (3, 850), "restored"),
        # Entries without a word on what the slot was confirmed to.
        (LogPosition(3, 900, None), 700, 2000, HISTORY, (3, 0), "confirmed"),
    ],
)
def test_29_what_does_not_continue_the_log_is_refused(
    log: LogPosition,
    slot: int | None,
    flush: int,
    history: ServerTimelines,
    fork_at: tuple[int, int],
    word: str,
) -> None:
    identity = SystemIdentity(1, history.timeline, flush, "db")
    fork = evaluate(log, slot, identity, history)
    assert isinstance(fork, Fork)
    assert (fork.timeline, fork.lsn) == fork_at
    assert word in fork.reason


def test_35_a_former_primary_that_came_back_is_to_be_stopped_before_anything_is_given_up() -> None:
    """The hint used to be to start over from it, which would give up what the new primary has committed."""
    log = LogPosition(3, 900, WalPosition(3, 800))
    former = evaluate(log, 700, replace(IDENTITY, timeline=2), ServerTimelines(2))
    assert former is not None
    assert former.repair("run this").startswith("stop this former primary, or correct the DSN")
    # A failover that lost the end of the log: the server is the newer one.
    left = ServerTimelines(4, (WalPosition(3, 850),))
    newer = evaluate(log, 700, replace(IDENTITY, timeline=4), left)
    assert newer is not None
    assert newer.repair("run this") == "run this"
