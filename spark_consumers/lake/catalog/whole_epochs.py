"""Shows epochs to engines that read tables through a catalog of others: `main` of all tables in one commit.

The commit has a snapshot of the control table (`control_table`), and requires the one that this writer has added last. So a
writer that was taken over shows nothing, in no table. Where a catalog commits one table at a time, the control table's part goes
first: a writer that was taken over still shows nothing, but others may see an epoch in part for a moment.

Where another program has committed to `main` of a table, moving it would undo that commit without a word. So nothing is shown, in no
table, until an operator has decided what becomes of it; `read` does not read `main`, and gets every epoch meanwhile.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from spark_consumers.lake.catalog.control_table import Control, NewSnapshot
from spark_consumers.lake.catalog.table_catalog import (
    LoadedTable,
    Outcome,
    TableCommit,
    TableId,
    assert_ref,
    assert_uuid,
    set_ref,
)
from spark_consumers.lake.concurrently import each
from spark_consumers.lake.format.iceberg_files import manifests_at, refs_of_record
from spark_consumers.lake.format.iceberg_refs import branch_of, fenced_by
from spark_consumers.lake.manifest.chain import Manifest, TableVersion
from spark_consumers.lake.manifest.takeover import ATTEMPTS
from spark_consumers.lake.store.place import place
from walsender_bridge.errors import (
    CorruptError,
    FencedError,
    LakeError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.runtime import fail_point, logs

if TYPE_CHECKING:
    # Not imported where lakes are in folders: its library is of an extra.
    from spark_consumers.lake.catalog.rest_catalog import RestCatalog

#: The control table's name in the lake's namespace, and its property that has the lake's UUID.
CONTROL: Final = TableId((), "tuskline_epochs")
_LAKE: Final = "tuskline.lake"
#: It has no rows; takeovers and epochs are in its snapshots.
_SCHEMA: Final = {
    "type": "struct",
    "schema-id": 0,
    "fields": [{"id": 1, "name": "epoch", "type": "long", "required": False}],
}

#: Seconds between two looks at the names of all tables, and until the next one after a failure or a refusal.
_NAMES_SECONDS, _AFTER_FAILURE = 60.0, 5.0

log = logs.logger()


class _ForeignCommitError(Exception):
    """`main` of this table is at a snapshot that another program has committed."""

    def __init__(self, table: str, snapshot: int) -> None:
        super().__init__(table)
        self.refusal = LakeError(
            f"another program has committed snapshot {snapshot} to the table's main branch, so no epoch is shown to other engines",
            where=table,
            repair="roll the table back to the snapshot before it (CALL system.rollback_to_snapshot in Spark), or copy it again: "
            f"tuskline table resync {table}; and let only Tuskline write to the lake's tables",
        )


class WholeEpochs:
    """The control table of one lake, and the epochs of one writer of it. `empty`: writes a manifest list for its next snapshot."""

    def __init__(
        self,
        catalog: "RestCatalog",
        lake: str,
        empty: Callable[[LoadedTable], NewSnapshot],
    ) -> None:
        self._catalog = catalog
        self._lake = lake
        self._empty = empty
        self._writer = ""
        self._term = 0
        #: The newest epoch that the control table tells of.
        self._epoch = 0
        #: What plain readers see of each table folder.
        self._shown: dict[str, int] = {}
        #: The folders whose tables had their names when that was looked at last.
        self._named: set[str] = set()
        self._look_at = float("-inf")
        self._taken: set[str] = set()
        self._refusal: LakeError | None = None
        self._show_at = float("-inf")

    def trouble(self) -> TusklineError | None:
        """Why no epoch is shown though all is published, or what is wrong with the catalog; None: nothing is."""
        return self._refusal or self._catalog.trouble()

    def term(self) -> int:
        """The term of the newest takeover; 0 without any. Raises `LakeError` if the namespace is another lake's."""
        return Control.of(CONTROL, self._loaded().metadata).term

    def take_over(self, head: Manifest) -> None:
        """Fence all earlier writers, unless that is done; `head` is a link of ours. Raises `FencedError`, `LakeError`."""
        if (self._term, self._writer) == (head.term, head.writer):
            return
        for _ in range(ATTEMPTS):
            there = self._loaded()
            control = Control.of(CONTROL, there.metadata)
            if (control.term, control.writer) != (head.term, head.writer):
                # Before the commit: what is there now was not made by a writer that comes after us.
                found = manifests_at(str(there.metadata["location"]))
                new = self._empty(there)
                commit = control.taken_over(head.term, head.writer, new)
                won = _is_won(self._catalog.commit(commit))
                self._remove_lists(control, new, found, won=won)
                if not won:
                    continue
            self._term, self._writer, self._epoch = head.term, head.writer, control.epoch
            # What the earlier writer has published and not shown is shown with the first look.
            self._shown = {}
            return
        raise _contended()

    def show(self, manifest: Manifest) -> None:
        """Let plain readers see what was published, all tables at once, unless others have committed to one (`trouble`).

        Raises `FencedError`, `UnavailableError`.
        """
        if self._refusal is not None and time.monotonic() < self._show_at:
            return
        before, self._refusal = self._refusal, None
        try:
            self._show(manifest)
        except _ForeignCommitError as foreign:
            self._refusal, self._show_at = foreign.refusal, time.monotonic() + _AFTER_FAILURE
        if self._refusal is not None and (before is None or before.what != self._refusal.what):
            log.error("no epoch is shown to other engines", reason=str(self._refusal))

    def _show(self, manifest: Manifest) -> None:
        for _ in range(ATTEMPTS):
            readable = manifest.readable
            unseen = {n: t for n, t in readable.items() if self._shown.get(t.path) != t.snapshot_id}
            if not unseen and manifest.epoch <= self._epoch:
                self._follow_names(manifest)
                return
            moved = each(list(unseen.items()), self._moved)
            commits = [commit for commit in moved if commit is not None]
            # An epoch that changes no table is told all the same.
            news = commits or manifest.epoch > self._epoch
            if not news or self._commit(manifest.epoch, commits):
                self._epoch = manifest.epoch
                self._shown |= {table.path: table.snapshot_id for table in unseen.values()}
                self._follow_names(manifest)
                return
        raise _contended()

    def _follow_names(self, manifest: Manifest) -> None:
        """Have each table called by its name in PostgreSQL. A failure is logged, and retried: epochs do not depend on it."""
        now = time.monotonic()
        if now >= self._look_at:
            self._named, self._look_at = set(), now + _NAMES_SECONDS
        paths = {table.path: name for name, table in manifest.readable.items()}
        self._named &= paths.keys()
        for path in paths.keys() - self._named:
            try:
                given = self._catalog.give_name(TableId.at(path))
            except TusklineError as error:
                log.warning("table name not set", table=paths[path], error=str(error))
                self._look_at = now + _AFTER_FAILURE
                return
            if not given and path not in self._taken:
                log.warning(
                    "table not called by its name, which is taken or refused", table=paths[path]
                )
                self._taken.add(path)
            self._named.add(path)

    def _moved(self, name: str, table: TableVersion) -> TableCommit | None:
        """The commit that shows the table's snapshot; None if it is shown, or cannot be. Raises `_ForeignCommitError`."""
        id_ = TableId.at(table.path)
        there = self._catalog.load(id_)
        refs = refs_of_record(there.metadata) if there is not None else {}
        snapshots = there.metadata.get("snapshots", ()) if there is not None else ()
        if there is None or all(each["snapshot-id"] != table.snapshot_id for each in snapshots):
            # It is held as soon as it is to be written again.
            log.warning("table is damaged", table=name, error="the catalog has lost its snapshot")
            return None
        fenced_by(refs, self._term, table.path)
        # A table that has left, or was damaged at the takeover, has no branch of ours: the control table fences it.
        own = {"main", branch_of(self._term)}
        held = {name: ref.snapshot for name, ref in refs.items() if name in own}
        if held.get("main") == table.snapshot_id:
            return None
        if "main" in refs and refs["main"].version is None:
            raise _ForeignCommitError(name, refs["main"].snapshot)
        required = [
            assert_uuid(there.metadata["table-uuid"]),
            assert_ref("main", held.pop("main", None)),
            *(assert_ref(name, snapshot) for name, snapshot in held.items()),
        ]
        return TableCommit(
            id_, required, [set_ref("main", table.snapshot_id, "branch")], there.location
        )

    def _commit(self, epoch: int, commits: Sequence[TableCommit]) -> bool:
        """Make these commits, fenced; False if one is lost to another committer. Raises `FencedError`, `UnavailableError`."""
        there = self._loaded()
        control = Control.of(CONTROL, there.metadata)
        if (control.term, control.writer) != (self._term, self._writer):
            raise FencedError(
                f"another writer has taken over, under term {control.term}",
                where=str(CONTROL),
                repair="no action is needed: the newer writer continues",
            )
        made = self._empty(there)
        first, *others = control.published(max(epoch, control.epoch), commits, made)
        fail_point.hit("before-shown")
        if self._catalog.supports_multi_table:
            won = _is_won(self._catalog.commit_all([first, *others]))
        else:
            won = _is_won(self._catalog.commit(first))
            won = won and all(_is_won(self._catalog.commit(other)) for other in others)
        fail_point.hit("shown")
        self._remove_lists(control, made, control.expired(), won=won)
        return won

    def _remove_lists(
        self, control: Control, new: NewSnapshot, found: Iterable[str], *, won: bool
    ) -> None:
        """After a commit to the control table remove those of the found manifest lists that it does not need any more.

        After one that is lost, the one that was made for it.
        """
        kept = {_name(each) for each in control.lists()}
        for location in found if won else [new.manifest_list]:
            if _name(location) not in kept:
                place(location).unlink(missing_ok=True)

    def _loaded(self) -> LoadedTable:
        """The control table, created if need be. Raises `LakeError` if it is another lake's."""
        there = self._catalog.load(CONTROL)
        if there is None:
            self._catalog.create(CONTROL, _SCHEMA, {_LAKE: self._lake})
            there = self._catalog.load(CONTROL)
        if there is None:
            raise CorruptError("the catalog has no control table", where=str(CONTROL))
        owner = there.metadata.get("properties", {}).get(_LAKE)
        if owner != self._lake:
            raise LakeError(
                f"the catalog's namespace contains the tables of another lake, {owner}",
                where=str(CONTROL),
                repair="specify another namespace in [lake.catalog]",
            )
        return there


def _name(location: str) -> str:
    """The name of a file at a location, of which there may be several ways to write it."""
    return location.rpartition("/")[2]


def _is_won(outcome: Outcome) -> bool:
    if outcome is Outcome.UNKNOWN:
        raise UnavailableError(
            "it is not known whether the catalog made the commit",
            where=str(CONTROL),
            repair="check the catalog; the commit is retried automatically",
        )
    return outcome is Outcome.WON


def _contended() -> UnavailableError:
    return UnavailableError(
        f"gave up after {ATTEMPTS} attempts: other programs commit to the lake's tables",
        where=str(CONTROL),
        repair="let only Tuskline write to the lake's tables",
    )
