"""A connection to a server whose slots are read or moved; no query on it takes longer than a limit.

It is opened on first use, and again after it broke. Names and operators resolve to pg_catalog, whatever search_path the
role or the database has, so that no other user's objects run with this role's privileges.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from psycopg import sql

from walsender_bridge.errors import DeadlineError, ServerSettingError, TusklineError
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.replication_connection import describe, pinned_conninfo
from walsender_bridge.postgres.protocol.refusals import connection_error, server_error
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.sql import load

#: Seconds that the client waits beyond the server's timeout, for network latency.
_WAY: Final = 2.0
_NO_EXTENSION: Final = frozenset({"3F000", "42883"})

Values = Mapping[str, Any]


class BoundedSession(Closing):
    """One connection to `dsn`, to its own database or to `dbname`; each query is limited to `seconds`."""

    def __init__(self, dsn: str, *, seconds: float, dbname: str | None = None) -> None:
        self._dsn = dsn
        self._dbname = dbname
        self._seconds = seconds
        self._connection: BoundedConnection | None = None
        own = pinned_conninfo(dsn) if dbname is None else pinned_conninfo(dsn, dbname=dbname)
        self.where = describe(own)

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that is not known to be broken."""
        return self._connection is not None and not self._connection.closed

    def one(self, text: str, values: Values | None = None, **parts: str) -> Any:
        """The first value of the first row of sql/`text`.sql, or None without a row.

        `parts` name SQL files that replace placeholders in braces. Raises the errors of `connection_error` and `_refused`;
        the connection stays open after an error of the server, and is closed after any other. A connection that was open
        and turns out to be broken is replaced, since the server may have been restarted. A query may run twice.
        """
        query = sql.SQL(load(text)).format(**{k: sql.SQL(load(v)) for k, v in parts.items()})
        was_open = self.is_open
        try:
            row = self._open().execute(query, values).fetchone()
        except psycopg.Error as error:
            broken = error.sqlstate is None or self._connection is None or self._connection.broken
            if broken:
                self.close()
                if was_open:
                    return self.one(text, values, **parts)
            if error.sqlstate is None:
                raise connection_error(str(error), self.where) from None
            raise self._refused(error) from None
        except DeadlineError:
            self.close()
            raise
        return None if row is None else row[0]

    @contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        """Limit each query to `seconds` meanwhile. Raises as `one`."""
        usual, self._seconds = self._seconds, seconds
        try:
            self._limit()
            yield
        finally:
            self._seconds = usual
            self._limit()

    def _limit(self) -> None:
        """Apply `_seconds` to the server's timeout and to the client's; a closed connection gets it when it is opened."""
        if self._connection is not None and not self._connection.closed:
            self._connection.limit = self._seconds + _WAY
            self.one("slot_sync/begin", {"timeout": f"{round(self._seconds * 1000)}ms"})

    def close(self) -> None:
        """Close the connection; the server cancels a running query itself."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> BoundedConnection:
        if self._connection is not None and not self._connection.closed:
            return self._connection
        settings = {"application_name": "tuskline-slots"}
        if self._dbname is not None:
            settings["dbname"] = self._dbname
        conninfo = pinned_conninfo(self._dsn, **settings)
        connection = BoundedConnection.connect(conninfo, autocommit=True)
        connection.limit = self._seconds + _WAY
        timeout = f"{round(self._seconds * 1000)}ms"
        connection.execute(load("slot_sync/begin").encode(), {"timeout": timeout})
        self._connection = connection
        return connection

    def _refused(self, error: psycopg.Error) -> TusklineError:
        """Map the server's error, with the extension's detail and hint."""
        diagnostics = error.diag
        state = str(error.sqlstate)
        text = ". ".join(filter(None, (diagnostics.message_primary, diagnostics.message_detail)))
        if state in _NO_EXTENSION:
            return ServerSettingError(
                "the extension tuskline is not installed in this database",
                where=self.where,
                repair="CREATE EXTENSION tuskline there, on the primary; docs/extension.md",
            )
        if state == "57014":
            return DeadlineError(
                f"the server needed more than {self._seconds:g} s",
                where=self.where,
                repair="wait, it is retried; check what the server is busy with",
            )
        found = server_error(state, text, self.where)
        repair = diagnostics.message_hint or found.repair
        return type(found)(found.what, where=found.where, repair=repair)


class ExtensionSession:
    """A session whose queries contain a subquery on the extension, or another one if it is not installed.

    Functions under the extension's names that are not owned by a superuser are not called: they would run with this
    role's privileges.

    Whether it is installed is checked once, and again after an error of the server: it may have been dropped since.
    """

    def __init__(self, session: BoundedSession) -> None:
        self._session = session
        #: The extension's functions exist, and this role may call them.
        self.found = False

    def one(self, text: str, values: Values, *, inspected: str) -> Any:
        """As `BoundedSession.one`, with sql/`inspected`.sql or sql/slot_sync/bare.sql in it."""
        if self.found:
            try:
                return self._session.one(text, values, inspected=inspected)
            except DeadlineError:
                raise
            except TusklineError:
                if not self._session.is_open:
                    raise
        self.found = bool(self._session.one("slot_sync/extension", trusted="slot_sync/trusted"))
        return self._session.one(
            text, values, inspected=inspected if self.found else "slot_sync/bare"
        )
