"""When a view whose query has failed is tried again: what a view costs the tables is bounded."""

import pytest

from spark_consumers.lake.views.patience import FAILURES, LONGEST, ended, failed


def test_a_failing_view_takes_a_tenth_of_the_time():
    """For a day, in which epochs follow one another without a pause."""
    now, busy, known, attempts = 0.0, 0.0, None, 0
    while now < 86_400:
        if known is None or now >= known.until:
            now, busy, attempts = now + 60, busy + 60, attempts + 1
            known = failed(known, "it", now, 60.0, of_query=True)
        now += 1.0
    assert 0.08 < busy / now <= 0.1
    assert attempts > 100


def test_no_wait_is_longer_than_an_hour():
    assert failed(None, "it", 5.0, 1e6, of_query=True).until == 5.0 + LONGEST


def test_the_epoch_after_a_short_attempt_tries_again():
    """It may have the rows with which the query succeeds, and the lake may be idle after it."""
    assert failed(None, "division by zero", 7.0, 5.0, of_query=True).until == 7.0
    assert failed(None, "division by zero", 7.0, 6.0, of_query=True).until == 61.0


def test_failures_of_the_round_count_only_in_a_row():
    known = None
    for count in range(1, FAILURES):
        known = failed(known, "no memory", 100.0, 10.0, of_query=False)
        assert (known.count, known.until) == (count, 100.0), "the round is repeated at once"
    last = failed(known, "no memory", 100.0, 10.0, of_query=False)
    assert (last.count, last.until) == (FAILURES, 190.0)
    assert failed(last, "overflow", 200.0, 1.0, of_query=True).count == 0


@pytest.mark.parametrize("deaths", range(FAILURES))
def test_a_process_may_end_in_a_view_for_another_reason(deaths):
    assert ended(deaths, 7.0) is None


def test_a_view_that_ends_the_process_waits_from_its_start():
    known = ended(FAILURES, 7.0)
    assert known is not None
    assert known.until == 7.0 + LONGEST
