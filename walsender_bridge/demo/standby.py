"""The demo's standby: a candidate of the commit gate, promoted halfway through the load."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psycopg

from walsender_bridge.capture.gate.record import decisions
from walsender_bridge.demo.local_server import LocalServer, has_slots, make_standby
from walsender_bridge.errors import DeadlineError
from walsender_bridge.postgres.client.hosts import primary_dsn

#: The candidate's physical slot on the primary.
CANDIDATE = "demo_standby"
#: Seconds within which the logical slots have to be on the standby, and its promotion has to succeed.
_READY_SECONDS = 120.0
_PROMOTION_SECONDS = 60.0


def section() -> list[str]:
    """The section `[gate]` of the demo."""
    return ["[gate]", f'candidates = ["{CANDIDATE}"]']


class DemoStandby:
    """A running standby of `primary`, in `folder`; `primary`: the server that accepts writes now."""

    def __init__(self, primary: LocalServer, folder: Path) -> None:
        self.primary = primary
        self._first = primary
        self._standby = make_standby(primary, folder, slot=CANDIDATE)
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._standby.start()

    def dsn(self, database: str) -> str:
        """The connection string of the server that accepts writes."""
        ports = f"{self._first.port},{self._standby.port}"
        return primary_dsn(self._first.dsn(database, host="127.0.0.1,127.0.0.1", port=ports))

    def cut_power(self) -> None:
        """Kill the server that accepts writes, and start it again."""
        with self._lock:
            self.primary.kill()
            self.primary.start()

    def take_over(self, slots: Sequence[str]) -> None:
        """Wait until the standby has the logical slots, kill the primary, and promote it. Raises `DeadlineError`."""
        deadline = time.monotonic() + _READY_SECONDS
        while not self._ready([*slots]):
            if time.monotonic() > deadline:
                raise DeadlineError(
                    "the logical slots were not synchronized to the standby in time",
                    where=str(self._standby.folder),
                )
            time.sleep(0.2)
        with self._lock:
            began = time.monotonic()
            self.primary.kill()
            with psycopg.connect(self._standby.dsn(), autocommit=True) as connection:
                connection.execute("SELECT pg_promote(true, %s)", [int(_PROMOTION_SECONDS)])
            self.primary = self._standby
            self._seconds = time.monotonic() - began

    def _ready(self, slots: list[str]) -> bool:
        try:
            with psycopg.connect(self._first.dsn(), autocommit=True) as connection:
                # Advances idle slots to a position that the standby can use.
                connection.execute("SELECT pg_log_standby_snapshot()")
            return has_slots(self._standby, slots)
        except psycopg.OperationalError:
            # The server was killed just now.
            return False

    def figures(self, records: Sequence[Path]) -> dict[str, Any]:
        """The figures of the promotion. `records`: the gates' files of decisions."""
        found = [line["decision"] for path in records for line in decisions(path)]
        return {
            "promoted": self.primary is self._standby,
            "promotion_seconds": round(self._seconds, 2),
            "gate_decisions": found,
        }

    def destroy(self) -> None:
        """Stop it, and delete its folder."""
        self._standby.destroy()
