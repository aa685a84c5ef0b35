"""Where a proposer's WAL comes from when it is no primary: from a standby, or from the safekeepers alone."""

from typing import Protocol

from walsender_bridge.quorum.proposer.effects import Primary
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.protocol.messages import ServerInfo


class WalSource(Protocol):
    """What a session asks of its primary; see `primary.PrimaryStream`."""

    where: str

    def server_info(self) -> ServerInfo:
        """Whose WAL it is."""

    def primary(self) -> Primary | None:
        """Its timelines, and how far its WAL is flushed. None: there is none, the best safekeeper has the WAL."""

    def hold_wal(self, slot: str) -> int | None:
        """Keep WAL for laggards; the oldest that is kept. None: it keeps none for them."""

    def close(self) -> None:
        """End it."""


class StandbyStream(PrimaryStream):
    """A standby that passes on the WAL it has. No slot is made on it: it would hold WAL when all is over."""

    def hold_wal(self, slot: str) -> int | None:  # type: ignore[override]  # a primary's says where
        """None: laggards read from the other safekeepers."""
        del slot
        return None


class NoPrimary:
    """For an election without a primary: its core does not stream."""

    def __init__(self, server: ServerInfo) -> None:
        self.where = "the safekeepers"
        self._server = server

    def server_info(self) -> ServerInfo:
        """Whose WAL the safekeepers hold."""
        return self._server

    def primary(self) -> Primary | None:
        """There is none."""
        return None

    def hold_wal(self, slot: str) -> int | None:
        """There is no slot."""
        del slot
        return None

    def close(self) -> None:
        """Nothing is open."""
