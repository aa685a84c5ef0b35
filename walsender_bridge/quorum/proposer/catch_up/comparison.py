"""The two sides of a comparison of WAL bytes: the primary's own, and a safekeeper's. Pure.

Invariant: an answer is told once, from one range of each side. A comparison that failed on one side leaves the other
side's answer on its way, and the same range may be asked for again before that arrives: so the sides are kept apart,
or two answers of the primary would be found equal and a copy that went its own way would pass.
"""

from walsender_bridge.quorum.proposer.effects import CompareWal


class Comparison:
    """See the module."""

    def __init__(self) -> None:
        self._primary: dict[CompareWal, bytes] = {}
        self._safekeeper: dict[CompareWal, bytes] = {}

    def primary_has(self, wanted: CompareWal, data: bytes) -> bool | None:
        """The primary's bytes came: whether both are equal; None while the other side is missing."""
        self._primary[wanted] = data
        return self._answer(wanted)

    def safekeeper_has(self, wanted: CompareWal, data: bytes) -> bool | None:
        """The same for the safekeeper's."""
        self._safekeeper[wanted] = data
        return self._answer(wanted)

    def failed(self, wanted: CompareWal) -> None:
        """One side cannot be had: forget both."""
        self._primary.pop(wanted, None)
        self._safekeeper.pop(wanted, None)

    def _answer(self, wanted: CompareWal) -> bool | None:
        if wanted not in self._primary or wanted not in self._safekeeper:
            return None
        return self._primary.pop(wanted) == self._safekeeper.pop(wanted)
