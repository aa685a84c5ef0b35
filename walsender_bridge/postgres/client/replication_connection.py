"""A connection to a walsender, over libpq: commands, the replication stream, exported snapshots.

Values have the same text form on every connection opened here, whatever the settings of the server, the database
or the role: `PINNED_OPTIONS`. Nor can another role's function, operator or table replace one of the catalog and run with the
rights of the session.

Invariant: nothing blocks without a limit. A stream is non-blocking in both directions: `receive` takes
everything that libpq holds (a socket may never turn readable again for bytes that libpq has already
read), `send` queues, `flush` pushes what the socket takes. Errors say which server, never a password.
"""

import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from walsender_bridge.errors import (
    ConfigError,
    ConnectionFailedError,
    DeadlineError,
    PublicationError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.client.dsn import parameters
from walsender_bridge.postgres.protocol import replication
from walsender_bridge.postgres.protocol.lsn import Lsn, parse_lsn
from walsender_bridge.postgres.protocol.refusals import (
    connection_error,
    left_out,
    one_line,
    server_error,
    without_settings,
)
from walsender_bridge.postgres.protocol.replication import Row, ServerTimelines, SystemIdentity
from walsender_bridge.postgres.protocol.row_limit import unsendable_row
from walsender_bridge.runtime.closing import Closing

#: Settings of every connection, so that each value has one text form, and unqualified names are those of pg_catalog:
#: otherwise a function that matches better than `cardinality(anyarray)` would be preferred to it, from any schema in
#: the path. `regclass` and similar values are schema-qualified because of this. extra_float_digits: 3 is exact on 11, and
#: means shortest exact on 12 and later. quote_all_identifiers quotes the names in values of
#: `regclass` and similar types, and the names by which ADBC finds the types that it knows. array_nulls and
#: standard_conforming_strings determine what the literals of a publication's row filter mean.
PINNED_OPTIONS = (
    "-c TimeZone=UTC -c DateStyle=ISO,YMD -c IntervalStyle=postgres "
    "-c extra_float_digits=3 -c bytea_output=hex -c lc_monetary=C -c search_path=pg_catalog,pg_temp "
    "-c quote_all_identifiers=off -c array_nulls=on -c standard_conforming_strings=on"
)
#: Those of them that a server reports when a session begins, as it writes them.
_REPORTED = {"TimeZone": "UTC", "DateStyle": "ISO, YMD", "IntervalStyle": "postgres"}
#: Seconds for the TCP connection and the server's first answer, unless set in the DSN.
CONNECT_TIMEOUT = 10
#: Milliseconds without a TCP acknowledgement after which a connection is considered broken.
TCP_USER_TIMEOUT_MS = 30_000
#: Seconds that a running server may take for a simple answer, such as one from the catalog.
ANSWER_SECONDS = 30.0
#: Seconds between two checks that the server is still running during a long command.
_ALIVE_SECONDS = 5.0
#: Bytes after which `receive` returns, even if more data is available.
RECEIVE_BYTES = 1 << 20

_COPY_BOTH = pq.ExecStatus.COPY_BOTH
_ERROR_FIELDS = (
    pq.DiagnosticField.SQLSTATE,
    pq.DiagnosticField.MESSAGE_PRIMARY,
    pq.DiagnosticField.CONTEXT,
)
_GOOD = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK, pq.ExecStatus.EMPTY_QUERY)


def pinned_conninfo(dsn: str, **settings: str) -> str:
    """`dsn` with the pinned settings, and `settings` over it. Raises `ConfigError`."""
    own = parameters(dsn)
    options = " ".join(filter(None, (str(own.get("options") or ""), PINNED_OPTIONS)))
    defaults = {
        "connect_timeout": str(CONNECT_TIMEOUT),
        "tcp_user_timeout": str(TCP_USER_TIMEOUT_MS),
    }
    fixed = {"options": options, "client_encoding": "UTF8", **settings}
    return make_conninfo("", **{**defaults, **own, **fixed})


def describe(dsn: str) -> str:
    """`host:port/database` of a DSN, for messages; `service NAME` where libpq takes these from a service file."""
    try:
        own = parameters(dsn)
    except ConfigError:
        return "PostgreSQL"
    host = own.get("host") or own.get("hostaddr")
    if not host and "service" in own:
        return f"service {own['service']}"
    return f"{host or 'localhost'}:{own.get('port') or 5432}/{own.get('dbname') or own.get('user') or ''}"


class ReplicationConnection(Closing):
    """A connection that speaks to a walsender of one database. Make it with `connect`."""

    def __init__(self, pgconn: pq.abc.PGconn, where: str) -> None:
        self._pgconn = pgconn
        self.where = where
        #: The error that ended the stream, to be raised by the next `receive`.
        self._over = False
        #: Set if the server has omitted changes from the stream; nothing after that may be used.
        self._left_out: PublicationError | None = None
        pgconn.notice_handler = self._noticed

    @classmethod
    def connect(
        cls, dsn: str, *, application_name: str = "tuskline", replication: str = "database"
    ) -> Self:
        """Connect to a walsender, within the DSN's `connect_timeout` (10 s). A safekeeper's takes `true` only.

        Raises `ConfigError`, `AuthenticationError` (user, password, pg_hba.conf), `PrivilegeError`
        (no REPLICATION), `ConnectionFailedError` (not there, starting, no such database).
        """
        conninfo = pinned_conninfo(dsn, replication=replication, application_name=application_name)
        where = describe(dsn)
        pgconn = pq.PGconn.connect(conninfo.encode())
        if pgconn.status != pq.ConnStatus.OK:
            text = pgconn.get_error_message()
            pgconn.finish()
            raise connection_error(text, where)
        # The text of each value depends on them, and some poolers drop them without a word. Physical WAL has none, and
        # neither has a safekeeper such settings.
        found = {name: pgconn.parameter_status(name.encode()) for name in _REPORTED}
        shown = {name: value.decode() if value else None for name, value in found.items()}
        error = without_settings(shown, _REPORTED, where) if replication == "database" else None
        if error is not None:
            pgconn.finish()
            raise error
        pgconn.nonblocking = 1
        return cls(pgconn, where)

    def close(self) -> None:
        """Close the connection; a temporary slot and an exported snapshot end with it."""
        self._pgconn.finish()

    def fileno(self) -> int:
        """The socket, for a poll loop."""
        return self._pgconn.socket

    @property
    def backend_pid(self) -> int:
        """The pid of the walsender."""
        return self._pgconn.backend_pid

    @property
    def server_version(self) -> int:
        """The server's version number, 160014 for 16.14."""
        return self._pgconn.server_version

    # -- commands -----------------------------------------------------------------------------------

    def command(
        self,
        sql: str,
        *,
        timeout: float | None = None,
        check: Callable[[], object] | None = None,
    ) -> list[Row]:
        """Run one replication command or simple query and return its (last) result's rows.

        `timeout` is in seconds; None waits for as long as the connection lives, and `check`, which is called every few
        seconds, does not raise. Raises the error that the server's answer means (`server_error`), `ConnectionFailedError`,
        `DeadlineError`.
        """
        result = self._ask(sql, timeout, check=check)
        return [
            tuple(_text(result.get_value(row, column)) for column in range(result.nfields))
            for row in range(result.ntuples)
        ]

    def identify(self) -> SystemIdentity:
        """The server's system identifier, timeline and durable end of WAL."""
        rows = self.command(replication.IDENTIFY_SYSTEM, timeout=ANSWER_SECONDS)
        return replication.parse_identity(rows)

    def history(self, timeline: int) -> ServerTimelines:
        """The history that leads to `timeline`, as reported by `identify`."""
        if timeline == 1:
            return ServerTimelines(1)
        rows = self.command(replication.timeline_history(timeline), timeout=ANSWER_SECONDS)
        return replication.parse_history(timeline, rows[0][1] or "")

    def create_slot(
        self,
        slot: str,
        *,
        timeout: float | None = None,
        check: Callable[[], object] | None = None,
    ) -> Lsn:
        """Create a permanent logical slot; returns its consistent point, an LSN.

        The server waits until all running transactions have ended. Meanwhile `check` is called every few
        seconds and can end the wait by raising. Then, and after `timeout` seconds, the command is canceled:
        otherwise the server would keep waiting with the slot's name taken. Raises `DeadlineError` after `timeout`.
        """
        text = replication.create_logical_slot(slot)
        rows = self._canceled_at_the_end(text, timeout, check)
        return parse_lsn(rows[0][1] or "")

    def create_temporary_slot_with_snapshot(
        self, slot: str, *, timeout: float | None = None, check: Callable[[], object] | None = None
    ) -> tuple[Lsn, str]:
        """Export a snapshot: (consistent point, name for `SET TRANSACTION SNAPSHOT`).

        The snapshot holds exactly the transactions whose commit record starts below the consistent
        point. It lives until the next command on this connection, its temporary slot (which holds back
        WAL) until `close`. `check`, `timeout` and what is raised: as of `create_slot`.
        """
        text = replication.create_logical_slot(slot, temporary=True, export_snapshot=True)
        rows = self._canceled_at_the_end(text, timeout, check)
        return parse_lsn(rows[0][1] or ""), rows[0][2] or ""

    def _canceled_at_the_end(
        self, text: str, timeout: float | None, check: Callable[[], object] | None
    ) -> list[Row]:
        """Run a command that is not left running in the server when its `timeout` or `check` ends it here."""
        try:
            return self.command(text, timeout=timeout, check=check)
        except (DeadlineError, UnavailableError):
            # libpq's cancel call has no time limit, and a stopped server does not answer it.
            cancel = threading.Thread(target=self._pgconn.get_cancel().cancel, daemon=True)
            cancel.start()
            cancel.join(_ALIVE_SECONDS)
            raise

    # -- the stream ---------------------------------------------------------------------------------

    def start_logical(
        self,
        slot: str,
        publications: Sequence[str],
        *,
        streaming: bool = False,
        start_lsn: Lsn = 0,
        timeout: float = 60.0,
    ) -> None:
        """Start the stream; from here on only `receive`, `send` and `flush` make sense.

        `streaming`: see `replication.start_logical`.
        """
        command = replication.start_logical(
            slot,
            publications,
            server_version=self.server_version,
            streaming=streaming,
            start_lsn=start_lsn,
        )
        self._ask(command, timeout, copies=True)

    def receive(self) -> list[bytes]:
        """Return the CopyData payloads that have arrived, in order; about `RECEIVE_BYTES` at most. Never blocks.

        Raises the server's error if it ended the stream, `ConnectionFailedError` if the connection is lost;
        payloads that arrived before are returned first. Raises `PublicationError` as soon as the server has omitted changes,
        and from then on: it sends the same changes and the same warning again until they are confirmed.
        """
        if self._over:
            raise self._ended()
        payloads: list[bytes] = []
        take, append = self._pgconn.get_copy_data, payloads.append
        held = 0
        try:
            while held < RECEIVE_BYTES:
                before = held
                self._pgconn.consume_input()
                size, data = take(1)
                while size > 0:
                    append(bytes(data))
                    held += size
                    size, data = take(1)
                if size < 0 or held == before:
                    break
        except psycopg.OperationalError as error:
            # libpq keeps the error: the next call raises it again, after these payloads have been processed.
            if payloads and self._left_out is None:
                return payloads
            raise self._left_out or self._broken(str(error)) from None
        if self._left_out is not None:
            raise self._left_out
        if size < 0:
            if not payloads:
                raise self._ended()
            self._over = True
        return payloads

    def send(self, payload: bytes) -> None:
        """Queue one CopyData payload; `flush` sends it. Once the server has ended the stream it is discarded.

        The payloads received last can still be answered then, and the next `receive` raises the reason.
        """
        if self._over:
            return
        try:
            self._pgconn.put_copy_data(payload)
        except psycopg.OperationalError as error:
            raise self._broken(str(error)) from None

    def flush(self) -> bool:
        """Send the queue; True if it is empty afterwards, False if the socket is full."""
        try:
            return self._pgconn.flush() == 0
        except psycopg.OperationalError as error:
            raise self._broken(str(error)) from None

    # -- inside -------------------------------------------------------------------------------------

    def _ask(
        self,
        sql: str,
        timeout: float | None,
        *,
        copies: bool = False,
        check: Callable[[], object] | None = None,
    ) -> pq.abc.PGresult:
        deadline = None if timeout is None else time.monotonic() + timeout
        pgconn = self._pgconn
        last: pq.abc.PGresult | None = None
        refused: TusklineError | None = None
        try:
            pgconn.send_query(sql.encode())
            while pgconn.flush():
                self._wait(select.POLLIN | select.POLLOUT, deadline)
                pgconn.consume_input()
            while True:
                while pgconn.is_busy():
                    left = _ALIVE_SECONDS if deadline is None else deadline - time.monotonic()
                    if check is not None and not self._ready(
                        select.POLLIN, max(min(left, _ALIVE_SECONDS), 0.0)
                    ):
                        check()
                        if left > 0:
                            continue
                    self._wait(select.POLLIN, deadline)
                    pgconn.consume_input()
                result = pgconn.get_result()
                if result is None:
                    break
                if result.status not in (*_GOOD, _COPY_BOTH):
                    # Read the rest of the answer, too, so that the connection stays usable.
                    refused = refused or self._refused(result)
                last = result
                if result.status == _COPY_BOTH:
                    break
        except psycopg.OperationalError as error:
            raise refused or self._broken(str(error)) from None
        if refused is not None:
            raise refused
        if last is None or (last.status == _COPY_BOTH) != copies:
            raise self._broken("unexpected answer to the command")
        return last

    def _ready(self, events: int, seconds: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pgconn.socket, events)
        return bool(poll.poll(None if seconds is None else seconds * 1000))

    def _wait(self, events: int, deadline: float | None) -> None:
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        if not self._ready(events, left):
            raise DeadlineError(
                "the server did not answer in time",
                where=self.where,
                repair="check whether it is stopped, or its disk hangs; a new slot waits for "
                "running transactions: end the oldest",
            )

    def _refused(self, result: pq.abc.PGresult) -> TusklineError:
        code, text, context = (_text(result.error_field(each)) or "" for each in _ERROR_FIELDS)
        text = text or result.get_error_message()
        too_large = unsendable_row(code, text, context, self.where)
        return too_large or server_error(code, text, self.where)

    def _noticed(self, result: pq.abc.PGresult) -> None:
        """Process a warning, which arrives in the order of the stream."""
        code, text, _ = (_text(result.error_field(each)) or "" for each in _ERROR_FIELDS)
        self._left_out = self._left_out or left_out(code, text, self.where)

    def _ended(self) -> TusklineError:
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            return self._refused(result)
        return self._broken("the server ended the stream")

    def _broken(self, text: str) -> ConnectionFailedError:
        return ConnectionFailedError(
            f"the connection broke: {one_line(text)}",
            where=self.where,
            repair="check that the server is running; the stream continues when it is back",
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")
