"""The lake's folder, or its place in a bucket, as the steps of `takeover` act on it: each effect carried out, nothing decided."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from spark_consumers.lake.catalog import links as table_links
from spark_consumers.lake.compaction.offer import OFFERS, PREFIX
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import Stage
from spark_consumers.lake.format.table_format import TableFormat
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.chain import Chain, Manifest
from spark_consumers.lake.manifest.pinned_links import PinnedLinks, pinned, term_of
from spark_consumers.lake.manifest.takeover import Leftover, LeftoverKind
from spark_consumers.lake.store.place import Place, below, remove_tree
from spark_consumers.lake.tables.doubt import each_table, passing
from spark_consumers.lake.tables.fault import TableFault
from walsender_bridge.errors import CorruptError, FencedError, TusklineError, from_wire
from walsender_bridge.runtime import logs

log = logs.logger()


class LakeSite:
    """One lake. `used_elsewhere`: the greatest term that is known outside of it."""

    def __init__(
        self, chain: Chain, tables: TableFormat, used_elsewhere: Callable[[], int] = lambda: 0
    ) -> None:
        self._chain = chain
        self._used_elsewhere = used_elsewhere
        self._format = tables
        #: Folders that are known to stay.
        self._kept: set[str] = set()

    def do(self, effect: takeover.Effect) -> Any:
        """Carry out an effect of the lake; its answer."""
        match effect:
            case takeover.ReadPublishedLink():
                return self._chain.recorded_newest()
            case takeover.ReadUsedTerm():
                return self.used_term()
            case takeover.ReadHead():
                return self._chain.listed_head()
            case takeover.ReadLinks():
                return list(self._chain.links())
            case takeover.ReadPinnedLinks():
                return self._pinned()
            case takeover.Publish(link, after):
                return self._publish(link, after)
            case takeover.TakeTable():
                return self._take_table(effect)
            case takeover.ListLeftovers():
                return list(self.left())
            case takeover.Remove(left):
                return self.remove(left)
        raise AssertionError(f"{effect} is of a table")

    def _take_table(self, table: takeover.TakeTable) -> TusklineError | None:
        def take(_: str, table: takeover.TakeTable) -> None:
            path, later = self._path(table.path), table.later
            self._format.take_over(path, table.snapshot, table.term, table.epoch, later=later)

        def others(but: Collection[str], most: int) -> int:
            head = self._chain.head()
            paths = [each.path for each in head.written if each.path not in but] if head else []
            return passing(self._format, map(self._path, paths), most)

        ((kind, found),) = each_table([(table.path, table)], take, others, _damage)
        if kind == "done":
            return None
        error = from_wire(found[1])
        log.warning("table cannot be taken over", path=table.path, error=str(error))
        return error

    def _path(self, path: str) -> str:
        return str(self._chain.root / path)

    def _publish(self, link: Manifest, after: Manifest | None) -> int | None:
        try:
            self._chain.publish(link, after)
        except FencedError:
            newest = self._chain.head()
            if newest is None:
                raise
            log.info("takeover lost its link", term=link.term, link=link.link, newest=newest.term)
            return newest.term
        return None

    def used_term(self) -> int:
        """The greatest term in what writers have made: it is there still when the links that had it are lost."""
        names = [path.name for path in self._chain.staging.glob("*")]
        branches = [0]
        for table in table_links.folders(self._chain.root):
            # `unfit` is the name that earlier versions gave to `quarantine`.
            places = ("data", "index", "quarantine", "unfit")
            files = (file.name for place in places for file in table.glob(f"{place}/*"))
            names += [table.name, *files]
            branches += self._format.terms(str(table))
        pins = (term_of(record) for record in PinnedLinks(self._chain.store).names())
        return max(takeover.greatest_term(names), self._used_elsewhere(), *branches, *pins)

    def _pinned(self) -> list[Manifest] | None:
        """The pinned links, whose files are needed beside those of the chain; None if a copy of one is damaged."""
        head = self._chain.head()
        try:
            return pinned(self._chain.store, head) if head is not None else []
        except CorruptError as error:
            log.warning("leftovers of tables stay: what a pin keeps is not known", error=str(error))
            return None

    def left(self) -> Iterator[Leftover]:
        """What writers have made before it counts."""
        for name in self._chain.drafts():
            yield Leftover(LeftoverKind.LINK_DRAFT, name)
        for path in self._chain.staging.glob("*"):
            yield Leftover(LeftoverKind.STAGING, self._relative(path))
        # Also without metadata: a task may write into a folder that was removed.
        for path in table_links.folders(self._chain.root):
            yield Leftover(LeftoverKind.TABLE, self._relative(path))
        yield from self._of_links(table_links.folders(self._chain.root))

    def _of_links(self, tables: Iterable[Place]) -> Iterator[Leftover]:
        """Files of these tables that only links name."""
        kinds = (("quarantine", LeftoverKind.QUARANTINE), ("index", LeftoverKind.INDEX))
        for table in tables:
            for place, kind in kinds:
                for path in table.glob(f"{place}/*"):
                    sealed = checksums.file_of(path)
                    if sealed is not None and sealed.exists():
                        # These go with their file.
                        continue
                    if self._is_offered(path):
                        continue
                    yield Leftover(kind, self._relative(path), self._relative(table))

    def _is_offered(self, path: Place) -> bool:
        """Whether a run of the row index is a maintainer's, which is decided on, or whose maker dies, with its offer.

        It was there before its offer's record was looked for, and the record is made first.
        """
        name = path.name.removeprefix(".").removesuffix(".crc")
        offer = name.removeprefix(PREFIX).partition(".")[0]
        return name.startswith(PREFIX) and self._chain.store.exists(f"{OFFERS}/{offer}")

    def _relative(self, path: Place) -> str:
        return below(path, self._chain.root)

    def remove(self, left: Leftover) -> None:
        """Remove a file, or a folder with all that is in it."""
        path = self._chain.root / left.path
        if left.kind is LeftoverKind.TABLE:
            self.remove_table(left.path)
            return
        # Every epoch supersedes some of the index.
        say = log.debug if left.kind is LeftoverKind.INDEX else log.info
        say("leftover removed", kind=left.kind.name.lower(), path=left.path)
        if left.kind is LeftoverKind.STAGING:
            remove_tree(path)
        elif left.kind is LeftoverKind.LINK_DRAFT:
            self._chain.store.remove(left.path)
        else:
            checksums.remove(path)

    def remove_staging(self, term: int) -> None:
        """Remove what failed rounds of this term, which writes now, have left: its store did not answer, or a task wrote later.

        What else is there belongs to tables that are brought level beside the rounds, and goes with them.
        """
        for path in self._chain.staging.glob("*"):
            stage = Stage.of(path.name)
            if stage is not None and stage.term <= term:
                remove_tree(path)

    def remove_table(self, name: str) -> bool:
        """Remove a table's folder that no link names; False, and it stays, while users have references in it."""
        path = self._path(name)
        users = self._format.users_refs(path)
        if users and name not in self._kept:
            log.warning("folder kept: it has user branches or tags", path=name, names=users)
            self._kept.add(name)
        elif not users:
            log.info("leftover removed", kind=LeftoverKind.TABLE.name.lower(), path=name)
            self._format.drop(path)
        return not users

    def sweep_of_links(self, head: Manifest, tables: Collection[str]) -> int:
        """Remove our own and earlier files of these tables that only links name, and none does; how many. `head` is ours."""
        found = list(self._of_links(self._chain.root / path for path in tables))
        # Of the index, only the newest link counts.
        quarantine = any(left.kind is LeftoverKind.QUARANTINE for left in found)
        # The chain first, as in `takeover.sweep`.
        links = list(self._chain.links()) if quarantine else [head]
        pinned_links = self._pinned() if quarantine else []
        if not found or pinned_links is None:
            return 0
        links += pinned_links
        named = takeover.names_of(links, head)
        # A round that failed may be published still: its files are of a later link than `head`, and stay.
        garbage = [
            left for left in found if takeover.is_garbage(left, head, named, below=head.term + 1)
        ]
        for left in garbage:
            self.remove(left)
        return len(garbage)


def _damage(path: str, error: Exception) -> TableFault | None:
    """At a takeover, what a catalog does not support is of all tables: the catalog was changed."""
    return TableFault(path, error) if isinstance(error, CorruptError) else None
