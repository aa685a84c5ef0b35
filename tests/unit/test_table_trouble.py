"""What does not follow, or does not run, is named with its cause: in `status`, `/readyz` and their exit code."""

from dataclasses import replace

import pytest

from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.table_version import REATTACHED
from spark_consumers.lake.tables.target_names import REFUSED, given
from tests.support import statuses
from walsender_bridge.observability.observation import Observation, Process, SourceView
from walsender_bridge.observability.table_problems import misnamed, problems, sentences
from walsender_bridge.runtime.error_record import ErrorRecord

NAME = "shop.public.a"


def manifest(
    state: str, reason: str = "", resync: str = "", quarantined_rows: int = 0, **not_copied: str
) -> Manifest:
    table = TableVersion(
        *("p", "iceberg", 1, "", ("id",), (), 5, 1, 10, 7, state),
        reason=reason,
        resync=resync,
        as_of=7,
        layout=(("id", 23, -1),),
        quarantined_rows=quarantined_rows,
    )
    streams = {"shop": StreamPosition(1, 100, 7, 30)}
    return Manifest(
        *("lake", 9, 40, 39, 2, 0.0),
        streams=streams,
        tables={NAME: table},
        not_copied={f"shop.public.{name}": reason for name, reason in not_copied.items()},
    )


@pytest.mark.parametrize(
    ("lake", "words"),
    [
        (manifest("live"), []),
        (manifest("resuming"), []),
        (manifest("left"), []),
        (manifest("held", "it lost f"), [f"table {NAME} holds the epochs back: it lost f"]),
        (
            manifest("stale", "it lost f", "it lost f"),
            [f"table {NAME} is stale, as of epoch 7: it lost f; it is being copied again"],
        ),
        (
            manifest("stale", REATTACHED, REATTACHED),
            [
                f"table {NAME} is stale, as of epoch 7: {REATTACHED}; it is being brought level with its source"
            ],
        ),
        (
            manifest("held", REATTACHED, REATTACHED, quarantined_rows=3),
            [f"table {NAME} holds the epochs back: {REATTACHED}; it is being copied again"],
        ),
        (
            manifest("stale", "it lost f", "it lost f", a="denied\nHINT:  GRANT SELECT"),
            [
                f"table {NAME} is stale, as of epoch 7: it lost f",
                f"table {NAME} was not copied: denied; GRANT SELECT; it is retried",
            ],
        ),
        (
            manifest("live", a="denied\n  repair: GRANT SELECT"),  # an earlier version wrote it
            ["table shop.public.a was not copied: denied; GRANT SELECT; it is retried"],
        ),
        (
            manifest("paused", "paused"),
            [f"table {NAME} is paused, as of epoch 7; tuskline table resume {NAME}"],
        ),
        (
            manifest("live", b="no key"),
            ["table shop.public.b was not copied: no key; it is retried"],
        ),
    ],
)
def test_each_table_that_does_not_follow_is_named(lake: Manifest, words: list[str]) -> None:
    assert list(sentences(problems(lake))) == words


def test_a_table_that_keeps_its_name_is_degraded_and_one_without_a_name_is_a_problem() -> None:
    there, new = NAME, "shop.public.b"
    taken = {there: "shop.sales.c", new: "shop.sales.c", "shop.sales.c": "shop.sales.c"}
    made = given(taken, {there: there, "shop.sales.c": "shop.sales.c"}, {})
    lake = replace(
        manifest("live"), not_copied={n: REFUSED + why for n, why in made.refused.items()}
    )
    why = "shop.sales.c is the name of table shop.sales.c in the lake. Give one of them another name in [[lake.tables]] and start lake run again"
    # The one follows, and does not make `/readyz` fail; the other has no rows.
    keeps = f"table {there} keeps the name {there}: {why}"
    seen = Observation(0.0, None, [], [], None, lake)
    assert keeps in seen.degraded
    assert keeps not in seen.problems
    assert f"table {new} is not copied: {why}" in seen.problems
    assert [each.table for each in misnamed(lake)] == [there]
    # What keeps it from following is a problem all the same.
    copied = replace(manifest("stale", "it lost f", "it lost f"), not_copied=lake.not_copied)
    assert (
        f"table {there} is stale, as of epoch 7: it lost f; it is being copied again"
        in Observation(0.0, None, [], [], None, copied).problems
    )


def process(state: str, failures: int, started_at: float) -> Process:
    return Process("lake", 7, state, 9, 17, started_at, failures=failures)


def test_a_process_that_ends_again_and_again_is_named_while_it_runs_too() -> None:
    looping = process("running", 3, 100.0)
    (word,) = looping.problems(130.0)
    assert word == "process lake keeps failing, 3 times in a row (exit code 17, lake)"
    assert not list(looping.problems(161.0)), "a minute of good life"
    assert not list(process("running", 2, 100.0).problems(101.0))
    assert list(process("gone", 1, 100.0).problems(101.0)) == ["process lake is gone"]
    assert list(process("restarting", 1, 100.0).problems(101.0)) == [
        "process lake is restarting (exit code 17, lake)"
    ]


def test_a_capture_that_does_not_stream_says_why() -> None:
    error = ErrorRecord("CONNECTION", "connection refused", "", "start it")
    capture = statuses.capture(state="waiting", error=error, pid=5)
    view = SourceView("shop", "tuskline_shop", None, capture, None, None)
    ended = Process("bridge/capture-shop", 7, "running", 0, None, 0.0)
    again = SourceView("shop", "tuskline_shop", ended, capture, None, None)
    seen = Observation(0.0, None, [ended], [view, again], None, None)
    assert "capture of shop is waiting: connection refused; start it" in seen.problems
    assert (
        "capture of shop is starting: the previous process ended with: connection refused; start it"
        in seen.problems
    )
    # A list of lines is not shown as one line with escapes in it.
    diverged = replace(
        error, what="it has diverged\n  transactions of the log after that point:\n  none"
    )
    seen = replace(seen, sources=[replace(view, capture=replace(capture, error=diverged))])
    assert (
        "capture of shop is waiting: it has diverged; transactions of the log after that point: none; start it"
        in seen.problems
    )
