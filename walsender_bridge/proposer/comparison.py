"""The two sides of a comparison of WAL bytes: the primary's own, and a safekeeper's. Pure.

Invariant: an answer is told once, from one range of each side. A comparison that failed on one side leaves the other
side's answer on its way, and the same range may be asked for again before that arrives: so the sides are kept apart,
or two answers of the primary would be found equal and a copy that went its own way would pass.
"""

from walsender_bridge.proposer.effects import CompareWal, Limits
from walsender_bridge.safekeeper.messages import ServerInfo, VoteReply
from walsender_bridge.wire.lsn import format_lsn


def begin_lsn(
    vcl: int, reply: VoteReply, limits: Limits, server: ServerInfo, last_segment: bool
) -> int:
    """Where the WAL below VCL begins that is compared with a voter's; VCL: it has none to compare.

    `last_segment`: no further down than VCL's segment, as a server may have let go of the one before.
    """
    begin = max(vcl - limits.compare_bytes, reply.begin_lsn)
    if begin == vcl:
        return begin
    # A server sends one timeline at a time, and up to its switch the lineage has agreed.
    begin = max(begin, reply.history.timeline_start(vcl - 1))
    last = vcl - 1
    return max(begin, last - last % server.segment_size) if last_segment else begin


def removed(vcl: int) -> str:
    """What is wrong with a server that has not even the last segment below VCL."""
    return (
        f"the WAL of a majority of the safekeepers ends at {format_lsn(vcl)}, and this server has removed the segment "
        "before it: what they hold cannot be compared, and what they lack cannot be sent"
    )


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
