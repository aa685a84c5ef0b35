"""Slots of sources that were captured here and are not configured any more: renamed, or taken out. The server keeps WAL for them.

What a capture last said of itself (`capture.status`) stays in the run folder; it names the slot and the cluster. So a slot
of another installation, with a configuration of its own, is never taken for one that is left.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import tuple_row

from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.sql import load

if TYPE_CHECKING:
    from walsender_bridge.config import Config


@dataclass(frozen=True, slots=True)
class Former:
    """One that was captured. `system_id`: of the cluster that it was captured from."""

    source: str
    slot: str
    system_id: int


@dataclass(frozen=True, slots=True)
class LeftSlot:
    """A slot that is still there, as what is wrong and what removes it."""

    database: str
    what: str
    repair: str


def former_sources(settings: "Config") -> list[Former]:
    """Those whose slots no configured source uses, by name."""
    captured = (status_file.read(each) for each in settings.capture_statuses)
    found = (_former(each) for each in captured if each.get("source") and each.get("system_id"))
    names = {each.name for each in settings.source}
    slots = {each.slot_name for each in settings.source}
    return [each for each in found if each.source not in names and each.slot not in slots]


def _former(told: Mapping[str, Any]) -> Former:
    # A capture of an earlier version does not name its slot.
    slot = told.get("slot", f"tuskline_{told['source']}")
    return Former(told["source"], slot, told["system_id"])


def left_slots(
    connection: psycopg.Connection[Any], formers: Sequence[Former]
) -> Iterator[LeftSlot]:
    """Those of their slots that a server still has, and nobody streams from."""
    if not formers:
        return
    with connection.cursor(row_factory=tuple_row) as cursor:
        names = {"slots": [each.slot for each in formers]}
        found = cursor.execute(load("observability/former_slots").encode(), names).fetchall()
    for slot, database, system_id in found:
        for each in formers:
            if (each.slot, each.system_id) == (slot, system_id):
                yield LeftSlot(
                    database,
                    f"slot {slot} is still there, and the server keeps WAL for it, although source {each.source} is not"
                    " configured any more",
                    f"in database {database}: SELECT pg_drop_replication_slot('{slot}'); or configure the source again",
                )
