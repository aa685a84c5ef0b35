"""Finds the tables whose masks are others than the configuration's, when a writer begins. Pure.

The masks of a table are those of its copy: every value in its files was masked so. With other masks, or another key, it is copied again,
and does not follow until then: no change is written as it must not be any more. Copies that are not shown yet are given up. A table that
is paused is copied when it is resumed; one that has left the publication stays as it is, and is copied if it comes back.
"""

from collections.abc import Callable
from dataclasses import replace

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import LEFT
from spark_consumers.lake.tables import states
from walsender_bridge.postgres.column_masks import ColumnMask

REASON = "its masked columns are configured otherwise than when it was copied"


def remasked(
    head: Manifest, masks: Callable[[str], tuple[ColumnMask, ...]], *, holds: bool
) -> tuple[Manifest, list[str]]:
    """The head without what has other masks, and the tables that are copied again. `holds`: epochs wait for them."""
    copies = {name: copy for name, copy in head.copies.items() if copy.masks == masks(name)}
    if copies != head.copies:
        head = replace(head, copies=copies)
    others = [
        name
        for name, table in head.tables.items()
        if table.state != LEFT and table.masks != masks(name)
        # A whole copy with the right masks takes its place.
        if name not in copies or not table.resync
    ]
    for name in others:
        head = states.outdate(head, name, REASON, holds=holds)
    return head, others
