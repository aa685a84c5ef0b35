"""The screen of `top`: faults first, nothing that is not configured, nothing wider or longer than the screen."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from tests.support import statuses
from walsender_bridge.cli.top_view import screen
from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.observability.observation import SILENT, Observation, Process, SourceView
from walsender_bridge.observability.slots_view import SlotsView

NOW = time.time()
GONE = ConnectionFailedError(
    "connection failed: connection to server at 10.0.0.7, port 5432 failed: Connection refused",
    where="10.0.0.7:5432/shop",
    repair="check that the server is running, and that host and port are correct",
)


def source(name: str, error: ConnectionFailedError | None = None) -> SourceView:
    lsns = {f"{each}_lsn": 0x1000 for each in ("server", "logged", "committed", "confirmed")}
    capture = statuses.capture(**lsns)
    server = {"retained_bytes": 3 << 20, "server_lsn": 0x1800, "write_lag": 2.5, "flush_lag": None}
    return SourceView(name, f"tuskline_{name}", None, capture, None if error else server, error)


def observation(
    *,
    faults: int = 0,
    tables: int = 0,
    sources: int = 1,
    processes: int = 3,
    lake: bool = True,
    slots: SlotsView | None = None,
) -> Observation:
    names = [f"shop.public.table_{number}" for number in range(tables)]
    manifest = SimpleNamespace(
        epoch=41,
        term=3,
        published_at=NOW - 7,
        streams={},
        not_copied={},
        views={},
        feeds={},
        tables={
            name: SimpleNamespace(state="live", rows=12_345, reason="", as_of=0, resync="")
            for name in names
        },
    )
    return Observation(
        NOW,
        1,
        [
            Process(f"part-{n}", 100 + n, "running", 0, None, 0.0, 9 << 20, 1.5)
            for n in range(processes)
        ],
        [
            source("shop" if n == 0 else f"source_{n}", GONE if n < faults else None)
            for n in range(sources)
        ],
        None,
        manifest if lake else None,
        slots=slots,
        lake_configured=lake,
    )


def shown(seen: Observation, width: int, height: int) -> list[str]:
    lines = [line.text for line in screen(seen, width, height)]
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    for word in ("None", "{}", "[]", "nan"):
        assert word not in text
    return lines


def test_a_healthy_one_fits_80_by_24():
    assert shown(observation(tables=2), 80, 24) == [
        "version -, epoch 41, published 7 s ago, term 3",
        "source  state      capture        gate  barrier  merge  slot holds",
        "shop    streaming  2.0 kB, 2.5 s  0 B   -        -      3.0 MB",
        "table                state   rows  versions behind  behind",
        "shop.public.table_0  live   12345  -                -",
        "shop.public.table_1  live   12345  -                -",
        "process  state    pid  restarts  memory  CPU",
        "part-0   running  100         0  9.0 MB  1.5 s",
        "part-1   running  101         0  9.0 MB  1.5 s",
        "part-2   running  102         0  9.0 MB  1.5 s",
    ]


def test_without_a_lake_there_is_neither_epoch_nor_merge():
    text = "\n".join(shown(observation(lake=False), 80, 24))
    for word in ("epoch", "merge", "table", "safekeeper", "candidate"):
        assert word not in text


def test_faults_come_first_with_their_causes_and_are_wrapped():
    lines = shown(observation(faults=1, tables=1), 80, 24)
    assert lines[1:4] == [
        "! source shop: connection failed: connection to server at 10.0.0.7, port 5432",
        "  failed: Connection refused (10.0.0.7:5432/shop); check that the server is",
        "  running, and that host and port are correct",
    ]
    assert lines[4].startswith("source ")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10)])
def test_what_finds_no_room_is_counted(width, height):
    seen = observation(faults=9, tables=200, sources=30, processes=20)
    lines = shown(seen, width, height)
    assert len(lines) >= height - 1
    assert lines[1].startswith("! source shop: connection failed")
    text = "\n".join(lines)
    faults, sources, tables, processes = (
        int(found[1]) if (found := re.search(rf"(\d+) more {name}", text)) else 0
        for name in ("problems", "sources", "tables", "processes")
    )
    assert faults > 0
    assert sources + sum(line.startswith(("shop  ", "source_")) for line in lines) == 30
    if width == 80:
        assert tables + sum(line.startswith("shop.") for line in lines) == 200
        assert processes == 20


def test_tables_have_what_room_is_left():
    lines = shown(observation(tables=200), 80, 24)
    assert sum(line.startswith("shop.public.") for line in lines) >= 15
    assert any(line.startswith("... and ") for line in lines)


def test_a_small_screen_has_the_first_columns():
    lines = shown(observation(tables=1), 40, 10)
    assert "source  state      capture        gate" in lines
    assert any(line.startswith("shop.public.table_0") for line in lines)


def test_a_slot_that_is_not_proven_has_no_age():
    row = statuses.slot_copy(state="SUSPECT", reason="not_heard", age=None, lag_bytes=None)
    told = statuses.slots(slots=(replace(row, expected=False),))
    lines = shown(observation(slots=SlotsView(told)), 80, 24)
    assert "app   near       SUSPECT  -    -       not_heard" in lines


def test_a_session_whose_server_sends_nothing_is_named_and_so_is_a_process_that_is_suspended():
    seen = observation(lake=False)
    assert seen.problems == []

    def silent_for(seconds):
        view = replace(seen.sources[0], capture=statuses.capture(silent_seconds=seconds))
        return replace(seen, sources=[view])

    assert silent_for(SILENT - 1).problems == []
    (silent,) = silent_for(SILENT + 1).problems
    assert silent.startswith("the server of shop has WAL to send, but has sent nothing for 121 s")
    assert "slot tuskline_shop" in silent
    one = Process("lake", 100, "running", 0, None, 0.0, suspended=101)
    assert list(one.problems(NOW)) == [
        "process lake is stopped by a signal or a debugger; run kill -CONT 101"
    ]
