"""Carries out one action of the resolver on a standby (some on its primary). Nothing is decided here.

Each may be done twice and may end anywhere: what is there already is not made, what is gone is gone. The extension
refuses by itself whatever would be wrong by now, which is an error here and seen anew at the next poll.

An advance goes in steps, so that one which is ended by its time has come further.
"""

from typing import Final

from slot_sync.resolver.transitions import (
    Action,
    Advance,
    Drop,
    Mark,
    Nothing,
    Rename,
    Reserve,
    SetFailover,
    SetFields,
    Wait,
)
from slot_sync.session import Session
from slot_sync.sessions import Sessions
from walsender_bridge import fail_point
from walsender_bridge.wire.lsn import format_lsn, parse_lsn

#: Bytes of WAL that one step of an advance may decode beyond where the last one ended.
STEP_BYTES: Final = 256 << 20


def does_something(action: Action) -> bool:
    """Whether there is anything to carry out."""
    return not isinstance(action, Nothing | Wait)


def carry_out(action: Action, standby: Sessions, primary: Sessions) -> None:
    """Do it. Raises what `Session.one` does."""
    if isinstance(action, Mark):
        with primary.lent(None) as session:
            session.one("slots_mark", {"slot": action.physical_slot, "value": action.value})
        return
    if isinstance(action, Nothing | Wait):
        return
    on_primary = isinstance(action, Drop) and action.on_primary
    with (primary if on_primary else standby).lent(action.database) as session:
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
                    "slots_set_failover", {"name": action.name, "failover": action.failover}
                )
            case Rename():
                session.one(
                    "slots_rename", {"name": action.temporary_name, "new_name": action.name}
                )
            case Drop():
                _drop(session, action)
        fail_point.hit(f"slots-after-{type(action).__name__.lower()}")


def _reserve(session: Session, action: Reserve) -> None:
    two_phase_at = action.two_phase_at
    session.one(
        "slots_reserve",
        {
            "name": action.temporary_name,
            "plugin": action.plugin,
            "restart_lsn": format_lsn(action.restart_lsn),
            "confirmed_flush_lsn": format_lsn(action.confirmed_flush_lsn),
            "two_phase": action.two_phase,
            "two_phase_at": None if two_phase_at is None else format_lsn(two_phase_at),
        },
    )


def _advance(session: Session, action: Advance) -> None:
    """Up to the position; a copy that is there already is decoded up to it once more, which may find a snapshot."""
    at = parse_lsn(session.one("slots_confirmed", {"name": action.name}) or "0/0")
    while at <= action.to_lsn:
        step = min(action.to_lsn, at + STEP_BYTES)
        values = {"name": action.name, "lsn": format_lsn(step)}
        reached = parse_lsn(session.one("slots_advance", values))
        if step == action.to_lsn or reached < step:
            return
        at = reached


def _set_fields(session: Session, action: SetFields) -> None:
    session.one(
        "slots_set_fields",
        {
            "name": action.name,
            "restart_lsn": format_lsn(action.restart_lsn),
            "confirmed_flush_lsn": format_lsn(action.confirmed_flush_lsn),
            "catalog_xmin": str(action.catalog_xmin),
            "may_go_back": action.may_go_back,
        },
    )


def _drop(session: Session, action: Drop) -> None:
    if session.one("slots_there", {"name": action.name}):
        session.one("slots_drop", {"name": action.name, "any_slot": action.any_slot})
