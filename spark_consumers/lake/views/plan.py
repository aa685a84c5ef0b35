"""What an epoch does with a view. Pure.

**Safety.** The rows of a view that is `live` in a manifest are its query's over the tables of the same manifest. By induction: they are
computed from the tables of the epoch (`Compute`); or the tables' changes are applied to rows for which it held (`Apply`), which is allowed
only if the head's view is live, its rows are made in the same way, and each of its tables is live in both and the same Iceberg table, so that
two snapshots differ by the epoch's changes; or nothing has changed (`Keep`). Between two epochs there may be links in which a table has another
snapshot with the same rows (a compaction): changes are therefore taken from the head's snapshots, not from those that the view was computed
from. In all other cases the view is stale, and its table stays as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_consumers.lake.manifest.table_version import LIVE, TableVersion
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.views.translate import Translation

#: Changed rows up to which changes are applied, however small the tables are; and the part of the tables' rows, above.
_FEW, _PART = 100_000, 0.25

#: What the reason begins with of a view whose query fails for the tables' values.
FAILED = "its query fails: "

Tables = Mapping[str, TableVersion]


@dataclass(frozen=True, slots=True)
class Keep:
    """The view stays as it is."""


@dataclass(frozen=True, slots=True)
class Stale:
    """It cannot follow."""

    reason: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Its rows are computed from the tables. `anew`: in a new Iceberg table."""

    why: str
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    """The changes of these of its tables, by their places in the query, are applied."""

    changed: tuple[int, ...]


Action = Keep | Stale | Compute | Apply


def decide(
    view: ViewVersion | None,
    made: Translation,
    before: Tables,
    after: Tables,
    *,
    taken: bool,
    has_other_limit: bool = False,
) -> Action:
    """What becomes of a view. `before` and `after`: the tables of the head and of the epoch.

    `taken`: its name is a table's. `has_other_limit`: it had more rows than it was allowed, and another number is allowed now.
    """
    if taken:
        return Stale("a table of the lake has its name; choose another one")
    if reason := unreadable(made.tables, after):
        return Stale(reason)
    table = None if view is None else view.table
    if view is None or table is None:
        return Compute("it is new", anew=True)
    if view.digest != made.digest:
        return Compute("its definition has changed", anew=True)
    moved = [name for name in made.tables if not _is_continued(before.get(name), after[name])]
    changed = tuple(
        number
        for number, name in enumerate(made.tables)
        if name in moved or before[name].snapshot_id != after[name].snapshot_id
    )
    if table.state != LIVE:
        if not changed and table.reason.startswith(FAILED) and not has_other_limit:
            return Stale(table.reason)
        return Compute("it was stale")
    if moved or view.paths != tuple(after[name].path for name in made.tables):
        names = ", ".join(sorted(set(moved) or {*made.tables}))
        return Compute(f"{names} was copied again or renamed")
    if not changed:
        return Keep()
    return Apply(changed) if made.incremental is not None else Compute(made.why)


def unreadable(names: Sequence[str], tables: Tables) -> str:
    """Why a view of these tables cannot be at the epoch of `tables`; empty if it can."""
    for name in names:
        table = tables.get(name)
        if table is None:
            return f"the lake has no table {name}"
        if table.state != LIVE:
            return f"it reads {name}, which is {table.state}"
        if table.quarantined_rows:
            return f"it reads {name}, of which {table.quarantined_rows} rows are quarantined"
    return ""


def _is_continued(before: TableVersion | None, after: TableVersion) -> bool:
    return before is not None and before.state == LIVE and before.path == after.path


def is_too_much(changed: int, rows: int) -> bool:
    """Whether so many changed rows of tables with so many rows are applied more slowly than the view is computed."""
    return changed > _FEW and changed > _PART * rows
