"""Readers that were refused because their WAL is not here: for a while their positions count as needed. Pure.

After a full resync a safekeeper catches up on older WAL down to the oldest position needed (`../safekeeper/backfill.py`),
which includes that of a refused reader: a standby with several upstream hosts retries the same one again and again. The
WAL received stays until the reader has got it. If no other safekeeper has that WAL either, that never happens: so a
position counts for `PATIENCE_SECONDS` only, and nothing is retained forever. Bounded: `_MOST` readers.
"""

from dataclasses import dataclass

from walsender_bridge.postgres.protocol.lsn import Lsn

#: Seconds since a position was first refused. At the rate of catch-up that is 12 GiB.
PATIENCE_SECONDS = 600.0
#: Seconds without a retry of the reader, which reconnects every few seconds.
GONE_SECONDS = 60.0
_MOST = 64


@dataclass(slots=True)
class _Refused:
    lsn: Lsn
    since: float
    heard: float
    served: bool = False


class RefusedReaders:
    """See the module. A reader is known by its user and `application_name`; times are of a steady clock, in seconds."""

    def __init__(self) -> None:
        self._refused: dict[tuple[str, str], _Refused] = {}

    def refused(self, reader: tuple[str, str], lsn: Lsn, now: float) -> None:
        """The WAL at `lsn` was requested, and is not here."""
        known = self._refused.get(reader)
        if known is not None and known.lsn == lsn and not known.served:
            known.heard = now
        elif known is not None or len(self._refused) < _MOST:
            self._refused[reader] = _Refused(lsn, now, now)

    def sent(self, reader: tuple[str, str], lsn: Lsn, now: float) -> None:
        """The reader has been sent WAL up to `lsn`."""
        known = self._refused.get(reader)
        if known is not None and known.served and lsn == known.lsn:
            known.heard = now
        elif known is not None and lsn > known.lsn:
            self._refused[reader] = _Refused(lsn, now, now, served=True)

    def pin_lsn(self, now: float) -> Lsn | None:
        """The oldest position that counts; None: there is none."""
        for reader in [r for r, each in self._refused.items() if now - each.heard > GONE_SECONDS]:
            del self._refused[reader]
        counted = [e.lsn for e in self._refused.values() if now - e.since <= PATIENCE_SECONDS]
        return min(counted, default=None)
