"""A lake in memory, as its drivers see it: links, tables, files, each operation at once and by itself.

What is kept of the real thing: creating a link or a table's metadata fails if the name is taken; removing takes
away whatever has that name; a listing shows what is there at that moment. What is not: contents, and that
links are removed from the old end by age (`retire` keeps as many as it is told).

`check` is called after each effect and raises `ViolationError`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.newest import PublishedLink, lost
from spark_consumers.lake.manifest.takeover import Leftover, LeftoverKind
from walsender_bridge.errors import CorruptError


class ViolationError(Exception):
    """The lake is not what readers were promised."""


@dataclass(frozen=True)
class Table:
    """A table of a link."""

    path: str
    snapshot_id: int
    quarantine_files: tuple[str, ...] = ()
    index_files: tuple[str, ...] = ()
    has_left: bool = False


@dataclass(frozen=True)
class Link:
    """A link of the chain."""

    link: int
    epoch: int
    term: int
    tables: dict[str, Table] = field(default_factory=dict)

    @property
    def versions(self) -> list[Table]:
        return list(self.tables.values())

    @property
    def written(self) -> list[Table]:
        return [table for table in self.versions if not table.has_left]

    def next(self, **changes) -> "Link":
        return replace(self, link=self.link + 1, **changes)


@dataclass(frozen=True)
class Metadata:
    """One version of a table: its branches, and the files of its snapshots."""

    version: int
    branches: frozenset[int] = frozenset()
    snapshots: dict[int, frozenset[str]] = field(default_factory=dict)


class Store:
    """See the module."""

    def __init__(self) -> None:
        self.links: dict[int, Link] = {}
        self.told: PublishedLink | None = None
        self.tables: dict[str, Metadata] = {}
        #: All files below a table, by the table's path.
        self.files: dict[str, set[str]] = {}
        self.staging: set[str] = set()
        self.drafts: set[str] = set()
        #: Tables, by path, that cannot be opened.
        self.damaged: set[str] = set()
        self._has_lost = False
        self._numbers = iter(range(1, 10**9))

    def draw(self) -> int:
        """A number that nobody else draws: a snapshot's, a name's."""
        return next(self._numbers)

    @property
    def head(self) -> Link | None:
        return self.links[max(self.links)] if self.links else None

    # -- operations ---------------------------------------------------------------------------------

    def create_link(self, link: Link, after: Link | None) -> int | None:
        """As `Chain.publish`: also refused if the link before is gone; an error if that is lost."""
        if after is not None and after.link > max(self.links, default=0):
            raise lost(
                PublishedLink(after.link, after.epoch, after.term), self.head, f"link {after.link}"
            )
        if link.link in self.links or (after is not None and after.link not in self.links):
            assert self.head is not None
            return self.head.term
        before = self.head
        if self.told is not None and link.term < self.told.term:
            return self.told.term
        if before is not None and link.term < before.term:
            raise ViolationError(f"the head goes back from term {before.term} to {link.term}")
        if self.told is not None and (link.link <= self.told.link or link.epoch < self.told.epoch):
            raise ViolationError(f"{link} takes readers back behind {self.told}")
        self.links[link.link] = link
        self.told = PublishedLink(link.link, link.epoch, link.term)
        return None

    def lose(self) -> None:
        """The newest link is gone, and nobody has removed it: the index of the one before is built again."""
        self._has_lost = True
        del self.links[max(self.links)]

    def give_up(self, lost: int) -> None:
        """So many of the newest links are gone, all but one at most, and an operator has the lake go on from what is left."""
        for _ in range(min(lost, len(self.links) - 1)):
            self.lose()
        self.told = None

    def used_term(self) -> int:
        """The greatest term in what writers have made; tables keep it when links are lost."""
        branches = (term for table in self.tables.values() for term in table.branches)
        files = (file for there in self.files.values() for file in there)
        names = (*self.staging, *self.tables, *files)
        return max((*branches, *map(takeover.term_of, names)), default=0)

    def write(self, path: str, files: Iterable[str]) -> None:
        """Write new files of a table. A name that is taken keeps the file that it has: with other rows."""
        there = self.files.setdefault(path, set())
        if used := there & set(files):
            raise ViolationError(f"rows are lost: {path} has {sorted(used)} of another writer")
        there.update(files)

    def create_table(self, path: str) -> bool:
        if path in self.tables:
            return False
        self.tables[path] = Metadata(1)
        self.files.setdefault(path, set())
        return True

    def link_table(self, path: str, base: Metadata, made: Metadata) -> bool:
        if path not in self.tables or self.tables[path].version != base.version:
            return False
        self.tables[path] = replace(made, version=base.version + 1)
        return True

    def retire(self, kept: int) -> None:
        for number in sorted(self.links)[:-kept]:
            del self.links[number]

    def left(self) -> list[Leftover]:
        found = [
            Leftover(LeftoverKind.STAGING, f"_tuskline/staging/{name}") for name in self.staging
        ]
        found += [
            Leftover(LeftoverKind.LINK_DRAFT, f"_tuskline/epochs/{name}") for name in self.drafts
        ]
        for path in self.tables:
            found.append(Leftover(LeftoverKind.TABLE, path))
            for place, kind in (
                ("quarantine", LeftoverKind.QUARANTINE),
                ("index", LeftoverKind.INDEX),
            ):
                files = [file for file in self.files[path] if file.startswith(f"{place}/")]
                found += [Leftover(kind, f"{path}/{file}", path) for file in files]
        return sorted(found, key=lambda left: left.path)

    def remove(self, left: Leftover) -> None:
        match left.kind:
            case LeftoverKind.STAGING:
                self.staging.discard(left.path.rpartition("/")[2])
            case LeftoverKind.LINK_DRAFT:
                self.drafts.discard(left.path.rpartition("/")[2])
            case LeftoverKind.TABLE:
                self.tables.pop(left.path, None)
                self.files.pop(left.path, None)
            case LeftoverKind.QUARANTINE | LeftoverKind.INDEX:
                self.files.get(left.table, set()).discard(left.path.removeprefix(f"{left.table}/"))

    # -- what holds ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Everything that a kept link names is there; of the index, what the newest one names."""
        for link in self.links.values():
            is_newest = link.link == max(self.links) and not self._has_lost
            for name, table in link.tables.items():
                metadata = self.tables.get(table.path)
                where = f"link {link.link} of term {link.term}: {name} in {table.path}"
                if metadata is None:
                    raise ViolationError(f"{where} is gone")
                snapshot = metadata.snapshots.get(table.snapshot_id)
                if snapshot is None:
                    raise ViolationError(f"{where} has no snapshot {table.snapshot_id}")
                named = snapshot | set(table.quarantine_files)
                named |= set(table.index_files) if is_newest else set()
                if gone := named - self.files[table.path]:
                    raise ViolationError(f"{where} lacks {sorted(gone)}")

    # -- effects ------------------------------------------------------------------------------------

    def do(self, effect, path: str = ""):
        """Carry out an effect of `takeover`; those of a table are of the table at `path`."""
        if path in self.damaged:
            raise CorruptError("it is damaged", where=path)
        match effect:
            case takeover.ReadPublishedLink():
                return self.told
            case takeover.ReadUsedTerm():
                return self.used_term()
            case takeover.ReadHead():
                return self.head
            case takeover.ReadLinks():
                return [self.links[number] for number in sorted(self.links)]
            case takeover.ReadPinnedLinks():
                return []
            case takeover.Publish(link, after):
                return self.create_link(link, after)
            case takeover.ListLeftovers():
                return self.left()
            case takeover.Remove(left):
                return self.remove(left)
            case takeover.ListPrepared():
                # As if the clock had been set back: everything looks newer than the metadata.
                return frozenset(f for f in self.files.get(path, ()) if f.endswith(".avro"))
            case takeover.ReadTable():
                return self.tables.get(path, Metadata(0))
            case takeover.LinkTable(base, made):
                return self.link_table(path, base, made)
            case takeover.ReadNamed(files):
                named = set().union(*self.tables[path].snapshots.values())
                return files & named
            case takeover.RemovePrepared(file):
                return self.files.get(path, set()).discard(file)
        raise AssertionError(effect)
