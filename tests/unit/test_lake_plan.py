"""What an epoch holds: ranges that end at commits, in every stream at the same version."""

import threading
import time
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa

from spark_consumers.lake.copy.bootstrap import _remove_others, part_bytes
from spark_consumers.lake.copy.initial_copy import _Pace
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.epoch.packed import PackedTable
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.manifest.chain import COPIED, LIVE, Manifest, StreamPosition, TableVersion
from walsender_bridge.change_log.client import CutPoint, StreamCut


def cut(stream, end, lsn):
    return StreamCut(stream, (f"grpc://{stream}",), end, end, lsn, lsn, 1, 1, end * 100)


def commit(version, end, size=100):
    return CutPoint(version, end, end * size, version * 10, version * 10)


def table(state=LIVE, start_lsn=0, offset=1):
    return TableVersion(
        "path", "iceberg", 1, "", ("id",), (), start_lsn, offset, 0, 1, state, timeline=1
    )


def head(copies=None, **tables):
    streams = {s: StreamPosition(1, 10, 10, 5) for s in "ab"}
    return Manifest("lake", 3, 1, 0, 1, 0.0, streams=streams, tables=tables, copies=copies or {})


def packed(name):
    target = Target(name, "public.t", "", pa.schema([]), pa.schema([]), ("id",), 0, 1)
    return PackedTable.of(target, (None, 8))


CUTS = {"a": cut("a", 20, 70), "b": cut("b", 9, 60)}


def test_all_streams_end_at_the_version():
    commits = {"a": [commit(3, 10), commit(7, 20)], "b": [commit(6, 9)]}
    chosen = plan.choose(head(), 8, CUTS, commits)
    assert chosen.version == 8
    assert {s: p.offset for s, p in chosen.streams.items()} == {"a": 20, "b": 9}


def test_3_one_stream_that_is_cut_short_ends_the_epoch_for_all():
    """Stream a has more than an epoch may hold: b ends at the same version, not at its own end."""
    commits = {"a": [commit(3, 10)], "b": [commit(2, 6), commit(6, 9)]}
    chosen = plan.choose(head(), 8, CUTS, commits)
    assert chosen.version == 3
    assert {s: p.offset for s, p in chosen.streams.items()} == {"a": 10, "b": 6}
    assert [c.version for r in chosen.ranges for c in r.cuts] == [3, 2]


def test_a_copy_is_shown_when_the_cut_has_passed_its_lsn():
    commits = {"a": [commit(7, 20)]}
    cuts = {"a": CUTS["a"]}
    ripe = plan.choose(head({"a.public.t": table(COPIED, 70)}), 7, cuts, commits)
    assert ripe.tables["a.public.t"].state == LIVE
    assert ripe.fresh == {"a.public.t"}
    assert not ripe.copies
    unripe = plan.choose(head({"a.public.t": table(COPIED, 71)}), 7, cuts, commits)
    assert not unripe.tables
    assert not unripe.fresh
    assert list(unripe.copies) == ["a.public.t"]


def test_a_stream_that_is_new_begins_where_the_log_is():
    chosen = plan.choose(head(), 8, {**CUTS, "c": cut("c", 50, 80)}, {})
    assert chosen.streams["c"].offset == 50
    assert not [r for r in chosen.ranges if r.stream == "c"]


def test_ranges_end_at_commits_and_leave_nothing_out(monkeypatch):
    monkeypatch.setattr(plan, "RANGE_BYTES", 250)
    commits = {"a": [commit(v, v + 5) for v in range(2, 16)]}
    chosen = plan.choose(head(**{"a.public.t": table()}), 15, {"a": CUTS["a"]}, commits)
    tables = {"a.public.t": packed("a.public.t")}
    tasks = plan.tasks(chosen, tables, {"a": ("x", "y")}, {}, {}, "", "")
    edges = [(t.start, t.end) for t in tasks]
    assert edges[0][0] == 5
    assert edges[-1][1] == 20
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert {end for _, end in edges} <= {c.end_offset for c in commits["a"]}
    assert len(tasks) > 2
    assert all(not t.whole for t in tasks)
    # Each begins with another replica, so that all log servers are read.
    assert [t.addresses for t in tasks[:3]] == [("x", "y"), ("y", "x"), ("x", "y")]


def test_a_fresh_copy_reads_what_the_lake_has_already_and_the_rest_once():
    copied = {"a.public.new": table(COPIED, 60, offset=2)}
    commits = {"a": [commit(7, 20)]}
    start = head(copied, **{"a.public.t": table()})
    chosen = plan.choose(start, 7, {"a": CUTS["a"]}, commits)
    tables = {name: packed(name) for name in chosen.tables}
    late = {"a.public.new": [commit(1, 5)]}
    tasks = plan.tasks(chosen, tables, {"a": ("grpc://a",)}, late, {}, "", "")
    assert [(t.start, t.end, sorted(x.name for x in t.tables)) for t in tasks] == [
        (2, 5, ["a.public.new"]),
        (5, 20, ["a.public.new", "a.public.t"]),
    ]
    assert [sorted(t.whole) for t in tasks] == [[], ["a.public.t"]]


def test_a_copy_removes_what_attempts_have_left_but_no_later_writers(tmp_path):
    for name in ("copy-t1-0-7", "copy-t2-0-7", "copy-t2-0-8", "copy-t10-0-1"):
        (tmp_path / f"{name}.parquet").touch()
    _remove_others(tmp_path, 2, {"copy-t2-0-8.parquet"})
    left = {path.stem for path in tmp_path.iterdir()}
    # A writer that slept must not take away what its successor has copied.
    assert left == {"copy-t2-0-8", "copy-t10-0-1"}


def test_a_limited_copy_is_read_in_smaller_parts():
    assert part_bytes(None) == part_bytes(1e12) == 64 * 2**20
    assert part_bytes(4e6) == 4_000_000
    assert part_bytes(1.0) == 2**20


def test_a_pace_lets_the_next_part_wait():
    stop = threading.Event()
    # Its time begins with it.
    began = time.monotonic()
    pace = _Pace(1e6)
    pace.spent(200_000)
    pace.wait(stop)
    assert 0.2 <= time.monotonic() - began < 5
    pace.spent(10**12)
    stop.set()
    pace.wait(stop)
    _Pace(None).wait(threading.Event())


def test_a_table_that_resumes_is_brought_up_from_where_it_stopped():
    stopped = table("resuming", offset=2)
    chosen = plan.choose(
        head(**{"a.public.t": stopped}), 7, {"a": CUTS["a"]}, {"a": [commit(7, 20)]}
    )
    assert chosen.fresh == {"a.public.t"}
    assert chosen.tables["a.public.t"] == replace(stopped, state=LIVE)


def test_19_a_stream_whose_position_was_trimmed_begins_with_what_is_kept():
    """Nothing that follows needs what is gone: the pipeline sees to that."""
    trimmed = StreamCut("a", ("grpc://a",), 20, 20, 70, 70, 1, 12, 2000)
    copied = {"a.public.t": table(COPIED, 70, offset=15)}
    start = head(copied, **{"a.public.t": table("held")})
    chosen = plan.choose(start, 7, {"a": trimmed}, {"a": [commit(7, 20)]})
    assert [r.start for r in chosen.ranges] == [12]
    assert chosen.tables["a.public.t"].state == LIVE
    assert not chosen.copies
