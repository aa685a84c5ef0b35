"""The status file of a capture process: one JSON file, replaced atomically.

Keys: `source`, `slot`, `pid`, `state` (`connecting`, `streaming`, `waiting`, `stopped`), `error` (`code`, `what`,
`where`, `repair`; null when all is well), `timeline`, the LSNs `server_lsn` (durable end of the server's
WAL), `received_lsn`, `logged_lsn`, `committed_lsn`, `confirmed_lsn` (end LSNs, as integers), `lag_bytes`
(`server_lsn` - `confirmed_lsn`), `transactions` and `messages` (of this session), `in_flight_bytes`,
`spooled_bytes` (of transactions in progress, on disk), `silent_seconds` (since the server sent anything, while it has WAL
that it has not sent; 0: it sends, or has nothing to send), `updated_at` (seconds since the Unix epoch), `gate`. A
position that is not known yet is 0. `system_id`: of the cluster that the log was written from, null until it is known;
`behind`: the slot may have been confirmed to more than `confirmed_lsn` since. These two, `timeline`, `committed_lsn` and
`confirmed_lsn` are kept from one process to the next.

`gate` is null without a commit gate; else `open` (no candidate is left to wait for), `position_lsn` (what ends at or below
may be shown), `holding` (why more waits than that, in words), `stuck_since` (when it began to wait without anything
passing, or null), `quorum_lsn` (of the safekeepers; null without) and `candidates`: each one's `slot`, `standing` (`counted`, `degraded`, `promoted`), `flush_lsn`, and why it is `away` (empty: it streams).
"""

from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import pq

from walsender_bridge.capture.core import CaptureState
from walsender_bridge.capture.source import LogPosition
from walsender_bridge.errors import ConnectionFailedError, TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition
from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.sql import load

#: Keys that are kept across processes: the stream's position, for when neither the log nor capture runs.
_KEPT: Final = ("system_id", "behind", "timeline", "committed_lsn", "confirmed_lsn")


class StatusFile:
    """Writes the status file; does nothing without a path."""

    def __init__(self, path: Path | None, source: str, slot: str) -> None:
        self._path = path
        self._record: dict[str, Any] = {
            "source": source,
            "slot": slot,
            "state": "connecting",
            "error": None,
            "timeline": 0,
            "gate": None,
            "system_id": None,
            "behind": False,
            **dict.fromkeys(
                ("server_lsn", "received_lsn", "logged_lsn", "committed_lsn", "confirmed_lsn"), 0
            ),
            "silent_seconds": 0.0,
            **dict.fromkeys(
                ("lag_bytes", "transactions", "messages", "in_flight_bytes", "spooled_bytes"), 0
            ),
        }
        before = {} if path is None else status_file.read(path)
        self._record |= {key: before[key] for key in _KEPT if key in before}

    def state(self, name: str, error: TusklineError | None = None) -> None:
        """Record a change of state and its cause."""
        self._write(state=name, error=None if error is None else error.to_wire())

    def begin(self, log: LogPosition | None) -> None:
        """Record the log's position when a session starts; None if the stream is empty."""
        log = log or LogPosition(0, 0, None)
        timeline, confirmed = log.confirmed_to or WalPosition(log.timeline, 0)
        self._write(
            system_id=log.system_id,
            behind=False,
            timeline=timeline,
            committed_lsn=log.last_end_lsn,
            confirmed_lsn=confirmed,
        )

    def streaming(self, system_id: int) -> None:
        """Record that a session streams, from the cluster with this system identifier."""
        self._write(state="streaming", error=None, system_id=system_id, behind=True)

    def progress(
        self,
        session: CaptureState,
        server_lsn: Lsn,
        gate: dict[str, Any] | None,
        *,
        behind: bool,
        silent: float = 0.0,
    ) -> None:
        """Record the positions and the gate of a streaming session. `behind`: it continues. `silent`: seconds."""
        confirmed = session.confirmed.lsn
        server_lsn = max(server_lsn, session.received_lsn, session.idle_lsn)
        self._write(
            timeline=session.timeline,
            behind=behind,
            gate=gate,
            server_lsn=server_lsn,
            received_lsn=session.received_lsn,
            logged_lsn=session.logged_lsn,
            committed_lsn=session.committed_lsn,
            confirmed_lsn=confirmed,
            lag_bytes=server_lsn - confirmed,
            transactions=session.transactions,
            messages=session.messages,
            in_flight_bytes=session.in_flight_bytes,
            silent_seconds=silent,
            spooled_bytes=session.streams.spooled_bytes,
        )

    def _write(self, **changes: Any) -> None:
        self._record |= changes
        if self._path is not None:
            status_file.write(self._path, self._record)


class WalEnd:
    """Queries the server's end of WAL without waiting for the answer."""

    def __init__(self, connection: psycopg.Connection[Any], where: str) -> None:
        self._pgconn = connection.pgconn
        self._where = where
        self._asked = False
        self._query = load("capture/wal_end").encode()
        self.lsn = 0

    def refresh(self) -> None:
        """Take the answer to the last query if it has arrived, and query again.

        Raises `ConnectionFailedError`.
        """
        try:
            if self._asked:
                self._pgconn.consume_input()
                while not self._pgconn.is_busy():
                    result = self._pgconn.get_result()
                    if result is None:
                        self._asked = False
                        break
                    if result.status == pq.ExecStatus.TUPLES_OK:
                        self.lsn = int(result.get_value(0, 0) or b"0")
            if not self._asked:
                self._pgconn.send_query(self._query)
                self._pgconn.flush()
                self._asked = True
        except psycopg.OperationalError as error:
            text = " ".join(str(error).split())
            raise ConnectionFailedError(
                f"the connection broke: {text}"[:400], where=self._where
            ) from None
