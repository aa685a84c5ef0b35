"""Every order of unsent changes, looks, copies, epochs and flushes of one table: `noticed` and `shape` as they are.

The source's table is one partition whose file is replaced by each change, so a version of the table in the lake has the
changes up to that of the snapshot it was copied from, and nothing else tells them apart. A rotation changes no row: the
partition gets another name, and a new, empty one gets its name. A copy reads its part by name.

Another partition (`leaf`) comes, has rows, and goes. Its rows are in the log, by which an epoch applies them; that it goes
is not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest

from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from spark_consumers.lake.tables import noticed, shape, states
from spark_consumers.lake.tables.shape import Partition, Publication, Shape
from spark_consumers.snapshot import same_relation
from spark_consumers.snapshot.same_relation import RelationAnswer

NAME = "shop.public.t"
CHANGES = 3
DEPTH = 10


#: The rows of a copy that found the part's name taken by another partition.
NOTHING = -1


@dataclass(frozen=True, order=True)
class Moment:
    """How many changes there were, whether the partition was rotated, and what became of the leaf."""

    changes: int = 0
    rotated: bool = False
    leaf: int = 0

    @property
    def rows(self) -> int:
        return self.changes + (LEAF_ROWS if self.leaf in {FILLED, MADE} else 0)

    @property
    def is_logged(self) -> bool:
        return self.leaf > EMPTY

    @property
    def lsn(self) -> int:
        return LEAF_LSN + 1 if self.is_logged else LEAF_LSN - 1


#: What becomes of the leaf: attached without rows, then filled; or made as a partition and filled; then dropped or
#: detached, and attached again without the rows; or truncated.
EMPTY, FILLED, MADE, GONE, BACK, TRUNCATED = range(1, 7)
AFTER = {
    0: (EMPTY, MADE),
    EMPTY: (FILLED,),
    FILLED: (GONE,),
    MADE: (GONE, TRUNCATED),
    GONE: (BACK,),
}
LEAF, LEAF_ROWS, LEAF_LSN = 30, 1_000, 50


def at_source(now: Moment) -> Shape:
    name = "public.a_old" if now.rotated else "public.a"
    parts = [Partition(20, 10, "7", 100 + now.changes, name, ("id",))]
    if now.rotated:
        parts.append(Partition(21, 10, "8", 21, "public.a", ("id",), born_here=True))
    if now.leaf not in {0, GONE}:
        link, file = "12" if now.leaf == BACK else "11", 31 if now.leaf == TRUNCATED else LEAF
        made = now.leaf in {MADE, TRUNCATED}
        parts.append(Partition(LEAF, 10, link, file, "public.leaf", ("id",), born_here=made))
    sent = ", ".join(shape.OPERATIONS)
    return Shape(10, 0, ("id",), (), (), "5 6", sent, ("m",), parts=tuple(parts))


def version(snapshot: Moment, rows: int) -> TableVersion:
    """A copy of that snapshot; its `rows` say which changes are in it, its offset whether the leaf's rows came before."""
    dump, offset = at_source(snapshot).dump(), 1 + snapshot.is_logged
    return TableVersion(
        "p", "iceberg", 1, "", ("id",), (), 5, offset, rows, 10, shape=dump, timeline=1
    )


@dataclass(frozen=True)
class World:
    """`look`, `copying`, `flushing`: when what is under way began, if something is.

    `overtaken`: a copy arrived, or the log told of a partition, since the look began. `read`: what the copy's part gave. `copies`: how many were begun,
    and `failed`. `logged`: whether the leaf's rows were in the log when the flush began.
    """

    head: Manifest
    now: Moment = Moment()
    look: Moment | None = None
    overtaken: bool = False
    copying: Moment | None = None
    read: int | None = None
    flushing: Moment | None = None
    logged: bool = False
    copies: int = 0
    failed: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """What the future depends on."""
        tables = tuple(
            (v.rows, v.offset, v.state, bool(v.resync), v.shape)
            for found in (self.head.tables, self.head.copies)
            for v in found.values()
        )
        flushing = (self.flushing, self.logged)
        under_way = (self.look, self.overtaken, self.copying, self.read, flushing)
        return (tables, len(self.head.copies), self.now, under_way, self.copies, self.failed)


def look_at(seen: Moment, head: Manifest) -> Publication:
    is_empty = seen.leaf in {EMPTY, BACK} and LEAF not in noticed.known(head, "shop")
    return Publication(
        {"public.t": at_source(seen)}, frozenset({LEAF} if is_empty else ()), seen.lsn
    )


def compared(world: World, seen: Moment, *, overtaken: bool) -> tuple[World, bool]:
    look = look_at(seen, world.head)
    later = {NAME} if overtaken else set[str]()
    head, told = noticed.compare(world.head, "shop", look, later, holds=True)
    return replace(world, head=head), not told


def unsent_change(world: World) -> World | None:
    if world.now.changes == CHANGES:
        return None
    return replace(world, now=replace(world.now, changes=world.now.changes + 1))


def leaf_changes(after: int) -> Callable[[World], World | None]:
    def change(world: World) -> World | None:
        if after not in AFTER.get(world.now.leaf, ()):
            return None
        return replace(world, now=replace(world.now, leaf=after))

    return change


def rotation(world: World) -> World | None:
    return None if world.now.rotated else replace(world, now=replace(world.now, rotated=True))


def look_begins(world: World) -> World | None:
    if world.look is not None:
        return None
    return replace(world, look=world.now, overtaken=False)


def look_ends(world: World) -> World | None:
    if world.look is None:
        return None
    return replace(compared(world, world.look, overtaken=world.overtaken)[0], look=None)


def copy_begins(world: World) -> World | None:
    if world.copying is not None or not states.wanted_copies(world.head, {NAME}):
        return None
    return replace(world, copying=world.now, copies=world.copies + 1)


def copy_reads(world: World) -> World | None:
    """Its part, by the name that this had in the snapshot; or it fails."""
    if world.copying is None or world.read is not None:
        return None
    named = world.copying.rotated == world.now.rotated
    same_file = named and world.copying.changes == world.now.changes
    if same_relation.difference(RelationAnswer(named, same_file, same_columns=True)) is not None:
        return replace(world, copying=None, failed=world.failed + 1)
    return replace(world, read=world.copying.rows if same_file else NOTHING)


def copy_ends(world: World) -> World | None:
    if world.copying is None or world.read is None:
        return None
    head = replace(world.head, copies={NAME: version(world.copying, world.read)})
    return replace(world, head=head, copying=None, read=None, overtaken=True)


def published(world: World, polled: set[str]) -> World | None:
    """The epoch that shows what was copied; none while the table is held without a copy.

    It applies the rows of the leaf that are in the log, unless there is a reason to copy again.
    """
    if states.held(world.head) and NAME not in world.head.copies:
        return None
    tables = {**world.head.tables, **world.head.copies}
    table = tables[NAME]
    if world.now.is_logged and table.offset == 1:
        known = noticed.partitions(table)
        oids = {LEAF} if LEAF not in known or known[LEAF] > LEAF_LSN else set[int]()
        tables, told = noticed.after_partition_changes(tables, {NAME: oids}, polled)
        if told:
            head = states.stop(world.head, NAME, told[NAME], holds=True, full_resync=True)
            return replace(world, head=head)
        if tables[NAME].shape != table.shape:
            world = replace(world, overtaken=True)
        tables[NAME] = replace(tables[NAME], rows=table.rows + LEAF_ROWS, offset=2)
    return replace(world, head=replace(world.head, tables=tables, copies={}))


def epoch(world: World) -> World | None:
    """With a look that began after its cut. A source has at most one look under way (`looks`)."""
    if world.look is not None:
        return None
    judged, follow = compared(world, world.now, overtaken=False)
    shown = published(judged, {"shop"}) if follow else judged
    if shown is not None and follow and not states.held(shown.head):
        assert shown.head.tables[NAME].rows == world.now.rows, "an epoch lacks a change"
    return shown


def epoch_without_an_answer(world: World) -> World | None:
    return published(world, set())


def flush_begins(world: World) -> World | None:
    if world.flushing is not None:
        return None
    return replace(world, flushing=world.now, logged=world.now.is_logged)


def flush_looks(world: World) -> World | None:
    """It returns if the head is as the source was when it polled; otherwise it looks again.

    Before that it waits for an epoch with what was in the log.
    """
    if world.flushing is None or (world.logged and world.head.tables[NAME].offset == 1):
        return None
    looks = {"shop": look_at(world.flushing, world.head)}
    if noticed.unshown(world.head, looks) or states.unreadable(world.head, {NAME}):
        return replace(world, flushing=world.now)
    leaf, changes = divmod(world.head.tables[NAME].rows, LEAF_ROWS)
    assert changes >= world.flushing.changes, "a flush returned without a change"
    assert not (leaf and world.flushing.leaf >= GONE), "a flush returned with the rows of a leaf"
    return replace(world, flushing=None, logged=False)


OURS = (
    *(look_begins, look_ends, copy_begins, copy_reads, copy_ends),
    *(epoch, epoch_without_an_answer, flush_begins, flush_looks),
)
EVENTS: tuple[Callable[[World], World | None], ...] = (unsent_change, rotation, *OURS)
LEAF_EVENTS = (*map(leaf_changes, range(EMPTY, TRUNCATED + 1)), *OURS)

REST = (copy_reads, copy_ends, look_ends, epoch, copy_begins, copy_reads, copy_ends, epoch)


def start() -> World:
    streams = {"shop": StreamPosition(1, 100, 7, 30)}
    head = Manifest("lake", 9, 40, 39, 2, 0.0, streams=streams, tables={NAME: version(Moment(), 0)})
    return World(head)


def reached() -> Iterator[World]:
    """Every world within `DEPTH` events."""
    seen, edge = set[tuple[object, ...]](), [start()]
    for _ in range(DEPTH):
        following = []
        for world in edge:
            for event in EVENTS:
                made = event(world)
                if made is not None and made.key not in seen:
                    seen.add(made.key)
                    following.append(made)
                    yield made
        edge = following


def explore() -> int:
    """How many worlds there are. Raises `AssertionError` for one that is wrong, or does not come to rest."""
    count = 0
    for world in reached():
        count += 1
        # A leaf that was filled before it was seen empty may have had rows when it was attached.
        by_leaf = (world.now.leaf >= GONE) + (world.now.leaf not in {0, EMPTY, MADE})
        reasons = world.now.changes + world.failed + by_leaf
        assert world.copies <= reasons, "copied again without a change"
        for _ in range(4):
            before = world.key
            for event in REST:
                world = event(world) or world  # noqa: PLW2901  # until it is at rest
            if world.key == before:
                break
        table = world.head.tables[NAME]
        assert (table.rows, table.state) == (world.now.rows, "live"), "it does not come to rest"
        assert not table.resync
    return count


def test_no_order_of_events_loses_an_unsent_change_or_copies_for_ever():
    assert explore() > 1_000


def test_no_order_of_events_leaves_the_rows_of_a_partition_that_went(monkeypatch):
    monkeypatch.setattr(f"{__name__}.EVENTS", LEAF_EVENTS)
    assert explore() > 1_000


def _first_file(before, now, empty):
    """Every new partition is in its first file."""
    parts = [replace(p, file=p.file and p.oid) if p.oid == LEAF else p for p in now.parts]
    known = LEAF in before.relations
    return shape.changed(before, now if known else replace(now, parts=tuple(parts)), empty)


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        ("after_partition_changes", lambda tables, unexpected, polled: (dict(tables), {})),
        # What no look has followed is forgotten.
        (
            "after_partition_changes",
            lambda tables, unexpected, polled, real=noticed.after_partition_changes: (
                dict(tables),
                real(tables, unexpected, polled)[1],
            ),
        ),
        # An empty partition never had rows.
        ("followed", lambda before, now, lsn: now),
        ("changed", _first_file),
    ],
    ids=["nothing is told", "nothing is kept", "empty is empty", "any file is the first"],
)
def test_each_rule_of_partitions_that_went_is_needed(monkeypatch, place, mutant):
    monkeypatch.setattr(f"{__name__}.EVENTS", LEAF_EVENTS)
    monkeypatch.setattr(noticed, place, mutant)
    with pytest.raises(AssertionError):
        explore()


def unlike(name: str) -> Callable[..., object]:
    """Mutants of `noticed`, by what they leave out."""
    compare = noticed.compare
    mutants: dict[str, Callable[..., object]] = {
        "a truncated partition is nothing": lambda before, now, empty: None,
        "a look judges what came after it began": (
            lambda head, stream, look, later, *, holds: compare(
                head, stream, look, set(), holds=holds
            )
        ),
        "flush does not look": lambda head, looks: {},
        "a copy stays that lacks the change": (
            lambda head, stream, look, later, *, holds: _copies_kept(
                head, compare(head, stream, look, later, holds=holds)
            )
        ),
    }
    return mutants[name]


def _copies_kept(before, after):
    head, told = after
    return replace(head, copies=before.copies), told


@pytest.mark.parametrize(
    ("mutant", "place"),
    [
        ("a truncated partition is nothing", "changed"),
        ("a look judges what came after it began", "compare"),
        ("flush does not look", "unshown"),
        ("a copy stays that lacks the change", "compare"),
    ],
)
def test_each_rule_is_needed(monkeypatch, mutant, place):
    monkeypatch.setattr(noticed, place, unlike(mutant))
    with pytest.raises(AssertionError):
        explore()


def test_a_part_may_not_be_read_by_a_name_that_another_partition_has(monkeypatch):
    monkeypatch.setattr(same_relation, "difference", lambda answer: None)
    with pytest.raises(AssertionError, match=r"lacks a change|come to rest"):
        explore()


def test_a_copy_has_the_shape_of_its_own_snapshot(monkeypatch):
    """Read when the copy ends, it would say that changes are in it which came while it ran."""

    def later(world):
        made = copy_ends(world)
        if made is None:
            return None
        copy = replace(made.head.copies[NAME], shape=at_source(world.now).dump())
        return replace(made, head=replace(made.head, copies={NAME: copy}))

    events = tuple(later if event is copy_ends else event for event in EVENTS)
    monkeypatch.setattr(f"{__name__}.EVENTS", events)
    with pytest.raises(AssertionError, match="lacks a change"):
        explore()
