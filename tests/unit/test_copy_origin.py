"""Copies and failovers: a copy is joined to the changes of a log that contains it, and to no other."""

from dataclasses import replace
from itertools import product

import pytest

from spark_consumers.lake.manifest.chain import COPIED, Manifest, TableVersion
from spark_consumers.lake.tables import states
from spark_consumers.lake.tables.origin import Joins, Origin, check, joins
from walsender_bridge.change_log.client import StreamCut
from walsender_bridge.errors import DivergedError, UnavailableError

END = 7


def copied(timeline, lsn):
    return TableVersion(
        "path", "iceberg", 1, "", ("id",), (), lsn, 1, 0, 1, COPIED, timeline=timeline
    )


def cut(timeline, lsn):
    return StreamCut("a", ("grpc://a",), lsn, lsn, lsn, lsn, timeline, 1, 100)


def commits(timeline, fork, below):
    """(timeline, LSN) of what was committed below an LSN, one at each, in the history of a timeline."""
    return [(1 if timeline == 1 or lsn < fork else 2, lsn) for lsn in range(below)]


def by_lsn_alone(copy, timeline, lsn):  # the rule that was
    return Joins.NOW if lsn >= copy.start_lsn else Joins.LATER


def first_difference(rule):
    """Every fork, gate, copy and cut: where what is shown is not what the log's server has; None: nowhere.

    The log has timeline 1 up to the gate, never beyond the fork, and timeline 2 from there on.
    """
    for fork, timeline, lsn in product(range(END), (1, 2), range(END)):
        if timeline == 2 and lsn < fork:
            continue
        content = commits(timeline, fork, lsn)
        for gate in range(fork + 1):
            log = [(1, each) for each in range(gate)]
            log += [(1 if each < fork else 2, each) for each in range(gate, END)]
            for length in range(1, END + 1):
                last_timeline, last = log[length - 1]
                answer = rule(copied(timeline, lsn), last_timeline, last + 1)
                if answer is Joins.NEVER:
                    break
                if answer is Joins.NOW:
                    shown = content + [each for each in log[:length] if each[1] >= lsn]
                    if shown != log[:length]:
                        return fork, timeline, lsn, length, shown
                    break
    return None


def test_38_a_copy_shown_is_what_the_log_s_server_has_at_every_fork():
    assert first_difference(joins) is None


def test_38_the_model_finds_a_rule_that_looks_at_the_lsn_alone():
    assert first_difference(by_lsn_alone) is not None


def test_38_a_copy_is_given_up_when_the_log_goes_on_on_another_timeline():
    name = "a.public.t"
    head = Manifest("lake", 3, 1, 0, 1, 0.0, copies={name: copied(1, 100)})
    assert states.without_outrun(head, {"a": cut(1, 90)}) == (head, {})
    assert states.without_outrun(head, {}) == (head, {})
    without, gone = states.without_outrun(head, {"a": cut(2, 120)})
    assert gone == head.copies
    assert without == replace(head, copies={})
    assert states.wanted_copies(without, {name}) == {name}


@pytest.mark.parametrize(
    ("origin", "error", "word"),
    [
        (Origin(8, 1, 100), DivergedError, "system identifier"),
        (Origin(7, 1, 100), UnavailableError, "timeline 1"),
        (Origin(7, 2, 89), UnavailableError, "behind the log"),
    ],
)
def test_38_a_server_that_is_not_the_log_s_or_is_behind_it_is_not_copied_from(origin, error, word):
    with pytest.raises(error, match=word):
        check(origin, "a", 7, cut(2, 90))


def test_38_a_server_that_the_log_has_not_followed_yet_is_copied_from():
    check(Origin(7, 2, 90), "a", 7, cut(2, 90))
    check(Origin(7, 3, 50), "a", None, cut(2, 90))
