"""Finds the tables of whose rows the lake is to have something else than it has, when a writer begins. Pure.

The masks, the mode and the row filter of a table (`RowRules`) are those of its copy: every value in its files was masked so, every deleted
row was kept or not, and every row in them met the filter. With others, or another key of masks, it is copied again, and does not follow until then: no change is written as it must
not be any more. Copies that are not shown yet are given up. A table that is paused is copied when it is resumed; one that has left the
publication stays as it is, and is copied if it comes back.
"""

from collections.abc import Callable
from dataclasses import replace

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import LEFT
from spark_consumers.lake.tables import states
from walsender_bridge.postgres.table_layout import RowRules

MASKS = "its masked columns are configured differently than when it was copied"
MODE = "its mode is configured differently than when it was copied"
FILTER = "its row filter is configured differently than when it was copied"


def reconfigured(
    head: Manifest, rules: Callable[[str], RowRules], *, holds: bool
) -> tuple[Manifest, list[str]]:
    """The head without what has other rules, and the tables that are copied again. `holds`: epochs wait for them."""
    copies = {name: copy for name, copy in head.copies.items() if copy.rules == rules(name)}
    if copies != head.copies:
        head = replace(head, copies=copies)
    others = [
        name
        for name, table in head.tables.items()
        if table.state != LEFT and table.rules != rules(name)
        # A whole copy with the right ones takes its place.
        if name not in copies or not table.resync
    ]
    for name in others:
        reason = _reason(head.tables[name].rules, rules(name))
        head = states.outdate(head, name, reason, holds=holds)
    return head, others


def _reason(before: RowRules, now: RowRules) -> str:
    if before.masks != now.masks:
        return MASKS
    return MODE if before.mode != now.mode else FILTER
