"""What is to be kept where, as a configuration says it."""

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
    """`poll`: seconds between two looks at a candidate. `folder`: where the record of each is kept.

    `terms`: what an answer has to be good for.
    """

    primary_dsn: str
    candidates: tuple[FailoverCandidate, ...]
    wanted: Selection
    folder: Path
    poll: float = 1.0
    terms: ReadinessTerms = field(default_factory=ReadinessTerms)
