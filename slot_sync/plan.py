"""Which slots are copied to which candidates, as configured."""

from dataclasses import dataclass, field
from pathlib import Path

from slot_sync.resolver.observed import ReadinessTerms, Selection


@dataclass(frozen=True, slots=True)
class FailoverCandidate:
    """A standby that may be promoted. `slot`: the physical slot on the primary that it streams from."""

    name: str
    dsn: str
    slot: str


@dataclass(frozen=True, slots=True)
class SlotSyncPlan:
    """`poll`: seconds between two probes of a candidate. `folder`: holds the record of each candidate.

    `terms`: what a verdict must satisfy.
    """

    primary_dsn: str
    candidates: tuple[FailoverCandidate, ...]
    wanted: Selection
    folder: Path
    poll: float = 1.0
    terms: ReadinessTerms = field(default_factory=ReadinessTerms)
