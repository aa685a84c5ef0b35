"""What `flush` waits for, decided without servers."""

import itertools
from types import SimpleNamespace
from typing import ClassVar, Self
from unittest.mock import Mock

import pytest

from spark_consumers.lake import flush as module
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition
from spark_consumers.lake.tables.shape import Publication
from spark_consumers.lake.tables.sources import Source
from walsender_bridge.errors import ConnectionFailedError, DeadlineError
from walsender_bridge.postgres.protocol.lsn import WalPosition

GONE = "shop.public.gone"


def flushed(monkeypatch, looks, **changes):
    """Flush a lake that stays as it is, while the looks at its source are these; the last one stays."""
    streams = {"shop": StreamPosition(1, 100, 7, 30)}
    head = Manifest("lake", 9, 40, 39, 2, 0.0, **{"streams": streams, "tables": {}, **changes})
    found = itertools.chain(looks, itertools.repeat(looks[-1]))

    def look(*_):
        names = next(found)
        if isinstance(names, Exception):
            raise names
        return {"shop": Publication({name: Mock() for name in names}, frozenset())}

    monkeypatch.setattr(module, "open_chain", lambda *_: Mock(head=lambda: head))
    monkeypatch.setattr(module, "_poll_sources", look)
    monkeypatch.setattr(module, "_POLL_SOURCES_SECONDS", 0.0)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "_written", lambda _: {})
    monkeypatch.setattr(module._Patience, "barrier", lambda *_: 41)
    monkeypatch.setattr(module._Patience, "epoch", lambda *_: SimpleNamespace(**{
        name: getattr(head, name) for name in ("epoch", "tables", "copies", "not_copied")
    }))  # fmt: skip
    return flush("lake", "log", [Source("shop", "", "pub")], timeout=5.0)


@pytest.mark.parametrize("not_copied", [{}, {GONE: "its key is an array"}], ids=["new", "refused"])
def test_a_table_that_is_dropped_while_flush_waits_for_it_is_waited_for_no_more(
    monkeypatch, not_copied
):
    looks = [["public.gone"], ["public.gone"], ConnectionFailedError("busy"), []]
    assert flushed(monkeypatch, looks, not_copied=not_copied) == 40


def test_a_table_that_stays_published_is_waited_for_to_the_end_of_the_time(monkeypatch):
    with pytest.raises(DeadlineError, match=f"without {GONE}"):
        flushed(monkeypatch, [["public.gone"], ["public.gone", "public.later"]])


class Log:
    """The client of a log whose stream is on a timeline, and has committed to a later LSN than any of another timeline."""

    timelines: ClassVar[list[int]] = []

    def __init__(self, _: str) -> None:
        self.timeline = self.timelines.pop(0) if len(self.timelines) > 1 else self.timelines[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(streams={"shop": SimpleNamespace(timeline=self.timeline)})

    def barrier(self, positions: dict[str, int], timeout: float) -> int:
        del timeout
        assert positions == {"shop": 500}
        return 41


def test_a_log_that_reaches_farther_on_another_timeline_does_not_hold_the_position(monkeypatch):
    """After a failover to a standby that lacked the last transactions, the log is beyond every LSN that the new primary writes."""
    monkeypatch.setattr(module, "LogClient", Log)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(Log, "timelines", [1])
    with pytest.raises(DeadlineError, match="is on timeline 2, but the log ends on timeline 1"):
        module._Patience(0.05, None).barrier("log", {"shop": WalPosition(2, 500)})
    monkeypatch.setattr(Log, "timelines", [1, 1, 2])
    assert module._Patience(30.0, None).barrier("log", {"shop": WalPosition(2, 500)}) == 41
