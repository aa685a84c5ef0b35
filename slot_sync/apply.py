"""Carries out one action of the resolver on a standby (some on its primary). Nothing is decided here.

Each action may be carried out twice and may end anywhere: what exists is not created again, and what is dropped stays so.
The extension itself refuses an action that has become wrong; that is an error here, and the next poll evaluates again.

An advance goes in steps, so that one which reaches its time limit has made progress. Each decodes from the copy's
restart_lsn, which stays while a transaction is open: so a step is at least as long as the WAL that is decoded again for
it, and its time limit grows with the WAL that it decodes. With a fixed limit a copy could stall forever, long after the
transaction has ended.
"""

from typing import Final

from slot_sync.resolver.transitions import (
    Action,
    Advance,
    Drop,
    MarkIncarnation,
    Nothing,
    Rename,
    Reserve,
    RestoreMappings,
    SetFailover,
    SetFields,
    Wait,
)
from slot_sync.session import BoundedSession
from slot_sync.sessions import ACTION_SECONDS, Sessions
from walsender_bridge.errors import ServerSettingError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn, parse_lsn
from walsender_bridge.runtime import fail_point

#: Bytes of WAL that one step of an advance may decode beyond the end of the last one.
STEP_BYTES: Final = 256 << 20
#: Bytes of WAL per second that a standby is assumed to read at least; sets the time limits.
SLOWEST: Final = 4 << 20


def does_something(action: Action) -> bool:
    """Whether the action changes anything."""
    return not isinstance(action, Nothing | Wait)


def carry_out(action: Action, standby: Sessions, primary: Sessions) -> None:
    """Carry out the action. Raises as `BoundedSession.one`."""
    if isinstance(action, MarkIncarnation):
        with primary.lent(None) as session:
            _check_extension(session)
            session.one("slot_sync/mark", {"slot": action.slot, "value": action.value})
        return
    if isinstance(action, Nothing | Wait):
        return
    on_primary = isinstance(action, Drop) and action.on_primary
    with (primary if on_primary else standby).lent(action.database) as session:
        _check_extension(session)
        fail_point.hit(f"slots-before-{type(action).__name__.lower()}")
        match action:
            case Reserve():
                _reserve(session, action)
            case Advance():
                _advance(session, action)
            case SetFields():
                _set_fields(session, action)
            case SetFailover():
                session.one(
                    "slot_sync/set_failover", {"name": action.name, "failover": action.failover}
                )
            case RestoreMappings():
                _restore_mappings(session, action)
            case Rename():
                session.one(
                    "slot_sync/rename", {"name": action.temporary_name, "new_name": action.name}
                )
            case Drop():
                _drop(session, action)
        fail_point.hit(f"slots-after-{type(action).__name__.lower()}")


def _check_extension(session: BoundedSession) -> None:
    """Raise `ServerSettingError` unless this database's functions of the extension are a superuser's: each has its own."""
    if session.one("slot_sync/trusted") is not True:
        raise ServerSettingError(
            "the schema tuskline_slots or a function in it is missing, or not owned by a superuser",
            where=session.where,
            repair="on the primary, as a superuser: DROP SCHEMA IF EXISTS tuskline_slots CASCADE, then CREATE EXTENSION "
            "tuskline; docs/extension.md",
        )


def _reserve(session: BoundedSession, action: Reserve) -> None:
    two_phase_at = action.two_phase_at
    session.one(
        "slot_sync/reserve",
        {
            "name": action.temporary_name,
            "plugin": action.plugin,
            "restart_lsn": format_lsn(action.restart_lsn),
            "confirmed_flush_lsn": format_lsn(action.confirmed_flush_lsn),
            "two_phase": action.two_phase,
            "two_phase_at": None if two_phase_at is None else format_lsn(two_phase_at),
        },
    )


def _advance(session: BoundedSession, action: Advance) -> None:
    """Advance to the position; a copy already there is decoded up to it once more, which may find a snapshot."""
    restart, at, _ = _positions(session, action.name)
    while at <= action.to_lsn:
        step = min(action.to_lsn, at + max(STEP_BYTES, at - restart))
        values = {"name": action.name, "lsn": format_lsn(step)}
        with session.allowing(_seconds(step - restart)):
            reached = parse_lsn(session.one("slot_sync/advance", values))
        if step == action.to_lsn or reached < step:
            return
        restart, at, _ = _positions(session, action.name)


def _restore_mappings(session: BoundedSession, action: RestoreMappings) -> None:
    restart, _, replayed = _positions(session, action.name)
    with session.allowing(_seconds(replayed - restart)):
        session.one("slot_sync/restore_mappings", {"name": action.name})


def _positions(session: BoundedSession, name: str) -> tuple[Lsn, Lsn, Lsn]:
    """The slot's restart_lsn and confirmed_flush_lsn, and the standby's replay position; 0 for a missing one."""
    found = session.one("slot_sync/positions", {"name": name}) or (None, None, None)
    restart, confirmed, replayed = (parse_lsn(each or "0/0") for each in found)
    return restart, confirmed, replayed


def _seconds(bytes_of_wal: int) -> float:
    return ACTION_SECONDS + max(bytes_of_wal, 0) / SLOWEST


def _set_fields(session: BoundedSession, action: SetFields) -> None:
    session.one(
        "slot_sync/set_fields",
        {
            "name": action.name,
            "restart_lsn": format_lsn(action.restart_lsn),
            "confirmed_flush_lsn": format_lsn(action.confirmed_flush_lsn),
            "catalog_xmin": str(action.catalog_xmin),
            "may_go_back": action.may_go_back,
        },
    )


def _drop(session: BoundedSession, action: Drop) -> None:
    if session.one("slot_sync/there", {"name": action.name}):
        session.one("slot_sync/drop", {"name": action.name, "any_slot": action.any_slot})
