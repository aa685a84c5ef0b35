"""What the lake's writer is doing with its tables, for those who look from outside.

`<lake>/_tuskline/status.json` is replaced whole. It says only what is under way and would be lost with the
writer; what is durable is in the chain. `table_rows` puts the two together.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spark_consumers.lake.store.lake_store import STATE
from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.table_layout import HISTORY
from walsender_bridge.runtime import json_model
from walsender_bridge.runtime.times import iso_time_of_microseconds

if TYPE_CHECKING:  # an executor imports what is here, and opens no lake
    from spark_consumers.lake.manifest.chain import Chain, Manifest
    from spark_consumers.lake.manifest.table_version import TableVersion

_FILE = f"{STATE}/status.json"
#: After which a status that is not renewed while something is copied is of a writer that is gone, in seconds.
STALE_AFTER = 15.0


@dataclass(frozen=True, slots=True)
class CopyStatus:
    """How far the copy of one table is.

    `began_at`: seconds since the Unix epoch; 0: the table waits for its turn. `bytes`: of the rows in memory; `pieces`: the
    parts in which the table is read. `waits_for`: the transaction of the source that has to end first, if any. The rates are per
    second since the copy began. `levels`: the table is compared with its source and brought level, and not copied: `rows` are those that the
    source has compared, and of these `changed` are written or removed.
    """

    began_at: float
    rows: int
    bytes: int
    pieces: int
    pieces_done: int
    rows_per_second: float
    bytes_per_second: float
    waits_for: str = ""
    levels: bool = False
    changed: int = 0


@dataclass(frozen=True, slots=True)
class EpochStatus:
    """How far the epoch of this number is, which is under way.

    `stage`: what it does (as Spark's UI says it, where Spark does it), since `stage_at`; the epoch began at `began_at` (seconds since the
    Unix epoch). `tasks_done` of `tasks` of Spark and `tables_done` of `tables` have ended in this stage; 0 of 0 where it has none.
    `moved_at`: when a stage, a task or a table ended last.
    """

    epoch: int
    stage: str
    began_at: float
    stage_at: float
    tasks: int = 0
    tasks_done: int = 0
    tables: int = 0
    tables_done: int = 0
    moved_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LakeStatus:
    """The status file. `at`: seconds since the Unix epoch; `term`, `epoch`: of the head; `copying`: by table; `writing`: the next epoch."""

    at: float = 0.0
    term: int = 0
    epoch: int = 0
    copying: Mapping[str, CopyStatus] = field(default_factory=dict)
    writing: EpochStatus | None = None


def write_status(
    chain: "Chain",
    head: "Manifest",
    copying: Mapping[str, CopyStatus],
    writing: EpochStatus | None = None,
) -> None:
    """Replace the status, if the disk takes it. `copying`: how far each table's copy is, by name; `writing`: the epoch under way."""
    status = LakeStatus(time.time(), head.term, head.epoch, copying, writing)
    with contextlib.suppress(OSError, TusklineError):
        chain.store.replace(_FILE, json_model.encode(status), durable=False)


def read_status(chain: "Chain") -> LakeStatus:
    """The status that was written last; none of the present if there is none. It is no promise, so damage is none either."""
    with contextlib.suppress(OSError, TusklineError, ValueError):
        return json_model.decode(LakeStatus, chain.store.read(_FILE))
    return LakeStatus()


def copying_now(head: "Manifest", status: LakeStatus, now: float) -> Mapping[str, CopyStatus]:
    """The progress of copies, by table, if the head's writer reported it recently."""
    return status.copying if _is_fresh(head, status, now) else {}


def writing_now(head: "Manifest", status: LakeStatus, now: float) -> EpochStatus | None:
    """The epoch under way, if the head's writer reported it recently."""
    writing = status.writing
    is_ahead = writing is not None and writing.epoch > head.epoch
    return writing if is_ahead and _is_fresh(head, status, now) else None


def moved(head: "Manifest", status: LakeStatus, now: float) -> float:
    """When the epoch under way progressed last, in seconds since the Unix epoch; 0: none is known to be."""
    writing = writing_now(head, status, now)
    return 0.0 if writing is None else writing.moved_at


def _is_fresh(head: "Manifest", status: LakeStatus, now: float) -> bool:
    return now - status.at < STALE_AFTER and status.term == head.term


def table_rows(head: "Manifest", status: LakeStatus, now: float) -> list[dict[str, Any]]:
    """A record for each table that is in the lake, is copied, or could not be copied.

    `state` is that of `table_version`, or `copying`, `copied`, `failed` for a table that is not in the lake
    yet. `quarantined_rows`: quarantined rows that are not skipped, beside `rows`; `skipped_rows`: those that are.
    `copy`: how far its copy is (`CopyStatus`), if one runs. The change feeds follow, each with the table that it is the `feed_of`.
    `lake_name`: the name that readers know it by (`target_names`). `history`: where its history begins (`history_of`).
    """
    copying = copying_now(head, status, now)
    rows = []
    for name in sorted({*head.tables, *head.copies, *head.not_copied, *copying}):
        table = head.tables.get(name)
        copy = copying.get(name)
        if table is not None:
            state = table.state
        elif name in head.copies:
            state = "copying" if head.copies[name].is_partial else "copied"
        elif copy is not None:
            state = "copying"
        else:
            state = "failed"
        rows.append(
            {
                "table": name,
                "state": state,
                "rows": table.rows if table is not None else None,
                "quarantined_rows": table.quarantined_rows - table.skipped_rows
                if table is not None
                else None,
                "skipped_rows": table.skipped_rows if table is not None else None,
                "as_of": (table.as_of or head.epoch) if table is not None else None,
                "resync": _resync(name, table.resync if table else "", head, copy),
                "reason": _waits_for(copy)
                or head.not_copied.get(name)
                or (table.reason if table is not None else ""),
                "copy": None if copy is None else json_model.plain(copy),
                "feed_of": None,
                "lake_name": (table.lake_name if table is not None else "") or name,
                "history": None if table is None else history_of(table),
            }
        )
    return [*rows, *_feed_rows(head)]


def history_of(table: "TableVersion") -> dict[str, Any] | None:
    """Where the history begins of a table that has one: the LSN and the time of its copy, since each copy begins another history."""
    if table.mode != HISTORY:
        return None
    at = iso_time_of_microseconds(table.history_from) if table.history_from else None
    return {"begins_at_lsn": format_lsn(table.start_lsn), "begins_at": at}


def _feed_rows(head: "Manifest") -> Iterator[dict[str, Any]]:
    for name, feed in sorted(head.feeds.items()):
        table = feed.shown(head.tables.get(feed.of))
        yield {
            "table": name,
            "state": "failed" if table is None else table.state,
            "rows": None if table is None else table.rows,
            "quarantined_rows": None,
            "skipped_rows": None,
            "as_of": None if table is None else table.as_of or head.epoch,
            "resync": "",
            "reason": feed.reason if table is None else table.reason,
            "copy": None,
            "feed_of": feed.of,
            "lake_name": name,
            "history": None,
        }


def _waits_for(copy: CopyStatus | None) -> str:
    """What a copy waits for before it begins."""
    return f"its copy waits for {copy.waits_for}" if copy is not None and copy.waits_for else ""


def _resync(name: str, reason: str, head: "Manifest", copy: CopyStatus | None) -> str:
    """How far what will take the table's place is: a copy, or the table itself, brought level."""
    if not reason:
        return ""
    if name in head.copies and not head.copies[name].is_partial:
        return "level" if head.copies[name].path == head.tables[name].path else "copied"
    if copy is not None and copy.levels:
        return "leveling"
    return "copying" if copy is not None else "waiting"
