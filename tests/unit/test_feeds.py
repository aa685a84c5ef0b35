"""What an epoch does with a change feed, how feeds are named, and how a link has them."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from spark_consumers.decode.entries import ChangeBatch
from spark_consumers.lake.epoch.feed_rows import ABOUT, FeedTarget, feed_rows
from spark_consumers.lake.manifest.feed_version import FeedVersion
from spark_consumers.lake.manifest.table_version import HELD, LIVE, PAUSED, STALE, TableVersion
from spark_consumers.lake.tables.feeds import (
    Append,
    Begin,
    Keep,
    Stop,
    decide,
    without_damaged,
)
from walsender_bridge.config.sections import LakeTablesSection
from walsender_bridge.postgres.change_feed import feed_name, parse_feed
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.postgres.protocol.pgoutput import Column, Relation
from walsender_bridge.postgres.table_layout import feed_of

LAYOUT = (("id", 23, -1), ("body", 25, -1))
MORE = (*LAYOUT, ("n", 23, -1))


def table(path="t1", layout=LAYOUT, **more):
    return TableVersion(path, "iceberg", 7, "", ("id",), (), 0, 0, 3, 16384, layout=layout, **more)


def feed(of="t1", layout=LAYOUT, **more):
    return FeedVersion("shop.public.t", of, table("f1", layout, **more))


def decided(before, after, *, followed=None, sources=None, refused=""):
    return decide(before, followed or after, after, sources, 40, refused)


def test_a_feed_goes_on_where_its_changes_lead_on_and_begins_elsewhere():
    assert decided(feed(), table()) == Append(40)
    assert decided(feed(), table("t2")) == Append(40, is_copied=True)
    # Brought level: where it was, from another LSN on.
    assert decided(feed(), replace(table(), start_lsn=90)) == Append(40, is_copied=True)
    assert decided(replace(feed(), start_lsn=90), replace(table(), start_lsn=90)) == Append(40)
    assert decided(None, table()) == Begin("it is new")
    for state in (PAUSED, STALE, HELD):
        assert decided(feed(), table(state=state)) == Keep()
    assert decided(feed(), table(), refused="no") == Stop("no")
    left = decide(feed(), table("t2"), table("t2"), None, None, "")
    assert left == Begin("its table had left")
    stopped = feed().stopped(12, "damaged")
    assert (stopped.table.state, stopped.table.as_of) == (STALE, 12)
    assert decided(stopped, table()) == Stop("damaged")
    assert isinstance(decided(stopped, table("t2")), Begin)


def test_a_feed_has_its_tables_columns_or_begins():
    more, names = table(layout=MORE), {"id": "id", "body": "body"}
    assert decided(feed(), more, followed=table(), sources=names) == Append(40, False, names)
    # Nothing tells how the columns of a copy came from those that there were.
    assert isinstance(decided(feed(), table("t2", MORE)), Begin)
    assert isinstance(decided(feed(), more, followed=table()), Begin)
    masked = table("t2", masks=(ColumnMask("body", "hash", "key"),))
    assert isinstance(decided(feed(), masked), Begin)
    as_text = replace(table("t2"), text_columns=("body",))
    assert isinstance(decided(feed(), as_text), Begin)


def test_a_feed_is_of_the_epoch_of_its_table():
    paused = table(state=PAUSED, as_of=5, reason="paused")
    shown = feed().shown(paused)
    assert (shown.state, shown.as_of, shown.path) == (PAUSED, 5, "f1")
    assert feed().shown(table()).state == LIVE
    assert feed().stopped(4, "damaged").shown(paused).as_of == 4
    assert without_damaged({"f": feed()}, {"f1": "lost"}, 9)["f"].reason == "lost"
    assert without_damaged({"f": feed()}, {"t1": "lost"}, 9) == {"f": feed()}


def test_a_link_has_feeds_as_they_were():
    for each in (feed(), FeedVersion("shop.public.t", reason="it cannot"), feed(masks=())):
        assert FeedVersion.from_json(each.to_json()) == each


def test_names_of_feeds():
    assert feed_name(parse_feed(True), "shop.public.orders") == "shop.public.orders_changes"
    assert feed_name("log_{table}", 'shop."a.b".c') == 'shop."a.b".log_c'
    assert parse_feed(False) == ""
    for wrong in ("log", "{table}", "", "{table}.x", "{table}{table}_", "a/{table}"):
        with pytest.raises(ValueError, match="is not a name of feeds"):
            parse_feed(wrong)
    rules = [
        LakeTablesSection(pattern="public.audit").rule,
        LakeTablesSection(pattern="public.*", feed="{table}_log").rule,
    ]
    assert feed_of(rules, "shop.public.orders") == "shop.public.orders_log"
    assert feed_of(rules, "shop.public.audit") == feed_of(rules, "shop.sales.x") == ""


def batch(ops, new, old, kinds, unchanged=None, **more):
    count = len(ops)
    numbers = np.arange(count)
    columns = tuple(Column(name, kind, mod, name == "id") for name, kind, mod in LAYOUT)

    def arrays(rows):
        return [
            pa.array([r[0] for r in rows], pa.int32()),
            pa.array([r[1] for r in rows], pa.string()),
        ]

    return ChangeBatch(
        Relation(16384, "public", "t", "d", columns),
        b"",
        np.frombuffer(ops.encode(), np.uint8),
        (numbers + 100).astype(np.uint64),
        np.full(count, 9, np.uint32),
        np.full(count, 1_000_000),
        (numbers + 10).astype(np.uint64),
        np.full(count, 3, np.uint64),
        np.zeros(count, np.uint32),
        arrays(new),
        None if unchanged is None else np.array(unchanged),
        arrays(old),
        np.frombuffer(kinds.encode(), np.uint8)
        * (np.frombuffer(kinds.encode(), np.uint8) != ord("-")),
        **more,
    )


def test_rows_of_changes():
    nothing = (None, None)
    changes = batch(
        "IUUDT",
        [(1, "a"), (1, None), (2, "b"), nothing, nothing],
        [nothing, nothing, (1, None), (2, None), nothing],
        "--KK-",
        [[False, False], [False, True], [False, False], [False, False], [False, False]],
        unrepresentable={1: pa.array([None, None, "NaN", None, None])},
    )
    columns = pa.schema([*ABOUT, ("id", pa.int32()), ("body", pa.string())])
    target = FeedTarget("", columns, columns)
    rows = pa.table(feed_rows(changes, target, (0,)), schema=columns).to_pylist()
    assert [
        (r["_op"], r["id"], r["body"], r["_unchanged"], r["_unrepresentable"]) for r in rows
    ] == [
        ("insert", 1, "a", [], None),
        ("update", 1, None, ["body"], None),
        ("update_before", 1, None, [], None),
        ("update", 2, "b", [], '{"body": "NaN"}'),
        ("delete", 2, None, [], None),
        ("truncate", None, None, [], None),
    ]
    assert [r["_offset"] for r in rows] == [10, 11, 12, 12, 13, 14]
    later = feed_rows(changes, replace(target, after=13), (0,))
    assert later[0].to_pylist() == ["delete", "truncate"]


def test_a_part_of_the_key_that_was_not_sent_is_in_the_old_row():
    changes = batch("U", [(None, "b")], [(1, None)], "K", [[True, True]])
    columns = pa.schema([*ABOUT, ("id", pa.int32()), ("body", pa.string())])
    rows = pa.table(feed_rows(changes, FeedTarget("", columns, columns), (0,)), schema=columns)
    assert [(r["_op"], r["id"], r["_unchanged"]) for r in rows.to_pylist()] == [
        ("update_before", 1, []),
        ("update", 1, ["body"]),
    ]
