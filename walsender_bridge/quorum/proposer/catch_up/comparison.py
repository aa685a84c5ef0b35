"""The two sides of a comparison of WAL bytes: the primary's and a safekeeper's. Pure.

Invariant: a result is reported once, from one range of each side. If a comparison fails on one side, the other side's
answer is still under way, and the same range may be requested again before it arrives: so the sides are kept apart, or
two answers of the primary would be found equal, and a server whose WAL differs would pass.
"""

from walsender_bridge.quorum.proposer.effects import CompareWal


class Comparison:
    """See the module."""

    def __init__(self) -> None:
        self._primary: dict[CompareWal, bytes] = {}
        self._safekeeper: dict[CompareWal, bytes] = {}

    def primary_has(self, wanted: CompareWal, data: bytes) -> bool | None:
        """The primary's bytes arrived: whether both sides are equal; None while the other one is missing."""
        self._primary[wanted] = data
        return self._answer(wanted)

    def safekeeper_has(self, wanted: CompareWal, data: bytes) -> bool | None:
        """The safekeeper's bytes arrived: as `primary_has`."""
        self._safekeeper[wanted] = data
        return self._answer(wanted)

    def failed(self, wanted: CompareWal) -> None:
        """One side is unavailable: forget both."""
        self._primary.pop(wanted, None)
        self._safekeeper.pop(wanted, None)

    def _answer(self, wanted: CompareWal) -> bool | None:
        if wanted not in self._primary or wanted not in self._safekeeper:
            return None
        return self._primary.pop(wanted) == self._safekeeper.pop(wanted)
