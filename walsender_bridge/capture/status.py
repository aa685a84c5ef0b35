"""Writes the status file of a capture process (`status_record`)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg import pq

from walsender_bridge.capture.core import CaptureState
from walsender_bridge.capture.source import LogPosition
from walsender_bridge.capture.status_record import CaptureStatus, GateStatus, KeptPosition
from walsender_bridge.errors import ConnectionFailedError, TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition
from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.sql import load


class StatusFile:
    """Writes the status file; does nothing without a path.

    The stream's position is kept from one process to the next, for when neither the log nor capture runs.
    """

    def __init__(self, path: Path | None, source: str, slot: str) -> None:
        self._path = path
        self._status = CaptureStatus(source=source, slot=slot, state="connecting", behind=False)
        before = None if path is None else status_file.read(path, KeptPosition)
        if before is not None:
            self._status = replace(
                self._status,
                system_id=before.system_id,
                behind=before.behind,
                timeline=before.timeline,
                committed_lsn=before.committed_lsn,
                confirmed_lsn=before.confirmed_lsn,
            )

    def state(self, name: str, error: TusklineError | None = None) -> None:
        """Record a change of state and its cause."""
        record = None if error is None else ErrorRecord.of(error)
        self._write(replace(self._status, state=name, error=record))

    def begin(self, log: LogPosition | None) -> None:
        """Record the log's position when a session starts; None if the stream is empty."""
        log = log or LogPosition(0, 0, None)
        timeline, confirmed = log.confirmed_to or WalPosition(log.timeline, 0)
        self._write(
            replace(
                self._status,
                system_id=log.system_id,
                behind=False,
                timeline=timeline,
                committed_lsn=log.last_end_lsn,
                confirmed_lsn=confirmed,
            )
        )

    def streaming(self, system_id: int) -> None:
        """Record that a session streams, from the cluster with this system identifier."""
        self._write(
            replace(self._status, state="streaming", error=None, system_id=system_id, behind=True)
        )

    def progress(
        self,
        session: CaptureState,
        server_lsn: Lsn,
        gate: GateStatus | None,
        *,
        behind: bool,
        silent: float = 0.0,
    ) -> None:
        """Record the positions and the gate of a streaming session. `behind`: it continues. `silent`: seconds."""
        confirmed = session.confirmed.lsn
        server_lsn = max(server_lsn, session.received_lsn, session.idle_lsn)
        self._write(
            replace(
                self._status,
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
        )

    def _write(self, status: CaptureStatus) -> None:
        self._status = status
        if self._path is not None:
            status_file.write(self._path, status)


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
