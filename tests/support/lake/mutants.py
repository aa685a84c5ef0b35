"""The fence with one of its mends taken out, by name: what the explorer and the simulation have to find."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from spark_consumers.lake.format import leaks
from spark_consumers.lake.manifest import takeover
from walsender_bridge.errors import FencedError

_commit, _take_over, _sweep = takeover.commit, takeover.take_over, leaks.sweep
_is_garbage = takeover.is_garbage


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


def _damage_ends_it(propose, ours=None, decided=None):
    """One damaged table ends the takeover of all."""
    taken = yield from _take_over(propose, ours, decided)
    for error in taken.damaged.values():
        raise error
    return taken


def _another_link(propose, ours=None, decided=None):
    """Each attempt publishes a link of its own."""
    del ours
    return (yield from _take_over(propose, None, decided))


def _used_read_late(propose, ours=None, decided=None):
    """Looks at the newest link first, and then at the terms in what writers made."""
    late = 0
    steps = _take_over(lambda before, term: propose(before, max(term, late + 1)), ours, decided)
    effect = next(steps)
    try:
        while True:
            if isinstance(effect, takeover.ReadUsedTerm):
                effect = steps.send(0)
                continue
            answer = yield effect
            if isinstance(effect, takeover.ReadHead):
                late = yield takeover.ReadUsedTerm()
            effect = steps.send(answer)
    except StopIteration as end:
        return end.value


def _asks_nobody(propose, ours=None, decided=None):
    """Takes the newest link that is there for the newest that was."""
    steps = _take_over(propose, ours, decided)
    effect = next(steps)
    try:
        while True:
            told = isinstance(effect, takeover.ReadPublishedLink)
            effect = steps.send(None if told else (yield effect))
    except StopIteration as end:
        return end.value


def _opens_what_left(propose, ours=None, decided=None):
    """Takes every table that the link names."""
    taken = yield from _take_over(propose, ours, decided)
    for table in taken.head.versions:
        yield takeover.TakeTable(table.path, table.snapshot_id, taken.head.term, taken.head.epoch)
    return taken


def _tried_again(propose, ours=None, decided=None):
    """Begins again whenever it was overtaken."""
    while True:
        try:
            return (yield from _take_over(propose, ours, decided))
        except FencedError:
            pass


def _without_term(path: str, term: int, token: str) -> str:
    del term
    return f"{path}%t1-{token}"


def _unfenced(listed, is_ours, where):
    """Sweeps a table without a look at whose it is by now."""
    del is_ours
    return _sweep(listed, lambda _: True, where)


def _unnamed(listed, is_ours, where):
    """Sweeps a table and takes everything that is listed for garbage."""
    if is_ours((yield takeover.ReadTable())):
        for file in sorted(listed):
            yield takeover.RemovePrepared(file)


def _whoever_wrote_it(left, head, named, *, below):
    """A run goes if the link that this driver knows does not name it."""
    if left.kind is not takeover.LeftoverKind.INDEX:
        return _is_garbage(left, head, named, below=below)
    files = named.get(left.table)
    return files is not None and left.path.removeprefix(f"{left.table}/") not in files


_MUTANTS = {
    "a run of the index goes whoever wrote it": ("is_garbage", _whoever_wrote_it),
    "what was prepared is listed after the commit": ("commit", _listed_late),
    "what was prepared goes by its time alone": ("commit", _by_time_alone),
    "a lost link is always tried again": ("retries", lambda *_: True),
    "a takeover that was overtaken begins again": ("take_over", _tried_again),
    "one damaged table ends the takeover": ("take_over", _damage_ends_it),
    "the terms of links that were lost are used again": ("next_term", lambda newest, _: newest + 1),
    "what is left of lost terms is read after the head": ("take_over", _used_read_late),
    "each attempt at a takeover publishes a link": ("take_over", _another_link),
    "a lost link is not missed": ("take_over", _asks_nobody),
    "tables that have left are opened": ("take_over", _opens_what_left),
    "folders without their writer's term": ("folder_of", _without_term),
    "a sweep that looks at no term": ("term_of", lambda _: 1),
    "leaks: a table is swept by a driver that was fenced": ("sweep", _unfenced),
    "leaks: a table is swept of what is needed": ("sweep", _unnamed),
}
#: Found by the explorer.
NAMES = sorted(_MUTANTS)


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """Take the mend out for as long as the block lasts; the writer's own invariants, too: the model has to see the loss."""
    attribute, instead = _MUTANTS[name]
    with (
        mock.patch.object(takeover, "check_invariants", return_value=None),
        mock.patch.object(leaks if name.startswith("leaks: ") else takeover, attribute, instead),
    ):
        yield


@contextmanager
def lease_mutant(name: str) -> Iterator[None]:
    """As `mutant`, of what decides whether a takeover is tried (`LEASES`)."""
    with mock.patch.multiple(takeover, **_LEASES[name]):
        yield


class _NeverWaits(takeover.DriverWait):
    def waits_for(self, *_: object) -> None:
        return None


class _WaitsForEver(takeover.DriverWait):
    def waits_for(self, term, signs, now):
        del now
        return super().waits_for(term, signs, 0.0)


class _BelievesLocks(takeover.DriverWait):
    """A lock that is free here is free."""

    def waits_for(self, term, signs, now):
        held = {name: sign for name, sign in signs.items() if not sign.is_unlocked}
        return super().waits_for(term, held, now)


def _undecided(propose, ours=None, decided=None):
    """Takes over whoever has come since it decided to."""
    del decided
    return (yield from _take_over(propose, ours))


_LEASES: dict[str, dict[str, Any]] = {
    "a driver that lives is not waited for": {"DriverWait": _NeverWaits},
    "a driver that is silent is waited for for ever": {"DriverWait": _WaitsForEver},
    "a free lock is believed, wherever it is": {"DriverWait": _BelievesLocks},
    "a takeover is of whoever is there": {"take_over": _undecided},
}
#: Found by the simulation.
LEASES = sorted(_LEASES)
