"""The WAL source of a proposer without a primary: a standby, or the safekeepers alone."""

from typing import Protocol

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.proposer.effects import Primary
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.protocol.messages import ServerInfo


class WalSource(Protocol):
    """What a session needs of its primary; see `facts.PrimaryStream`."""

    where: str

    def server_info(self) -> ServerInfo:
        """The server's identity."""

    def primary(self) -> Primary | None:
        """Its timelines and flush position. None: there is no primary, and the best safekeeper has the WAL."""

    def hold_wal(self, slot: str) -> Lsn | None:
        """Keep WAL for laggards; returns the oldest LSN kept. None: it keeps none for them."""

    def close(self) -> None:
        """End it."""


class StandbyStream(PrimaryStream):
    """A standby that streams the WAL it has. No slot is created on it, as that would keep WAL after the failover."""

    def hold_wal(self, slot: str) -> Lsn | None:  # type: ignore[override]  # a primary's returns an LSN
        """None: laggards read from the other safekeepers."""
        del slot
        return None


class NoPrimary:
    """Stands for the primary in an election without one: its core does not stream."""

    def __init__(self, server: ServerInfo) -> None:
        self.where = "the safekeepers"
        self._server = server

    def server_info(self) -> ServerInfo:
        """The server whose WAL the safekeepers hold."""
        return self._server

    def primary(self) -> Primary | None:
        """There is none."""
        return None

    def hold_wal(self, slot: str) -> Lsn | None:
        """There is no slot."""
        del slot
        return None

    def close(self) -> None:
        """Nothing is open."""
