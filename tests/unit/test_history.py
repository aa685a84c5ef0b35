"""Which answers of a log show that a position is of another history than the log has now."""

import pytest

from spark_consumers.lake.epoch import rolled_back
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.table_version import (
    HELD,
    LEFT,
    LIVE,
    PAUSED,
    RESUMING,
    STALE,
)
from spark_consumers.lake.manifest.table_version import REATTACHED as BY_REATTACH
from spark_consumers.lake.tables import states
from spark_consumers.sources.history import (
    Around,
    HistoryMark,
    TransactionEnd,
    differs,
    was_reattached,
)
from spark_consumers.sources.positions import StreamOffsets
from walsender_bridge.change_log.client import CutPoint, LogStatus, StreamCut
from walsender_bridge.errors import ConfigError, DivergedError

MARK = HistoryMark(20, TransactionEnd(200, 2_000))
BEFORE, FIRST = CutPoint(7, 20, 0, 200, 2_000), CutPoint(9, 25, 0, 250, 2_500)


EARLY = {"a": "the log was rolled back: it ends early"}
LATE = {"a": "the log was rolled back: it ends late"}


def log(version: int = 9, end: int = 30, lsn: int = 300, time: int = 3_000) -> LogStatus:
    return LogStatus("log", version, 0, {"a": StreamCut("a", ("",), end, 0, lsn, time, 1, 1, 0)})


@pytest.mark.parametrize(
    ("mark", "status", "found", "why"),
    [
        (MARK, log(), Around(BEFORE, FIRST), None),
        # Positions of earlier versions do not say which transaction they end with.
        (HistoryMark(20), log(), Around(BEFORE, FIRST), None),
        # Nothing was looked at, or nothing is there that could be.
        (MARK, log(), None, None),
        (MARK, log(), Around(None, FIRST), None),
        (MARK, log(end=20, lsn=200, time=2_000), None, None),
        (MARK, log(version=7), None, "is at version 7, but version 8 was read"),
        (MARK, log(end=19), None, "ends at offset 19, but was read up to 20"),
        (MARK, LogStatus("log", 9, 0, {}), None, "has no stream a"),
        (MARK, log(end=20, lsn=200, time=2_001), None, "another transaction"),
        (MARK, log(end=20, lsn=201, time=2_000), None, "ends at 0/C9; .* ended at 0/C8"),
        (MARK, log(), Around(CutPoint(7, 20, 0, 200, 2_001), FIRST), "another transaction"),
        (MARK, log(), Around(CutPoint(7, 19, 0, 200, 2_000), FIRST), "no commit .* at offset 20"),
        (MARK, log(), Around(BEFORE, CutPoint(8, 25, 0, 250, 0)), "version 8 .* at offset 25"),
        (MARK, log(), Around(None, CutPoint(8, 25, 0, 250, 0)), "version 8 .* at offset 25"),
        (MARK, log(), Around(None, None), "no commit after offset 20"),
        (HistoryMark(20), log(), Around(CutPoint(7, 19, 0, 200, 2_000), FIRST), "no commit"),
    ],
)
def test_a_position_fits_a_log_or_not(
    mark: HistoryMark, status: LogStatus, found: Around | None, why: str | None
) -> None:
    answer = differs(8, mark, status, "a", found)
    if why is None:
        assert answer is None
    else:
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(answer)


def test_a_checkpoint_keeps_what_tells_histories_apart_and_an_older_one_is_read() -> None:
    position = StreamOffsets("log", 8, {"a": 20}, {"a": TransactionEnd(200, 2_000)})
    record = position.to_json()
    read = StreamOffsets.from_json(record)
    assert (read, read.ends) == (position, {"a": (200, 2_000)})
    del record["ends"]
    older = StreamOffsets.from_json(record)
    assert (older, older.ends) == (position, {})
    for damaged in ({"a": [1]}, {"a": 1}, [1]):
        with pytest.raises(ConfigError):
            StreamOffsets.from_json({**record, "ends": damaged})


def lake(**states: str) -> Manifest:
    tables = {
        f"a.public.{name}": TableVersion(
            *(name, "iceberg", 1, "", ("id",), (), 5, 1, 10, 7), state=state, timeline=1
        )
        for name, state in states.items()
    }
    streams = {"a": StreamPosition(1, 200, 2_000, 20), "b": StreamPosition(1, 7, 7, 7)}
    copies = dict(list(tables.items())[:1])
    return Manifest("lake", 3, 8, 7, 1, 0.0, streams=streams, tables=tables, copies=copies)


def states_of(head: Manifest) -> list[str]:
    return [table.state for table in head.tables.values()]


@pytest.mark.parametrize(("holds", "stopped"), [(True, HELD), (False, STALE)])
def test_tables_of_a_stream_that_is_apart_stop_and_keep_their_cut(
    holds: bool, stopped: str
) -> None:
    before = lake(one=LIVE, two=PAUSED, three=LEFT, four=RESUMING)
    head = rolled_back.hold(before, EARLY, holds=holds)
    assert states_of(head) == [stopped, PAUSED, LEFT, STALE]
    assert head.tables["a.public.one"].reason == "the log was rolled back: it ends early"
    assert (head.streams, head.copies) == (before.streams, {})
    # What is found later, with other figures, is no news; and it is undecided whose it is.
    assert rolled_back.hold(head, LATE, holds=holds) == head
    assert rolled_back.begin_again(head, EARLY, log()) == head
    with pytest.raises(DivergedError, match=r"resync a.public.four a.public.one copies"):
        rolled_back.check(head, EARLY, "lake")
    assert rolled_back.hold(before, {"b": EARLY["a"]}, holds=holds) == before


def test_a_history_of_which_all_tables_are_paused_is_given_up_when_one_is_asked_for() -> None:
    apart = EARLY
    for before in (lake(one=PAUSED, two=PAUSED), lake(one=PAUSED, two=LEFT)):
        head = rolled_back.hold(before, apart, holds=True)
        # It fits again when the right log is put back, and a table that is resumed then goes on.
        assert rolled_back.given_up(head, apart) == []
        assert rolled_back.begin_again(head, apart, log(version=8)) == head
        asked = states.resync(head, "a.public.one", "asked for")
        assert rolled_back.given_up(asked, apart) == ["a"]
    nothing = rolled_back.hold(lake(one=LEFT), apart, holds=True)
    assert rolled_back.given_up(nothing, apart) == ["a"]


def test_the_old_history_is_given_up_when_all_of_its_tables_are_copied_anew() -> None:
    before = lake(one=LIVE, two=PAUSED, three=LEFT)
    apart = EARLY
    head = rolled_back.hold(before, apart, holds=True)
    asked = states.resync(head, "a.public.one", "asked for")
    rolled_back.check(asked, apart, "lake")
    assert rolled_back.hold(asked, apart, holds=True) == asked
    # Not before the log is past the epoch.
    assert rolled_back.given_up(asked, apart) == ["a"]
    assert rolled_back.begin_again(asked, apart, log(version=7)) == asked
    made = rolled_back.begin_again(asked, apart, log(version=8))
    assert made.streams["a"] == StreamPosition(1, 300, 3_000, 30)
    assert [bool(table.resync) for table in made.tables.values()] == [True, True, False]
    assert rolled_back.without(log(), apart).streams == {}


REATTACHED = StreamCut("a", ("",), 30, 0, 300, 3_000, 1, 1, 0, 22)


def reattached(version: int = 9) -> LogStatus:
    return LogStatus("log", version, 0, {"a": REATTACHED})


@pytest.mark.parametrize(("offset", "is_apart"), [(1, True), (20, True), (21, True), (22, False)])
def test_what_was_read_below_the_new_beginning_has_no_continuation(
    offset: int, is_apart: bool
) -> None:
    # Whatever else fits: nothing was committed behind it, or what was is trimmed.
    why = differs(8, HistoryMark(offset), reattached(), "a", None)
    assert (why is not None) == is_apart
    assert was_reattached(HistoryMark(offset), REATTACHED) == is_apart
    if why is not None:
        assert "begins another history at offset 22" in why


@pytest.mark.parametrize("tables", [{"one": LIVE, "two": PAUSED, "three": LEFT}, {"one": PAUSED}])
def test_the_tables_of_a_source_that_was_reattached_are_copied_again_by_themselves(
    tables: dict[str, str],
) -> None:
    before = lake(**tables)
    why = rolled_back.why_apart(before, reattached(), "a")
    assert why == BY_REATTACH
    held = rolled_back.hold(before, {"a": why}, holds=True)
    assert held.copies == {}
    rolled_back.check(held, {"a": why}, "lake")
    assert rolled_back.hold(held, {"a": why}, holds=True) == held
    assert rolled_back.given_up(held, {"a": why}) == ["a"]
    made = rolled_back.begin_again(held, {"a": why}, reattached())
    assert made.streams["a"] == StreamPosition(1, 300, 3_000, 30)
    assert all(t.resync == why for t in made.tables.values() if t.state != LEFT)
    assert rolled_back.why_apart(made, reattached(), "a") is None


def test_a_table_that_waited_for_a_decision_is_copied_again_with_the_others() -> None:
    undecided = rolled_back.hold(lake(one=LIVE), EARLY, holds=True)
    assert not undecided.tables["a.public.one"].resync
    head = rolled_back.hold(undecided, {"a": BY_REATTACH}, holds=True)
    assert head.tables["a.public.one"].resync == BY_REATTACH
