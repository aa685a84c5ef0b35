"""The catalog state of a table at its source, as far as its changes emit no replication message. Pure.

A `Shape` is the catalog state of one table in one snapshot (sql/lake/shapes.sql). A table in the lake has the shape of
the snapshot that it was copied from. Whenever the source is polled, `changed` compares the two: a change that emits no
replication message (DROP of a partition, a new row filter, ALTER TYPE ... RENAME VALUE) shows there, and the table is
copied again. A change that is harmless, or is in the stream, is adopted as the table's shape.

Type modifiers are not compared: where ALTER TYPE changes values (`numeric(10,2)` to `numeric(10,1)`), the server rewrites the
table, which `file` and the versions of the columns show on every major. Where it rewrites nothing, no value has changed.

Why no change is missed, even if it is undone before the next poll: OIDs are compared, and the versions of catalog rows (xmin),
which never return. An OID can return after four billion others (TOAST values use them up, too), so the transaction
that created the table is compared as well. Why none is repaired twice: the copy has the shape of its own
snapshot, which contains the change, and only polls that begin after the copy are compared.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from walsender_bridge.postgres.protocol.lsn import Lsn

#: The operations that a publication must send.
OPERATIONS = ("insert", "update", "delete", "truncate")
#: Fields that no later shape is compared with, and that are not kept.
_TRANSIENT = frozenset({"born_here", "filled", "via_root", "unlogged"})


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition below a table, at any depth.

    `link`: the version of the row that makes it a partition of `parent` (empty: only the stream has had it, and the
    catalog was not read since). `file`: its relfilenode; 0 if it is partitioned itself. `name`: as SQL writes it.
    `identity`: the columns by which its updates and deletes identify a row (None: the whole row).
    `born_here`: it was made as a partition, so every row in it came through the stream. `empty_at`: the LSN at which it
    was found empty instead; a change of it that was committed before shows that it had rows under an earlier link.
    `unlogged`: see `Shape`.
    """

    oid: int
    parent: int
    link: str
    file: int
    name: str
    identity: tuple[str, ...] | None = None
    born_here: bool = False
    empty_at: Lsn = 0
    unlogged: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """A table. See the module.

    `file`: its relfilenode (0: partitioned). `identity`: see `Partition`; `unsent`: those of these columns that the
    publication leaves out. `columns`: number, name, type, row version. `publication`: its OID and row version.
    `members`: by which entries the table is in the publication. `column_list`, `row_filter`: their text, if there are
    any. `labels`: of the enums in its columns, each its OID, text and row version; `composites`: of the composite types
    OID, name and attributes; `outputs`: of the base types of others than PostgreSQL OID, name, and OID and row version of the
    output function. `filled`: numbers of the columns in which a row may have a value that no change has carried.
    `natts`: the greatest number that a column has had (0: unknown). `generated`: numbers of the generated columns that
    the publication does not send.
    `recorded`: what the event trigger is that records schema changes; empty: nothing records them.
    `via_root`: whether the publication sends partitions as the table that they are of. `unlogged`: `unlogged` or
    `foreign`, if changes of its rows are not in the WAL. `born`: the transaction that created it (empty: unknown).
    """

    oid: int
    file: int
    identity: tuple[str, ...] | None
    unsent: tuple[str, ...]
    columns: tuple[tuple[int, str, int, str], ...]
    publication: str
    operations: str
    members: tuple[str, ...]
    column_list: str | None = None
    row_filter: str | None = None
    labels: tuple[tuple[int, str, str], ...] = ()
    composites: tuple[tuple[int, str, str], ...] = ()
    parts: tuple[Partition, ...] = ()
    filled: tuple[int, ...] = ()
    via_root: bool = False
    unlogged: str = ""
    natts: int = 0
    generated: tuple[int, ...] = ()
    outputs: tuple[tuple[int, str, str], ...] = ()
    recorded: str = ""
    born: str = ""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The shape in the query's JSON, or in `dump`'s."""
        lists = {
            name: tuple(tuple(each) for each in record.get(name) or ())
            for name in ("columns", "labels", "composites", "outputs")
        }
        return cls(
            **{
                **record,
                **lists,
                "identity": _names(record["identity"]),
                "unsent": tuple(record["unsent"]),
                "members": tuple(record["members"] or ()),
                "filled": tuple(record.get("filled") or ()),
                "generated": tuple(record.get("generated") or ()),
                "parts": tuple(
                    Partition(**{**part, "identity": _names(part.get("identity"))})
                    for part in record["parts"] or ()
                ),
            }
        )

    @classmethod
    def load(cls, text: str) -> Self:
        """The shape that `dump` wrote."""
        return cls.from_json(json.loads(text))

    def dump(self) -> str:
        """The shape for a manifest: one line, with what `changed` needs of what was before."""
        kept = [
            {k: v for k, v in asdict(part).items() if k not in {"identity", *_TRANSIENT}}
            for part in self.parts
        ]
        record = {k: v for k, v in asdict(self).items() if k not in _TRANSIENT}
        return json.dumps({**record, "parts": kept}, separators=(",", ":"))

    @property
    def relations(self) -> set[int]:
        """The OIDs of the table and its partitions, as far as the catalog had them."""
        return {self.oid, *(part.oid for part in self.parts if part.link)}

    def with_partitions(self, partitions: Collection[int]) -> "Shape":
        """The shape after changes in the stream of these partitions, which the catalog did not have."""
        new = sorted(set(partitions) - {part.oid for part in self.parts})
        parts = (Partition(oid, self.oid, "", oid, f"with OID {oid}") for oid in new)
        return replace(self, parts=(*self.parts, *parts))


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)


@dataclass(frozen=True, slots=True)
class Publication:
    """The tables that a source publishes, by `schema.table`, without Tuskline's own.

    `empty`: the OIDs of partitions that were not known, and whose files are empty. `lsn`: commits at or above it came
    after the read began. `marked`: the table that marks positions in the log is published, too; `updates`: and so is the
    UPDATE that marks one.
    """

    shapes: Mapping[str, Shape]
    empty: frozenset[int]
    lsn: Lsn = 0
    marked: bool = True
    updates: bool = True


#: What the columns of a table are, as far as records tell all changes (`recorded`): numbers, names and types, and the greatest number.
Columns = tuple[tuple[tuple[int, str, int], ...], int]


def columns_in(shape: Shape) -> Columns:
    """The columns of this shape."""
    return tuple((number, name, kind) for number, name, kind, _ in shape.columns), shape.natts


def with_columns_of(shape: Shape, other: Shape) -> Shape:
    """The shape with all that `other`, of the same table, says of its columns and of its file."""
    return replace(
        shape,
        columns=other.columns,
        natts=other.natts,
        file=other.file,
        filled=other.filled,
        generated=other.generated,
        identity=other.identity,
    )


# -- what differs -----------------------------------------------------------------------------------


def changed(before: Shape, now: Shape, empty: Collection[int] = ()) -> str | None:
    """Why a table of the shape `before` lacks changes that emitted no message; None if it does not.

    `empty`: new partitions whose files are empty.
    """
    if now.oid != before.oid:
        return "the table was dropped, and another one created with its name"
    if before.born and now.born and now.born != before.born:
        return "the table was dropped, and another one created with its OID"
    return (
        _publication(before, now)
        or _partitions(before, now, empty)
        or _columns(before, now)
        or _lent(before, now)
        or texts_changed(before, now)
    )


def _publication(before: Shape, now: Shape) -> str | None:
    if now.column_list != before.column_list:
        return "its column list in the publication changed"
    if now.row_filter != before.row_filter:
        return "its row filter in the publication changed"
    if not set(now.members) & set(before.members):
        return "it was removed from the publication and added again"
    if now.operations != before.operations:
        return f"the publication sends {now.operations or 'nothing'}, and sent {before.operations or 'nothing'}"
    if now.publication != before.publication:
        return "the publication was altered"
    return None


def _partitions(before: Shape, now: Shape, empty: Collection[int]) -> str | None:
    found = {part.oid: part for part in now.parts}
    for old in before.parts:
        new = found.get(old.oid)
        if new is None:
            return f"its partition {old.name} was dropped or detached"
        if not old.link:
            continue
        if (new.parent, new.link) != (old.parent, old.link):
            return f"its partition {old.name} was detached and attached again"
        if new.file != old.file:
            return f"its partition {old.name} was truncated or rewritten"
    silent = set(empty) - {part.oid for part in before.parts}
    for new in _new_parts(before, now):
        # A table's first file has its OID for a name. What is in another one has replaced rows that were sent, perhaps.
        if new.file != new.oid:
            return f"its new partition {new.name} was truncated or rewritten"
        if new.oid not in silent and not _born_here(before, new):
            return f"its partition {new.name} was attached with rows"
    return None


def _new_parts(before: Shape, now: Shape) -> list[Partition]:
    """The partitions that are new and can have rows."""
    known = before.relations
    return [part for part in now.parts if part.oid not in known and part.file != 0]


def _born_here(before: Shape, part: Partition) -> bool:
    """A parent that is new may have come with its partitions."""
    return part.born_here and part.parent in before.relations


def followed(before: Shape, now: Shape, lsn: Lsn) -> Shape:
    """The shape of a table that was `before`, has lost nothing, and is `now`, as polled at this LSN."""
    empty_at = {part.oid: part.empty_at for part in before.parts}
    new = _new_parts(before, now)
    empty_at |= {part.oid: 0 if _born_here(before, part) else lsn for part in new}
    parts = [replace(part, empty_at=empty_at.get(part.oid, 0)) for part in now.parts]
    return replace(now, parts=tuple(parts))


def _columns(before: Shape, now: Shape) -> str | None:
    """What became of the sent columns, by number, since a name can pass from one column to another.

    A new file alone is VACUUM FULL, CLUSTER or TRUNCATE, which the stream shows; with new columns the stream does not.
    """
    old, new = _sent(before), _sent(now)
    for number, (name, kind, _) in old.items():
        if number in now.generated:
            # An earlier version recorded it as sent.
            continue
        if number not in new:
            return f"it lost {name}"
        if new[number][0] != name:
            return f"its column {name!r} was renamed to {new[number][0]!r}"
        if new[number][1] != kind:
            return f"it has another type for {name}"
    for number, (name, _, version) in new.items():
        if number in before.generated:
            return f"its column {name!r} is no longer generated"
        if number not in old and number in now.filled:
            return f"its column {name!r} was added with a default, or NOT NULL"
        if number not in old and _was_dropped(range(before.natts + 1, number), before, now):
            return f"its column {name!r} was added after another one, which was dropped again"
        if now.file == before.file:
            continue
        if number not in old:
            return f"its column {name!r} was added, and its rows were rewritten or truncated"
        if old[number][2] != version:
            return f"its rows were rewritten: its column {name!r} was altered"
    return None


def _was_dropped(numbers: range, before: Shape, now: Shape) -> bool:
    """Whether a column of these numbers was dropped: the stream may have sent it under a name that is now another's."""
    return before.natts > 0 and not set(numbers) <= {number for number, *_ in now.columns}


def others_by_now(names: Sequence[str], now: Shape) -> bool:
    """Whether columns that the stream has sent in this order have given their names to others."""
    sent = sent_names(now)
    return set(names) <= set(sent) and list(names) != sent[: len(names)]


def sent_names(shape: Shape) -> list[str]:
    """The names of the columns that the publication sends, in their order."""
    return [name for name, _ in sent_columns(shape).values()]


def sent_columns(shape: Shape) -> dict[int, tuple[str, int]]:
    """Name and type of the columns that the publication sends, by number, in their order."""
    return {number: (name, kind) for number, (name, kind, _) in sorted(_sent(shape).items())}


def _lent(before: Shape, now: Shape) -> str | None:
    """Whether the table may have been a partition meanwhile: its changes were then sent as another table's.

    ATTACH and DETACH rewrite the row of each column, which counts the tables that it is inherited from.
    """
    versions = {number: version for number, _, _, version in now.columns}
    if (
        now.via_root
        and before.columns
        and all(versions.get(number) != version for number, _, _, version in before.columns)
    ):
        return "each of its columns was altered: it may have been a partition of another table, as which its changes were sent"
    return None


def _sent(shape: Shape) -> dict[int, tuple[str, int, str]]:
    """Name, type and row version of the columns that the publication sends, by number."""
    listed = None if shape.column_list is None else re.findall(r"\d+", shape.column_list)
    return {
        number: (name, kind, version)
        for number, name, kind, version in shape.columns
        if (listed is None or str(number) in listed) and number not in shape.generated
    }


def texts_changed(before: Shape, now: Shape) -> str | None:
    """Why PostgreSQL writes other texts for values that it has not touched.

    Its output functions use the current catalog, regardless of the snapshot.
    """
    labels = {oid: rest for oid, *rest in before.labels}
    for oid, label, version in now.labels:
        if labels.get(oid, [label, version]) != [label, version]:
            return f"the enum label {labels[oid][0]!r} was renamed to {label!r}"
    composites = {oid: attributes for oid, _, attributes in before.composites}
    for oid, name, attributes in now.composites:
        if composites.get(oid, attributes) != attributes:
            return f"the attributes of the composite type {name} changed"
    outputs = {oid: function for oid, _, function in before.outputs}
    for oid, name, function in now.outputs:
        if outputs.get(oid, function) != function:
            return f"the output function of the type {name} was replaced or altered"
    return None


# -- what cannot be followed ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShapeRefusal:
    """Why the changes of a table would not yield its rows, and the repair."""

    reason: str
    repair: str


def refusal(shape: Shape) -> ShapeRefusal | None:
    """Whether the stream cannot yield this table's rows, even after a copy."""
    missing = [name for name in OPERATIONS if name not in shape.operations.split(", ")]
    if missing:
        return ShapeRefusal(
            f"the publication does not send {', '.join(missing)}",
            "ALTER PUBLICATION ... SET (publish = 'insert, update, delete, truncate')",
        )
    if shape.unsent:
        return ShapeRefusal(
            f"its key contains the column {', '.join(shape.unsent)}, which the publication does not send",
            "ALTER PUBLICATION ... SET TABLE, without a column list or with the whole key in it",
        )
    if shape.unlogged:
        return _unlogged("it", "...", shape.unlogged)
    for part in shape.parts:
        if part.unlogged:
            return _unlogged(f"its partition {part.name}", part.name, part.unlogged)
        if part.file and not names_rows(shape.identity, part.identity):
            return ShapeRefusal(
                f"its partition {part.name} has another replica identity than the table: "
                f"{_identity_text(part.identity)} instead of {_identity_text(shape.identity)}",
                f"ALTER TABLE {part.name} REPLICA IDENTITY FULL",
            )
    return None


def _unlogged(what: str, table: str, kind: str) -> ShapeRefusal:
    """Changes of these rows are not in the WAL."""
    if kind == "unlogged":
        reason, repair = "is unlogged", f"ALTER TABLE {table} SET LOGGED"
    else:
        reason, repair = "is a foreign table", f"ALTER TABLE ... DETACH PARTITION {table}"
    return ShapeRefusal(f"{what} {reason}: changes of its rows are not in the WAL", repair)


def names_rows(root: tuple[str, ...] | None, part: tuple[str, ...] | None) -> bool:
    """Whether a partition's updates and deletes contain the columns that identify the table's rows.

    A partition without an identity (an empty one) has no updates and deletes: the server refuses them.
    """
    if part is None or not part:
        return True
    return bool(root) and set(root or ()) <= set(part)


def _identity_text(identity: tuple[str, ...] | None) -> str:
    return "the whole row" if identity is None else f"({', '.join(identity)})"
