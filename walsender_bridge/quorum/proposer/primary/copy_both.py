"""CopyBoth through libpq, for connections whose bytes only libpq can read: TLS, GSSAPI."""

from collections.abc import Iterator

import psycopg
from psycopg import pq

from walsender_bridge.errors import ConnectionFailedError, MalformedMessageError, TusklineError
from walsender_bridge.postgres.protocol.lsn import WalPosition, parse_lsn
from walsender_bridge.postgres.protocol.refusals import server_error
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream


class LibpqCopy:
    """A `CopyBothStream` through libpq."""

    def __init__(self, connection: PrimaryStream) -> None:
        """The connection, idle, is this object's from now on."""
        self._connection = connection
        self._pgconn = connection.pgconn
        self._copying = False
        self._row: WalPosition | None = None
        self._next: WalPosition | None = None

    def fileno(self) -> int:
        """See `CopyBothStream`."""
        return self._pgconn.socket

    def start(self, command: str) -> None:
        """See `CopyBothStream`."""
        self._row = self._next = None
        try:
            self._pgconn.send_query(command.encode())
        except psycopg.OperationalError as error:
            raise self._broken(str(error)) from None
        self.flush()

    def payloads(self) -> Iterator[memoryview]:
        """See `CopyBothStream`."""
        pgconn = self._pgconn
        try:
            pgconn.consume_input()
            if not self._copying:
                self._results()
            while self._copying:
                size, data = pgconn.get_copy_data(1)
                if size > 0:
                    yield memoryview(data)
                    continue
                if size < 0:
                    self._copying = False
                    self._results()
                return
        except psycopg.OperationalError as error:
            raise self._broken(str(error)) from None

    def _results(self) -> None:
        """Process the server's answers so far: the copy begins, or the next timeline is named."""
        pgconn = self._pgconn
        while not pgconn.is_busy():
            result = pgconn.get_result()
            if result is None:
                if self._row is None:
                    raise self._broken("the server ended the stream")
                self._next = self._row
                return
            status = result.status
            if status == pq.ExecStatus.COPY_BOTH:
                self._copying = True
                return
            if status == pq.ExecStatus.COPY_IN:  # the server has ended its half
                pgconn.put_copy_end()
                self.flush()
            elif status == pq.ExecStatus.TUPLES_OK:
                self._row = self._switch(result)
            elif status == pq.ExecStatus.FATAL_ERROR:
                code = result.error_field(pq.DiagnosticField.SQLSTATE) or b""
                text = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b""
                raise server_error(
                    code.decode("utf-8", "replace"),
                    text.decode("utf-8", "replace") or result.get_error_message(),
                    self._connection.where,
                )

    def _switch(self, result: pq.abc.PGresult) -> WalPosition:
        try:
            timeline, lsn = ((result.get_value(0, n) or b"").decode("ascii") for n in range(2))
            return WalPosition(int(timeline), parse_lsn(lsn))
        except (ValueError, TusklineError):
            raise MalformedMessageError(
                "not the end of a timeline", where=self._connection.where
            ) from None

    def next_timeline(self) -> WalPosition | None:
        """See `CopyBothStream`."""
        return self._next

    def send(self, payload: bytes) -> None:
        """See `CopyBothStream`."""
        if not self._copying:
            return
        try:
            self._pgconn.put_copy_data(payload)
        except psycopg.OperationalError as error:
            raise self._broken(str(error)) from None
        self.flush()

    def flush(self) -> bool:
        """See `CopyBothStream`."""
        try:
            return self._pgconn.flush() == 0
        except psycopg.OperationalError as error:
            raise self._broken(str(error)) from None

    def _broken(self, text: str) -> ConnectionFailedError:
        line = " ".join(text.split())[:400]
        return ConnectionFailedError(f"the connection broke: {line}", where=self._connection.where)

    def close(self) -> None:
        """See `CopyBothStream`."""
        self._connection.close()
