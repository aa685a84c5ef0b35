"""Every order of one part's read and of DDL beside it: the order and the judgment of `same_relation` as they are.

The part is relation 20, which had this name and these columns in the snapshot. Names, columns and files are those of
today's catalog; the rows are right if they are read from relation 20 as the snapshot knew it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from spark_consumers.snapshot import same_relation
from spark_consumers.snapshot.same_relation import RelationAnswer, RelationStep

PART, NEW, OTHER_SCHEMA = 20, 21, 30
#: How often a table is renamed or altered. A schema that is renamed and named back at the wrong moments is not noticed.
DDL, SCHEMAS = 3, 1
#: Relation, files and names of the snapshot.
RIGHT = (PART, 0, False)


@dataclass(frozen=True)
class World:
    """`rotated`, `swapped`: the part's name is another's, its columns have each other's names.

    `files`: how often its file was replaced. `moved`: how often its schema was renamed, and another put in its place.
    `done`: steps of the read; `locks` and what it `got`.
    """

    rotated: bool = False
    swapped: bool = False
    files: int = 0
    moved: int = 0
    altered: int = 0
    done: int = 0
    locks: frozenset[int] = frozenset()
    got: tuple[object, ...] | None = None
    failed: bool = False

    @property
    def found(self) -> int:
        """What the name stands for today."""
        if self.moved % 2:
            return OTHER_SCHEMA
        return NEW if self.rotated else PART

    @property
    def ended(self) -> bool:
        return self.failed or self.done == len(same_relation.ORDER)


def alters(change: Callable[[World], World], *locked: int) -> Callable[[World], World | None]:
    """DDL that waits for whoever has locked one of these."""

    def event(world: World) -> World | None:
        if world.altered == DDL or world.locks & set(locked):
            return None
        return replace(change(world), altered=world.altered + 1)

    return event


def renames_schemas(world: World) -> World | None:
    return replace(world, moved=world.moved + 1) if world.moved < SCHEMAS else None


def reads_on(world: World) -> World | None:
    if world.ended:
        return None
    match same_relation.ORDER[world.done]:
        case RelationStep.LOCK:
            world = replace(world, locks=world.locks | {world.found})
        case RelationStep.ASK:
            answer = RelationAnswer(world.found == PART, world.files == 0, not world.swapped)
            world = replace(world, failed=same_relation.difference(answer) is not None)
        case RelationStep.READ:
            world = replace(world, got=(world.found, world.files, world.swapped))
    world = replace(world, done=world.done + 1)
    return replace(world, locks=frozenset()) if world.ended else world


EVENTS = (
    alters(lambda world: replace(world, rotated=not world.rotated), PART, NEW),
    alters(lambda world: replace(world, swapped=not world.swapped), PART),
    alters(lambda world: replace(world, files=world.files + 1), PART),
    renames_schemas,
    reads_on,
)


def explore() -> tuple[int, int]:
    """How many reads failed and how many got rows, in all worlds. Raises `AssertionError` for other rows."""
    seen, edge = {World()}, [World()]
    while edge:
        made = {event(world) for world in edge for event in EVENTS} - {None} - seen
        edge = [world for world in made if world is not None]
        seen.update(edge)
    for world in seen:
        if world.ended and not world.failed:
            assert world.got == RIGHT, f"rows of something else: {world}"
        assert world.got in {None, RIGHT} or world.moved, f"read in vain: {world}"
    failed = sum(world.failed for world in seen)
    return failed, sum(world.ended for world in seen) - failed


def test_no_ddl_beside_a_read_by_name_gives_other_rows():
    failed, read = explore()
    assert failed > 50
    assert read > 20


@pytest.mark.parametrize(("left_out", "word"), [(0, "else"), (1, "in vain"), (3, "else")])
def test_each_step_is_needed(monkeypatch, left_out, word):
    order = same_relation.ORDER
    monkeypatch.setattr(same_relation, "ORDER", order[:left_out] + order[left_out + 1 :])
    with pytest.raises(AssertionError, match=word):
        explore()


@pytest.mark.parametrize("ignored", ["named", "same_file", "same_columns"])
def test_each_answer_is_needed(monkeypatch, ignored):
    difference = same_relation.difference
    monkeypatch.setattr(
        same_relation, "difference", lambda answer: difference(replace(answer, **{ignored: True}))
    )
    with pytest.raises(AssertionError, match=r"else|in vain"):
        explore()
