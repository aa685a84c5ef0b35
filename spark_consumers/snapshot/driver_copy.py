"""Reads a COPY through ADBC's driver, which has libpq decrypt it; where nothing is encrypted, `plain_copy` is faster."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from spark_consumers.snapshot.exported import reader_conninfo
from walsender_bridge.runtime.closing import Closing

if TYPE_CHECKING:
    from adbc_driver_manager.dbapi import Connection

#: Bytes of a record batch.
_BATCH_BYTES: Final = 8 * 2**20


class DriverCopy(Closing):
    """A session that reads a snapshot. Raises ADBC's and Arrow's errors, `OSError`."""

    def __init__(self, dsn: str) -> None:
        from adbc_driver_postgresql import dbapi

        self._connection: Connection = dbapi.connect(reader_conninfo(dsn), autocommit=False)

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def run(self, script: str) -> None:
        """Run statements that return nothing, in the session's transaction: the first of them begins it."""
        with self._connection.cursor() as cursor:
            # One script: each begins by ending the transaction.
            cursor.executescript(script)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            found: list[tuple[Any, ...]] = cursor.fetchall()
        return found

    def batches(self, query: str, oids: Sequence[int | None]) -> Iterator[pa.RecordBatch]:
        """The rows of a query. The driver looks the types up by itself, whatever `oids` says."""
        from adbc_driver_postgresql import StatementOptions

        del oids
        with self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(
                **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
            )
            cursor.execute(query)
            yield from cursor.fetch_record_batch()
