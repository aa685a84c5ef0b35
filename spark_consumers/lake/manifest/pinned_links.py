"""Copies of links whose epochs are pinned: `<lake>/_tuskline/pins/<link, 20 digits>-t<term>.json`.

The chain is shortened at its old end only, in order: writers and readers rely on it having no gaps. So a pinned epoch's link
is copied, before the link that has the pin. The copy is the same whoever makes it, and its name has the term of the
writer that did. A writer removes copies of its own and lower terms that its newest link does not name: a newer
writer's have a higher term, so a suspended one removes none of these.
"""

import re
from collections.abc import Collection

from spark_consumers.lake.manifest.chain import Chain, Manifest
from spark_consumers.lake.manifest.pin import PINNED, Pin, checked_name
from spark_consumers.lake.manifest.sealed_json import REPAIR, dump, load
from spark_consumers.lake.store.lake_store import STATE, LakeStore
from walsender_bridge.errors import CorruptError, LakeError, TrimmedError

_PINS = f"{STATE}/pins"
_RECORD = re.compile(r"(\d{20})-t(\d+)\.json")


class PinnedLinks:
    """The copies of one lake."""

    def __init__(self, store: LakeStore) -> None:
        self._store = store

    def keep(self, link: Manifest, term: int) -> str:
        """Copy this link durably, as a writer of this term; the copy's name. Raises `CorruptError` if another is there."""
        record = f"{link.link:020d}-t{term}.json"
        self._store.prepare(_PINS)
        self._store.create(f"{_PINS}/{record}", dump(link.to_json()))
        self.read(record)
        return record

    def read(self, record: str) -> Manifest:
        """The link of this copy. Raises `CorruptError`, also if it is lost."""
        where = self._store.where(f"{_PINS}/{record}")
        try:
            link = Manifest.from_json(load(self._store, f"{_PINS}/{record}"), where)
        except FileNotFoundError:
            raise CorruptError("the pinned epoch is lost", where=where, repair=REPAIR) from None
        if link.link != link_of(record):
            raise CorruptError(f"holds link {link.link}", where=where, repair=REPAIR)
        return link

    def names(self) -> list[str]:
        """The names of all copies."""
        return sorted(name for name in self._store.names(_PINS) if _RECORD.fullmatch(name))

    def remove(self, record: str) -> None:
        """Remove the copy, if it is there."""
        self._store.remove(f"{_PINS}/{record}")


def link_of(record: str) -> int:
    """The number of the link that is copied in a record of this name; 0 for another name."""
    match = _RECORD.fullmatch(record)
    return int(match[1]) if match else 0


def term_of(record: str) -> int:
    """The term of the writer that made a record of this name; 0 for another name."""
    match = _RECORD.fullmatch(record)
    return int(match[2]) if match else 0


def unneeded(records: Collection[str], head: Manifest, held: int | None) -> list[str]:
    """The copies that a writer whose newest link is `head` may remove. `held`: the oldest link that a reader holds."""
    named = {pin.record for pin in head.pins.values()}
    return [
        record
        for record in records
        if record not in named
        and term_of(record) <= head.term
        and (held is None or link_of(record) < held)
    ]


def at_epoch(chain: Chain, epoch: int) -> Manifest:
    """The last link of that epoch, also if only a pin keeps it, or its link is damaged. Raises as `Chain.at_epoch`."""
    try:
        return chain.at_epoch(epoch)
    except (TrimmedError, CorruptError, LakeError):
        pin = _of_epoch(chain, epoch)
        if pin is None:
            raise
        return PinnedLinks(chain.store).read(pin.record)


def pinned(store: LakeStore, head: Manifest) -> list[Manifest]:
    """The links of all pinned epochs. Raises `CorruptError` for a copy that is damaged or lost."""
    links = PinnedLinks(store)
    return [links.read(record) for record in sorted({pin.record for pin in head.pins.values()})]


def _of_epoch(chain: Chain, epoch: int) -> Pin | None:
    head = chain.head()
    pins = head.pins.values() if head is not None else ()
    return next((pin for pin in pins if pin.epoch == epoch and pin.keeps_tags), None)


def at_pin(chain: Chain, name: str) -> Manifest:
    """The link of the epoch that is pinned under this name. Raises `LakeError`, `UsageError`, `CorruptError`."""
    checked_name(name)
    head = chain.head()
    pins = head.pins if head is not None else {}
    pin = pins.get(name)
    if pin is None or pin.state != PINNED:
        raise LakeError(
            f"there is no pin {name!r}" if pin is None else f"pin {name!r} is {pin.state}",
            where=chain.store.location,
            repair="list the pinned epochs with `tuskline epochs list`",
        )
    try:
        return PinnedLinks(chain.store).read(pin.record)
    except CorruptError:
        now = chain.head()
        if now is None or now.pins.get(name) == pin:
            raise
        # It was released since, and its copy removed; or it has been given another time, which is tried again.
        return at_pin(chain, name)


def is_kept(chain: Chain, link: Manifest) -> bool:
    """Whether the link is in the chain, or its epoch is pinned."""
    if chain.has(link.link):
        return True
    head = chain.head()
    return head is not None and any(pin.link == link.link for pin in head.pins.values())
