"""What the change log keeps for a lake: everything behind the epoch that it has published, and more for copies.

The log trims what is past its retention and below every lease. A lease ends some time after it was last
renewed, so that a lake that is gone does not hold the log for ever. It is renewed for as long as the writer
runs, whether an epoch is published or not: a lake that one table holds back for weeks must find the log as
it left it. A writer that takes over renews the leases of copies that are under way, too.
"""

from dataclasses import dataclass

from walsender_bridge.change_log.client import LogClient

#: Seconds for which the log keeps what this lake needs, after the lake was last heard of: more than a week, and no more than
#: the log grants.
LEASE = 10 * 86_400.0
#: Seconds after which a lease is renewed at the latest.
RENEWAL = 3600.0


def renewal_due(now: float, renewed_at: float, lease: float) -> bool:
    """Whether a lease of `lease` seconds wants to be renewed: while most of its time is left."""
    return now - renewed_at >= min(RENEWAL, lease / 4)


@dataclass
class _HeldLease:
    version: int
    renewed_at: float = float("-inf")


class Leases:
    """The leases of one writer, by consumer name. `now` is monotonic seconds; the log's errors are raised."""

    def __init__(self, seconds: float = LEASE) -> None:
        self._seconds = seconds
        self._held: dict[str, _HeldLease] = {}

    def hold(self, log: LogClient, name: str, version: int, now: float) -> None:
        """From now on the log keeps for `name` what is behind `version`."""
        self._held[name] = _HeldLease(version)
        self.renew(log, now)

    def holds(self, name: str) -> bool:
        """Whether this writer keeps up the lease of `name`."""
        return name in self._held

    def drop(self, log: LogClient, name: str) -> None:
        """`name` needs nothing any more; also one that another writer held."""
        self._held.pop(name, None)
        log.drop_consumer(name)

    def renew(self, log: LogClient, now: float) -> None:
        """Renew what is due."""
        for name, held in self._held.items():
            if renewal_due(now, held.renewed_at, self._seconds):
                log.register_consumer(name, held.version, self._seconds)
                held.renewed_at = now
