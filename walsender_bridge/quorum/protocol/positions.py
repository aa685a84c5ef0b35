"""What a safekeeper holds, and what its readers need: the values shared by its hot loop and its WAL server."""

from dataclasses import dataclass
from typing import Final

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback

NO_FEEDBACK: Final = HotStandbyFeedback()


@dataclass(frozen=True, slots=True)
class Positions:
    """What a safekeeper holds. LSNs are exclusive ends; `major` is PostgreSQL's, `segment_bytes` its segments'.

    `history` is that of `timeline`, the newest one, whose `.history` file is durable before it is published here.
    """

    system_id: int
    major: int
    segment_bytes: int
    history: ServerTimelines
    flush_lsn: Lsn
    commit_lsn: Lsn

    @property
    def timeline(self) -> int:
        """The newest timeline."""
        return self.history.timeline

    @property
    def served_lsn(self) -> Lsn:
        """The LSN up to which WAL may be read: durable here *and* on a quorum."""
        return min(self.flush_lsn, self.commit_lsn)


@dataclass(frozen=True, slots=True)
class Readers:
    """What the readers need. `pin_lsn`: the oldest WAL that a slot keeps, according to its file on disk, or a reader lacks.

    `pin_lsn` None: there is none. `feedback` is the minimum over all readers and slots, `count` the number of streaming
    readers.
    """

    pin_lsn: Lsn | None = None
    feedback: HotStandbyFeedback = NO_FEEDBACK
    count: int = 0
