"""When a proposer takes the primary's questions for a shutdown that no quorum answers."""

from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.quorum.proposer.primary.shutdown_watch import PATIENCE, ShutdownWatch


def first_true(times, commit_lsn=lambda now: 100):
    watch = ShutdownWatch()
    for now in times:
        try:
            watch.asked(now, commit_lsn(now), "primary")
        except ConnectionFailedError:
            return now
    return None


def test_20_a_server_that_asks_and_asks_waits_in_vain():
    assert first_true([n / 500 for n in range(5000)]) == PATIENCE


def test_20_a_quorum_that_gets_on_is_waited_for():
    assert first_true([n / 500 for n in range(5000)], int) is None


def test_20_an_ordinary_server_is_never_taken_for_one_that_ends():
    # wal_sender_timeout of 1 s, and of the usual minute.
    assert first_true([n * 0.5 for n in range(190)]) is None
    assert first_true([n * 30.0 for n in range(1000)]) is None
