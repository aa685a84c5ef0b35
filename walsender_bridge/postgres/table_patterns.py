"""Evaluates which tables a source's `tables` match. Pure.

An entry is a pattern, `schema.table`, in which `*` matches any characters; an entry that starts with `!` excludes its matches,
whatever its position. A name in double quotes is literal, as in SQL (`"a.b"."c*"`); an unquoted one is literal except for
`*`, so the schema ends at the first dot, and case is preserved. Without an entry that includes, all tables match.

An entry without `*` names one table, which must exist and be publishable; otherwise that is an error.
Tables that a pattern matches are published if and as soon as they are publishable, and left out otherwise.

Invariant: no table is published whose UPDATEs and DELETEs the server would then refuse, nor one whose future partitions
would have theirs refused.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from walsender_bridge.postgres.protocol.relation_name import relation_name

_LITERAL: Final = re.compile(r'"((?:[^"]|"")+)"', re.DOTALL)
_QUOTED_SCHEMA: Final = re.compile(r'("(?:[^"]|"")+")\.(.+)', re.DOTALL)
#: The first major in which a partitioned table is published as one, through its root.
_VIA_ROOT_MAJOR: Final = 13
#: The first major that refuses UPDATEs if the replica identity has a generated column that is not sent.
_GENERATED_MAJOR: Final = 18


@dataclass(frozen=True, slots=True)
class Pattern:
    """An entry of `tables`. `schema` and `table`: regular expressions for the whole name."""

    text: str
    excludes: bool
    schema: str
    table: str
    #: The table that it names, if it has no `*`.
    exact: tuple[str, str] | None

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Parse an entry. Raises `ValueError` for an invalid one."""
        excludes = text.startswith("!")
        body = text.removeprefix("!")
        quoted = _QUOTED_SCHEMA.fullmatch(body)
        schema, dot, table = (
            quoted.expand(r"\1\0.\0\2").split("\0") if quoted else body.partition(".")
        )
        if not (schema and dot and table):
            raise ValueError(
                f"{text!r} is not a table pattern; write schema.table, schema.* or !schema.table, a name with * or a dot"
                ' in double quotes: "schema"."table"'
            )
        (left, first), (right, second) = _name(schema), _name(table)
        exact = None if first is None or second is None else (first, second)
        return cls(text, excludes, left, right, exact)

    def matches(self, schema: str, table: str) -> bool:
        """Whether it matches this table."""
        return _whole(self.schema, schema) and _whole(self.table, table)


def _name(text: str) -> tuple[str, str | None]:
    """A regular expression for a part of a pattern, and the name if it matches only one."""
    quoted = _LITERAL.fullmatch(text)
    if quoted is not None:
        name = quoted[1].replace('""', '"')
        return re.escape(name), name
    parts = [re.escape(part) for part in text.split("*")]
    return ".*".join(parts), text if len(parts) == 1 else None


def _whole(pattern: str, name: str) -> bool:
    return re.fullmatch(pattern, name, re.DOTALL) is not None


def entry_for(schema: str, table: str) -> str:
    """The entry that names exactly this table."""
    left = _quoted(schema) if re.search(r'[."*]|^!', schema) else schema
    right = _quoted(table) if "*" in table or _LITERAL.fullmatch(table) else table
    return f"{left}.{right}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class Choice:
    """The entries of a source's `tables`."""

    patterns: tuple[Pattern, ...]

    @classmethod
    def of(cls, tables: Iterable[str]) -> "Choice":
        """Parse the entries. Raises `ValueError` for an invalid one."""
        return cls(tuple(Pattern.parse(text) for text in tables))

    @property
    def is_default(self) -> bool:
        """Whether no entry includes: all tables match except those excluded."""
        return all(pattern.excludes for pattern in self.patterns)

    @property
    def follows(self) -> bool:
        """Whether tables created later can match."""
        return self.is_default or any(not p.excludes and p.exact is None for p in self.patterns)

    @property
    def named(self) -> list[tuple[str, str]]:
        """The tables named one by one, except those excluded."""
        exact = [p.exact for p in self.patterns if not p.excludes and p.exact is not None]
        return [each for each in dict.fromkeys(exact) if not self._excludes(*each)]

    def means(self, schema: str, table: str) -> bool:
        """Whether the entries match this table, publishable or not."""
        included = self.is_default or any(
            p.matches(schema, table) for p in self.patterns if not p.excludes
        )
        return included and not self._excludes(schema, table)

    def _excludes(self, schema: str, table: str) -> bool:
        return any(p.matches(schema, table) for p in self.patterns if p.excludes)


@dataclass(frozen=True, slots=True)
class CatalogTable:
    """A table of the database, as sql/publication/tables.sql describes it.

    `quoted`: as SQL writes it. `kind`, `logged`: relkind, and whether its rows are in the WAL. `root`: the partitioned table
    that it is a partition of, whatever the depth. `of_extension`: an extension made it. `bare`: it, or those of its partitions,
    that have no replica identity; `children`: the same of tables that inherit from it. `unlogged`: its partitions whose
    rows are not in the WAL. `has_key`: it has a primary key, which new partitions get. `generated`: generated columns in its
    replica identity or that of a partition. `misnamed`: its partitions with another identity.
    `owned`: the session may act as its owner. `published`: it is in the publication, by itself or by a table above it;
    `member`: it has an entry there.
    """

    schema: str
    table: str
    quoted: str
    kind: str
    logged: bool
    root: tuple[str, str] | None
    of_extension: bool
    bare: tuple[str, ...]
    children: tuple[str, ...]
    unlogged: tuple[str, ...]
    has_key: bool
    generated: tuple[str, ...]
    owned: bool
    published: bool
    member: bool
    misnamed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The table, as `relation_name` writes it."""
        return relation_name(self.schema, self.table)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A matching table that is not published: the failed condition, its repair, and the cost of the repair.

    `harms`: while it is published, the server refuses its UPDATEs and DELETEs.
    """

    table: CatalogTable
    reason: str
    repair: str
    cost: str = ""
    harms: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of evaluating `tables` in a database.

    `named`: the tables named one by one; `unknown`: those of them that do not exist. `fit`: publishable tables that patterns
    match. `idle`: entries that match nothing. `others`: tables published besides. `unmeant`: tables with an entry in the
    publication that do not match. `harmed`: matching, published tables whose UPDATEs the server therefore refuses.
    """

    named: tuple[CatalogTable, ...]
    unknown: tuple[str, ...]
    fit: tuple[CatalogTable, ...]
    left_out: tuple[LeftOut, ...]
    idle: tuple[str, ...]
    others: tuple[CatalogTable, ...]
    unmeant: tuple[CatalogTable, ...]

    @property
    def harmed(self) -> tuple[CatalogTable, ...]:
        """See the class."""
        return tuple(each.table for each in self.left_out if each.table.member and each.harms)

    @property
    def wanted(self) -> tuple[CatalogTable, ...]:
        """All tables to publish."""
        return (*self.named, *self.fit)


def choose(choice: Choice, tables: Sequence[CatalogTable], major: int) -> Chosen:
    """Evaluate the entries for these tables."""
    here = {(each.schema, each.table): each for each in tables}
    named = choice.named
    candidates = [t for t in tables if _is_candidate(t, major) and (t.schema, t.table) not in named]
    matched = [t for t in candidates if _means(choice, t, major)]
    evaluated = [(table, _failed_condition(table, major)) for table in matched]
    wanted = {*named, *((t.schema, t.table) for t, failed in evaluated if failed is None)}
    published = {(t.schema, t.table) for t in tables if t.published}
    return Chosen(
        named=tuple(here[name] for name in named if name in here),
        unknown=tuple(relation_name(*name) for name in named if name not in here),
        fit=tuple(table for table, failed in evaluated if failed is None),
        left_out=tuple(failed for _, failed in evaluated if failed is not None),
        idle=tuple(p.text for p in choice.patterns if _is_idle(p, choice, candidates, major)),
        others=tuple(
            t
            for t in tables
            if t.published and (t.schema, t.table) not in wanted and t.root not in published
        ),
        unmeant=tuple(t for t in tables if t.member and not _means(choice, t, major)),
    )


def _is_candidate(table: CatalogTable, major: int) -> bool:
    """Whether the table is published by itself: partitions are published through their root where the server supports it."""
    if table.of_extension:
        return False
    if major >= _VIA_ROOT_MAJOR:
        return table.kind in {"r", "p"} and table.root is None
    return table.kind == "r"


def _names(table: CatalogTable, major: int) -> list[tuple[str, str]]:
    own = (table.schema, table.table)
    return [own] if major >= _VIA_ROOT_MAJOR or table.root is None else [own, table.root]


def _means(choice: Choice, table: CatalogTable, major: int) -> bool:
    """Whether the table matches; partitions published by themselves match, and are excluded, with their root."""
    names = _names(table, major)
    return any(choice.means(*name) for name in names) and not any(
        p.excludes and p.matches(*name) for p in choice.patterns for name in names
    )


def _is_idle(
    pattern: Pattern, choice: Choice, candidates: Sequence[CatalogTable], major: int
) -> bool:
    if pattern.exact is not None and not pattern.excludes:
        return pattern.exact not in choice.named
    if pattern.excludes and any(
        p.exact and pattern.matches(*p.exact) for p in choice.patterns if not p.excludes
    ):
        return False
    return not any(pattern.matches(*name) for t in candidates for name in _names(t, major))


def _failed_condition(table: CatalogTable, major: int) -> LeftOut | None:
    """The first failed condition: why publishing the table would harm it, or have no effect."""
    if not table.logged:
        return LeftOut(
            table,
            "is unlogged: its changes are not in the WAL",
            f"ALTER TABLE {table.quoted} SET LOGGED",
            "which writes all of it to the WAL",
        )
    if table.unlogged:
        return LeftOut(
            table,
            f"has partitions whose changes are not in the WAL: {', '.join(table.unlogged)}",
            "make them ordinary, logged tables, or detach them",
        )
    if table.kind == "p" and not table.has_key:
        return LeftOut(
            table,
            "has no primary key, so its next partition would have no replica identity, and have its UPDATEs and DELETEs"
            " refused once the table is published",
            f"ALTER TABLE {table.quoted} ADD PRIMARY KEY (...), with the columns of its partition key",
            "which builds an index under a lock",
        )
    if table.bare:
        return LeftOut(
            table,
            "has no replica identity, and would have its UPDATEs and DELETEs refused once it is published"
            if table.bare == (table.quoted,)
            else f"has partitions without a replica identity: {', '.join(table.bare)}",
            "; ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in table.bare),
            "which writes the whole old row to the WAL with each UPDATE and DELETE; a primary key costs less",
            harms=True,
        )
    return _failed_key_condition(table, major)


def _failed_key_condition(table: CatalogTable, major: int) -> LeftOut | None:
    if table.misnamed:
        return LeftOut(
            table,
            f"has partitions with another replica identity: {', '.join(table.misnamed)}",
            "; ".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in table.misnamed),
            "which writes the whole old row to the WAL with each UPDATE and DELETE",
        )
    if table.generated:
        refused = (
            ", so that its UPDATEs and DELETEs would be refused"
            if major >= _GENERATED_MAJOR
            else ""
        )
        return LeftOut(
            table,
            f"has generated columns in its replica identity, which are not sent{refused}: {', '.join(table.generated)}",
            "give it a primary key without them, and REPLICA IDENTITY DEFAULT",
            harms=major >= _GENERATED_MAJOR,
        )
    return None
