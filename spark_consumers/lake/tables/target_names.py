"""Decides which name each table has in the lake. Pure.

A table is identified by its name at the source (`stream.schema.table`, the key of `Manifest.tables`): requests, masks, copies and the log know it by that.
Its name in the lake is what readers and other engines see (`Manifest.readable`), and nothing else depends on it. Its target name is the one that it is to have
there: by the `name` of `[[lake.tables]]`, otherwise the source's.

**Why this is right.** In one link, each name in the lake is that of one table, feed or view: a name is given only if nothing else keeps it. All names
are given at once (two tables may exchange theirs), but for those that are refused. A table that is refused keeps the name that it
has; if that is the target name of another table, this is refused, too. Each turn refuses at least one more table, so the search ends. A new table that is refused has
none, and is not copied until it can have its name. An epoch that is published keeps its names, as names are given with an epoch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import TableVersion

#: What the reason begins with of a table that does not have its target name (`Manifest.not_copied`).
REFUSED: Final = "its name in the lake: "


def _source_name(name: str) -> str:
    return name


def _no_feed(_name: str, _lake_name: str) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the configuration says: a table's target name, by its name at the source, and the name of its feed by both (empty: it has none).

    `is_set`: whether it says anything. `move`: whether a table that the lake has can get another name; otherwise it keeps the one that it
    came with.
    """

    of: Callable[[str], str] = _source_name
    feed: Callable[[str, str], str] = _no_feed
    is_set: bool = False
    move: bool = True


#: Nothing.
AS_AT_SOURCES: Final = Targets()


@dataclass(frozen=True, slots=True)
class Given:
    """The names in the lake of the tables that have one, by their names at the source; and why others do not get their target names."""

    names: Mapping[str, str]
    refused: Mapping[str, str]


def given(wanted: Mapping[str, str], before: Mapping[str, str], others: Mapping[str, str]) -> Given:
    """The names of tables (both sides `stream.schema.table`, by the source's name).

    `wanted`: their target names. `before`: the names that they have; a new table has none. `others`: the names of views and feeds, and what each is:
    only a table whose target name is that at its source may take one.
    """
    moves = {name: to for name, to in wanted.items() if before.get(name) != to}
    if not moves:
        return Given(dict(before), {})
    refused: dict[str, str] = {}
    while True:
        stay = {of: name for name, of in before.items() if name not in moves}
        times = Counter([*stay, *moves.values()])
        found = {}
        for name, to in moves.items():
            taken = others.get(to) if to != name else None
            if to in stay:
                found[name] = f"{to} is the name of table {stay[to]} in the lake"
            elif times[to] > 1:
                rival = min(n for n, its in moves.items() if its == to and n != name)
                found[name] = f"table {rival} would have the same name, {to}"
            elif taken is not None:
                found[name] = f"{to} is the name of {taken}"
        if not found:
            break
        refused |= found
        moves = {name: to for name, to in moves.items() if name not in found}
    return Given(
        {**before, **moves}, {name: _reason(name, refused[name], before) for name in refused}
    )


def _reason(name: str, why: str, before: Mapping[str, str]) -> str:
    keeps = f"it keeps the name {before[name]}" if name in before else "it is not copied"
    return (
        f"{keeps}: {why}. Give one of them another name in [[lake.tables]] and start lake run again"
    )


def names_in(head: Manifest) -> dict[str, str]:
    """The names that the tables of the head have in the lake, by those at the source."""
    return {name: table.lake_name or name for name, table in head.tables.items()}


def others_in(head: Manifest) -> dict[str, str]:
    """The names in the lake that are not of tables, and what each is."""
    views = {
        view.full_name(name): f"view {name}" for name, view in head.views.items() if view.tables
    }
    return {**{name: f"the change feed of {feed.of}" for name, feed in head.feeds.items()}, **views}


def pending(head: Manifest, names: Given) -> dict[str, str]:
    """The tables of the head that get another name in the lake, and which."""
    in_lake = names_in(head)
    return {n: to for n, to in names.names.items() if in_lake.get(n, to) != to}


def with_names(
    head: Manifest,
    names: Given,
    feed_of: Callable[[str, str], str],
    renamed: Collection[str] = (),
) -> Manifest:
    """The head whose tables and copies have these names in the lake, and whose feeds have the names that follow from them.

    `feed_of`: as in `Targets`. `renamed`: the tables that have another name at their source as of this head: their feeds have the names that go
    with their target names, which the tables may not have got. A copy without a name is not part of it.
    """

    def lake_name(name: str) -> str:
        to = names.names.get(name, name)
        return "" if to == name else to

    copies = {n: c for n, c in head.copies.items() if n in names.names or n not in names.refused}
    copies = {n: _with_name(copy, lake_name(n)) for n, copy in copies.items()}
    tables = {n: _with_name(table, lake_name(n)) for n, table in head.tables.items()}
    moved = {n for n, table in tables.items() if table is not head.tables[n]}
    moved |= names.names.keys() & {*renamed}
    feeds = {
        (feed.of in moved and feed_of(feed.of, names.names[feed.of])) or full: feed
        for full, feed in head.feeds.items()
    }
    if len(feeds) < len(head.feeds):
        # One would get the name of another that still has it: they begin again.
        feeds = dict(head.feeds)
    return replace(head, tables=tables, copies=copies, feeds=feeds)


def _with_name(table: TableVersion, lake_name: str) -> TableVersion:
    return table if table.lake_name == lake_name else replace(table, lake_name=lake_name)
