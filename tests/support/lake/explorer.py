"""Drivers that overtake one another, each stopped before every one of its effects in turn.

An older driver runs up to some effect, a newer one up to some effect of its own, a third to its end; then the newer
and the older go on. All pairs of places are taken, and after each effect the store is checked.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from tests.support.lake.drivers import Driver
from tests.support.lake.store import Store, ViolationError
from walsender_bridge.errors import FencedError


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


def interleave(older: int, newer: int) -> tuple[Run, bool, bool]:
    """Stop an older and a newer driver before these effects, let a third live, let them go on.

    Returns also whether each of the two was stopped before its end.
    """
    run = begun()
    drivers = {name: Driver(run.store, name) for name in ("older", "newer", "newest")}
    steps = {name: driver.steps() for name, driver in drivers.items()}
    ended = run.go("older", steps["older"], older)
    over = run.go("newer", steps["newer"], newer)
    run.go("newest", steps["newest"])
    newest = run.store.links[max(run.store.links)].term
    for name, at_end in (("newer", over), ("older", ended)):
        if not at_end:
            run.go(name, steps[name])
    for name in ("newer", "older"):
        driver = drivers[name]
        began = newest if driver.began is None else driver.began
        if driver.head is not None and driver.head.term > newest > began:
            run.violated(f"{name} has taken the lake back from the newest driver")
    return run, not ended, not over


def explore() -> int:
    """All pairs of places to stop at; how many there were. Raises `ViolationError`."""
    count = older = 0
    while True:
        newer, stopped = 0, True
        while True:
            _, stopped, again = interleave(older, newer)
            count += 1
            if not again:
                break
            newer += 1
        if not stopped:
            return count
        older += 1
