"""What must hold of a core's state after each step, and the error that ends the part where it does not. Pure.

Each core has its invariants beside it, as a tuple of `Invariant`. Its driver checks them after every step that is not hot,
before it carries out what the step wants done: a fault of ours ends the part while everything on disk is still right. The
simulators check the same tuples, after hot steps too.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from walsender_bridge.errors import InvariantError

_T = TypeVar("_T")

REPAIR: Final = "nothing of that step was written; keep the data folder and the log as they are, and report this with both"


@dataclass(frozen=True, slots=True)
class Invariant(Generic[_T]):
    """`name` is stable: errors and docs/invariants.md name it. `rule`: where it is from. `holds` is asked after a step."""

    name: str
    rule: str
    holds: Callable[[_T], bool]


def check(
    part: str, invariants: Iterable[Invariant[_T]], subject: _T, describe: Callable[[_T], str]
) -> None:
    """Raise `InvariantError` for the first of `invariants` that does not hold of `subject`.

    `part` names what has to stop, `describe` the state in short; it is called only for the error.
    """
    for invariant in invariants:
        if not invariant.holds(subject):
            raise InvariantError(
                f"invariant {invariant.name} ({invariant.rule}) does not hold: {describe(subject)}",
                where=part,
                repair=REPAIR,
            )
