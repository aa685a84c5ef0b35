"""Where a proposer's WAL comes from when it is no primary: from a standby, or from the safekeepers alone."""

import os
from typing import Protocol

from walsender_bridge.proposer.effects import Primary
from walsender_bridge.proposer.primary import PrimaryStream
from walsender_bridge.safekeeper.messages import ServerInfo


class WalSource(Protocol):
    """What a session asks of its primary; see `primary.PrimaryStream`."""

    where: str

    def fileno(self) -> int:
        """For the poll loop."""

    def server_info(self) -> ServerInfo:
        """Whose WAL it is."""

    def primary(self) -> Primary | None:
        """Its timelines, and how far its WAL is flushed. None: there is none, the best safekeeper has the WAL."""

    def hold_wal(self, slot: str) -> int | None:
        """Keep WAL for laggards; the oldest that is kept. None: it keeps none for them."""

    def start_physical(self, lsn: int, timeline: int) -> None:
        """Have WAL sent."""

    def receive(self) -> list[bytes]:
        """What has arrived."""

    def send(self, payload: bytes) -> None:
        """Queue a message."""

    def flush(self) -> bool:
        """Send what is queued; whether all of it is out."""

    def close(self) -> None:
        """End it."""


class StandbyStream(PrimaryStream):
    """A standby that passes on the WAL it has. No slot is made on it: it would hold WAL when all is over."""

    def hold_wal(self, slot: str) -> int | None:  # type: ignore[override]  # a primary's says where
        """None: laggards read from the other safekeepers."""
        del slot
        return None


class NoPrimary:
    """For an election without a primary: nothing ever arrives, nobody listens."""

    def __init__(self, server: ServerInfo) -> None:
        self.where = "the safekeepers"
        self._server = server
        self._descriptor = os.eventfd(0)

    def fileno(self) -> int:
        """Never readable."""
        return self._descriptor

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

    def start_physical(self, lsn: int, timeline: int) -> None:
        """A core without a primary does not stream."""
        raise AssertionError((lsn, timeline))

    def receive(self) -> list[bytes]:
        """Nothing."""
        return []

    def send(self, payload: bytes) -> None:
        """To nobody."""

    def flush(self) -> bool:
        """Nothing is queued."""
        return True

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._descriptor)
