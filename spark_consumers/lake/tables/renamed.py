"""Finds the tables that have another name at their source, and gives them that name in the lake: no row is copied. Pure.

PostgreSQL knows a table by its OID, which a rename does not change, and so does the log. (A table that has got the OID of a dropped one is
recognized by the transaction that created it, `shape`: then the earlier one does not follow, and keeps its name.) In the lake a table is its folder, which has its
rows, row index and history; a name only leads to it. So a rename moves the name, with an epoch, and nothing else: an epoch
that is published keeps its names.

**Why this is right.** (1) A table follows the changes of its OID, under whatever name the log has them (`stage._take`), so its rows at a cut
of the log do not depend on when the name moves. (2) A name moves only to where no other table stays that follows: in one link each name has
one table, and each table one name. A swap, or a cycle, moves all of its names at once, or none. (3) What the configuration says of the table under its new
name is what its rows were written by (`Naming.settings`): masks, row filter, mode, layout. Otherwise the earlier name leaves and
the table is copied under the new one, as any other new table, unless that would show masked columns (`disclosed`). (4) Views are computed from names:
those that read one of the names are stale in the same link, and computed by the next epoch.

Until that epoch the table is the one of its earlier name for everything that is done with it.

A table is not renamed while it does not follow, or is copied: what is to become of it was asked for by its earlier name.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.feed_version import FeedVersion
from spark_consumers.lake.manifest.table_version import LEFT, LIVE, STALE, TableVersion
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.tables.disclosed import succeeding
from spark_consumers.lake.tables.states import stream_of


@dataclass(frozen=True)
class Naming:
    """What the configuration says by names: all that a table's rows were written by (`settings`), and the name of its feed, if it has one."""

    settings: Callable[[str], object]
    feed: Callable[[str], str]


def renamed(head: Manifest, stream: str, oids: Mapping[str, int], naming: Naming) -> dict[str, str]:
    """The tables of the stream that get another name, and which. `oids`: of the published tables, by name."""
    others = {
        name: table.relation_id
        for name, table in head.tables.items()
        if oids.get(name) != table.relation_id
        and stream_of(name) == stream
        and _follows(head, name, table)
    }
    if not others:
        return {}
    names = {oid: name for name, oid in oids.items()}
    moves = {
        name: now
        for name, oid in others.items()
        if (now := names.get(oid)) is not None
        and now not in head.copies
        and naming.settings(now) == naming.settings(name)
    }
    while refused := _refused(head, moves, naming):
        moves = {name: now for name, now in moves.items() if name not in refused}
    return moves


def _follows(head: Manifest, name: str, table: TableVersion) -> bool:
    return table.state == LIVE and not table.resync and name not in head.copies


def _refused(head: Manifest, moves: Mapping[str, str], naming: Naming) -> set[str]:
    """Those of the moves whose names are another's, if the other moves are made."""
    stays = {n for n, table in head.tables.items() if n not in moves and table.state != LEFT}
    feeds = {full for full, feed in head.feeds.items() if feed.of not in moves}
    views = {view.full_name(name) for name, view in head.views.items() if view.tables}
    got = [*moves.values(), *(full for now in moves.values() if (full := naming.feed(now)))]
    times = Counter([*stays, *feeds, *views, *got])
    return {n for n, now in moves.items() if times[now] > 1 or times[naming.feed(now)] > 1}


def moved(head: Manifest, moves: Mapping[str, str], naming: Naming) -> Manifest:
    """The head with these tables under their new names, their feeds too; the views that read one of the names are stale."""
    tables = {name: table for name, table in head.tables.items() if name not in moves}
    for name, now in moves.items():
        # Only a table that has left has the name, if any has: it goes.
        tables[now] = succeeding(tables.get(now), head.tables[name])
    touched = {*moves, *moves.values()}
    return replace(
        head,
        tables=tables,
        feeds=dict(_feed(full, feed, moves, naming) for full, feed in head.feeds.items()),
        views={name: _view(view, touched, head.epoch) for name, view in head.views.items()},
        not_copied={n: why for n, why in head.not_copied.items() if n not in touched},
    )


def _feed(
    full: str, feed: FeedVersion, moves: Mapping[str, str], naming: Naming
) -> tuple[str, FeedVersion]:
    now = moves.get(feed.of)
    # A feed that the configuration has no more keeps its name until the next epoch, with which it goes.
    return (full, feed) if now is None else (naming.feed(now) or full, replace(feed, of=now))


def _view(view: ViewVersion, touched: set[str], epoch: int) -> ViewVersion:
    names = sorted(touched & {*view.tables})
    if not names or view.table is None or view.table.state != LIVE:
        return view
    reason = f"at its source, another table has the name {names[0]} now, or none"
    return replace(
        view, reason=reason, table=replace(view.table, state=STALE, as_of=epoch, reason=reason)
    )
