"""How a table's rows are laid out in the lake, as the configuration says it by table patterns. Pure.

A partition field is a column, or a transform of one: `region`, `day(created_at)`, `bucket(16, id)`. A sort field is a column
with PostgreSQL's words: `created_at DESC NULLS LAST`, whose defaults are PostgreSQL's, too. A column in double quotes is
literal; an unquoted one is folded to lower case, as in SQL. Which columns a table has, and of which types, is not known here.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from walsender_bridge.postgres.change_feed import feed_name
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.postgres.column_name import NAME, unquoted
from walsender_bridge.postgres.protocol.relation_name import split_relation
from walsender_bridge.postgres.table_patterns import Pattern
from walsender_bridge.postgres.target_name import target_name

IDENTITY: Final = "identity"
#: What a table of the lake has: the source's rows, the deleted ones as well, or all versions of each row.
CURRENT: Final = "current"
SOFT_DELETE: Final = "soft_delete"
HISTORY: Final = "history"
MODES: Final = (CURRENT, SOFT_DELETE, HISTORY)
#: Transforms with a number: of buckets, or the width.
NUMBERED: Final = ("bucket", "truncate")
#: Of which a column may have one.
TIMES: Final = ("year", "month", "day", "hour")

_TRANSFORM: Final = re.compile(rf"(\w+)\s*\(\s*(?:(\d+)\s*,\s*)?({NAME})\s*\)")
_SORT: Final = re.compile(rf"({NAME})(?:\s+(asc|desc))?(?:\s+nulls\s+(first|last))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PartitionField:
    """A partition field: the transform's name, the column, and the transform's number, if it has one."""

    transform: str
    column: str
    number: int | None = None

    @property
    def iceberg(self) -> str:
        """The transform in Iceberg's words."""
        return self.transform if self.number is None else f"{self.transform}[{self.number}]"

    def __str__(self) -> str:
        if self.transform == IDENTITY:
            return self.column
        number = "" if self.number is None else f"{self.number}, "
        return f"{self.transform}({number}{self.column})"

    @classmethod
    def parse(cls, text: str) -> "PartitionField":
        """Parse a field. Raises `ValueError` for an invalid one."""
        text = text.strip()
        if re.fullmatch(NAME, text):
            return cls(IDENTITY, unquoted(text))
        found = _TRANSFORM.fullmatch(text)
        if found is None:
            raise ValueError(
                f'{text!r} is not a partition field; write a column ("Region" in double quotes, if SQL needs them), or'
                " a transform of one: day(created_at), bucket(16, id)"
            )
        name, number, column = found[1].lower(), found[2], unquoted(found[3])
        if name not in (IDENTITY, *NUMBERED, *TIMES):
            known = ", ".join((IDENTITY, *TIMES, "bucket(N, ...)", "truncate(W, ...)"))
            raise ValueError(f"{text!r}: {name} is not a transform; there are {known}")
        if (number is not None) != (name in NUMBERED):
            wanted = f"write {name}(16, {column})" if name in NUMBERED else "it takes no number"
            raise ValueError(f"{text!r}: {wanted}")
        if number is not None and not 0 < int(number) < 2**31:
            raise ValueError(f"{text!r}: the number must be between 1 and {2**31 - 1}")
        return cls(name, column, None if number is None else int(number))


@dataclass(frozen=True, slots=True)
class SortField:
    """A column that rows are sorted by within a data file."""

    column: str
    descending: bool = False
    nulls_first: bool = False

    @classmethod
    def parse(cls, text: str) -> "SortField":
        """Parse a field. Raises `ValueError` for an invalid one."""
        found = _SORT.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{text!r} is not a sort field; write a column, with DESC and NULLS FIRST or NULLS LAST if wanted"
            )
        descending = (found[2] or "asc").lower() == "desc"
        nulls_first = descending if found[3] is None else found[3].lower() == "first"
        return cls(unquoted(found[1]), descending, nulls_first)


@dataclass(frozen=True, slots=True)
class TableLayout:
    """A table's partition fields, sort fields, and Iceberg's table properties besides those that the lake sets."""

    partition: tuple[PartitionField, ...] = ()
    sort: tuple[SortField, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(
        cls,
        partition: Iterable[str] = (),
        sort: Iterable[str] = (),
        options: Mapping[str, str] | None = None,
    ) -> "TableLayout":
        """Parse a layout. Raises `ValueError` for an invalid one, and for an option that the lake sets itself."""
        fields = tuple(map(PartitionField.parse, partition))
        columns = tuple(map(SortField.parse, sort))
        _once(fields, columns)
        for name, value in (options or {}).items():
            refused = refusal(name)
            if refused:
                raise ValueError(f"option {name!r} {refused}")
            if _NUMBERS.fullmatch(name) and not _is_number(value):
                raise ValueError(f"option {name!r}: {value!r} is not a whole number below 10^9")
        compression(options or {})
        return cls(fields, columns, tuple(sorted((options or {}).items())))


def _once(fields: Sequence[PartitionField], columns: Sequence[SortField]) -> None:
    """Raise `ValueError` for what would say nothing a second time."""
    # Of a column, hours are within days: Iceberg takes only one of the two.
    said = [(f.column, "time" if f.transform in TIMES else f.iceberg) for f in fields]
    for field, what in zip(fields, said, strict=True):
        if said.count(what) > 1:
            raise ValueError(f"{field} is one of two partition fields of which one is enough")
    names = [each.column for each in columns]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the rows are sorted by {name} twice")


#: Properties on which the lake depends, by how their names begin, and what to do instead.
_REFUSED: Final = {
    "format-version": "is decided by how rows are removed: set it in [lake.deletes]",
    "tuskline.": "is Tuskline's own: choose another name",
    "write.delete.": "is decided by how rows are removed: set it in [lake.deletes]",
    "write.update.": "is decided by how rows are removed: set it in [lake.deletes]",
    "write.merge.": "is decided by how rows are removed: set it in [lake.deletes]",
    "write.format.": "cannot be set, since data files are always Parquet: remove it",
    "write.data.path": "would move files that the lake looks for in the table's folder: remove it",
    "write.folder-storage.": "would move files that the lake looks for in the table's folder: remove it",
    "write.location-provider.": "would move files that the lake looks for in the table's folder: remove it",
    "write.object-storage.": "would move files that the lake looks for in the table's folder: remove it",
    "write.metadata.compression-codec": "would rename the metadata files by which writers are fenced: remove it",
    "write.metadata.delete-after-commit.": "would remove metadata files, which the lake does itself: remove it",
    "write.manifest.": "would change the files that the lake reads without Iceberg's library: remove it",
    "write.metadata.path": "would move the metadata files by which writers are fenced: remove it",
    "history.expire.": "would expire epochs that are still to be read: set [lake] retention",
    "gc.": "is about expiry, which the lake does itself: set [lake] retention",
    "encryption.": "cannot be set, since the lake's own files are not encrypted: remove it",
    "schema.": "is of the schema, which follows PostgreSQL's: remove it",
}


def refusal(name: str) -> str:
    """Why an option cannot be set, and what to do instead; nothing if it can."""
    return next((why for begin, why in _REFUSED.items() if name.startswith(begin)), "")


#: Properties that Iceberg's library reads as whole numbers whenever it commits: by any other value it fails, with the whole epoch.
_NUMBERS: Final = re.compile(
    r"commit\.(retry|status-check|manifest)\..*|write\.metadata\.previous-versions-max"
    r"|write\.metadata\.metrics\.max-inferred-column-defaults|write\.summary\.partition-limit"
)


def _is_number(value: str) -> bool:
    return re.fullmatch("[0-9]{1,9}", value) is not None


CODEC: Final = "write.parquet.compression-codec"
LEVEL: Final = "write.parquet.compression-level"
#: Codecs of Parquet by Iceberg's names, what Arrow calls them, and the levels that they have.
_CODECS: Final = {
    "zstd": ("zstd", range(1, 23)),
    "snappy": ("snappy", range(0)),
    "gzip": ("gzip", range(1, 10)),
    "lz4": ("lz4", range(0)),
    "brotli": ("brotli", range(1, 12)),
    "uncompressed": ("none", range(0)),
}


def compression(properties: Mapping[str, str]) -> tuple[str, int | None]:
    """How a table with these properties is compressed, in Arrow's words, and at which level.

    Raises `ValueError` for what Parquet does not have.
    """
    codec, level = properties.get(CODEC, "zstd"), properties.get(LEVEL)
    if codec not in _CODECS:
        raise ValueError(f"option {CODEC!r}: {codec!r} is none of {', '.join(_CODECS)}")
    name, levels = _CODECS[codec]
    if level is None:
        return name, None
    if not level.isdecimal() or int(level) not in levels:
        known = f"its levels are 1 to {levels[-1]}" if levels else "it has no levels"
        raise ValueError(f"option {LEVEL!r}: {level!r} is no level of {codec}: {known}")
    return name, int(level)


class RowRules(NamedTuple):
    """What the lake has of a table's rows: which columns are masked, whether deleted rows or earlier versions are kept (`MODES`), and which rows it has.

    `row_filter`: a condition in PostgreSQL's SQL; empty: all rows.
    """

    masks: tuple[ColumnMask, ...] = ()
    mode: str = CURRENT
    row_filter: str = ""


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """A layout for the tables that match a pattern, of one source (by its name) or of all; what it has of their rows (`RowRules`).

    `feed`: how the change feeds of the tables are named (`change_feed`); empty: they have none. `delta`: whether they are Delta tables,
    too; None: as the lake's other tables. `name`: how the tables are named in the lake (`target_name`); empty: as at the source.
    """

    pattern: Pattern
    layout: TableLayout
    source: str | None = None
    masks: tuple[ColumnMask, ...] = ()
    mode: str = CURRENT
    feed: str = ""
    row_filter: str = ""
    delta: bool | None = None
    name: str = ""

    def matches(self, name: str) -> bool:
        """Whether it is for this table, `stream.schema.table`."""
        stream, _, relation = name.partition(".")
        return self.source in {None, stream} and self.pattern.matches(*split_relation(relation))


def layout_of(rules: Iterable[LayoutRule], name: str) -> TableLayout:
    """The layout of a table (`stream.schema.table`): that of the first rule that matches it."""
    return next((rule.layout for rule in rules if rule.matches(name)), TableLayout())


def rules_of(rules: Iterable[LayoutRule], name: str) -> RowRules:
    """What the lake has of the rows of a table (`stream.schema.table`), by the first rule that matches it; its masks are ordered."""
    found = next((rule for rule in rules if rule.matches(name)), None)
    return RowRules() if found is None else RowRules(found.masks, found.mode, found.row_filter)


def feed_of(rules: Iterable[LayoutRule], name: str, lake_name: str = "") -> str:
    """The change feed of a table (`stream.schema.table`), named alike, by the first rule that matches the table; empty without one.

    `lake_name`: the table's name in the lake; by default the one that the rules give it.
    """
    found = next((rule for rule in rules if rule.matches(name)), None)
    if found is None or not found.feed:
        return ""
    return feed_name(found.feed, lake_name or _target(found, name))


def target_of(rules: Iterable[LayoutRule], name: str) -> str:
    """The name in the lake of a table (`stream.schema.table`), named alike, by the first rule that matches the table."""
    found = next((rule for rule in rules if rule.matches(name)), None)
    return name if found is None else _target(found, name)


def _target(rule: LayoutRule, name: str) -> str:
    return target_name(rule.name, name) if rule.name else name


def is_delta(rules: Iterable[LayoutRule], name: str, default: bool) -> bool:
    """Whether a table (`stream.schema.table`) is a Delta table, too, by the first rule that matches it."""
    found = next((rule.delta for rule in rules if rule.matches(name)), None)
    return default if found is None else found
