"""Which tables of the lake do not show the newest epoch, and why, as `status`, `top` and `/readyz` name them. Pure."""

from collections.abc import Iterator
from typing import Any, Final

from walsender_bridge.errors import HINT

#: How lakes have it that an earlier version wrote.
_OLDER_HINT: Final = "\n  repair: "


def ill(lake: Any) -> Iterator[str]:
    """A sentence for each table that does not follow. `lake`: the newest manifest."""
    for name, table in sorted(lake.tables.items()):
        since = f"as of epoch {table.as_of}"
        again = "; it is being copied again" if table.resync and name not in lake.set_aside else ""
        if table.state == "held":
            yield f"table {name} holds the epochs back: {table.reason}{again}"
        elif table.state == "stale":
            yield f"table {name} is stale, {since}: {table.reason}{again}"
        elif table.state == "paused":
            yield f"table {name} is paused, {since}; tuskline table resume {name}"
    for name, reason in sorted(lake.set_aside.items()):
        what, _, repair = reason.replace(_OLDER_HINT, HINT).partition(HINT)
        way = f"; {repair.strip()}" if repair else ""
        yield f"table {name} was not copied: {what.strip()}{way}; it is tried again"
