"""Removes what is past its retention: links, then the snapshots and files that only they needed.

Ages are differences of steady times (`Manifest.steady_at`): a machine's clock that leaps ahead must not end every epoch
but the newest one, whether or not the driver is restarted after the leap. Each writer's clock continues from the
newest link (`clock_after`), so steady times never fall along the chain, and two links are at most `CATCH_UP` times as
far apart as the time during which writers ran between them.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import islice

from spark_consumers.lake.format import leaks
from spark_consumers.lake.format.table_format import TableFormat
from spark_consumers.lake.manifest import reader_files, takeover
from spark_consumers.lake.manifest.chain import Chain, Manifest
from spark_consumers.lake.manifest.reader_leases import Readers
from spark_consumers.lake.store.living import Living
from spark_consumers.lake.store.place import place
from spark_consumers.lake.writer import presence
from spark_consumers.lake.writer.lake_site import LakeSite
from spark_consumers.lake.writer.pins import Pins
from spark_consumers.spark.java_errors import is_of_data
from walsender_bridge.errors import CorruptError, FencedError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.steady_clock import SteadyClock

#: Tables that are cleaned at a time, at most, though more have changed: epochs wait meanwhile.
_MOST = 100
#: Tables that did not change, and are looked at all the same, each time: users drop references, and crashes leave files.
_OTHERS = 20
#: How often what is past its retention is removed, in seconds, at most.
_HOUSEKEEPING = 60.0

log = logs.logger()


def _jumped(seconds: float) -> None:
    log.warning(
        "the system clock was set; retention follows the steady clock", seconds=round(seconds)
    )


def clock_after(link: Manifest | None) -> SteadyClock:
    """The clock of a writer whose first link follows this one."""
    return SteadyClock(link.steady_at if link is not None else 0.0, jumped=_jumped)


@dataclass
class Retention:
    """One writer's housekeeping, by the clock that its links are stamped by."""

    chain: Chain
    tables: TableFormat
    site: LakeSite
    clock: SteadyClock
    #: Called with a table's path before its snapshots but these expire.
    before_expiry: Callable[[str, Collection[int]], None] | None = None
    #: The last link of each snapshot, by the table's path.
    _last_use: dict[str, dict[int, int]] = field(default_factory=dict)
    _cleaned_at: float = float("-inf")
    #: Paths of tables that may have something to remove, since they were written or a link that used them is gone.
    _due: set[str] = field(default_factory=set)
    #: Those that were named to us (`mark`) and have not had their turn since.
    _named: set[str] = field(default_factory=set)
    #: Of all tables, those that it is longest ago for come first.
    _turns: dict[str, None] = field(default_factory=dict)
    #: Tables that are still to be swept (`leaks`), and what the one that is under way may have left.
    _unswept: list[str] = field(default_factory=list)
    _listed: tuple[str, frozenset[str]] | None = None
    #: When the takeover's link was written, in nanoseconds, by the clock of the tables' files.
    _taken_at: int = 0
    _readers: Readers = field(init=False)
    _drivers: Living = field(init=False)
    _pins: Pins = field(init=False)

    def __post_init__(self) -> None:
        self._readers = Readers(self.chain.store)
        self._drivers = presence.living(self.chain.store)
        self._pins = Pins(self.chain, self.tables)

    @classmethod
    def begin(
        cls,
        chain: Chain,
        tables: TableFormat,
        site: LakeSite,
        clock: SteadyClock,
        before_expiry: Callable[[str, Collection[int]], None] | None = None,
    ) -> "Retention":
        """That of a writer that has just taken over."""
        kept = cls(chain, tables, site, clock, before_expiry)
        for manifest in chain.links():
            kept.remember(manifest)
        head = chain.head()
        if head is not None:
            kept._unswept = [table.path for table in head.versions if not table.is_partial]
            kept._taken_at = place(chain.where(head)).stat().st_mtime_ns
        return kept

    def remember(self, manifest: Manifest) -> None:
        """This link needs its tables' snapshots."""
        for table in manifest.versions:
            uses = self._last_use.setdefault(table.path, {})
            if table.snapshot_id not in uses:
                self._due.add(table.path)
            uses[table.snapshot_id] = manifest.link

    def is_due(self, seconds: float) -> bool:
        """Whether it is time to look, with a retention of so many seconds."""
        return time.monotonic() - self._cleaned_at >= min(_HOUSEKEEPING, seconds)

    def mark(self, paths: Collection[str]) -> None:
        """These tables may have something to remove, as somebody else has found."""
        self._due |= set(paths)
        self._named |= set(paths)

    def has_looked_at(self, paths: Collection[str]) -> bool:
        """Whether all of these tables that are there have had their turn since they were named, whatever came of it."""
        return self._named.isdisjoint(paths)

    def expire(
        self,
        head: Manifest,
        seconds: float,
        *,
        others: bool = True,
        busy: Collection[str] = (),
    ) -> None:
        """Remove epochs past a retention of so many seconds, then what only they needed. `head` is ours.

        `others`: look at tables that did not change as well, some each time; a maintainer spares that, as it names those that
        are worth it (`mark`). `busy`: tables, by path, of which something is written that no link names yet.

        Raises `FencedError`. What no link and no pin has is never pinned again, for a pin is made of one of these. So the oldest
        link is read first, and then whether a newer writer has come: one that comes after that can pin nothing that is
        removed here. An overtaken writer may remove links, as a pin has a copy of its own.
        """
        self._cleaned_at = time.monotonic()
        pinned = self._pinned(head)
        if pinned is None:
            return
        removed = self.chain.retire(self.clock.now() - seconds, self._readers.held_from())
        oldest = next(iter(islice(self.chain.links(), 1)), None)
        if oldest is None:
            return
        # A reader may have come since: what it holds stays, even if its link went in between.
        held = self._readers.held_from()
        first = oldest.link if held is None else min(oldest.link, held)
        newest = self.chain.head()
        if newest is not None and newest.term > head.term:
            raise takeover.overtaken(newest.term)
        files = 0
        # The copy itself writes into a table of which chunks are still to come: the newest is in no link yet.
        copying = {table.path for table in head.copies.values() if table.is_partial} | {*busy}
        current = {table.path for table in head.versions} - copying
        for name, uses in list(self._last_use.items()):
            kept = pinned.get(name, set())
            for snapshot in [s for s, link in uses.items() if link < first and s not in kept]:
                del uses[snapshot]
                self._due.add(name)
        # Earlier copies, too: what a release could not change in one, as it was damaged, is done when it can be.
        known = {name: uses for name, uses in self._last_use.items() if name not in copying}
        there = current | {name for name, uses in known.items() if uses}
        cleaned = self._turn(there, _OTHERS if others else 0)
        # What others have removed, and what was tagged for a link that was lost.
        self._pins.repair(head, cleaned)
        for name, uses in known.items():
            if name in there:
                if name in cleaned:
                    files += self._expire_table(name, head.term, uses)
            elif not uses:
                # Copied again since, and no epoch that is kept is of the old copy.
                if self.before_expiry is not None:
                    self.before_expiry(name, ())
                if self.site.remove_table(name):
                    del self._last_use[name]
        self._named = (self._named & there) - set(cleaned)
        files += self.site.sweep_of_links(head, cleaned)
        files += self._sweep(head, current) + self.chain.store.sweep_drafts()
        self._pins.expire(head, held)
        reader_files.remove_dead(self.chain.root, self._readers.names)
        # Dead drivers' signs of life go.
        self._drivers.records()
        if removed or files:
            log.info("expired", links=removed, files=files, oldest_epoch=oldest.epoch)

    def _expire_table(self, name: str, term: int, kept: Collection[int]) -> int:
        """Drop the snapshots of a table but these; how many files went. One that cannot be cleaned stays due. Raises `FencedError`."""
        try:
            if self.before_expiry is not None:
                self.before_expiry(name, set(kept))
            files = self.tables.expire(str(self.chain.root / name), term, set(kept))
        except Exception as error:
            if not is_of_data(error):
                raise
            # What ails it is said where it is written.
            log.warning("snapshots of a table do not expire", path=name, error=str(error)[:500])
            return 0
        # Not before: an error ends this look, and the tables behind it are due at the next.
        self._due.discard(name)
        return files

    def _pinned(self, head: Manifest) -> dict[str, set[int]] | None:
        """The snapshots that pins keep, by the table's path; None if that is not known."""
        found: dict[str, set[int]] = {}
        try:
            links = self._pins.needed(head)
        except CorruptError as error:
            log.warning("nothing expires: what a pin keeps is not known", error=str(error))
            return None
        for link in links:
            for table in link.readable.values():
                found.setdefault(table.path, set()).add(table.snapshot_id)
                # Of an earlier driver's pin, whose link is not in the chain.
                self._last_use.setdefault(table.path, {}).setdefault(table.snapshot_id, link.link)
        return found

    def _turn(self, there: Collection[str], more: int) -> list[str]:
        """The tables to clean this time, of these: as many as there is work for, not as many as there are; and `more` others."""
        self._turns = dict.fromkeys([*(t for t in self._turns if t in there), *there])
        self._due &= set(there)
        due = [path for path in self._turns if path in self._due][:_MOST]
        others = (path for path in self._turns if path not in due)
        found = [*due, *islice(others, more)]
        for path in found:
            del self._turns[path]
            self._turns[path] = None
        return found

    def _sweep(self, head: Manifest, current: Collection[str]) -> int:
        """One step in sweeping the tables of what earlier writers left: one table each time; how many files."""
        files = 0
        there = {table.path for table in head.versions}
        if self._listed is not None and self._listed[0] not in current:
            # Something is written there that no link names yet: its turn comes after that.
            self._unswept.append(self._listed[0])
        elif self._listed is not None:
            name, listed = self._listed
            try:
                files = self.tables.sweep(str(self.chain.root / name), head.term, listed)
            except FencedError:
                raise
            except Exception as error:
                # The files stay until the next takeover; the table's own trouble is reported where it is used.
                log.warning("could not remove files", path=name, error=str(error)[:500])
        self._listed = None
        self._unswept = [name for name in self._unswept if name in there]
        if (turn := next((n for n in self._unswept if n in current), None)) is not None:
            self._unswept.remove(turn)
            self._listed = turn, leaks.listed(self.chain.root / turn, head.term, self._taken_at)
        return files
