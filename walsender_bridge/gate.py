"""The commit gate: up to which LSN a transaction may be shown to consumers.

A consumer must never hold a transaction that the server promoted after a failure lacks. Whoever knows
what the survivors hold implements `Gate`; capture tells the replica its position, and the replica
reports an entry as committable only when the entry's last end LSN is at or below it.
"""

from typing import Protocol

from walsender_bridge.wire.lsn import MAX_LSN


class Gate(Protocol):
    """What capture asks. The answer may be late, never early, and never goes back."""

    def position(self) -> int:
        """The LSN up to which every server that may take over is durable."""


class OpenGate:
    """No failover candidates: whatever the source has committed may be shown."""

    def position(self) -> int:
        """The end of every log."""
        return MAX_LSN
