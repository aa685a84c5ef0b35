"""Which tables of the lake do not show the newest epoch, and why, as `status`, `top`, `doctor` and `/readyz` name them. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from walsender_bridge.errors import HINT

#: How lakes have it that an earlier version wrote.
_OLDER_HINT: Final = "\n  repair: "


@dataclass(frozen=True, slots=True)
class Trouble:
    """One table, what is wrong with it, as what follows its name in a sentence, and the way out, if there is one."""

    table: str
    what: str
    repair: str = ""


def troubles(lake: Any) -> Iterator[Trouble]:
    """Each table that does not follow. `lake`: the newest manifest."""
    for name, table in sorted(lake.tables.items()):
        since = f"as of epoch {table.as_of}"
        again = "; it is being copied again" if table.resync and name not in lake.set_aside else ""
        if table.state == "held":
            yield Trouble(name, f"holds the epochs back: {table.reason}{again}")
        elif table.state == "stale":
            yield Trouble(name, f"is stale, {since}: {table.reason}{again}")
        elif table.state == "paused":
            yield Trouble(name, f"is paused, {since}", f"tuskline table resume {name}")
    for name, reason in sorted(lake.set_aside.items()):
        what, _, repair = reason.replace(_OLDER_HINT, HINT).partition(HINT)
        what = what.strip().removeprefix(f"{name}: ")
        again = "it is tried again"
        way = f"{repair.strip()}; {again}" if repair else again
        yield Trouble(name, f"was not copied: {what}", way)


def ill(lake: Any) -> Iterator[str]:
    """A sentence for each table that does not follow. `lake`: the newest manifest."""
    for each in troubles(lake):
        way = f"; {each.repair}" if each.repair else ""
        yield f"table {each.table} {each.what}{way}"
