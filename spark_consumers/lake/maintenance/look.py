"""Which tables have something to expire that their writer does not know of: a look at their metadata, a few at a time.

A writer knows what its own links stop needing. What it does not know is what others do: a user drops a branch that kept a
snapshot, or the tag of a pin. So somebody has to go through all tables now and then. The maintainer does, and names to the
writer those that are worth its own look; nothing depends on what it finds.
"""

import threading
from collections.abc import Collection, Iterator, Mapping
from itertools import islice, takewhile
from typing import Any

from spark_consumers.lake.catalog.table_catalog import TableCatalog, TableId
from spark_consumers.lake.manifest.chain import Chain, Manifest
from spark_consumers.lake.manifest.pin import PINNED, tag_of
from spark_consumers.lake.manifest.pinned_links import PinnedLinks

#: Links that are read for a look, at most; nothing is judged before all of them are.
_LINKS = 200
#: Tables that are looked at each time.
_TABLES = 20


class Look:
    """One maintainer's looks at a lake."""

    def __init__(self, chain: Chain, catalog: TableCatalog) -> None:
        self._chain = chain
        self._catalog = catalog
        #: The last link of each snapshot, by the table's path.
        self._last_use: dict[str, dict[int, int]] = {}
        self._newest = 0
        self._turns: dict[str, None] = {}

    def unclean(self, head: Manifest) -> list[str]:
        """The paths of tables that the writer should look at, of those whose turn it is. Raises `CorruptError`."""
        if not self._follow():
            return []
        there = {table.path: None for table in head.versions}
        self._turns = dict.fromkeys([*(t for t in self._turns if t in there), *there])
        turn = list(islice(self._turns, _TABLES))
        for path in turn:
            del self._turns[path]
            self._turns[path] = None
        pins = list(self._pinned(head))
        return [path for path in turn if self._is_unclean(path, pins)]

    def all_unclean(self, head: Manifest, stop: threading.Event) -> list[str]:
        """Those of all tables, or of as many as there was time for before `stop`. Raises `CorruptError`."""
        while not self._follow():
            if stop.is_set():
                return []
        pins = list(self._pinned(head))
        there = takewhile(lambda _: not stop.is_set(), (table.path for table in head.versions))
        return [path for path in there if self._is_unclean(path, pins)]

    def _follow(self) -> bool:
        """Read the links that came; whether all are read."""
        numbers = self._chain.numbers()
        new = [number for number in numbers if number > self._newest]
        for number in new[:_LINKS]:
            link = self._chain.at_link(number)
            for table in link.versions if link is not None else ():
                self._last_use.setdefault(table.path, {})[table.snapshot_id] = number
            self._newest = number
        if numbers:
            for uses in self._last_use.values():
                for snapshot in [s for s, link in uses.items() if link < numbers[0]]:
                    del uses[snapshot]
        return len(new) <= _LINKS

    def _pinned(self, head: Manifest) -> Iterator[tuple[str | None, Manifest]]:
        """The links of pins, each with its tag if all tables have it."""
        links = PinnedLinks(self._chain.store)
        for name, pin in head.pins.items():
            yield tag_of(name) if pin.state == PINNED else None, links.read(pin.record)

    def _is_unclean(self, path: str, pins: Collection[tuple[str | None, Manifest]]) -> bool:
        loaded = self._catalog.load(TableId.at(path))
        if loaded is None:
            return False
        pinned = [
            (tag, table.snapshot_id)
            for tag, link in pins
            for table in link.readable.values()
            if table.path == path
        ]
        needed = {*self._last_use.get(path, ()), *(snapshot for _, snapshot in pinned)}
        tags = {tag: snapshot for tag, snapshot in pinned if tag is not None}
        return is_unclean(loaded.metadata, needed, tags)


def is_unclean(
    metadata: Mapping[str, Any], needed: Collection[int], tags: Mapping[str, int]
) -> bool:
    """Whether a table has a snapshot that nobody needs and nothing refers to, or lacks one of these tags of pins."""
    refs = {name: ref["snapshot-id"] for name, ref in metadata.get("refs", {}).items()}
    there = {snapshot["snapshot-id"] for snapshot in metadata.get("snapshots", ())}
    return bool(there - {*needed, *refs.values()}) or any(
        refs.get(tag) != snapshot for tag, snapshot in tags.items() if snapshot in there
    )
