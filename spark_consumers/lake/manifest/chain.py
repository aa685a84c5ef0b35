"""The chain of manifests: what an epoch is, and who may publish the next one.

A lake's state is a chain of immutable files, `<lake>/_tuskline/epochs/<link, 20 digits>.json`. Each link
names an epoch, the snapshot of every table that makes it, and the term of its writer. The newest link is
the lake: readers resolve it once and read every table at the snapshot that it names.

Why a table set is never torn and never goes back:

- A link is published by creating its file *exclusively* under the number after the head's, complete and
  synced before it gets that name. Of two writers one gets the number; the other is fenced.
- A writer's first act is a *takeover link*: the head's content under a higher term. Whatever an older
  writer does from then on, the number that it means to publish is taken.
- Epochs and terms never fall along the chain; `publish` refuses a link that would.
- The newest link is recorded beside the chain (`newest_record`): a chain that ends before has lost it, and every writer and
  reader stops.
- Links are removed from the old end only, in order. A writer that slept until then could create a removed
  number again; it finds after creating that the link before its own is gone, and takes its own away.
  Readers never saw it, for they start at the greatest number.

Half-written files have temporary names and are not links. A damaged link is an error that names it, not a
reason to read an older one.

Most links have only what differs from a full one (`delta`), which retention keeps for as long as them.
"""

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

from spark_consumers.lake.manifest import delta, home
from spark_consumers.lake.manifest.feed_version import FeedVersion
from spark_consumers.lake.manifest.newest import ChainLink, PublishedLink, lost
from spark_consumers.lake.manifest.newest_record import NewestRecord
from spark_consumers.lake.manifest.pin import Pin
from spark_consumers.lake.manifest.sealed_json import (
    FORMAT_VERSION,
    REPAIR,
    dump,
    is_sealed,
    load,
    parse_sealed,
    sealed,
    unreadable,
)
from spark_consumers.lake.manifest.table_version import (
    COPIED,
    HELD,
    LEFT,
    LIVE,
    StreamPosition,
    TableVersion,
)
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.store.lake_store import (
    FROM_ENVIRONMENT,
    STATE,
    Created,
    LakeStore,
    StoreOptions,
)
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.store.open_store import open_store
from spark_consumers.lake.store.place import Place, place
from walsender_bridge.errors import (
    CorruptError,
    DeadlineError,
    FencedError,
    LakeError,
    NotSupportedError,
    TrimmedError,
    TusklineError,
    UnavailableError,
)

__all__ = [
    "COPIED",
    "LEFT",
    "LIVE",
    "Chain",
    "Manifest",
    "StreamPosition",
    "TableVersion",
    "open_chain",
    "wait_for_epoch",
]

_LINK_DIGITS = 20
_IDENTITY = f"{STATE}/lake.json"
_EPOCHS = f"{STATE}/epochs"
#: The former names of members, by the format that brought the present ones.
_BEFORE_7 = {"set_aside": "not_copied"}
#: Full links whose tables a reader of the chain keeps.
_BASES = 4
#: Seconds between a waiting reader's polls for a new link.
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Manifest:
    """One link of the chain.

    `published_at` is in seconds since the Unix epoch, by the wall clock, for people and `as_of`. `steady_at` is the
    writer's `SteadyClock`, which continues along the chain, for ages; 0 in links of earlier formats. `seconds` is the
    duration of the round that wrote it; `changes` counts the row changes of the log in this epoch's range (0 in a takeover
    link); `stage` is the name that the round's data files carry. `tables` is keyed by `stream.schema.table`, a table's name at
    its source; so is `copies`: copies that are not shown yet, beside the tables that they replace. `views`, by `schema.view`, are of the same epoch, and so are
    `feeds`, by `stream.schema.feed`. `not_copied`: why a table is not in the
    lake, why its last copy failed, or why it does not have its target name. `answered`: requests that were carried out, by their ids (`requests`).
    `log_id`: the log that the lake is of, if it is not the one in `lake.json` any more (`adopt`). `writer`: drawn for the
    takeover; two links of one number are told apart by it, though their writers have chosen the same term. `pins`: the pinned
    epochs by the names of their pins.
    """

    lake: str
    link: int
    epoch: int
    previous_epoch: int
    term: int
    published_at: float
    steady_at: float = 0.0
    seconds: float = 0.0
    changes: int = 0
    stage: str = ""
    streams: dict[str, StreamPosition] = field(default_factory=dict)
    tables: dict[str, TableVersion] = field(default_factory=dict)
    views: dict[str, ViewVersion] = field(default_factory=dict)
    feeds: dict[str, FeedVersion] = field(default_factory=dict)
    not_copied: dict[str, str] = field(default_factory=dict)
    copies: dict[str, TableVersion] = field(default_factory=dict)
    answered: dict[str, dict[str, Any]] = field(default_factory=dict)
    log_id: str = ""
    writer: str = ""
    pins: dict[str, Pin] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows that a reader of this epoch sees, over all tables."""
        return sum(table.rows for table in self.tables.values())

    @property
    def readable(self) -> dict[str, TableVersion]:
        """The tables that a reader of this epoch sees, those of views and feeds too, by their names in the lake.

        A table that has come with the name of a view or a feed takes its place.
        """
        seen = self.readable_views
        views = {n: t for n, t in self.view_tables.items() if n in seen}
        tables = {table.lake_name or name: table for name, table in self.tables.items()}
        return {**self.feed_tables, **views, **tables}

    @property
    def at_sources(self) -> dict[str, str]:
        """By the names in the lake of the tables that sources have: their names there."""
        return {table.lake_name or name: name for name, table in self.tables.items()}

    @property
    def readable_views(self) -> dict[str, ViewVersion]:
        """The views that a reader of this epoch sees, by `stream.schema.view`.

        A table that has come with the name of a view takes its place.
        """
        named = {
            view.full_name(name): view
            for name, view in self.views.items()
            if view.table is not None
        }
        tables = self.at_sources
        return {full: view for full, view in named.items() if full not in tables}

    @property
    def view_tables(self) -> dict[str, TableVersion]:
        """The tables of the views that have rows, by `stream.schema.view`."""
        return {
            view.full_name(name): view.table
            for name, view in self.views.items()
            if view.table is not None
        }

    @property
    def feed_tables(self) -> dict[str, TableVersion]:
        """The tables of the feeds that have rows, by `stream.schema.feed`."""
        shown = {name: feed.shown(self.tables.get(feed.of)) for name, feed in self.feeds.items()}
        return {name: table for name, table in shown.items() if table is not None}

    @property
    def versions(self) -> list[TableVersion]:
        """Every table whose files are needed: shown, or copied and not shown yet."""
        derived = [*self.view_tables.values(), *self.feed_tables.values()]
        return [*self.tables.values(), *self.copies.values(), *derived]

    @property
    def written(self) -> list[TableVersion]:
        """Those that a writer may come to write: a table that has left is copied again if it comes back."""
        return [table for table in self.versions if table.state != LEFT]

    def to_json(self) -> dict[str, Any]:
        """The manifest as the file of a full link has it (`delta`)."""
        # `asdict` would copy every member of every table.
        members = asdict(replace(self, tables={}, copies={}, views={}, feeds={}))
        members["tables"] = {name: table.to_json() for name, table in self.tables.items()}
        members["copies"] = {name: table.to_json() for name, table in self.copies.items()}
        members["views"] = {name: view.to_json() for name, view in self.views.items()}
        members["feeds"] = {name: feed.to_json() for name, feed in self.feeds.items()}
        return {"format_version": FORMAT_VERSION, **members, "rows": self.rows}

    @classmethod
    def from_json(
        cls, record: dict[str, Any], where: str, base: delta.Tables | None = None
    ) -> Self:
        """The manifest in a file's JSON, of a delta with the tables of its base.

        Raises `CorruptError`, or `NotSupportedError` for a newer format.
        """
        version = record.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise NotSupportedError(
                f"the lake has format {version}, but this version supports {FORMAT_VERSION}",
                where=where,
                repair="install a newer tuskline",
            )
        values = {
            _BEFORE_7.get(k, k): v for k, v in record.items() if k not in {"format_version", "rows"}
        }
        try:
            values["streams"] = {k: StreamPosition(**v) for k, v in values["streams"].items()}
            differing = values.pop(delta.BASE, None)
            if differing is not None:
                values["tables"] = delta.applied(base or {}, differing)
            for name in ("tables", "copies") if differing is None else ("copies",):
                values[name] = {
                    k: TableVersion.from_json(v) for k, v in values.get(name, {}).items()
                }
            values["views"] = {
                k: ViewVersion.from_json(v) for k, v in values.get("views", {}).items()
            }
            values["feeds"] = {
                k: FeedVersion.from_json(v) for k, v in values.get("feeds", {}).items()
            }
            values["pins"] = {k: Pin.from_json(v) for k, v in values.get("pins", {}).items()}
            if version == 1:
                # There, a copy stood in the place of its table.
                copies = {k: t for k, t in values["tables"].items() if t.state == COPIED}
                values["copies"] = copies
                values["tables"] = {k: t for k, t in values["tables"].items() if k not in copies}
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if "unexpected keyword argument" in str(error):
                # The checksum is right: a later version has written a member that this one does not know, and the link is not to be moved away.
                raise NotSupportedError(
                    f"a newer version has written the lake: {error}",
                    where=where,
                    repair="install a newer tuskline",
                ) from None
            raise CorruptError(f"not a manifest: {error}", where=where, repair=REPAIR) from None

    def next(self, steady_at: float, **changes: Any) -> "Manifest":
        """The link after this one, published at `steady_at`: same content but for `changes`."""
        return replace(
            self,
            **{
                "link": self.link + 1,
                "previous_epoch": self.epoch,
                "published_at": time.time(),
                "steady_at": steady_at,
                "seconds": 0.0,
                "changes": 0,
                "stage": "",
                **changes,
            },
        )


def open_chain(lake: str | Place, options: StoreOptions = FROM_ENVIRONMENT) -> "Chain":
    """The chain of this lake, by the lake's own path (`home`). It need not exist yet. `options`: for one in a bucket."""
    store = open_store(lake, options)
    return Chain(LocalStore(home.resolved(store.folder)) if store.folder is not None else store)


class Chain:
    """The manifests of one lake."""

    def __init__(self, store: LakeStore) -> None:
        self.store = store
        self._newest = NewestRecord(store)
        #: What our next links build on, and what deltas that were read lately do, by number and checksum.
        self._base: delta.Base | None = None
        self._bases: dict[tuple[int, int], delta.Tables] = {}

    @property
    def root(self) -> Place:
        """The lake's folder, which has its tables: on this machine, or in a bucket."""
        return self.store.folder or place(self.store.location)

    @property
    def staging(self) -> Place:
        """Where a round's unfinished work is; nothing of it outlives the round."""
        return self.root / STATE / "staging"

    def initialise(self, log_id: str, table_format: str) -> str:
        """Make this folder a lake of that change log, or find that it is one, of whatever log (`adopt`); the lake's UUID.

        Raises `LakeError` if it holds another format, or belongs at another path, `NotSupportedError` for a store in which
        a link could have two writers.
        """
        made = {
            "format_version": FORMAT_VERSION,
            "lake": str(uuid.uuid4()),
            "log_id": log_id,
            "format": table_format,
        }
        self.store.check()
        self.store.prepare(_EPOCHS)
        # Whether we made it or found it, what counts is what is there.
        self.store.create(_IDENTITY, dump(made))
        home.record(self.store)
        found = load(self.store, _IDENTITY)
        if found.get("format") != table_format:
            raise LakeError(
                f"this lake's format is {found.get('format')!r}, not {table_format!r}",
                where=self.store.location,
                repair="specify another folder for the lake",
            )
        lake: str = found["lake"]
        return lake

    def exists(self) -> bool:
        """Whether a lake is here."""
        return self.store.exists(_IDENTITY)

    def identity(self) -> dict[str, Any]:
        """What `lake.json` says. Raises `LakeError` if this is no lake, or not where it belongs; `CorruptError`."""
        if not self.exists():
            raise LakeError(
                "no lake in this folder",
                where=self.store.location,
                repair="specify the folder that `tuskline lake run` writes",
            )
        home.check(self.store)
        return load(self.store, _IDENTITY)

    def numbers(self) -> list[int]:
        """The numbers of the links that are there, ascending."""
        try:
            names = self.store.names(_EPOCHS)
        except OSError as error:
            raise unreadable(self.store.where(_EPOCHS), error) from None
        return sorted(
            int(stem)
            for stem, _, ending in (name.partition(".") for name in names)
            if ending == "json" and len(stem) == _LINK_DIGITS and stem.isdecimal()
        )

    def head(self) -> Manifest | None:
        """The newest link; None if nothing was ever published. Raises `CorruptError`.

        It is looked for from the recorded one on: a listing grows with the chain. If links between others are lost that
        the record is older than, this is the one before them; a takeover lists.
        """
        return self._after_recorded() or self.listed_head()

    def _after_recorded(self) -> Manifest | None:
        """The newest link that follows the recorded one without a gap; None if that is not certain."""
        try:
            recorded = self._newest.known()
        except OSError:
            return None
        if recorded is None:
            return None
        number = recorded.link
        while self.has(number + 1):
            number += 1
        found = self._read(number)
        # Removed are the oldest, in order. So if the one before is there, the next was not removed, but never created; and
        # this one is not a removed number that a writer which slept has just created again.
        return found if number == 1 or self.has(number - 1) else None

    def listed_head(self) -> Manifest | None:
        """The link of the greatest number; None if there is none. Raises `CorruptError`."""
        while True:
            numbers = self.numbers()
            if not numbers:
                return None
            found = self._read(numbers[-1])
            if found is not None:
                return found

    def links(self) -> Iterator[Manifest]:
        """All links that are kept, oldest first."""
        for number in self.numbers():
            found = self._read(number)
            if found is not None:
                yield found

    def at_link(self, link: int) -> Manifest | None:
        """That link; None if it is not there. Raises `CorruptError`."""
        return self._read(link)

    def newest_first(self, epoch: int | None = None) -> Iterator[Manifest]:
        """The links of this epoch and of all before (default: of all epochs), newest first.

        Only those that are asked for are read, and none is listed before the oldest: there may be very many. Raises
        `CorruptError`.
        """
        found = self.head() if epoch is None else self._last_through(epoch, self.numbers())
        while found is not None:
            yield found
            number, found = found.link, None
            while number > 1 and found is None:
                number -= 1
                found = self._read(number)
                if found is None:
                    # It is lost, or it and all that were older are removed.
                    number = 1 + max((each for each in self.numbers() if each < number), default=0)

    def newest(self, limit: int) -> list[Manifest]:
        """The newest `limit` links, newest first."""
        found = (self._read(number) for number in reversed(self.numbers()[-limit:]))
        return [manifest for manifest in found if manifest is not None]

    def at_epoch(self, epoch: int) -> Manifest:
        """The last link of that epoch.

        Raises `TrimmedError` for one that is past its retention, `LakeError` for one that never was.
        """
        best = self._last_through(epoch, self.numbers())
        if best is not None and best.epoch == epoch:
            return best
        oldest = next(self.links(), None)
        if oldest is not None and epoch < oldest.epoch:
            raise TrimmedError(
                f"epoch {epoch} has expired; the oldest retained epoch is {oldest.epoch}",
                where=self.store.location,
                repair="read a later epoch, or set a longer [lake] retention",
            )
        nearest = f"; the preceding one is {best.epoch}" if best is not None else ""
        raise LakeError(
            f"there is no epoch {epoch}{nearest}",
            where=self.store.location,
            repair="list them with `tuskline epochs list`",
        )

    def _last_through(self, epoch: int, numbers: Sequence[int]) -> Manifest | None:
        """The last link of this epoch or an earlier one. Epochs never fall along the chain, so it is found by halves."""
        low, high = 0, len(numbers)
        best: Manifest | None = None
        while low < high:
            middle = (low + high) // 2
            manifest = self._read(numbers[middle])
            if manifest is None or manifest.epoch <= epoch:
                best = manifest or best
                low = middle + 1
            else:
                high = middle
        return best

    def as_of(self, moment: float) -> Manifest:
        """The link that was the newest at `moment`, in seconds since the Unix epoch.

        Raises `TrimmedError` if that is before the oldest kept link, `LakeError` if nothing is published.
        """
        oldest: Manifest | None = None
        for number in reversed(self.numbers()):
            manifest = self._read(number)
            if manifest is None:
                continue
            if manifest.published_at <= moment:
                return manifest
            oldest = manifest
        if oldest is None:
            raise LakeError("no epoch is published yet", where=self.store.location)
        raise TrimmedError(
            f"no epoch of that time is retained; the oldest is {oldest.epoch}",
            where=self.store.location,
            repair="read a later epoch, or set a longer [lake] retention",
        )

    def publish(self, manifest: Manifest, head: Manifest | None) -> None:
        """Make `manifest` the link after `head`, durably.

        Raises `FencedError` if another writer has published since `head`, `CorruptError` if `head` is lost,
        `UnavailableError` if the outcome is not known, or an earlier attempt has published another link, and
        `AssertionError` for a link that could not follow `head`. After any other error it may be published, too.
        """
        if head is not None:
            assert manifest.link == head.link + 1, "links are consecutive"
            assert manifest.epoch >= head.epoch, "epochs never go back"
            assert manifest.term >= head.term, "terms never go back"
            assert manifest.steady_at >= head.steady_at, "the steady time never goes back"
            if not self.has(head.link) and max(self.numbers(), default=0) < head.link:
                raise lost(
                    PublishedLink(head.link, head.epoch, head.term), self.head(), self.where(head)
                )
        self._newest.fence(manifest)
        name = _name(manifest.link)
        content, base = self._encoded(manifest)
        # Whatever fails from here on, this link may be there, and a full one: no later link builds on one before it (`retire`).
        self._base = None
        taken = self.store.create(name, content) is Created.LOST
        retired = self._is_retired(manifest, head)
        if retired and not taken:
            self.store.remove(name)
        if taken or retired:
            raise self._refused(manifest)
        self._base = base
        self._newest.record(manifest)

    def _encoded(self, manifest: Manifest) -> tuple[bytes, delta.Base]:
        """The link's file: a delta, or a full one if that is due; and what the next link builds on once it is published."""
        base, tables = self._base, manifest.tables
        if (
            base is None
            or delta.is_due(base, manifest.link, manifest.term, len(tables))
            or not self._is_whole(base)
        ):
            content, crc = sealed(manifest.to_json())
            return content, delta.Base(manifest.link, manifest.term, crc, tables)
        differing = delta.delta(base.tables, tables)
        record = replace(manifest, tables={}).to_json() | {"rows": manifest.rows}
        record[delta.BASE] = {"link": base.link, "crc": base.crc, **differing}
        return dump(record), replace(base, written=base.written + len(differing["changed"]))

    def _is_whole(self, base: delta.Base) -> bool:
        """Whether the base can be read still: one that was lost or damaged takes no further epochs with it."""
        try:
            return is_sealed(self.store.read(_name(base.link)), base.crc)
        except FileNotFoundError:
            return False

    def _is_retired(self, manifest: Manifest, head: Manifest | None) -> bool:
        """Whether this link, just created, is far behind the chain's end."""
        if head is not None:
            return not self._follows(head)
        return max(self.numbers(), default=0) > manifest.link

    def _refused(self, manifest: Manifest) -> TusklineError:
        """Why this link is not published."""
        there = self._read(manifest.link)
        if there is not None and there.writer == manifest.writer != "":
            # In an object store a request may be carried out long after its writer has given it up.
            return UnavailableError(
                f"link {manifest.link} was published by an earlier attempt of this writer",
                where=self.where(manifest),
                repair="no action is needed: the writer continues from that link",
            )
        now = self.listed_head()
        return FencedError(
            f"cannot publish link {manifest.link}: term {manifest.term} has ended"
            + (f", term {now.term} is at link {now.link}" if now is not None else ""),
            where=self.store.location,
            repair="no action is needed: the newer writer continues",
        )

    def _follows(self, head: Manifest) -> bool:
        """Whether this link is there: not removed by retention, nor lost, and its number another writer's by now."""
        try:
            there = self._record(head.link)
        except CorruptError:
            return True
        return there is not None and bool(there.get("term") == head.term)

    def recorded_newest(self) -> PublishedLink | None:
        """The newest link that a writer has recorded, which may not be the newest. Raises `CorruptError`.

        Call this before the chain is read.
        """
        return self._newest.read()

    def where(self, link: ChainLink) -> str:
        """The file of this link."""
        return self.store.where(_name(link.link))

    def missing(self) -> list[int]:
        """Numbers of links that are lost between others: those removed by retention are older than all that are there."""
        there = self.numbers()
        gaps = [n for before, after in pairwise(there) for n in range(before + 1, after)]
        # Retention may have removed some while the folder was listed; it goes from the old end, in order.
        return [n for n in gaps if any(self.has(older) for older in there if older < n)]

    def drafts(self) -> Iterable[str]:
        """The names of half-made links that crashes left."""
        return self.store.drafts(_EPOCHS)

    def has(self, link: int) -> bool:
        """Whether this link is kept."""
        return self.store.exists(_name(link))

    def retire(self, before: float, held_from: int | None = None) -> int:
        """Remove the links that were already succeeded at `before` (steady seconds), below `held_from`; how many.

        The newest link published at or before that time stays, for it was current then; so does the head, and what a link
        that stays builds on: bases never go back along the chain (`publish`), so that of the oldest one is the oldest. A link
        of an earlier format has no steady time: it counts as published with the next one that
        has.
        """
        succeeded: list[int] = []
        waiting: list[int] = []
        numbers = self.numbers()
        for number, following in pairwise(numbers):
            after = self._record(following)
            if after is None or (held_from is not None and number >= held_from):
                break
            waiting.append(number)
            steady_at = after.get("steady_at", 0.0)
            if not steady_at:
                continue
            if steady_at > before:
                break
            succeeded += waiting
            waiting.clear()
        if not succeeded:
            return 0
        # Not always the next number: a lost link has left a gap.
        stays = next(number for number in numbers if number > succeeded[-1])
        oldest = self._record(stays)
        if oldest is None:
            return 0
        needed = oldest.get(delta.BASE, {}).get("link", stays)
        gone = [number for number in succeeded if number < needed]
        for number in gone:
            self.store.remove(_name(number))
        return len(gone)

    def _read(self, link: int) -> Manifest | None:
        """The link; None if it has been removed in between."""
        record = self._record(link)
        if record is None:
            return None
        where = self.store.where(_name(link))
        base = record.get(delta.BASE)
        if base is None:
            return Manifest.from_json(record, where)
        tables = self._tables_of(link, base)
        return None if tables is None else Manifest.from_json(record, where, tables)

    def _tables_of(self, link: int, base: dict[str, Any]) -> delta.Tables | None:
        """The tables of a delta's base; None if both have been removed in between."""
        number, crc = base["link"], base["crc"]
        if (number, crc) in self._bases:
            return self._bases[number, crc]
        name = _name(number)
        try:
            content = self.store.read(name)
        except FileNotFoundError:
            there = self.numbers()
            if there and number < there[0] and link < there[-1]:
                return None
            raise CorruptError(
                f"is missing, and link {link} builds on it",
                where=self.store.where(name),
                repair=f"restore it from a backup; or move link {link} away, too: its epoch is then lost",
            ) from None
        record, found = parse_sealed(content, self.store.where(name))
        if found != crc:
            raise CorruptError(
                f"is not what link {link} builds on", where=self.store.where(name), repair=REPAIR
            )
        tables = Manifest.from_json(record, self.store.where(name)).tables
        while len(self._bases) >= _BASES:
            del self._bases[next(iter(self._bases))]
        self._bases[number, crc] = tables
        return tables

    def _record(self, link: int) -> dict[str, Any] | None:
        """The link as its file has it; None if it has been removed in between. Raises `CorruptError`."""
        name = _name(link)
        try:
            record = load(self.store, name)
        except FileNotFoundError:
            return None
        if record.get("link") != link:
            raise CorruptError(
                f"holds link {record.get('link')}", where=self.store.where(name), repair=REPAIR
            )
        return record


def _name(link: int) -> str:
    return f"{_EPOCHS}/{link:0{_LINK_DIGITS}d}.json"


def wait_for_epoch(
    chain: Chain, version: int, *, timeout: float, stop: threading.Event | None = None
) -> Manifest:
    """Wait until an epoch at or past `version` is published; the newest then. `timeout` is in seconds.

    Raises `DeadlineError`, also when `stop` is set before.
    """
    stop = stop or threading.Event()
    deadline = time.monotonic() + timeout
    while True:
        head = chain.head()
        if head is not None and head.epoch >= version:
            return head
        left = deadline - time.monotonic()
        # The writer is another process, and the file system may not notify: so this polls.
        if left <= 0 or stop.wait(min(left, max(_POLL_SECONDS, chain.store.pause))):
            tables = head.tables if head is not None else {}
            held = [f"{name} ({t.reason})" for name, t in tables.items() if t.state == HELD]
            raise DeadlineError(
                f"version {version} was not published in time; the newest epoch is "
                f"{head.epoch if head is not None else 'none'}"
                + (f"; epochs wait for {', '.join(held)}" if held else ""),
                where=chain.store.location,
                repair="check `tuskline table list`, and that `tuskline lake run` is running",
            )
