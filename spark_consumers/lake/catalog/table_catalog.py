"""The seam between tables and the catalog that says which metadata each of them has: `TableCatalog`.

A commit to a table is *updates* under *requirements*, in the words and the JSON of the Iceberg REST specification: the
catalog makes the updates if all requirements hold of the table as it is then, and nothing otherwise. Both at once, so two
writers that require the same of a table cannot both commit. `FolderCatalog` has tables in a lake's folder,
`RestCatalog` those of a server.

A commit has one of three outcomes. What is UNKNOWN may have been made, or may be made later; a writer looks at the table
before it does anything else, and takes what it finds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import PurePath
from typing import Any, Protocol, Self

#: A TableRequirement: `type`, and what it requires.
Requirement = Mapping[str, Any]
#: A TableUpdate: `action`, and what it sets.
Update = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TableId:
    """A table in a catalog. Lakes have a namespace for each schema of each log stream, and a name for each copy."""

    namespace: tuple[str, ...]
    name: str

    @classmethod
    def at(cls, path: str) -> Self:
        """The table in a folder of a lake: `.../stream/schema/copy`."""
        *_, stream, schema, name = PurePath(path).parts
        return cls((stream, schema), name)

    def __str__(self) -> str:
        return ".".join((*self.namespace, self.name))


class Outcome(Enum):
    """How a commit or a creation ended: made by this writer, not made by it, or not known."""

    WON = auto()
    LOST = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, slots=True)
class LoadedTable:
    """A table as its catalog has it now: where its metadata is, the metadata, and how its files are reached.

    `config` has the settings of FileIO that the catalog gave for this table, among them keys to its files: never logged.
    """

    location: str
    metadata: Mapping[str, Any]
    config: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class TableCommit:
    """A change of one table.

    `base` is the metadata file that the updates were made from. A catalog that has metadata files in sequence makes the
    commit only if that is the newest, whatever is required; others ignore it.
    """

    table: TableId
    requirements: Sequence[Requirement]
    updates: Sequence[Update]
    base: str = ""


class TableCatalog(Protocol):
    """The tables of a lake, by name. Safe to use from several threads.

    Raises `UnavailableError` for a catalog that does not answer, `NotSupportedError` for what it cannot do, and
    `CorruptError` for metadata that is not what was written.
    """

    @property
    def supports_multi_table(self) -> bool:
        """Whether `commit_all` can change several tables at once."""

    @property
    def supports_v3(self) -> bool:
        """Whether tables may have version 3 of the format, and so deletion vectors."""

    @property
    def supports_branches(self) -> bool:
        """Whether tables keep branches and tags besides `main`, and the snapshots that these are on."""

    @property
    def is_folder(self) -> bool:
        """Whether a table's metadata is numbered files in its folder, by which Iceberg's library opens it."""

    def load(self, table: TableId) -> LoadedTable | None:
        """The table as it is now; None if there is none."""

    def create(
        self, table: TableId, schema: Mapping[str, Any], properties: Mapping[str, str]
    ) -> Outcome:
        """Create an empty table without partitions. LOST: there is one of that name already.

        The property `format-version` is the version of its format; 3 without it, where that is supported.
        """

    def commit(self, commit: TableCommit) -> Outcome:
        """Make the updates if all requirements hold."""

    def commit_all(self, commits: Sequence[TableCommit]) -> Outcome:
        """Make all of these, of different tables, or none. Raises `NotSupportedError` where there is no such commit."""

    def drop(self, table: TableId) -> None:
        """Remove the table from the catalog, if it is there, and its files."""


# -- requirements -----------------------------------------------------------------------------------


def assert_uuid(uuid: str) -> Requirement:
    """The table is still this one."""
    return {"type": "assert-table-uuid", "uuid": uuid}


def assert_ref(name: str, snapshot: int | None) -> Requirement:
    """The branch or tag is on this snapshot; None: it does not exist."""
    return {"type": "assert-ref-snapshot-id", "ref": name, "snapshot-id": snapshot}


# -- updates ----------------------------------------------------------------------------------------


def set_ref(name: str, snapshot: int, kind: str) -> Update:
    """Create or move a `branch` or `tag`."""
    return {"action": "set-snapshot-ref", "ref-name": name, "snapshot-id": snapshot, "type": kind}


def moved_main(table: TableId, there: LoadedTable, fence: str, snapshot: int) -> TableCommit | None:
    """What moves the table's `main` to a snapshot, if its branch `fence` is where it was; None: it is there already."""
    refs = there.metadata.get("refs", {})
    main = refs["main"]["snapshot-id"] if "main" in refs else None
    if main == snapshot:
        return None
    required = [
        assert_uuid(there.metadata["table-uuid"]),
        assert_ref(fence, refs[fence]["snapshot-id"] if fence in refs else None),
        assert_ref("main", main),
    ]
    return TableCommit(table, required, [set_ref("main", snapshot, "branch")], there.location)


def remove_ref(name: str) -> Update:
    """Remove a branch or tag."""
    return {"action": "remove-snapshot-ref", "ref-name": name}
