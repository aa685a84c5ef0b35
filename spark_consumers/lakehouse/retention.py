"""What is removed because it is past its retention: links, then the snapshots and files that only they needed.

Ages are counted by a `SteadyClock`: a machine's clock that leaps ahead must not end every epoch but the newest one.
"""

import shutil
import time
from dataclasses import dataclass, field
from itertools import islice

import structlog

from spark_consumers.lakehouse.lake_site import LakeSite
from spark_consumers.lakehouse.manifest import Chain, Manifest
from spark_consumers.lakehouse.reader_leases import held_from
from spark_consumers.lakehouse.table_format import TableFormat
from walsender_bridge.steady_clock import SteadyClock

#: How often what is past its retention is removed, in seconds, at most.
_HOUSEKEEPING = 60.0

log = structlog.get_logger()


def _jumped(seconds: float) -> None:
    log.warning(
        "the system clock was set; retention follows the steady clock", seconds=round(seconds)
    )


@dataclass
class Retention:
    """One writer's housekeeping. `clock` goes on from a link that was published before this writer came."""

    chain: Chain
    tables: TableFormat
    site: LakeSite
    clock: SteadyClock
    #: The last link of each snapshot, by the table's path.
    _last_use: dict[str, dict[int, int]] = field(default_factory=dict)
    _cleaned_at: float = float("-inf")

    @classmethod
    def begin(cls, chain: Chain, tables: TableFormat, site: LakeSite) -> "Retention":
        """That of a writer that has just taken over."""
        published = [manifest.published_at for manifest in chain.newest(2)]
        kept = cls(chain, tables, site, SteadyClock(min(published), jumped=_jumped))
        for manifest in chain.links():
            kept.remember(manifest)
        return kept

    def remember(self, manifest: Manifest) -> None:
        """This link needs its tables' snapshots."""
        for table in manifest.versions:
            self._last_use.setdefault(table.path, {})[table.snapshot_id] = manifest.link

    def is_due(self, seconds: float) -> bool:
        """Whether it is time to look, with a retention of so many seconds."""
        return time.monotonic() - self._cleaned_at >= min(_HOUSEKEEPING, seconds)

    def expire(self, head: Manifest, seconds: float) -> None:
        """Remove epochs past a retention of so many seconds, then what only they needed. `head` is ours."""
        self._cleaned_at = time.monotonic()
        state = self.chain.root / "_tuskline"
        removed = self.chain.retire(self.clock.kept_until(seconds), time.time(), held_from(state))
        oldest = next(iter(islice(self.chain.links(), 1)), None)
        if oldest is None:
            return
        # A reader may have come since: what it holds stays, even if its link went in between.
        held = held_from(state)
        first = oldest.link if held is None else min(oldest.link, held)
        files = 0
        current = {table.path for table in head.versions}
        for name, uses in list(self._last_use.items()):
            for snapshot in [s for s, link in uses.items() if link < first]:
                del uses[snapshot]
            path = self.chain.root / name
            if name in current:
                files += self.tables.expire(str(path), head.term, set(uses))
            elif not uses:
                # Copied again since, and no epoch that is kept is of the old copy.
                shutil.rmtree(path, ignore_errors=True)
                del self._last_use[name]
        files += self.site.sweep_unfit(head)
        if removed or files:
            log.info("expired", links=removed, files=files, oldest_epoch=oldest.epoch)
