"""Invariants of a core's state, checked after each step, and the error that stops the part on a violation. Pure.

Each core has its invariants beside it, as a tuple of `Invariant`. Its driver checks them after every step that is not hot,
before it performs the effects: a bug stops the part while everything on disk is still correct. The
simulators check the same tuples, after hot steps too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from walsender_bridge.errors import InvariantError

_T = TypeVar("_T")

REPAIR: Final = (
    "copy the part's state and its log (docs/trouble.md lists the files) before you restart it, and report the bug with both. The"
    " files are intact: nothing of this step was written, and a restart continues from them. If the error repeats, leave the part"
    " stopped"
)


@dataclass(frozen=True, slots=True)
class Invariant(Generic[_T]):
    """`name` is stable: errors and docs/invariants.md refer to it. `rule`: its origin. `holds` is evaluated after a step."""

    name: str
    rule: str
    holds: Callable[[_T], bool]


def check(
    part: str, invariants: Iterable[Invariant[_T]], subject: _T, describe: Callable[[_T], str]
) -> None:
    """Raise `InvariantError` for the first of `invariants` that does not hold of `subject`.

    `part` names the part to stop; `describe` summarizes the state, and is called only for the error.
    """
    for invariant in invariants:
        if not invariant.holds(subject):
            raise InvariantError(
                f"invariant {invariant.name} ({invariant.rule}) does not hold: {describe(subject)}",
                where=part,
                repair=REPAIR,
            )
