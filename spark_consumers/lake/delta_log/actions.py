"""What a Delta log says of a table, and the commit that makes it say what an epoch has. Pure.

**Why a log that is written behind the manifest is safe.** A commit's content follows from the log's last commit and from a published
link: it makes the log's table equal the snapshot that the link names. It is created exclusively, under the number behind the
last commit's, and only if its link is newer than the last commit's (`next_commit`). So, whichever writers take part,
suspended ones too, the links of a log's commits ascend, each is a published one, and a plain reader of the log sees whole epochs
that never go back. A commit that a dead writer did not make is made by the next one, from the same chain; that of a
suspended writer either is the one that was missing, or its number is taken.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self
from urllib.parse import quote

from spark_consumers.lake.delta_log.schema import DeltaSchema

#: An action of Delta's protocol: one member, by the name of its kind.
Action = Mapping[str, Any]

#: The application whose transactions (`txn`) a commit records: the number of the link that it shows.
APPLICATION: Final = "tuskline"
OPERATION: Final = "TUSKLINE EPOCH"
#: The tag of a data file's `add`: the file of its deletion vector, which is in the log itself.
_VECTOR: Final = "tuskline.vector"


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A data file of a snapshot: its path below the table's folder, bytes, and statistics in Delta's JSON.

    `vector`: the path of the file with its removed rows; empty without one.
    """

    path: str
    size: int
    statistics: str
    vector: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a commit shows: a published link, its epoch, and the table's snapshot there. `term` is of the writer that publishes it."""

    link: int
    epoch: int
    snapshot: int
    term: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """What ascends along the chain, also where links were lost and their numbers are given again, by a writer of a higher term."""
        return self.term, self.link


@dataclass(frozen=True, slots=True)
class LogState:
    """A Delta table at a version of its log; -1: the log has no commit. `adds`: the `add` of each data file, by its path."""

    version: int = -1
    shown: Shown = field(default=Shown(0, 0, 0))
    protocol: Mapping[str, Any] | None = None
    metadata: Mapping[str, Any] | None = None
    adds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def after(self, version: int, actions: Iterable[Action]) -> Self:
        """The table after the commit of that version. Raises `KeyError`, `TypeError` or `ValueError` for what is none of ours."""
        shown, protocol, metadata = self.shown, self.protocol, self.metadata
        added: dict[str, Mapping[str, Any]] = {}
        removed = set()
        for action in actions:
            ((kind, what),) = action.items()
            match kind:
                case "add":
                    added[what["path"]] = what
                case "remove":
                    removed.add(what["path"])
                case "protocol":
                    protocol = what
                case "metaData":
                    metadata = what
                case "commitInfo":
                    shown = shown_in(what)
        kept = {path: add for path, add in self.adds.items() if path not in removed}
        return replace(
            self,
            version=version,
            shown=shown,
            protocol=protocol,
            metadata=metadata,
            adds={**kept, **added},
        )


def shown_in(information: Mapping[str, Any]) -> Shown:
    """What the commit with this `commitInfo` shows. Raises `KeyError`, `TypeError` or `ValueError` for another program's."""
    if information.get("operation") != OPERATION:
        raise ValueError(f"the operation {information.get('operation')!r} is another program's")
    told = information["operationParameters"]
    return Shown(*(int(told[name]) for name in ("link", "epoch", "snapshot", "term")))


def next_commit(
    state: LogState,
    shown: Shown,
    schema: DeltaSchema,
    table_id: str,
    wanted: Iterable[WantedFile],
    vector_of: Mapping[str, Mapping[str, Any]],
    moment: int,
) -> list[Action]:
    """The actions of the commit behind `state` that shows this; none if the log shows as new a link, or the same snapshot.

    `vector_of`: the descriptors of deletion vectors, by the paths of their files, of all that are `new_vectors`. `moment`: milliseconds
    since the Unix epoch.
    """
    if not is_behind(state, shown):
        return []
    # Rows that were only moved, by maintenance, are no changes to those that read the log as a stream.
    changes_rows = shown.epoch != state.shown.epoch
    wanted = list(wanted)
    actions = [*_header(state, shown, schema, table_id, moment)]
    names = {_encoded(file.path): file for file in wanted}
    for path, add in state.adds.items():
        if path not in names or not _is_same(add, names[path]):
            actions.append({"remove": _remove(add, moment, changes_rows=changes_rows)})
    for path, file in names.items():
        there = state.adds.get(path)
        if there is None or not _is_same(there, file):
            actions.append({"add": _add(path, file, vector_of, moment, changes_rows=changes_rows)})
    return actions


def is_behind(state: LogState, shown: Shown) -> bool:
    """Whether the log does not show this yet: its last commit is of an older link, with another snapshot."""
    return state.version < 0 or (
        state.shown.order < shown.order and state.shown.snapshot != shown.snapshot
    )


def new_vectors(state: LogState, wanted: Iterable[WantedFile]) -> Iterator[WantedFile]:
    """The data files whose deletion vector the log does not have yet."""
    for file in wanted:
        there = state.adds.get(_encoded(file.path))
        if file.vector and (there is None or not _is_same(there, file)):
            yield file


def lines(actions: Iterable[Action]) -> bytes:
    """The file of a commit."""
    return b"".join(json.dumps(action, ensure_ascii=False).encode() + b"\n" for action in actions)


def _header(
    state: LogState, shown: Shown, schema: DeltaSchema, table_id: str, moment: int
) -> Iterator[Action]:
    told = {
        "link": str(shown.link),
        "epoch": str(shown.epoch),
        "snapshot": str(shown.snapshot),
        "term": str(shown.term),
    }
    yield {
        "commitInfo": {
            "timestamp": moment,
            "operation": OPERATION,
            "operationParameters": told,
            "isBlindAppend": False,
            "engineInfo": "Tuskline",
        }
    }
    yield {"txn": {"appId": APPLICATION, "version": shown.link, "lastUpdated": moment}}
    if state.protocol != schema.protocol:
        yield {"protocol": schema.protocol}
    there = state.metadata or {}
    configuration = dict(schema.configuration)
    if (there.get("schemaString"), there.get("configuration")) != (
        schema.schema_string,
        configuration,
    ):
        yield {
            "metaData": {
                "id": table_id,
                "format": {"provider": "parquet", "options": {}},
                "schemaString": schema.schema_string,
                "partitionColumns": [],
                "configuration": configuration,
                "createdTime": there.get("createdTime", moment),
            }
        }


def _is_same(add: Mapping[str, Any], file: WantedFile) -> bool:
    return bool((add.get("tags") or {}).get(_VECTOR, "") == file.vector)


def _add(
    path: str,
    file: WantedFile,
    vector_of: Mapping[str, Mapping[str, Any]],
    moment: int,
    *,
    changes_rows: bool,
) -> dict[str, Any]:
    made: dict[str, Any] = {
        "path": path,
        "partitionValues": {},
        "size": file.size,
        "modificationTime": moment,
        "dataChange": changes_rows,
        "stats": file.statistics,
    }
    if file.vector:
        made["tags"] = {_VECTOR: file.vector}
        made["deletionVector"] = vector_of[file.vector]
    return made


def _remove(add: Mapping[str, Any], moment: int, *, changes_rows: bool) -> dict[str, Any]:
    made = {
        "path": add["path"],
        "deletionTimestamp": moment,
        "dataChange": changes_rows,
        "extendedFileMetadata": True,
        "partitionValues": {},
        "size": add["size"],
    }
    if add.get("deletionVector"):
        made["deletionVector"] = add["deletionVector"]
    return made


def _encoded(path: str) -> str:
    """A path below the table's folder as an action has it: a relative URI."""
    return quote(path, safe="/")
