"""The fence with one of its mends taken out, by name: what the explorer and the simulation have to find."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from spark_consumers.lakehouse import takeover
from walsender_bridge.errors import FencedError

_commit, _take_over = takeover.commit, takeover.take_over


def _listed_late(change, where, *, clean=False):
    """Lists what was prepared when the commit is done, and takes all of it for a dead writer's."""
    done = yield from _commit(change, where)
    for file in sorted((yield takeover.ListPrepared()) if clean else ()):
        yield takeover.RemovePrepared(file)
    return done


def _by_time_alone(change, where, *, clean=False):
    """Lists in time, and does not ask whether a snapshot needs it."""
    listed = (yield takeover.ListPrepared()) if clean else ()
    done = yield from _commit(change, where)
    for file in sorted(listed):
        yield takeover.RemovePrepared(file)
    return done


def _tried_again(propose):
    """Begins again whenever it was overtaken."""
    while True:
        try:
            return (yield from _take_over(propose))
        except FencedError:
            pass


def _without_term(path: str, term: int, token: str) -> str:
    del term
    return f"{path}%t1-{token}"


def _never_waits(*_: object) -> None:
    return None


_MUTANTS = {
    "what was prepared is listed after the commit": ("commit", _listed_late),
    "what was prepared goes by its time alone": ("commit", _by_time_alone),
    "a lost link is always tried again": ("retries", lambda *_: True),
    "a takeover that was overtaken begins again": ("take_over", _tried_again),
    "folders without their writer's term": ("folder_of", _without_term),
    "a sweep that looks at no term": ("term_of", lambda _: 1),
}
#: Found by the explorer.
NAMES = sorted(_MUTANTS)


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Take the mend out for as long as the block lasts."""
    attribute, instead = _MUTANTS[name]
    with mock.patch.object(takeover, attribute, instead):
        yield


@contextmanager
def without_lease() -> Iterator[None]:
    """Drivers that try to take over whoever is at work."""
    with mock.patch.object(takeover.Standby, "waits_for", _never_waits):
        yield
