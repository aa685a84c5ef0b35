"""An epoch as one commit of all its tables, fenced by a control table. Pure.

Where the catalog has a commit of several tables, a lake has a control table beside them. Each takeover and each epoch adds
a snapshot to its `main`, whose summary has the term, the writer and the epoch, and requires that `main` is on the snapshot
that this writer has added last. So

- a writer that was taken over gets 409, and changes none of its tables, also those that the newer writer has not come to yet;
- of two writers of one term, one has the epoch;
- what became of a commit whose outcome is unknown is in one table, and stays there: `has`.

The first takeover has no snapshot to require, and there are servers (Nessie 0.99) that do not look at a requirement that
`main` does not exist. So it adds a column as well, and requires the number of columns that it has found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from spark_consumers.lake.catalog.table_catalog import (
    TableCommit,
    TableId,
    Update,
    assert_ref,
    assert_uuid,
    set_ref,
)
from walsender_bridge.errors import FencedError, LakeError

#: Snapshots that the table keeps: what became of a commit whose answer was lost is looked for among them.
_KEPT = 20
#: The column that the first takeover adds.
_COLUMN = "taken_over"
#: The members of a snapshot's summary.
_TERM, _WRITER, _EPOCH = "tuskline.term", "tuskline.writer", "tuskline.epoch"


@dataclass(frozen=True, slots=True)
class NewSnapshot:
    """A snapshot of the control table that is to be: an id drawn for it, its (empty) manifest list, milliseconds since 1970."""

    id: int
    manifest_list: str
    now: int


@dataclass(frozen=True, slots=True)
class Control:
    """A control table at its newest snapshot of a writer, whose term, writer and epoch these are; 0, empty and 0 in a new one."""

    table: TableId
    metadata: Mapping[str, Any]
    snapshot: int | None
    term: int
    writer: str
    epoch: int

    @classmethod
    def of(cls, table: TableId, metadata: Mapping[str, Any]) -> Self:
        """The control table that has this metadata.

        Another program may have committed to it, or have set `main` back: the newest snapshot of a writer counts, and the next commit
        requires `main` as it is. Raises `LakeError` if all of them are gone.
        """
        ref = metadata.get("refs", {}).get("main")
        if ref is None:
            return cls(table, metadata, None, 0, "", 0)
        own = [each for each in metadata["snapshots"] if _TERM in each["summary"]]
        if not own:
            raise LakeError(
                "another program has removed the snapshots that tell which driver writes the lake",
                where=str(table),
                repair="drop this table in the catalog while no driver runs; the next driver creates it again",
            )
        summary = max(own, key=lambda each: each["sequence-number"])["summary"]
        found = int(summary[_TERM]), summary[_WRITER], int(summary[_EPOCH])
        return cls(table, metadata, ref["snapshot-id"], *found)

    def taken_over(self, term: int, writer: str, new: NewSnapshot) -> TableCommit:
        """The commit by which a writer takes the lake over. Raises `FencedError` if a later one has."""
        if term <= self.term:
            raise FencedError(
                f"another writer has taken over, under term {self.term}",
                where=str(self.table),
                repair="no action is needed: the newer writer continues",
            )
        return self._commit(term, writer, self.epoch, new)

    def published(
        self, epoch: int, commits: Sequence[TableCommit], new: NewSnapshot
    ) -> list[TableCommit]:
        """An epoch of this table's writer: the control table's part and `commits`, to be made by `commit_all`.

        The same epoch again: of tables that were not shown with the others.
        """
        if epoch < self.epoch:
            raise ValueError(f"epoch {epoch} is before epoch {self.epoch}")
        return [self._commit(self.term, self.writer, epoch, new), *commits]

    def has(self, writer: str, epoch: int) -> bool:
        """Whether this writer has published that epoch, as long as its snapshot has not expired."""
        wanted = (writer, str(epoch))
        summaries = _summaries(self.metadata).values()
        return any((each.get(_WRITER), each.get(_EPOCH)) == wanted for each in summaries)

    def expired(self) -> list[str]:
        """The manifest lists of the snapshots that the next commit removes."""
        gone = self._surplus()
        snapshots = self.metadata.get("snapshots", ())
        return [each["manifest-list"] for each in snapshots if each["snapshot-id"] in gone]

    def lists(self) -> list[str]:
        """The manifest lists of the snapshots that the next commit leaves."""
        gone = self._surplus()
        snapshots = self.metadata.get("snapshots", ())
        return [each["manifest-list"] for each in snapshots if each["snapshot-id"] not in gone]

    def _surplus(self) -> list[int]:
        """The snapshots that are not needed any more once there is another one: the table does not grow with its epochs."""
        snapshots = self.metadata.get("snapshots", ())
        by_age = sorted(snapshots, key=lambda each: each["sequence-number"])
        return [each["snapshot-id"] for each in by_age[: -(_KEPT - 1)]]

    def _commit(self, term: int, writer: str, epoch: int, new: NewSnapshot) -> TableCommit:
        record = {
            "snapshot-id": new.id,
            "sequence-number": self.metadata["last-sequence-number"] + 1,
            "timestamp-ms": max(new.now, self.metadata["last-updated-ms"]),
            "manifest-list": new.manifest_list,
            "schema-id": self.metadata["current-schema-id"],
            "summary": {
                "operation": "append",
                _TERM: str(term),
                _WRITER: writer,
                _EPOCH: str(epoch),
            },
        }
        if self.snapshot is not None:
            record["parent-snapshot-id"] = self.snapshot
        if self.metadata["format-version"] >= 3:
            record |= {"first-row-id": self.metadata["next-row-id"], "added-rows": 0}
        required = [assert_uuid(self.metadata["table-uuid"]), assert_ref("main", self.snapshot)]
        updates = [
            {"action": "add-snapshot", "snapshot": record},
            set_ref("main", new.id, "branch"),
        ]
        if gone := self._surplus():
            updates.append({"action": "remove-snapshots", "snapshot-ids": gone})
        if self.snapshot is None:
            count = self.metadata["last-column-id"]
            required.append(
                {"type": "assert-last-assigned-field-id", "last-assigned-field-id": count}
            )
            updates = [*self._one_more_column(count + 1), *updates]
        return TableCommit(self.table, required, updates)

    def _one_more_column(self, number: int) -> list[Update]:
        (schema,) = (
            each
            for each in self.metadata["schemas"]
            if each["schema-id"] == self.metadata["current-schema-id"]
        )
        column = {"id": number, "name": _COLUMN, "required": False, "type": "boolean"}
        added = {**schema, "fields": [*schema["fields"], column]}
        added["schema-id"] = schema["schema-id"] + 1
        return [
            {"action": "add-schema", "schema": added, "last-column-id": number},
            {"action": "set-current-schema", "schema-id": -1},
        ]


def _summaries(metadata: Mapping[str, Any]) -> dict[int, Mapping[str, str]]:
    """The summary of each snapshot, by its id."""
    return {each["snapshot-id"]: each["summary"] for each in metadata.get("snapshots", ())}
