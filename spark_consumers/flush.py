"""FLUSH: everything that was committed before the call is readable when it returns.

Why it holds: for each source the write-ahead log's insert position L is read first, and then a row of the
published one-row table `tuskline.flush` is written. Whatever the caller committed ends at or below L; the
row's own commit ends above L. When the log has committed a position beyond L, everything up to L is in it
(transactions enter the log in commit order), and a barrier forced then is a version that holds it all.
"""

from collections.abc import Mapping

import psycopg

from spark_consumers.lakehouse.manifest import wait_for_epoch
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import ConnectionFailedError, PrivilegeError
from walsender_bridge.sql import load
from walsender_bridge.wire.bounded import BoundedConnection


def force_barrier(log: str, sources: Mapping[str, str], *, timeout: float = 60.0) -> int:
    """Write to each source (stream name -> DSN) and force a barrier; the version that holds the writes.

    Raises `ConnectionFailedError`, `PrivilegeError`, `DeadlineError`, `UnavailableError`.
    """
    positions = {stream: _write(stream, dsn) for stream, dsn in sources.items()}
    with LogClient(log) as client:
        return client.barrier(positions, timeout=timeout)


def flush(lake: str, log: str, sources: Mapping[str, str], *, timeout: float = 60.0) -> int:
    """Wait until all that was committed in `sources` before this call is readable in `lake`.

    Returns the epoch that holds it (a later one may be published already). `timeout` is in seconds and
    holds for each of the two waits, the log's and the lake's. Raises what `force_barrier` raises, and
    `DeadlineError` when no epoch came in time.
    """
    version = force_barrier(log, sources, timeout=timeout)
    return wait_for_epoch(lake, version, timeout=timeout).epoch


def _write(stream: str, dsn: str) -> int:
    try:
        with BoundedConnection.open(dsn) as connection:
            row = connection.execute(load("flush_position")).fetchone()
            connection.execute(load("flush_write"))
    except psycopg.errors.InsufficientPrivilege as error:
        raise PrivilegeError(
            str(error).strip(), where=stream, repair="grant UPDATE on tuskline.flush to this role"
        ) from None
    except psycopg.Error as error:
        raise ConnectionFailedError(
            str(error).strip() or type(error).__name__,
            where=stream,
            repair="see that it accepts connections",
        ) from None
    if row is None:
        raise ConnectionFailedError("the server gave no position", where=stream)
    return int(row[0])
