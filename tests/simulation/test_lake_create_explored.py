"""Two writers create one record, in every order of lost, late, doubled and conflicting requests: the real `create.step`.

The store is one object. A request is carried out when it arrives, or later, or never; its answer arrives or is lost; a
proxy on the way may repeat it. Whatever happens:

- a writer that has WON is the one whose content is there, and one that has LOST is not; so there is one winner at most;
- once nothing fails any more, every writer gets an outcome within a few steps, and one of them has won.

A writer whose outcome stayed unknown tries once more with the same content, while its old requests may still arrive.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from spark_consumers.lake.store import create
from spark_consumers.lake.store.create import Answer, Creation, Outcome, Request

#: How many requests or answers go wrong in one run, and how often a writer may begin again.
FAULTS, AGAIN = 6, 1
Step = Callable[..., Creation | Outcome]


class ViolationError(Exception):
    """The store's promise is broken."""


@dataclass(frozen=True)
class World:
    """`there`: whose content the object has. `late`: of each writer, requests that have not arrived yet."""

    there: int | None = None
    writers: tuple[Creation | Outcome, ...] = (Creation(), Creation())
    late: tuple[int, ...] = (0, 0)
    again: tuple[int, ...] = (AGAIN, AGAIN)
    faults: int = FAULTS


def put(world: World, who: int) -> tuple[World, Answer]:
    """A creation arrives."""
    if world.there is None:
        return replace(world, there=who), Answer.CREATED
    return world, Answer.EXISTS


def changed(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def answers(world: World, who: int, request: Request) -> Iterator[tuple[World, Answer]]:
    """Everything that can become of a request."""
    faulty = replace(world, faults=world.faults - 1) if world.faults else None
    if request is Request.READ_BACK:
        found = {None: Answer.NOTHING, who: Answer.OWN}.get(world.there, Answer.ANOTHERS)
        yield world, found
        if faulty is not None:
            yield faulty, Answer.NO_ANSWER
        return
    yield put(world, who)
    if faulty is None:
        return
    done, _ = put(faulty, who)
    yield done, Answer.NO_ANSWER  # the answer is lost
    yield done, Answer.EXISTS  # a proxy has repeated it
    yield faulty, Answer.NO_ANSWER  # the request is lost
    yield replace(faulty, late=changed(faulty.late, who, faulty.late[who] + 1)), Answer.NO_ANSWER
    yield faulty, Answer.EXISTS  # it met another one, and neither was carried out


def following(world: World, step: Step) -> Iterator[World]:
    for who, writer in enumerate(world.writers):
        if world.late[who]:
            arrived, _ = put(world, who)
            yield replace(arrived, late=changed(world.late, who, world.late[who] - 1))
        if writer is Outcome.UNKNOWN and world.again[who]:
            yield replace(
                world,
                writers=changed(world.writers, who, Creation()),
                again=changed(world.again, who, 0),
            )
        if isinstance(writer, Outcome):
            continue
        for after, answer in answers(world, who, writer.request):
            # Its time may be over at any moment; that counts as a fault, too.
            for late in (False, True) if after.faults else (False,):
                spent = replace(after, faults=after.faults - late)
                made = step(writer, answer, late=late)
                if isinstance(made, Creation):
                    made = replace(made, failures=0)  # pauses are no matter of order
                yield replace(spent, writers=changed(spent.writers, who, made))


def check(world: World) -> None:
    for who, writer in enumerate(world.writers):
        if writer is Outcome.WON and world.there != who:
            raise ViolationError(f"{who} has won, and the content is of {world.there}: {world}")
        if writer is Outcome.LOST and world.there in {who, None}:
            raise ViolationError(f"{who} has lost, and the content is of {world.there}: {world}")
    if not world.faults and all(isinstance(writer, Outcome) for writer in world.writers):
        unknown = Outcome.UNKNOWN in world.writers
        if not unknown and Outcome.WON not in world.writers:
            raise ViolationError(f"nobody has won: {world}")


def settles(world: World, step: Step) -> None:
    """With no more faults each writer gets an outcome."""
    healed = replace(world, faults=0)
    for who in range(len(healed.writers)):
        for _ in range(4):
            writer = healed.writers[who]
            if isinstance(writer, Outcome):
                break
            healed, answer = next(answers(healed, who, writer.request))
            made = step(writer, answer, late=False)
            healed = replace(healed, writers=changed(healed.writers, who, made))
        else:
            raise ViolationError(f"no outcome: {world}")


def explore(step: Step) -> int:
    """Every world that can be reached; how many."""
    first = World()
    seen, todo = {first}, [first]
    while todo:
        world = todo.pop()
        check(world)
        settles(world, step)
        for after in following(world, step):
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen)


def test_a_record_has_one_winner_and_every_writer_knows_it_in_the_end() -> None:
    count = explore(create.step)
    print(f"{count} states")
    assert count > 3000


def exists_means_lost(creation: Creation, answer: Answer, *, late: bool) -> Creation | Outcome:
    """What every client library says of its own creation after a retry."""
    return Outcome.LOST if answer is Answer.EXISTS else create.step(creation, answer, late=late)


def no_answer_means_lost(creation: Creation, answer: Answer, *, late: bool) -> Creation | Outcome:
    return Outcome.LOST if answer is Answer.NO_ANSWER else create.step(creation, answer, late=late)


def no_answer_means_won(creation: Creation, answer: Answer, *, late: bool) -> Creation | Outcome:
    return Outcome.WON if answer is Answer.NO_ANSWER else create.step(creation, answer, late=late)


def nothing_means_lost(creation: Creation, answer: Answer, *, late: bool) -> Creation | Outcome:
    """As if the request that found another one, or was lost, could not be the one that arrives in the end."""
    return Outcome.LOST if answer is Answer.NOTHING else create.step(creation, answer, late=late)


def equal_contents(creation: Creation, answer: Answer, *, late: bool) -> Creation | Outcome:
    """Both writers read their own content back, whoever has written it."""
    seen = Answer.OWN if answer is Answer.ANOTHERS else answer
    return create.step(creation, seen, late=late)


def gives_up_never(creation: Creation, answer: Answer, *, late: bool) -> Creation | Outcome:
    """It reads back, and never asks again for the creation."""
    made = create.step(creation, answer, late=late)
    return Creation(Request.READ_BACK) if isinstance(made, Creation) else made


@pytest.mark.parametrize(
    "mutant",
    [
        exists_means_lost,
        no_answer_means_lost,
        no_answer_means_won,
        nothing_means_lost,
        equal_contents,
        gives_up_never,
    ],
)
def test_the_explorer_finds_the_mutant(mutant: Step) -> None:
    with pytest.raises(ViolationError) as found:
        explore(mutant)
    print(found.value)


def test_pauses_grow_and_stay_bounded() -> None:
    creation, pauses = Creation(), []
    for _ in range(8):
        made = create.step(creation, Answer.NO_ANSWER, late=False)
        assert isinstance(made, Creation)
        creation = made
        pauses.append(creation.pause)
    assert pauses[:3] == [0.1, 0.2, 0.4]
    assert max(pauses) == 2.0
