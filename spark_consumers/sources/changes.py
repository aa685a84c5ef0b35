"""`format("tuskline")`: the change log as a batch or streaming source of Spark.

    spark.readStream.format("tuskline").option("log", "grpc://127.0.0.1:7400")
         .option("tables", "public.orders").option("mode", "table").load()

The driver plans ranges of the log that end at commits; the executors read them from the log servers and
decode them into Arrow batches. The driver never sees a change.

Invariant: the position after a batch is the position before the next, in the checkpoint as in memory,
and each is a version's cut: rows come exactly once into each batch's range, transactions whole.

Tables, columns and versions are options. Spark's own filters prune what is read too (module `pushdown`), but
only with the option `pruneByFilters`, since Spark 4.1 goes on using them in later queries of a DataFrame.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from spark_consumers.decode.entries import ChangeBatch, decode_entries
from spark_consumers.decode.types import arrow_schema, spark_schema
from spark_consumers.sources import pushdown
from spark_consumers.sources.options import Options
from spark_consumers.sources.positions import LogReader, StreamOffsets
from spark_consumers.sources.pushdown import Pruning
from spark_consumers.sources.rows import (
    CHANGES_SCHEMA,
    change_rows,
    table_columns,
    table_rows,
    table_schema,
)
from spark_consumers.sources.tables import WantedTable, choose_tables, newest_hash, tables_of
from walsender_bridge.change_log.client import LogClient, LogStatus
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.errors import SchemaError, UnsupportedValueError, UsageError

NAME = "tuskline"
OPTIONS = (
    *("log", "tables", "columns", "mode", "startingVersion", "startingTimestamp", "endingVersion"),
    *("maxBytesPerTrigger", "maxVersionsPerTrigger", "availableNow", "partitionBytes"),
    *("consumer", "consumerLeaseSeconds", "pruneByFilters"),
)
#: Bytes of the log, as it is stored, for one task.
PARTITION_BYTES = 16 * 2**20
_EVERYTHING = Pruning()
#: The name of a table's schema, in the metadata of the rows' first field.
_HASH = "tuskline.schema_hash"
#: Seconds for which a consumer that does not come back still holds the log.
LEASE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class _Settings:
    """The options, read."""

    log: str
    tables: tuple[str, ...] | None
    columns: tuple[str, ...] | None
    mode: str
    starting_version: int | str | None
    starting_time: int | None
    ending_version: int | None
    max_bytes: int | None
    max_versions: int | None
    available_now: bool | None
    partition_bytes: int
    consumer: str | None
    lease_seconds: int
    prune: bool


def read_options(options: dict[str, str]) -> _Settings:
    """The options of `format("tuskline")`. Raises `UsageError`."""
    given = Options(NAME, options, OPTIONS)
    mode = given.text("mode") or "changes"
    if mode not in {"changes", "table"}:
        raise given.wrong("mode", f"{mode!r} is neither changes nor table")
    tables = given.names("tables")
    if mode == "table" and (tables is None or len(tables) != 1):
        raise given.wrong("tables", "mode=table reads exactly one table")
    start, moment = given.text("startingVersion"), given.text("startingTimestamp")
    if start is not None and moment is not None:
        raise given.wrong("startingVersion", "specify either this or startingTimestamp")
    starting: int | str | None = None
    if start is not None:
        word = start.strip().lower()
        starting = (
            word if word in {"earliest", "latest"} else given.number("startingVersion", least=0)
        )
    return _Settings(
        log=given.required("log"),
        tables=tables,
        columns=given.names("columns"),
        mode=mode,
        starting_version=starting,
        starting_time=None if moment is None else _microseconds(given, moment),
        ending_version=given.number("endingVersion", least=0),
        max_bytes=given.number("maxBytesPerTrigger"),
        max_versions=given.number("maxVersionsPerTrigger"),
        available_now=given.flag("availableNow"),
        partition_bytes=given.number("partitionBytes") or PARTITION_BYTES,
        consumer=given.text("consumer"),
        lease_seconds=given.number("consumerLeaseSeconds") or LEASE_SECONDS,
        prune=given.flag("pruneByFilters") or False,
    )


def _microseconds(given: Options, moment: str) -> int:
    """A time in ISO form, or seconds since 1970, as microseconds since 1970; UTC unless it says so."""
    try:
        if moment.strip().replace(".", "", 1).isdigit():
            return round(float(moment) * 1_000_000)
        time_of = datetime.fromisoformat(moment.strip())
    except ValueError:
        raise given.wrong(
            "startingTimestamp", f"{moment!r} is not a time such as 2024-05-01T12:00:00Z"
        ) from None
    aware = time_of if time_of.tzinfo else time_of.replace(tzinfo=UTC)
    whole = aware - datetime(1970, 1, 1, tzinfo=UTC)
    return (whole.days * 86_400 + whole.seconds) * 1_000_000 + whole.microseconds


class TusklineSource(DataSource):
    """The data source. Raises `UsageError` and what the log raises."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.settings = read_options(options)

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return NAME

    def schema(self) -> StructType:
        """The rows' shape: fixed in mode=changes, the table's newest columns in mode=table."""
        if self.settings.mode == "changes":
            return spark_schema(CHANGES_SCHEMA)
        (table,) = choose_tables(tables_of(self.settings.log), self.settings.tables or ())
        columns = arrow_schema(table.chosen(self.settings.columns))
        found = spark_schema(table_schema(columns))
        if self.settings.columns is None:
            # With the shape goes which one it is: see `_Plan.read`.
            found.fields[0].metadata = {_HASH: table.schema_hash.hex()}
        return found

    def reader(self, schema: StructType) -> DataSourceReader:
        """The batch reader, for Spark."""
        plan = _Plan(self.settings, schema)
        pruning = self.settings.prune and pushdown.asked()
        return _FilteringReader(plan) if pruning else _BatchReader(plan)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  # Spark's name
        """The streaming reader, for Spark."""
        return _StreamReader(_Plan(self.settings, schema))


@dataclass
class _Task(InputPartition):
    """What one task reads of the log that the range was planned from; `relations` (None: all) are names `schema.table`.

    `addresses`: of the replicas to read from, in the order to try.
    """

    log_id: str
    stream: str
    addresses: tuple[str, ...]
    first: int
    end: int
    relations: tuple[str, ...] | None


class _Plan:
    """What both readers share: how a range of the log becomes tasks, and a task becomes rows."""

    def __init__(self, settings: _Settings, schema: StructType) -> None:
        self.settings = settings
        #: mode=table: the rows' shape, and which of the table's schemas it has (None: chosen columns).
        self._shape: pa.Schema | None = None
        self._newest: bytes | None = None
        if settings.mode == "table":
            self._shape = to_arrow_schema(schema)
            digest = next((f.metadata[_HASH] for f in schema.fields if _HASH in f.metadata), None)
            self._newest = None if digest is None else bytes.fromhex(digest)

    def wanted(self, only: Pruning = _EVERYTHING) -> list[WantedTable] | None:
        """The wanted tables; None for all."""
        names = self.settings.tables
        if names is None and only.streams is None and only.relations is None:
            return None
        tables = tables_of(self.settings.log)
        return [
            table
            for table in (tables if names is None else choose_tables(tables, names))
            if (only.streams is None or table.stream in only.streams)
            and (only.relations is None or table.relation.full_name in only.relations)
        ]

    def first(self, log: LogReader, status: LogStatus) -> StreamOffsets:
        """Where a reader without a checkpoint begins."""
        chosen = self.settings.starting_version
        if self.settings.starting_time is not None:
            chosen = log.version_at(status, self.settings.starting_time)
            chosen = "latest" if chosen is None else chosen
        if chosen == "latest":
            return log.newest(status)
        if chosen is None or chosen == "earliest":
            return log.oldest(status)
        return log.at(status, max(int(chosen) - 1, 0))

    def tasks(
        self, log: LogReader, status: LogStatus, start: StreamOffsets, end: StreamOffsets
    ) -> list[InputPartition]:
        """The tasks that read what lies between two positions. Raises `TrimmedError`."""
        log.check_kept(status, start)
        found: list[InputPartition] = []
        for part in log.ranges(status, start, end, self.settings.partition_bytes):
            names = log.relations.get(part.stream)
            where = (part.stream, part.addresses, part.first, part.end)
            found.append(_Task(status.log_id, *where, names))
        return found

    def read(self, task: InputPartition | None) -> Iterator[pa.RecordBatch]:
        """The rows of one task, on an executor. Raises `ConfigError` if another log answers than the planned one."""
        if task is None:
            # What Spark makes of a batch without partitions.
            return
        if not isinstance(task, _Task):
            raise TypeError(task)
        chosen = self.settings.columns
        if self._shape is not None and self._newest is None:
            chosen = tuple(table_columns(self._shape).names)
        # Offsets of another log are the same numbers: the reader compares the log's id with each batch of entries.
        with StreamReader(
            task.stream, task.addresses, holds=task.end, log_id=task.log_id
        ) as reader:
            batches = decode_entries(
                reader.read(task.first, task.end, task.relations),
                lambda digest: reader.schemas([digest])[digest],
                relations=None if task.relations is None else frozenset(task.relations),
                columns=None if chosen is None else frozenset(chosen),
                as_text=self._shape is None,
            )
            yield from self._rows(reader, task, batches)

    def _rows(
        self, reader: StreamReader, task: _Task, batches: Iterator[ChangeBatch]
    ) -> Iterator[pa.RecordBatch]:
        if self._shape is None:
            yield from (change_rows(task.stream, batch) for batch in batches)
            return
        fitting: set[bytes] = set()
        for batch in _typed(batches):
            if batch.schema_hash not in fitting:
                self._check_columns(reader, task, batch, table_columns(self._shape).names)
                fitting.add(batch.schema_hash)
            yield table_rows(batch, self._shape)

    def _check_columns(
        self, reader: StreamReader, task: _Task, batch: ChangeBatch, known: list[str]
    ) -> None:
        """Columns that this query does not know may be left out only if the table has lost them since."""
        extra = {column.name for column in batch.relation.columns} - set(known)
        name = batch.relation.full_name
        if extra and self._newest != newest_hash(reader, name):
            raise SchemaError(
                f"the table has columns that this query does not have: {', '.join(sorted(extra))}",
                where=f"{task.stream}.{name}, log offset {batch.offset[0]}",
                repair="restart the query; its checkpoint stays valid",
            )


def _typed(batches: Iterator[ChangeBatch]) -> Iterator[ChangeBatch]:
    """The batches; a value that its column's type cannot hold names what this format has for that."""
    try:
        yield from batches
    except UnsupportedValueError as error:
        raise UnsupportedValueError(
            error.what,
            where=error.where,
            repair='exclude the column with .option("columns", ...), or read every value as text with '
            '.option("mode", "changes")',
        ) from None


class _BatchReader(DataSourceReader):
    """`spark.read`: from the start to the newest version, or to `endingVersion`."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._only = _EVERYTHING

    def partitions(self) -> Sequence[InputPartition]:
        # First the end of the range, then the tables: a table that is created between the two lies after the range.
        with LogClient(self._plan.settings.log) as client:
            newest = client.status().version
        tables = self._plan.wanted(self._only)
        if tables == []:
            return []
        given, only = self._plan.settings.ending_version, self._only.last_version
        last = min(each for each in (newest, given, only) if each is not None)
        with LogReader(self._plan.settings.log, tables) as log:
            status = log.status()
            start = self._plan.first(log, status)
            if self._only.first_version > start.version + 1:
                start = log.at(status, self._only.first_version - 1)
            end = log.step(status, start, last_version=last)
            return self._plan.tasks(log, status, start, end)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._plan.read(partition)


class _FilteringReader(_BatchReader):
    """The same, for a session that passes filters to sources."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Prune by them; Spark applies all of them again."""
        self._only = _EVERYTHING.with_filters(filters, table=self._plan.settings.mode == "table")
        return filters


class _StreamReader(DataSourceStreamReader):
    """`spark.readStream`. It limits a batch itself, counting from the end of the last planned range.

    Spark 4.1 passes a source neither its trigger nor its checkpoint. A restarted query first has the
    reader plan the empty range at its last position, which shows where the query continues. A trigger that
    ends by itself (AvailableNow, Once) asks for the end exactly once; a limited answer would end the query
    early, so a limit requires the option that states the trigger.
    """

    def __init__(self, plan: _Plan) -> None:
        settings = plan.settings
        limited = settings.max_bytes is not None or settings.max_versions is not None
        if limited and settings.available_now is None:
            raise UsageError(
                "maxBytesPerTrigger and maxVersionsPerTrigger need the option availableNow: this Spark "
                "does not pass a source its trigger, and Trigger.AvailableNow with a limit would end "
                "after the first batch as if that were all",
                where=f"format({NAME!r})",
                repair='.option("availableNow", "false") for a query that continues, or "true" for '
                "Trigger.AvailableNow, which then reads everything there is in one batch",
            )
        self._plan = plan
        # Made when it is first asked: Spark also makes readers only to send their `read` to executors.
        self._connected: LogReader | None = None
        self._limited = limited and not settings.available_now
        self._warned = False
        self._here: StreamOffsets | None = None
        self._first: StreamOffsets | None = None
        self._renewed: float | None = None

    @property
    def _log(self) -> LogReader:
        if self._connected is None:
            self._connected = LogReader(self._plan.settings.log, self._plan.wanted())
        return self._connected

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        """Where the query's first batch begins. Spark asks for no other, and asks again if that batch comes again."""
        if self._here is not None and self._here.began is not None:
            # Not where a new query would begin: the options may have changed.
            return StreamOffsets(self._here.log_id, 0, self._here.began).to_json()
        return self._beginning(self._log.status()).to_json()

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        settings = self._plan.settings
        status = self._log.status()
        here = self._here or self._beginning(status)
        self._log.check_log(status, here)
        self._lease(here.version, renewing=True)
        end = self._log.step(
            status,
            here,
            max_bytes=settings.max_bytes if self._limited else None,
            max_versions=settings.max_versions if self._limited else None,
            last_version=settings.ending_version,
        )
        if self._limited and end.version < status.version and not self._warned:
            self._warned = True
            sys.stderr.write(
                f"tuskline: a batch is limited to version {end.version} of {status.version}; with "
                "Trigger.AvailableNow this query would end there\n"
            )
        if end is not here and here is self._first:
            end = replace(end, began=here.streams)
        self._here = end
        return end.to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, last = StreamOffsets.from_json(start), StreamOffsets.from_json(end)
        self._here = last
        if first == last:
            return []
        status = self._log.status()
        self._log.check_log(status, first)
        self._log.check_log(status, last)
        return self._plan.tasks(self._log, status, first, last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._plan.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        self._lease(StreamOffsets.from_json(end).version, renewing=False)

    def stop(self) -> None:
        if self._connected is not None:
            self._connected.close()

    def _beginning(self, status: LogStatus) -> StreamOffsets:
        if self._first is None:
            chosen = self._plan.settings.starting_version
            if isinstance(chosen, int) and chosen > status.version + 1:
                # It would begin now, and read what comes before that version.
                raise UsageError(
                    f"option startingVersion: version {chosen} is beyond the end of the log, which is at version "
                    f"{status.version}",
                    where=f"format({NAME!r})",
                    repair=f"specify {status.version + 1} or an earlier one, or latest",
                )
            moment = self._plan.settings.starting_time
            if moment is not None and moment > time.time_ns() // 1000:
                raise UsageError(
                    "option startingTimestamp: the time is in the future, and a stream would begin now",
                    where=f"format({NAME!r})",
                    repair="specify a time that has passed, or startingVersion=latest",
                )
            self._first = self._plan.first(self._log, status)
        return self._first

    def _lease(self, version: int, *, renewing: bool) -> None:
        """Report to the log the position up to which this consumer is done; with `renewing` only when a renewal is due."""
        settings = self._plan.settings
        if settings.consumer is None:
            return
        now = time.monotonic()
        fresh = self._renewed is not None and now - self._renewed < settings.lease_seconds / 4
        if renewing and fresh:
            return
        self._renewed = now
        self._log.client.register_consumer(settings.consumer, version, settings.lease_seconds)
