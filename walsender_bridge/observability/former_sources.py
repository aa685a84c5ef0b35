"""Slots of sources that were captured here and are no longer configured (renamed or removed). The server keeps WAL for them.

The last status of a capture (`capture.status_record`) stays in the run folder, and names the slot and the cluster. So a slot
of another installation, with a configuration of its own, is never taken for an abandoned one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import tuple_row

from walsender_bridge.capture.status_record import KeptPosition
from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.sql import load

if TYPE_CHECKING:
    from walsender_bridge.config import Config


@dataclass(frozen=True, slots=True)
class Former:
    """A source that was captured. `system_id`: of the cluster that it was captured from."""

    source: str
    slot: str
    system_id: int


@dataclass(frozen=True, slots=True)
class LeftSlot:
    """An abandoned slot that still exists: the problem and its repair."""

    database: str
    what: str
    repair: str


def former_sources(settings: "Config") -> list[Former]:
    """The former sources whose names and slots no configured source uses."""
    captured = (status_file.read(each, KeptPosition) for each in settings.capture_statuses)
    found = (former for each in captured if each and (former := _former(each)))
    names = {each.name for each in settings.source}
    slots = {each.slot_name for each in settings.source}
    return [each for each in found if each.source not in names and each.slot not in slots]


def _former(status: KeptPosition) -> Former | None:
    if status.system_id is None:
        return None
    # The status of an earlier version does not name the slot.
    slot = status.slot or f"tuskline_{status.source}"
    return Former(status.source, slot, status.system_id)


def left_slots(
    connection: psycopg.Connection[Any], formers: Sequence[Former]
) -> Iterator[LeftSlot]:
    """The slots of former sources that exist on a server and are inactive."""
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
                    f"slot {slot} of source {each.source}, which is no longer configured, still exists: the server"
                    " keeps WAL for it",
                    f"in database {database}: SELECT pg_drop_replication_slot('{slot}'); or configure the source again",
                )
