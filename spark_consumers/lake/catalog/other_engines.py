"""Publishes an epoch to engines that do not read manifests: `main` of each table, then its name in catalog and folder.

After each link the driver compares the catalog (`file.py`) and the links (`links.py`) with the state that they should
have, and writes the differences. Epochs do not depend on them: a failure here is logged, and retried.

A driver that was suspended does not restore an older state. It holds a lock while it compares and writes, and under the
lock its own link must be the newest of the chain. If it is, a later driver writes after it; if not, it changes nothing.
"""

import errno
import fcntl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from spark_consumers.lake.catalog import links as table_links
from spark_consumers.lake.catalog.entries import Name
from spark_consumers.lake.catalog.file import CatalogFile
from spark_consumers.lake.concurrently import each
from spark_consumers.lake.format.iceberg_files import is_newest
from spark_consumers.lake.format.table_format import TableFormat
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion
from spark_consumers.lake.store.place import Place
from spark_consumers.spark.java_errors import is_of_data
from walsender_bridge.errors import CorruptError, UnavailableError
from walsender_bridge.runtime import logs

#: Seconds between two comparisons while no link is published, and until the next one after a failure.
_CHECK_SECONDS = 60.0
_AFTER_FAILURE = 1.0
#: Links that the log names at once.
_NAMED = 10

log = logs.logger()


class OtherEngines:
    """Shows one writer's tables to plain readers, in the term that began with link `head`."""

    def __init__(self, chain: Chain, tables: TableFormat, head: Manifest) -> None:
        self._root = chain.root
        self._format = tables
        self._term = head.term
        #: What plain readers see of each table folder: the takeover has shown what there was. Of a folder that has a table and its
        #: rows brought level, which are in no epoch yet, it is the table, which comes first.
        self._shown = {table.path: table.snapshot_id for table in reversed(head.versions)}
        #: By path: the link that could not be shown for a reason of the table, and when that is tried again without another one.
        self._refused: dict[str, tuple[int, float]] = {}
        #: A bucket has no links, and no file that is changed in place.
        self._names = (
            TableNames(
                chain,
                lambda path, at: tables.metadata_file(str(chain.root / path), at),
            )
            if chain.store.folder is not None
            else None
        )

    def show(self, manifest: Manifest) -> None:
        """Let them see what was published: all that they do not see yet, also of earlier epochs. Raises `FencedError`."""
        now = time.monotonic()

        def show(name: str, table: TableVersion) -> None:
            try:
                self._format.show(str(self._root / table.path), self._term, table.snapshot_id)
            except Exception as error:
                if not isinstance(error, CorruptError) and not is_of_data(error):
                    raise
                # It is suspended as soon as it is to be written again.
                log.warning("table not shown to other engines", table=name, error=str(error)[:500])
                self._refused[table.path] = manifest.link, now + _CHECK_SECONDS
            else:
                self._shown[table.path] = table.snapshot_id
                self._refused.pop(table.path, None)

        def waits(table: TableVersion) -> bool:
            link, until = self._refused.get(table.path, (0, now))
            return link == manifest.link and now < until

        readable = manifest.readable.items()
        unseen = [
            (n, t) for n, t in readable if self._shown.get(t.path) != t.snapshot_id and not waits(t)
        ]
        if unseen:
            each(unseen, show)
        if self._names is not None:
            self._names.follow(manifest)


class TableNames:
    """The names of the tables of a lake in a folder of this machine, kept by one writer.

    `metadata`: the newest metadata file of the table in a folder (below the lake) that shows plain readers this
    snapshot; None if none does. `now` counts seconds.
    """

    def __init__(
        self,
        chain: Chain,
        metadata: Callable[[str, int], Place | None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._chain = chain
        self._metadata = metadata
        self._now = now
        assert chain.store.folder is not None
        self._root = chain.store.folder
        self._file = CatalogFile(self._root)
        #: By folder: a snapshot and the metadata file that shows it.
        self._known: dict[str, tuple[int, Place]] = {}
        self._link = 0
        self._check_at = float("-inf")
        #: When the files of all tables are looked at again, also of those that were not written.
        self._look_at = float("-inf")
        self._failure = ""
        self._taken: set[str] = set()
        #: By link: its error at the last comparison.
        self._failed_links: dict[str, str] = {}

    def follow(self, head: Manifest) -> None:
        """Set the names to those of this link, our newest: at once after it, and then periodically."""
        now = self._now()
        if head.link == self._link and now < self._check_at:
            return
        self._link, self._check_at = head.link, now + _CHECK_SECONDS
        try:
            self._check(head, thorough=now >= self._look_at)
        except Exception as error:
            self._failed(error)
            self._check_at = self._look_at = self._now() + _AFTER_FAILURE
            return
        if now >= self._look_at:
            self._look_at = now + _CHECK_SECONDS
        if self._failure:
            log.info("table names are up to date again")
        self._failure = ""

    def _check(self, head: Manifest, *, thorough: bool) -> None:
        with self._locked():
            newest = self._chain.head()
            if newest is None or newest.link != head.link:
                return
            try:
                self._follow_links(head)
            finally:
                self._file.follow(self._locations(head, thorough=thorough))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self._root / "_tuskline" / "names.lock"
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UnavailableError(
                    "another driver is updating the names",
                    where=str(path),
                    repair="if that driver is suspended, terminate it",
                ) from None
            except OSError as error:
                # A file system without locks: the next check corrects what a suspended driver restores.
                if error.errno not in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
                    raise
            yield

    def _follow_links(self, head: Manifest) -> None:
        folders = {name: table.path for name, table in head.readable.items()}
        followed = table_links.follow(self._root, folders)
        taken = set(followed.taken)
        for name in sorted(taken - self._taken):
            log.warning("no link for a table: its name is taken", path=name)
        self._taken = taken
        failed = {name: str(error) for name, error in followed.failed.items()}
        unknown = sorted(
            name for name, error in failed.items() if self._failed_links.get(name) != error
        )
        for name in unknown[:_NAMED]:
            log.warning("a table's link is out of date", path=name, error=failed[name])
        self._failed_links = failed
        if failed:
            raise UnavailableError(
                f"{len(failed)} of the tables' links are out of date: {', '.join(sorted(failed)[:_NAMED])}",
                where=str(self._root),
            )

    def _locations(self, head: Manifest, *, thorough: bool) -> Mapping[Name, str | None]:
        tables = head.readable
        found = {
            Name.of(name): self._location(table, thorough=thorough)
            for name, table in tables.items()
        }
        folders = {table.path for table in tables.values()}
        self._known = {path: at for path, at in self._known.items() if path in folders}
        return found

    def _location(self, table: TableVersion, *, thorough: bool) -> str | None:
        snapshot, file = self._known.get(table.path, (None, None))
        known = file is not None and snapshot == table.snapshot_id
        if file is None or not known or (thorough and not is_newest(file)):
            try:
                file = self._metadata(table.path, table.snapshot_id)
            except Exception:
                # A table's own trouble is reported where it is used; the others go on.
                file = None
            if file is None:
                return None
            self._known[table.path] = table.snapshot_id, file
        return str(file)

    def _failed(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        if cause != self._failure:
            log.warning("table names are out of date", path=str(self._file.path), error=cause)
        self._failure = cause
