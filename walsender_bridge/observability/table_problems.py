"""The tables, views and feeds of the lake that do not follow, or not by their configured names, for `status`, `top`, `doctor` and `/readyz`. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from walsender_bridge.errors import HINT

#: The hint's prefix in lakes of an earlier version.
_OLDER_HINT: Final = "\n  repair: "
#: What the reason begins with of a table that cannot get its name in the lake (`target_names`). It may follow, and nothing is retried.
_NAME: Final = "its name in the lake: it "


@dataclass(frozen=True, slots=True)
class TableProblem:
    """One table, view or feed, its problem as the predicate of a sentence, and the repair, if any."""

    table: str
    what: str
    repair: str = ""
    kind: str = "table"


def problems(lake: Any) -> Iterator[TableProblem]:
    """Each table, view and feed that does not follow. `lake`: the newest manifest."""
    for name, table in sorted(lake.tables.items()):
        since = f"as of epoch {table.as_of}"
        again = ""
        if table.resync and (name not in lake.not_copied or _is_of_name(lake.not_copied[name])):
            how = "brought level with its source" if table.is_leveled else "copied again"
            again = f"; it is being {how}"
        if table.state == "held":
            yield TableProblem(name, f"holds the epochs back: {table.reason}{again}")
        elif table.state == "stale":
            yield TableProblem(name, f"is stale, {since}: {table.reason}{again}")
        elif table.state == "paused":
            yield TableProblem(name, f"is paused, {since}", f"tuskline table resume {name}")
    yield from _names(lake, follow=False)
    for name, reason in sorted(lake.not_copied.items()):
        if _is_of_name(reason):
            continue
        what, _, repair = reason.replace(_OLDER_HINT, HINT).partition(HINT)
        what = what.strip().removeprefix(f"{name}: ")
        again = "it is retried"
        hint = f"{repair.strip()}; {again}" if repair else again
        yield TableProblem(name, f"was not copied: {what}", hint)
    for name, view in sorted(lake.views.items()):
        if view.table is None:
            yield TableProblem(name, f"has no rows: {view.reason}", kind="view")
        elif view.table.state == "stale":
            since = f"as of epoch {view.table.as_of}"
            yield TableProblem(name, f"is stale, {since}: {view.reason}", kind="view")
    for name, feed in sorted(lake.feeds.items()):
        if feed.reason:
            since = f"as of epoch {feed.table.as_of}" if feed.table else "without rows"
            yield TableProblem(name, f"is stale, {since}: {feed.reason}", kind="feed")


def misnamed(lake: Any) -> Iterator[TableProblem]:
    """Each table that the lake has under another name than the configured one. It follows, or `problems` has it. `lake`: the newest manifest."""
    return _names(lake, follow=True)


def _names(lake: Any, *, follow: bool) -> Iterator[TableProblem]:
    for name, reason in sorted(lake.not_copied.items()):
        if _is_of_name(reason) and (name in lake.tables) == follow:
            yield TableProblem(name, reason.removeprefix(_NAME))


def _is_of_name(reason: str) -> bool:
    return reason.startswith(_NAME)


def sentences(found: Iterable[TableProblem]) -> Iterator[str]:
    """A sentence for each."""
    for each in found:
        hint = f"; {each.repair}" if each.repair else ""
        yield f"{each.kind} {each.table} {each.what}{hint}"
