"""What of a table at its source counts as a change that no message tells, decided without a server."""

from dataclasses import replace
from itertools import combinations, product

import pytest

from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from spark_consumers.lake.tables import noticed, states
from spark_consumers.lake.tables.shape import (
    Partition,
    Publication,
    Shape,
    changed,
    names_rows,
    others_by_now,
    refusal,
)

NAME = "shop.public.t"
ALL = "insert, update, delete, truncate"
A = Partition(20, 10, "700", 20, "public.a", ("id",), born_here=True)
MIDDLE = Partition(30, 10, "701", 0, "public.m", ("id",))
B = Partition(31, 30, "702", 31, "public.b", ("id",))
TREE = Shape(
    oid=10,
    file=0,
    identity=("id",),
    unsent=(),
    columns=((1, "id", 23, "690"), (2, "mood", 90, "690")),
    publication="5 600",
    operations=ALL,
    members=("table 6",),
    labels=((91, "calm", "690"), (92, "cross", "690")),
    composites=((95, "pair", "1:23 2:23"),),
    outputs=((98, "own", "97 690"),),
    parts=(A, MIDDLE, B),
)
PLAIN = replace(TREE, file=10, parts=(), natts=2, born="690")
GENERATED = replace(PLAIN, generated=(2,))
NEWER = (3, "x", 23, "691")
NEW = Partition(40, 10, "710", 40, "public.n", ("id",))


def tree(*parts):
    return replace(TREE, parts=parts)


@pytest.mark.parametrize(
    ("now", "word"),
    [
        (replace(PLAIN, oid=11), "another one created"),
        (replace(PLAIN, born="691"), "another one created with its OID"),
        (replace(PLAIN, column_list="[1]"), "column list"),
        (replace(PLAIN, row_filter="(id > 5)"), "row filter"),
        (replace(PLAIN, members=("table 7",)), "removed from the publication"),
        (replace(PLAIN, members=()), "removed from the publication"),
        (replace(PLAIN, operations="insert"), "sends insert, and sent"),
        (replace(PLAIN, publication="5 601"), "altered"),
        (
            replace(PLAIN, labels=((91, "serene", "691"), (92, "cross", "690"))),
            "'calm' was renamed to 'serene'",
        ),
        (replace(PLAIN, labels=((91, "calm", "692"),)), "'calm' was renamed to 'calm'"),
        (replace(PLAIN, composites=((95, "pair", "1:23"),)), "composite type pair"),
        (replace(PLAIN, outputs=((98, "own", "97 691"),)), "output function of the type own"),
        (replace(PLAIN, file=12, columns=((1, "id", 23, "690"), (2, "mood", 25, "691"))), "type"),
        (replace(PLAIN, file=12, columns=((1, "id", 23, "691"), PLAIN.columns[1])), "rewritten"),
        (replace(PLAIN, columns=PLAIN.columns[:1]), "lost mood"),
        (replace(PLAIN, columns=((1, "id", 23, "690"), (2, "x", 90, "691"))), "'mood' was renamed"),
        (replace(PLAIN, columns=((1, "id", 20, "691"), PLAIN.columns[1])), "another type for id"),
        # A swap of names, and a name that goes to another column while a third gets its own.
        (replace(PLAIN, columns=((1, "mood", 90, "691"), (2, "id", 23, "691"))), "renamed"),
        (replace(PLAIN, columns=((2, "id", 90, "691"), (3, "mood", 90, "691"))), "lost id"),
        (replace(PLAIN, columns=(*PLAIN.columns, NEWER), filled=(3,)), "with a default"),
        # What filled the new column is not there to be seen any more.
        (replace(PLAIN, file=12, columns=(*PLAIN.columns, NEWER)), "rewritten or truncated"),
        (replace(PLAIN, file=12, columns=(*PLAIN.columns, NEWER), filled=(3,)), "with a default"),
        # Column 3 came and went: its values may have come under the name of the one that is there.
        (replace(PLAIN, natts=4, columns=(*PLAIN.columns, (4, "x", 23, "692"))), "dropped again"),
        (replace(GENERATED, generated=()), "'mood' is no longer generated"),
    ],
)
def test_what_a_table_lacks_is_said(now, word):
    before = GENERATED if "generated" in word else PLAIN
    assert word in str(changed(before, now))


@pytest.mark.parametrize(
    "now",
    [
        PLAIN,
        replace(PLAIN, file=12),
        replace(PLAIN, natts=4, columns=(*PLAIN.columns, NEWER, (4, "y", 23, "692"))),
        replace(PLAIN, natts=4, columns=(*PLAIN.columns, NEWER)),
        GENERATED,
        replace(PLAIN, columns=((1, "id", 23, "691"), PLAIN.columns[1])),
        replace(PLAIN, filled=(1, 2)),
        replace(PLAIN, members=("schema 8", "table 6")),
        replace(PLAIN, labels=(*PLAIN.labels, (93, "sad", "691"))),
        replace(PLAIN, labels=(), composites=(), outputs=()),
        replace(PLAIN, outputs=(*PLAIN.outputs, (99, "newer", "96 691"))),
        replace(PLAIN, identity=None),
    ],
)
def test_what_the_stream_tells_or_nobody_sees_is_no_change(now):
    assert changed(PLAIN, now) is None


@pytest.mark.parametrize(
    ("sent", "names", "others"),
    [
        (("id", "mood", "x"), ("x", "y"), False),
        (("id", "mood", "x", "y"), ("x", "y"), False),
        (("id", "mood", "x", "y"), ("y", "x"), True),
        (("id", "mood", "x"), ("y", "x"), True),
        # Of what the shape does not have, another look tells.
        (("id", "mood", "z"), ("x", "y"), False),
    ],
)
def test_added_columns_are_others_once_their_names_have_moved(sent, names, others):
    added = ((3, names[0], 23, "691"), (4, names[1], 23, "691"))
    now = replace(PLAIN, columns=(*PLAIN.columns, *added))
    assert others_by_now(sent, now) == others


@pytest.mark.parametrize(
    ("names", "word"),
    [
        (("id", "mood"), ""),
        (("id", "mood", "x"), ""),
        (("id", "mood", "x", "y"), ""),
        (("id", "mood", "y"), "'y' was added"),
        (("id", "mood", "z"), "'z' was added"),
    ],
)
def test_columns_that_the_lake_took_unseen_are_compared_by_the_next_look(names, word):
    layout = tuple((name, 23, -1) for name in names)
    now = replace(PLAIN, columns=(*PLAIN.columns, NEWER, (4, "y", 23, "691")), natts=4)
    found = noticed.outdated(version(PLAIN, layout=layout), now, Publication({}, frozenset()))
    assert word in str(found) if word else found is None


@pytest.mark.parametrize(
    ("now", "empty", "word"),
    [
        (tree(A), (), "public.m was dropped or detached"),
        (tree(MIDDLE, B), (), "public.a was dropped or detached"),
        (tree(replace(A, link="711"), MIDDLE, B), (), "public.a was detached and attached"),
        (tree(replace(A, parent=30), MIDDLE, B), (), "public.a was detached and attached"),
        (tree(A, replace(MIDDLE, link="711"), B), (), "public.m was detached and attached"),
        (tree(replace(A, file=21), MIDDLE, B), (), "public.a was truncated or rewritten"),
        (tree(A, MIDDLE, B, NEW), (), "public.n was attached with rows"),
        # Its parent came with it, perhaps.
        (
            tree(
                A, MIDDLE, B, replace(NEW, oid=41, file=0), replace(NEW, parent=41, born_here=True)
            ),
            (),
            "public.n was attached with rows",
        ),
        (tree(replace(A, name="other.a"), MIDDLE, B), (), ""),
        (tree(A, MIDDLE, B, NEW), {40}, ""),
        (tree(A, MIDDLE, B, replace(NEW, file=44)), {40}, "new partition public.n was truncated"),
        (tree(A, MIDDLE, B, replace(NEW, file=44, born_here=True)), (), "public.n was truncated"),
        (tree(A, MIDDLE, B, replace(NEW, born_here=True)), (), ""),
        (tree(A, MIDDLE, B, replace(NEW, parent=30, born_here=True)), (), ""),
        (tree(A, MIDDLE, B, replace(NEW, file=0)), (), ""),
    ],
)
def test_partitions_are_followed_unless_their_rows_come_or_go_unsent(now, empty, word):
    found = changed(TREE, now, empty)
    assert word in str(found) if word else found is None


def test_of_all_trees_of_two_partitions_those_are_taken_that_lose_and_bring_no_rows():
    """Each partition is away, as it was, truncated, or attached again; new, born here or empty: all at once."""
    olds = [None, A, replace(A, file=21), replace(A, link="720")]
    news = [None, NEW, replace(NEW, born_here=True)]
    for old, new, empty in product(olds, news, [(), {NEW.oid}]):
        now = tree(*filter(None, (old, new)))
        keeps = old == A
        brings = new is not None and not new.born_here and not empty
        found = changed(tree(A), now, empty)
        assert (found is None) == (keeps and not brings), (old, new, empty, found)


def test_a_table_all_of_whose_columns_were_altered_may_have_been_a_partition():
    """ATTACH and DETACH do that, and what was committed in between was sent as another table's."""
    altered = tuple((number, name, kind, "691") for number, name, kind, _ in PLAIN.columns)
    lent = replace(PLAIN, columns=altered, via_root=True)
    assert "partition of another table" in str(changed(PLAIN, lent))
    assert "partition of another table" in str(
        changed(PLAIN, replace(lent, columns=(*altered, NEWER)))
    )
    assert changed(lent, lent) is None
    assert changed(PLAIN, replace(lent, via_root=False)) is None
    assert changed(PLAIN, replace(lent, columns=(altered[0], PLAIN.columns[1]))) is None
    empty = replace(PLAIN, columns=(), via_root=True)
    assert changed(empty, empty) is None


def test_of_a_column_that_is_not_sent_nothing_is_said():
    listed = replace(PLAIN, column_list="[1]")
    assert changed(listed, replace(listed, columns=PLAIN.columns[:1])) is None
    assert changed(listed, replace(listed, columns=(*PLAIN.columns, NEWER), filled=(3,))) is None
    assert "lost id" in str(changed(listed, replace(listed, columns=PLAIN.columns[1:])))


def test_every_column_that_is_not_what_it_was_shows():
    """Names go to other columns, columns go, and come filled or not: all small tables against each other."""
    columns = [(n, name, 23, "690") for n in (1, 2, 3) for name in "ab"]
    tables = [
        found
        for size in (1, 2)
        for found in combinations(columns, size)
        if len({c[0] for c in found}) == len({c[1] for c in found}) == size
    ]
    for before, now in product(tables, tables):
        added = tuple(c[0] for c in now if c[0] > max(c[0] for c in before))
        for filled in ((), added):
            found = changed(
                replace(PLAIN, columns=before), replace(PLAIN, columns=now, filled=filled)
            )
            follows = set(before) <= set(now) and not filled
            assert (found is None) is follows, (before, now, filled, found)


def test_a_shape_is_written_without_what_is_not_compared_and_read_again():
    for shape in (TREE, PLAIN, replace(PLAIN, identity=None, row_filter='"x" > 1')):
        again = Shape.load(shape.dump())
        assert changed(again, shape) is None
        assert again.dump() == shape.dump()
        assert again.relations == shape.relations
    assert "\n" not in TREE.dump()


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "part", "fits"),
    [
        (("id",), ("id",), True),
        (("id",), ("code", "id"), True),
        (("id",), None, True),
        (("id",), (), True),
        (("id",), ("code",), False),
        (("a", "b"), ("a",), False),
        (None, None, True),
        (None, (), True),
        (None, ("id",), False),
        ((), ("id",), False),
        ((), None, True),
    ],
)
def test_whether_a_partition_names_the_rows_of_its_table(root, part, fits):
    assert names_rows(root, part) is fits
    shape = replace(tree(replace(A, identity=part)), identity=root)
    found = refusal(shape)
    assert (found is None) is fits
    if found is not None:
        assert "public.a" in found.reason
        assert found.repair == "ALTER TABLE public.a REPLICA IDENTITY FULL"


def test_what_is_not_sent_is_refused_by_name():
    assert refusal(TREE) is None
    assert refusal(tree(replace(MIDDLE, identity=("code",)))) is None
    found = refusal(replace(PLAIN, unsent=("region",)))
    assert found is not None
    assert "region" in found.reason
    found = refusal(replace(PLAIN, operations="insert, truncate"))
    assert found is not None
    assert found.reason == "the publication does not send update, delete"


@pytest.mark.parametrize(
    ("kind", "repair"),
    [("unlogged", "public.a SET LOGGED"), ("foreign", "DETACH PARTITION public.a")],
)
def test_what_is_not_in_the_wal_is_refused_by_name(kind, repair):
    found = refusal(tree(replace(A, unlogged=kind), B))
    assert found is not None
    assert "public.a is" in found.reason
    assert kind in found.reason
    assert repair in found.repair
    found = refusal(replace(PLAIN, unlogged=kind))
    assert found is not None
    assert kind in found.reason
    # It is asked anew with each look.
    assert refusal(Shape.load(replace(PLAIN, unlogged=kind).dump())) is None


# -- what becomes of tables -----------------------------------------------------------------------------


def version(shape, **changes):
    made = TableVersion("path", "iceberg", 1, "", ("id",), (), 5, 1, 10, 10)
    return replace(made, shape=shape.dump() if shape else "", **changes)


def head(table, copy=None):
    return Manifest(
        *("lake", 9, 40, 39, 2, 0.0),
        streams={"shop": StreamPosition(1, 100, 7, 30)},
        tables={NAME: table} if table else {},
        copies={NAME: copy} if copy else {},
    )


def look(shape):
    return Publication({"public.t": shape}, frozenset())


FEWER = replace(TREE, parts=(A,))


def compared(start, seen, later=(), holds=True):
    return noticed.compare(start, "shop", seen, later, holds=holds)


@pytest.mark.parametrize(
    ("before", "holds", "after", "is_told"),
    [
        ("live", True, "held", True),
        ("live", False, "stale", True),
        ("paused", True, "paused", True),
        ("resuming", True, "stale", True),
        ("held", True, "held", False),
        ("stale", True, "stale", False),
        ("left", True, "left", False),
    ],
)
def test_a_table_whose_source_changed_is_copied_again(before, holds, after, is_told):
    made, told = compared(head(version(TREE, state=before)), look(FEWER), holds=holds)
    assert (made.tables[NAME].state, NAME in told) == (after, is_told)
    assert bool(made.tables[NAME].resync) is is_told
    # Once: what is to be copied again already is not told again.
    if is_told:
        assert compared(made, look(FEWER), holds=holds) == (made, {})
        assert states.wanted_copies(made, {NAME}) == ({NAME} if after != "paused" else set())


def test_the_copy_that_has_the_change_stays_and_one_that_lacks_it_goes():
    start = head(version(TREE, resync="asked"), version(FEWER, state="copied"))
    made, told = compared(start, look(FEWER))
    assert (made.tables[NAME].state, list(made.copies), list(told)) == ("held", [NAME], [NAME])
    assert compared(made, look(FEWER)) == (made, {})
    made, told = compared(made, look(TREE))
    assert (list(made.copies), list(told)) == ([], [NAME])
    assert states.wanted_copies(made, {NAME}) == {NAME}


def test_what_came_after_the_look_began_is_not_judged_by_it():
    start = head(version(FEWER))
    assert compared(start, look(TREE), {NAME}) == (start, {})
    assert compared(start, look(TREE))[1]


def test_a_lake_without_shapes_takes_over_what_is_seen_first():
    made, told = compared(head(version(None)), look(PLAIN))
    assert (told, Shape.load(made.tables[NAME].shape).dump()) == ({}, PLAIN.dump())
    _, told = compared(head(version(None, relation_id=9)), look(PLAIN))
    assert "another one created" in told[NAME]
    _, told = compared(head(version(None)), look(replace(PLAIN, unsent=("id",))))
    assert "does not send" in told[NAME]


def test_a_partitioned_table_without_a_shape_is_copied_again_once():
    """Its partitions may have been truncated, dropped or attached, which an earlier version did not see."""
    made, told = compared(head(version(None)), look(TREE))
    assert "did not follow its partitions" in told[NAME]
    assert (made.tables[NAME].state, states.wanted_copies(made, {NAME})) == ("held", {NAME})
    assert compared(made, look(TREE)) == (made, {})
    assert compared(head(version(TREE)), look(TREE))[1] == {}


def test_what_is_harmless_is_compared_with_from_then_on():
    grown = tree(A, MIDDLE, B, replace(NEW, born_here=True))
    made, told = compared(head(version(TREE)), look(grown))
    assert not told
    _, told = compared(made, look(tree(A, MIDDLE, B, replace(NEW, file=44, born_here=True))))
    assert "public.n was truncated" in told[NAME]


GONE = 50


def told(table, looked=("shop",), oids=(GONE,)):
    tables, reasons = noticed.after_partition_changes({NAME: table}, {NAME: set(oids)}, looked)
    return tables[NAME], reasons.get(NAME)


def test_a_partition_of_which_only_the_log_tells_is_gone():
    assert told(version(TREE), oids=()) == (version(TREE), None)
    assert "OID 50 had rows" in str(told(version(TREE))[1])
    # Nothing is known of what an earlier version copied.
    assert told(version(None)) == (version(None), None)


def test_a_partition_of_which_the_log_tells_before_the_source_answers_is_judged_by_the_next_look():
    table, reason = told(version(TREE), looked=())
    assert reason is None
    assert noticed.partitions(table)[GONE] == 0
    assert told(table, looked=()) == (table, None)
    assert GONE not in noticed.known(head(table), "shop")
    _, reasons = compared(head(table), look(TREE))
    assert "with OID 50 was dropped or detached" in reasons[NAME]
    came = Partition(GONE, 10, "712", GONE, "public.g", ("id",))
    made, reasons = compared(head(table), look(tree(*TREE.parts, replace(came, born_here=True))))
    assert (reasons, "OID" in made.tables[NAME].shape) == ({}, False)
    # It had rows, and is another one than it was then.
    seen = Publication({"public.t": tree(*TREE.parts, came)}, frozenset({GONE}))
    assert "public.g was attached" in compared(head(table), seen)[1][NAME]


def test_a_partition_that_was_found_empty_has_no_change_from_before():
    came = Partition(GONE, 10, "712", GONE, "public.g", ("id",))
    seen = Publication({"public.t": tree(*TREE.parts, came)}, frozenset({GONE}), 700)
    made, reasons = compared(head(version(TREE)), seen)
    assert not reasons
    known = noticed.partitions(made.tables[NAME])
    assert known == {20: 0, 30: 0, 31: 0, GONE: 700}
    # It stays so, whenever the next look is.
    again, _ = compared(made, replace(seen, empty=frozenset(), lsn=900))
    assert noticed.partitions(again.tables[NAME]) == known
    assert "public.g had rows" in str(told(again.tables[NAME], looked=())[1])


def test_flush_names_tables_that_are_not_what_their_source_has():
    assert noticed.unshown(head(version(TREE)), {"shop": look(TREE)}) == {}
    assert "dropped" in noticed.unshown(head(version(TREE)), {"shop": look(FEWER)})[NAME]
    assert "not compared" in noticed.unshown(head(version(None)), {"shop": look(PLAIN)})[NAME]
    assert "did not follow" in noticed.unshown(head(version(None)), {"shop": look(TREE)})[NAME]
    assert noticed.unshown(head(version(TREE, state="paused")), {"shop": look(FEWER)}) == {}
    assert noticed.known(head(version(TREE)), "shop") == {10, 20, 30, 31}
