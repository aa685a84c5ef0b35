"""Drops a slot that a client has just left."""

import time
from typing import Any, Final

import psycopg

from walsender_bridge.errors import SlotInUseError
from walsender_bridge.runtime.sql import load

#: Seconds within which a walsender detects that its client has disconnected.
_SECONDS: Final = 5.0


def drop_unused(connection: psycopg.Connection[Any], statement: str, slot: str, where: str) -> None:
    """Drop the slot by this statement as soon as no client uses it. Raises `SlotInUseError` if one keeps using it."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            with connection.transaction():
                connection.execute(load(statement).encode(), {"slot": slot})
        except psycopg.errors.ObjectInUse as error:
            if time.monotonic() > deadline:
                raise SlotInUseError(
                    str(error.diag.message_primary),
                    where=f"{where}, slot {slot}",
                    repair="run tuskline down, or stop the other client that uses it",
                ) from None
            time.sleep(0.1)
        else:
            return
