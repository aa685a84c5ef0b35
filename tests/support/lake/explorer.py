"""Drivers that overtake one another, each stopped before every one of its effects in turn.

An older driver runs up to some effect, a newer one up to some effect of its own. Then a third one runs to its end, and
the newer and the older go on; or without a third one the older goes on first, in the middle of what the newer does. All
pairs of places are taken in both ways, and after each effect the store is checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NoReturn

from tests.support.lake.drivers import Driver
from tests.support.lake.store import Store, ViolationError
from walsender_bridge.errors import CorruptError, FencedError


@dataclass
class Run:
    """One interleaving, as it happened."""

    store: Store = field(default_factory=Store)
    trace: list[str] = field(default_factory=list)

    def go(self, name: str, steps: Iterator[str], effects: int | None = None) -> bool:
        """Let a driver go on for so many effects, or to its end; whether it is at its end."""
        done = 0
        while effects is None or done < effects:
            try:
                place = next(steps)
            except StopIteration:
                return True
            except FencedError:
                self.trace.append(f"{name}: gives way")
                return True
            finally:
                # The effect before this place has been carried out.
                self._check()
            self.trace.append(f"{name}: {place}")
            done += 1
        return False

    def _check(self) -> None:
        try:
            self.store.check()
        except ViolationError as error:
            self.violated(str(error))

    def violated(self, what: str) -> NoReturn:
        """Raise, with what happened last."""
        raise ViolationError(f"{what}\n  " + "\n  ".join(self.trace[-60:])) from None


def begun() -> Run:
    """A lake with one table of two epochs, and what a driver that died in its own epoch has left."""
    run = Run()
    run.go("first", Driver(run.store, "first", epochs=2).steps())
    for place in Driver(run.store, "killed").steps():
        # Killed when its copy was in no link yet, and a commit was prepared that never came.
        if place.startswith("publish"):
            break
    run.store.drafts.add(f".{max(run.store.links):020d}.json.0.tmp")
    run.store.files["tables/s/p/t0%t1-1"].add("metadata/prepared-m0.avro")
    return run


def with_damage(trouble: int) -> bool:
    """A lake with a damaged table and one that has left; the takeover's effect of this number fails as well, twice.

    Returns whether there was such an effect.
    """
    run = begun()
    run.go("before", Driver(run.store, "before", epochs=0).steps())
    before = run.store.links[max(run.store.links)]
    one = before.tables["t0"]
    left = replace(one, path="tables/s/p/left%t1-a", has_left=True)
    run.store.tables[left.path] = run.store.tables[one.path]
    run.store.files[left.path] = set(run.store.files[one.path])
    now = before.next(tables={**before.tables, "left": left})
    assert run.store.create_link(now, before) is None
    run.store.damaged |= {one.path, left.path}
    driver = Driver(run.store, "opener", troubles=frozenset({trouble, trouble + 2}))
    try:
        run.go("opener", driver.steps())
    except CorruptError as error:
        run.violated(f"one damaged table keeps the lake closed: {error.what}")
    if driver.head is None or driver.head.epoch == now.epoch:
        run.violated("no epoch is published")
    elif driver.head.term != now.term + 1:
        run.violated(f"the takeover has published {driver.head.term - now.term} links")
    elif driver.damaged != {one.path}:
        run.violated(f"{driver.damaged} are told to be damaged")
    return trouble <= driver.effects


def with_loss(place: int) -> bool:
    """The newest link is lost while a driver is stopped before this effect; another comes, then the first goes on.

    Nobody may publish anything then (`Store.create_link`). Returns whether there was such an effect.
    """
    run = begun()
    driver = Driver(run.store, "older")
    steps = driver.steps()
    ended = run.go("older", steps, place)
    run.store.lose()
    names = {"newer": Driver(run.store, "newer").steps(), **({} if ended else {"older": steps})}
    for name, each in names.items():
        try:
            run.go(name, each)
        except CorruptError:
            continue
        except ViolationError as error:
            run.violated(str(error))
        if name == "newer":
            run.violated("the newer driver goes on from an older link")
    return not ended


def with_links_given_up(place: int, lost: int) -> bool:
    """So many of the newest links are lost while a driver is stopped before this effect, and given up.

    Another driver goes on from what is left and publishes an epoch; then the first goes on. Returns whether there was such
    an effect.
    """
    run = begun()
    for name in ("first again", "second"):
        run.go(name, Driver(run.store, name, copies=0, epochs=0).steps())
    steps = Driver(run.store, "older").steps()
    ended = run.go("older", steps, place)
    run.store.give_up(lost)
    newer = Driver(run.store, "newer")
    for name, each in (("newer", newer.steps()), *(() if ended else (("older", steps),))):
        try:
            run.go(name, each)
        except CorruptError:
            continue
        except ViolationError as error:
            run.violated(str(error))
        if name == "newer" and run.store.head != newer.head:
            run.violated("the newer driver gives way, and there is no other")
    return not ended


def interleave(older: int, newer: int, *, third: bool) -> tuple[Run, bool, bool]:
    """Stop an older and a newer driver before these effects, let a third live or none, let them go on.

    Returns also whether each of the two was stopped before its end.
    """
    run = begun()
    drivers = {name: Driver(run.store, name) for name in ("older", "newer", "newest")}
    steps = {name: driver.steps() for name, driver in drivers.items()}
    ended = run.go("older", steps["older"], older)
    over = run.go("newer", steps["newer"], newer)
    if third:
        run.go("newest", steps["newest"])
    newest = run.store.links[max(run.store.links)].term
    others = [("newer", over), ("older", ended)]
    for name, at_end in others if third else reversed(others):
        if not at_end:
            run.go(name, steps[name])
    for name in ("newer", "older") if third else ():
        driver = drivers[name]
        began = newest if driver.began is None else driver.began
        if driver.head is not None and driver.head.term > newest > began:
            run.violated(f"{name} has taken the lake back from the newest driver")
    return run, not ended, not over


def explore() -> int:
    """All pairs of places to stop at, all places of trouble and of a loss; how many. Raises `ViolationError`."""
    trouble = lost = given_up = 0
    while with_loss(lost):
        lost += 1
    for links in (1, 2, 3):
        place = 0
        while with_links_given_up(place, links):
            place += 1
        given_up += place
    while with_damage(trouble):
        trouble += 1
    return lost + trouble + given_up + sum(_explore(third=third) for third in (True, False))


def _explore(*, third: bool) -> int:
    count = older = 0
    while True:
        newer, stopped = 0, True
        while True:
            _, stopped, again = interleave(older, newer, third=third)
            count += 1
            if not again:
                break
            newer += 1
        if not stopped:
            return count
        older += 1
