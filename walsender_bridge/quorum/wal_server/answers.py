"""The answers to a walsender's short commands, as a function of the positions. No I/O.

All commands except `START_REPLICATION` and those that change slots. Columns and errors are PostgreSQL's own; what a
safekeeper does not have (databases, most settings) is refused with PostgreSQL's SQLSTATE.
"""

from typing import Final

from walsender_bridge.postgres.protocol import backend
from walsender_bridge.postgres.protocol.backend import INT4, INT8, TEXT, SqlErrorReply
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.postgres.protocol.wal_page import PAGE_BYTES, history_name
from walsender_bridge.quorum.protocol.positions import Positions
from walsender_bridge.quorum.wal_server.slots import WalServerSlot

_MIB, _GIB = 1 << 20, 1 << 30
#: WAL files are readable by their owner only; tools that copy them get that mode.
_DIRECTORY_MODE: Final = "0700"


def identify_system(positions: Positions) -> bytes:
    """The answer to `IDENTIFY_SYSTEM`: the position is the end of readable WAL."""
    columns = [("systemid", TEXT), ("timeline", INT4), ("xlogpos", TEXT), ("dbname", TEXT)]
    values: list[str | int | bytes | None] = [
        str(positions.system_id),
        positions.timeline,
        format_lsn(positions.served_lsn),
        None,
    ]
    return backend.row(columns, values) + backend.complete("IDENTIFY_SYSTEM")


def show(name: str, positions: Positions) -> bytes:
    """The answer to `SHOW`. Raises `SqlErrorReply` 42704 for a setting that a safekeeper does not have."""
    size = positions.segment_bytes
    segment = f"{size // _GIB}GB" if size % _GIB == 0 else f"{size // _MIB}MB"
    settings = status_parameters(positions) | {
        "server_version_num": f"{positions.major}0000",
        "wal_segment_size": segment,
        "wal_block_size": str(PAGE_BYTES),
        "data_directory_mode": _DIRECTORY_MODE,
    }
    found = next((key for key in settings if key.lower() == name.lower()), None)
    if found is None:
        raise SqlErrorReply("42704", f'unrecognized configuration parameter "{name[:80]}"')
    return backend.row([(found, TEXT)], [settings[found]]) + backend.complete("SHOW")


def status_parameters(positions: Positions) -> dict[str, str]:
    """The parameters that a client gets after login."""
    return {
        "server_version": f"{positions.major}.0",
        "server_encoding": "UTF8",
        "client_encoding": "UTF8",
        "DateStyle": "ISO, MDY",
        "IntervalStyle": "postgres",
        "TimeZone": "UTC",
        "integer_datetimes": "on",
        "standard_conforming_strings": "on",
        # As on a standby: WAL comes from another server.
        "in_hot_standby": "on",
        "is_superuser": "off",
    }


def timeline_history(timeline: int, text: bytes) -> bytes:
    """The answer to `TIMELINE_HISTORY`: the file's name and `text`."""
    columns = [("filename", TEXT), ("content", TEXT)]
    answer = backend.row(columns, [history_name(timeline), text])
    return answer + backend.complete("TIMELINE_HISTORY")


def created_slot(slot: WalServerSlot) -> bytes:
    """The answer to `CREATE_REPLICATION_SLOT`: a physical slot has no consistent point."""
    names = ("slot_name", "consistent_point", "snapshot_name", "output_plugin")
    answer = backend.row([(name, TEXT) for name in names], [slot.name, "0/0", None, None])
    return answer + backend.complete("CREATE_REPLICATION_SLOT")


def read_slot(slot: WalServerSlot | None, history: ServerTimelines) -> bytes:
    """The answer to `READ_REPLICATION_SLOT`: a row of NULLs for a slot that does not exist."""
    columns = [("slot_type", TEXT), ("restart_lsn", TEXT), ("restart_tli", INT8)]
    values: list[str | int | bytes | None] = [None, None, None]
    if slot is not None:
        values[0] = "physical"
        if slot.restart_lsn is not None and not slot.lost:
            values[1:] = [format_lsn(slot.restart_lsn), _timeline_at(slot.restart_lsn, history)]
    return backend.row(columns, values) + backend.complete("READ_REPLICATION_SLOT")


def _timeline_at(lsn: Lsn, history: ServerTimelines) -> int:
    """The timeline of the byte at `lsn`."""
    return next((left.timeline for left in history.ancestors if lsn < left.lsn), history.timeline)
