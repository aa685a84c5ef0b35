"""A copy in chunks, each from a later snapshot: what it lacks makes it the table, or it is copied again, and that seldom."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from spark_consumers.decode.entries import ChangeBatch
from spark_consumers.fold.keyed import fold
from spark_consumers.lake.copy.chunk import continued
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.tables.chunks import missing, numbers_of
from spark_consumers.lake.tables.origin import Joins, joins
from spark_consumers.lake.tables.shape import Shape
from spark_consumers.snapshot.key_ranges import (
    KeyRange,
    Sample,
    chunk_end,
    is_clustered,
    least_uuid,
    most_of_one_key,
    ordinal_of,
    percent,
    pieces,
)
from tests.unit.test_fold import KEY, Batch, D, I, T, U, apply, histories
from tests.unit.test_shape import NEW as NEW_PART
from tests.unit.test_shape import TREE
from walsender_bridge.change_log.entry import NAMED_OTHERWISE
from walsender_bridge.postgres.protocol.pgoutput import Column, Relation

RELATION = Relation(
    7,
    "public",
    "t",
    "d",
    (
        Column("id", 20, -1, is_key=True),
        *(Column(name, 25, -1, is_key=False) for name in "ab"),
        Column("c", 701, -1, is_key=False),
    ),
)

COLUMNS = ("id", "a", "b", "c")


def changes(events, lsns, relation=RELATION):
    made = Batch(events)
    numbers = np.arange(len(events))
    return ChangeBatch(
        relation=relation,
        schema_hash=b"",
        ops=made.ops,
        commit_lsn=np.array(lsns, np.uint64),
        xid=numbers.astype(np.uint32),
        commit_time=numbers,
        offset=numbers.astype(np.uint64),
        version=numbers.astype(np.uint64),
        sequence=numbers.astype(np.uint32),
        columns=made.columns,
        unchanged=made.unchanged,
        old_columns=made.old_columns,
        old_kind=made.old_kind,
    )


def states(table, events):
    """The table before each of the events, and after the last."""
    found = [dict(table)]
    for op, row, skipped, old, _ in events:
        now = dict(found[-1])
        if op == T:
            now.clear()
        before = now.pop((old or row)[:1]) if op in {U, D} else ()
        if op in {I, U}:
            now[row[:1]] = tuple(before[c] if c in skipped else row[c] for c in range(4))
        found.append(now)
    return found


@st.composite
def copies(draw):
    """A history, the LSNs of its commits, chunks, and the rows that these have."""
    table, events, after = draw(histories(identity="d"))
    # Some events share a transaction. Chunks are read all along the history, most often in its middle.
    choose = draw(st.randoms(use_true_random=False))
    lsns = np.cumsum([choose.choice([0, 10, 10, 10]) for _ in events])
    uppers = sorted(choose.sample(range(1, 6), choose.randint(1, 3)))
    last = int(lsns[-1]) + 10
    at = sorted(choose.randint(0, last) // 10 * 10 for _ in range(len(uppers) + 1))
    chunks = tuple(zip([*uppers, None], at, strict=True))
    then = states(table, events)
    assert then[-1] == after
    copied: dict[tuple[int, ...], tuple[object, ...]] = {}
    begin = float("-inf")
    for end, lsn in chunks:
        state = then[int((lsns < lsn).sum())]
        limit = float("inf") if end is None else end
        copied |= {key: row for key, row in state.items() if begin <= key[0] < limit}
        begin = limit
    return events, lsns, chunks, copied, after


@settings(max_examples=200, deadline=None)
@given(copies(), st.integers(0, 40))
def test_what_a_copy_in_chunks_lacks_makes_it_the_table(drawn, cut):
    events, lsns, chunks, copied, after = drawn
    start = chunks[-1][1]
    lacks, reasons = [], set()
    for part in (slice(None, cut), slice(cut, None)):
        if events[part]:
            found, reason = missing(
                changes(events[part], lsns[part]), start, chunks, ("id",), COLUMNS
            )
            lacks += [found] if len(found) else []
            reasons |= {reason} - {None}
    event(f"copied again: {reasons}")
    within = (lsns >= chunks[0][1]) & (lsns < start)
    seen = [op for (op, *_), inside in zip(events, within, strict=True) if inside]
    moves = [
        e
        for e, inside in zip(events, within, strict=True)
        if inside and e[0] == U and e[3] and e[2]
    ]
    if reasons:
        assert T in seen or moves
        return
    assert len(chunks) == 1 or T not in seen
    assert (apply(copied, fold(lacks, KEY)) if lacks else copied) == after


def test_most_copies_are_not_made_again():
    """A table whose keys change during its copy needs another one only where a value was not sent."""
    chunks = ((50, 100), (None, 200))
    batch = changes(
        [
            (U, (70, "x", "y", 2.0), (), (10, None, None, None), "K"),
            (U, (20, "x", "y", 2.0), (), (80, None, None, None), "K"),
            (U, (21, "x", None, 2.0), {2}, (22, None, None, None), "K"),
            (U, (81, "x", None, 2.0), {2}, (82, None, None, None), "K"),
            (U, (83, "x", None, 2.0), {2}, (23, None, None, None), "K"),
        ],
        [150] * 5,
    )
    found, reason = missing(batch, 200, chunks, ("id",), COLUMNS)
    assert reason is None
    assert Counter(found.ops.tolist()) == {D: 2, I: 1, U: 1}
    batch = changes([(U, (24, "x", None, 2.0), {2}, (84, None, None, None), "K")], [150])
    assert "TOAST" in (missing(batch, 200, chunks, ("id",), COLUMNS)[1] or "")


def relation(names, key, identity="d"):
    kinds = {column.name: column.type_oid for column in RELATION.columns}
    return replace(
        RELATION,
        replica_identity=identity,
        columns=tuple(Column(n, kinds.get(n, 20), -1, is_key=n in key) for n in names),
    )


@pytest.mark.parametrize(
    "other",
    [
        relation(COLUMNS, {"a"}, "i"),
        relation(COLUMNS, COLUMNS, "f"),
        relation(("b", "a", "id", "c"), {"id"}),
        relation(("other", "a", "b", "c"), set()),
    ],
    ids=["another identity", "no key", "names that moved", "another table"],
)
def test_an_update_of_a_key_that_does_not_tell_the_old_one_is_noticed(other):
    chunks = ((50, 100), (None, 200))
    # The row was in the first chunk, and is in the second: the copy has it twice, and lacks nothing by the new key.
    moved = [(U, (70, "x", "y", 2.0), (), None, "")]
    assert "another key" in (
        missing(changes(moved, [150], other), 200, chunks, ("id",), COLUMNS)[1] or ""
    )
    for lsn in (90, 200):
        found, reason = missing(changes(moved, [lsn], other), 200, chunks, ("id",), COLUMNS)
        assert reason is None
        assert len(found) == (lsn >= 200)
    # A partition with another identity is described as its table, and named apart.
    batch = changes(moved, [150])
    batch.partitions = [(0, 0, NAMED_OTHERWISE)]
    assert "partitions" in (missing(batch, 200, chunks, ("id",), COLUMNS)[1] or "")
    batch.partitions = [(0, 0, 77), (5, 0, NAMED_OTHERWISE)]
    assert missing(batch, 200, chunks, ("id",), COLUMNS)[1] is None
    # A column that came at the end is none of these.
    later = missing(changes(moved, [150]), 200, chunks, ("id",), (*COLUMNS, "later"))
    assert later[1] is None


def test_each_chunk_has_the_shape_of_its_snapshot():
    first = TableVersion(
        *("p", "iceberg", 1, "", ("id",), (), 90, 1, 0, 10, "copied"),
        timeline=1,
        shape=TREE.dump(),
        chunks=((5, 90),),
    )
    with_new = replace(TREE, parts=(*TREE.parts, replace(NEW_PART, born_here=True)))
    later = continued(first, replace(first, start_lsn=200), with_new, ())
    assert isinstance(later, TableVersion)
    # What a chunk has of a partition that goes before anybody has looked at the catalog.
    assert "public.n was dropped" in str(continued(later, first, TREE, ()))
    assert isinstance(continued(first, first, TREE, ()), TableVersion)
    attached = replace(TREE, parts=(*TREE.parts, NEW_PART))
    assert "attached with rows" in str(continued(first, first, attached, ()))
    known = continued(first, replace(first, start_lsn=200), attached, {NEW_PART.oid})
    assert isinstance(known, TableVersion)
    assert Shape.load(known.shape).parts[-1].empty_at == 200
    for other in (
        replace(first, timeline=2),
        replace(first, system_id=7),
        replace(first, relation_id=7),
    ):
        assert isinstance(continued(first, other, TREE, ()), str)
    assert "its key" in str(continued(first, replace(first, key=("a",)), TREE, ()))


def test_a_copy_is_not_shown_before_its_last_chunk():
    copy = TableVersion("p", "iceberg", 1, "", ("id",), (), 90, 1, 0, 7, "copied", timeline=1)
    for chunks, expected in [
        ((), Joins.NOW),
        (((5, 90),), Joins.LATER),
        (((5, 80), (None, 90)), Joins.NOW),
    ]:
        partial = TableVersion.from_json({**copy.to_json(), "chunks": [list(c) for c in chunks]})
        assert partial.chunks == chunks
        assert joins(partial, 1, 100) is expected


UUIDS = Relation(
    7,
    "public",
    "t",
    "d",
    (Column("id", 2950, -1, is_key=True), *RELATION.columns[1:]),
)


def of_uuids(batch):
    """The same changes of a table whose keys are UUIDs in the same order."""

    def key(number):
        return None if number is None else least_uuid(number << 40)

    def columns(old):
        return [pa.array([key(n) for n in old[0].to_pylist()], pa.string()), *old[1:]]

    old = batch.old_columns
    return replace(
        batch,
        relation=UUIDS,
        columns=columns(batch.columns),
        old_columns=None if old is None else columns(old),
    )


@settings(max_examples=100, deadline=None)
@given(copies())
def test_a_copy_in_chunks_of_uuids_lacks_what_one_of_integers_lacks(drawn):
    events, lsns, chunks, *_ = drawn
    if not events:
        return
    batch, start = changes(events, lsns), chunks[-1][1]
    found, reason = missing(batch, start, chunks, ("id",), COLUMNS)
    ranges = tuple((None if end is None else end << 40, lsn) for end, lsn in chunks)
    of_uuid, same_reason = missing(of_uuids(batch), start, ranges, ("id",), COLUMNS)
    assert same_reason == reason
    assert of_uuid.offset.tolist() == found.offset.tolist()
    assert of_uuid.ops.tolist() == found.ops.tolist()


# -- how a table is divided -------------------------------------------------------------------------


def sample(keys, size=1000, oid=1):
    return Sample(("public", f"t{oid}"), oid, size, np.array(keys, np.int64))


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), min_size=1, max_size=3),
    st.integers(1, 3000),
    st.integers(1, 300),
)
def test_every_key_is_in_one_range_of_one_chunk(keys, chunk_bytes, piece_bytes):
    samples = [sample(some, oid=number) for number, some in enumerate(keys)]
    begin = None
    ends: list[int | None] = []
    ranges: dict[int, list[tuple[int | None, int | None]]] = {
        number: [] for number in range(len(keys))
    }
    while not ends or ends[-1] is not None:
        end = chunk_end(samples, begin, chunk_bytes)
        for part in pieces(samples, "id", begin, end, piece_bytes):
            ranges[part.oid].append((part.begin, part.end))
        assert end is None or begin is None or end > begin
        ends.append(end)
        begin = end
    for found in ranges.values():
        assert found[0][0] is None
        assert found[-1][1] is None
        assert all(a[1] == b[0] is not None for a, b in pairwise(found))
    assert len(ends) <= 2 + 3000 // chunk_bytes * 2 + sum(map(len, keys))


def test_chunks_have_about_the_bytes_that_are_wanted():
    samples = [
        sample(range(0, 100_000, 10), 64_000),
        sample(range(100_000, 150_000, 10), 32_000, 2),
    ]
    begin, chunks = None, []
    while (end := chunk_end(samples, begin, 10_000)) is not None:
        chunks.append(end)
        begin = end
    assert 8 <= len(chunks) <= 10
    assert max(b - a for a, b in pairwise(chunks)) < 1.2 * 15_700
    assert len(list(pieces(samples, "id", chunks[2], chunks[3], 1_000))) >= 8


@pytest.mark.parametrize("order", ["up", "down", "mostly", "shuffled"])
def test_only_a_table_in_the_order_of_its_key_is_read_in_chunks(order, seed):
    print(f"seed {seed}")
    choose = np.random.default_rng(seed)
    keys = np.arange(2000)
    if order == "down":
        keys = keys[::-1]
    if order == "shuffled":
        choose.shuffle(keys)
    if order == "mostly":
        # Updated rows move to the table's end.
        moved = choose.choice(2000, 40, replace=False)
        keys = np.concatenate([np.delete(keys, moved), keys[moved]])
    assert is_clustered([sample(keys), sample([3, 1, 2], 10, 2)], 100) is (order != "shuffled")


def test_a_sample_is_of_few_blocks():
    assert percent(10, 80_000, 64 << 20) == 100.0
    assert 10_000 < percent(128 << 20, 1 << 40, 64 << 20) / 100 * (128 << 20) <= 50_000


@given(st.lists(st.uuids(), min_size=1))
def test_uuids_are_divided_in_the_order_of_postgresql(uuids):
    """PostgreSQL compares their bytes. All with the same first eight are in one range."""
    texts = [str(each) for each in sorted(uuids, key=lambda each: each.bytes)]
    numbers = [ordinal_of(text) for text in texts]
    assert numbers == sorted(numbers)
    assert numbers_of(pa.array([*texts, None], pa.string()))[:-1].tolist() == numbers
    for text, number in zip(texts, numbers, strict=True):
        least = least_uuid(number)
        assert ordinal_of(least) == number
        assert UUID(least).bytes <= UUID(text).bytes
        assert -(2**63) <= number < 2**63


def test_a_range_of_uuids_is_asked_for_as_such():
    one = KeyRange(("public", "t"), 7, "id", ordinal_of("0190" + "0" * 28), None, is_uuid=True)
    (bound,) = one.bounds
    assert bound.as_string() == "\"id\" >= '01900000-0000-0000-0000-000000000000'::uuid"


def test_a_key_with_many_rows_is_weighed():
    samples = [sample([1, 1, 1, 2], 4000), sample([2, 3], 1000, 2), sample([], 0, 3)]
    assert most_of_one_key(samples) == 3000
    assert most_of_one_key(samples[1:]) == 500
    assert most_of_one_key(samples[2:]) == 0
