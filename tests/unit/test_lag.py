"""How far behind a stage is, from an observation."""

import time

import pytest

from tests.support import statuses
from walsender_bridge.change_log.client import LogStatus, StreamCut
from walsender_bridge.observability.lag import of_sources
from walsender_bridge.observability.observation import Observation, SourceView

COMMITTED = 1_000_000_000_000_000


SERVER: dict[str, object] = {"server_lsn": 1100, "write_lag": None, "flush_lag": None}


def seconds(
    server: dict[str, object] | None, updated_at: float = 0.0, logged: int = 1000
) -> float | None:
    """The lag of an idle source's capture an hour after its last change; `server` is what the server says."""
    capture = statuses.capture(
        state="streaming" if server else "waiting",
        updated_at=updated_at,
        # An idle server writes a record of its own now and then.
        server_lsn=1100,
        logged_lsn=logged,
        committed_lsn=1000,
        confirmed_lsn=1000,
    )
    view = SourceView("shop", "tuskline_shop", None, capture, server, None)
    cut = StreamCut("shop", ("",), 5, 0, 1000, COMMITTED, 1, 1, 0)
    log = LogStatus("log", 3, 0, {"shop": cut})
    at = COMMITTED / 1e6 + 3600
    lag, *_ = of_sources(Observation(at, None, [], [view], log, None))
    assert (lag.stage, lag.bytes) == ("capture", 1100 - logged)
    return lag.seconds


def test_the_lag_of_an_idle_source_does_not_jump_when_its_server_stops() -> None:
    assert seconds(None) is None


def test_a_capture_that_does_not_stream_from_a_server_that_runs_is_behind() -> None:
    assert seconds(SERVER) == 3600.0


def test_a_capture_that_has_been_suspended_is_behind_for_as_long_as_it_has_reported_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = COMMITTED / 1e6 + 3600
    monkeypatch.setattr(time, "time", lambda: now)
    # The server's own figure is of the last answer that it has had.
    assert seconds(SERVER | {"write_lag": 0.25}, updated_at=now - 1) == 0.25
    assert seconds(SERVER | {"write_lag": 0.25}, updated_at=now - 7) == 7.0
    assert seconds(SERVER, updated_at=now - 7, logged=1100) == 0.0
