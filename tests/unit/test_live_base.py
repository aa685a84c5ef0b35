"""What a live read begins with: the newest epoch, without the tables whose changes it cannot read."""

import pytest

from spark_consumers.lake.live import log_tail
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.table_version import LEFT, LIVE, PAUSED, RESUMING, STALE
from spark_consumers.lake.tables.states import is_behind, without_earlier
from walsender_bridge.change_log.client import LogStatus
from walsender_bridge.errors import LakeError

COLUMNS = (("id", 23, -1),)


def head(*, layout=COLUMNS, **states):
    """Epoch 8, with tables of these states whose rows are of epoch 5 (if they follow: of 8)."""
    tables = {
        f"a.public.{name}": TableVersion(
            *(name, "iceberg", 1, "", ("id",), (), 5, 1, 10, 7),
            state=state,
            as_of=0 if state == LIVE else 5,
            layout=layout,
        )
        for name, state in states.items()
    }
    streams = {"a": StreamPosition(1, 200, 2_000, 20)}
    return Manifest("lake", 3, 8, 7, 1, 0.0, streams=streams, tables=tables)


def test_a_table_without_a_record_of_its_columns_is_left_out():
    before = head(layout=(), old=LIVE, paused=PAUSED)
    after = {name: log_tail._followed(before, each) for name, each in before.tables.items()}
    assert [each.state for each in after.values()] == [STALE, PAUSED]
    assert (after["a.public.old"].as_of, before.epoch) == (8, 8)
    assert "an earlier version" in after["a.public.old"].reason
    following = head(docs=LIVE, again=RESUMING)
    states = [log_tail._followed(following, each).state for each in following.tables.values()]
    assert states == [LIVE, STALE]


def test_a_log_without_a_stream_of_the_lake_is_named():
    empty = LogStatus(log_id="log", version=9, forced_version=0, streams={}, faults={})
    with pytest.raises(LakeError, match="stream a, grpc://log: the log does not have a stream"):
        log_tail._checked(head(docs=LIVE), empty, "grpc://log")
    # It has no table that would be followed.
    assert log_tail._checked(head(docs=PAUSED), empty, "grpc://log") == empty


@pytest.mark.parametrize(
    ("state", "seen", "held"),
    [
        (PAUSED, 6, True),
        (PAUSED, 5, False),
        (LEFT, 6, True),
        (LEFT, 0, False),
        (LIVE, 6, False),
    ],
)
def test_a_table_that_stopped_before_what_was_read_of_it_is_held_back(state, seen, held):
    before = head(docs=state)
    after = without_earlier(before, {"a.public.docs": seen} if seen else {})
    table = after.tables["a.public.docs"]
    assert is_behind(after, table) is held
    assert (after == before) is not held
    assert ("version 6 of it" in table.reason) is held
