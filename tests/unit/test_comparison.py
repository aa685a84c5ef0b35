"""Which bytes are compared with which."""

from walsender_bridge.quorum.proposer.catch_up.comparison import Comparison
from walsender_bridge.quorum.proposer.effects import CompareWal

WANTED = CompareWal(0, 100, 200)


def test_17_a_late_answer_of_the_primary_never_stands_for_the_safekeeper_s():
    comparison = Comparison()
    comparison.failed(WANTED)  # the safekeeper's connection broke before either side came
    assert comparison.primary_has(WANTED, b"mine") is None  # asked for the first time
    assert comparison.primary_has(WANTED, b"mine") is None  # asked again
    assert comparison.safekeeper_has(WANTED, b"other") is False


def test_17_equal_bytes_are_equal_in_either_order():
    comparison = Comparison()
    assert comparison.safekeeper_has(WANTED, b"same") is None
    assert comparison.primary_has(WANTED, b"same") is True
    assert (
        comparison.safekeeper_has(WANTED, b"same") is None
    )  # nothing is left of the answer before
