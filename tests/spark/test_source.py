"""`format("tuskline")` over a real log server and repository: batch and stream, limits, restarts, errors."""

import collections
import datetime as dt
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThan

from spark_consumers.sources import pushdown
from spark_consumers.sources.changes import TusklineSource
from tests.support import pgoutput_messages as pm
from tests.support.capture_stack import ChangeLog
from tests.support.change_entries import UNCHANGED, Table, delete, insert, update
from tests.support.log_trim import trim
from tests.support.log_writer import LogWriter
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.errors import ConfigError

INT, TEXT = 23, 25
ORDERS = Table(1, "orders", (("id", INT, -1), ("note", TEXT, -1)))
AUDIT = Table(2, "audit", (("order_id", INT, -1), ("what", TEXT, -1)), "f")
#: One second of the log's clock, in microseconds.
SECOND = 1_000_000


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChangeLog]:
    with ChangeLog(tmp_path_factory.mktemp("log")) as running:
        yield running


_streams = (f"s{number}" for number in itertools.count())


@pytest.fixture
def writer(log: ChangeLog) -> Iterator[LogWriter]:
    """A stream of the test's own in the module's log."""
    found = LogWriter(log, next(_streams))
    yield found
    found.close()


class Reads:
    """The module's log, as a user reads it."""

    def __init__(self, spark: SparkSession, log: ChangeLog, stream: str) -> None:
        self._spark = spark
        self._options = {"log": log.address, "tables": f"{stream}.public.orders"}

    def batch(self, **options: Any) -> DataFrame:
        found: DataFrame = self._reader(self._spark.read, options).load()
        return found

    def stream(self, **options: Any) -> DataFrame:
        found: DataFrame = self._reader(self._spark.readStream, options).load()
        return found

    def _reader(self, reader: Any, options: dict[str, Any]) -> Any:
        chosen = {"mode": "table", **self._options, **options}
        return reader.format("tuskline").options(
            **{k: v for k, v in chosen.items() if v is not None}
        )


@pytest.fixture
def reads(spark: SparkSession, log: ChangeLog, writer: LogWriter) -> Reads:
    return Reads(spark, log, writer.stream)


def commit_orders(writer: LogWriter, *ids: int, **options: Any) -> int:
    """Each id inserted in a transaction of its own, all in one version."""
    return writer.commit([ORDERS], *([insert(ORDERS, [i, f"note {i}"])] for i in ids), **options)


class Collector:
    """What a streaming query wrote, batch by batch, over restarts: a batch that comes again is the same."""

    def __init__(
        self, frame: DataFrame, checkpoint: Path, before: "Collector | None" = None
    ) -> None:
        self.batches: dict[int, list[int]] = before.batches if before else {}
        self._frame, self._checkpoint = frame, checkpoint

    def run(self, **trigger: Any) -> None:
        """Run until the query ends by itself."""
        self.start(**trigger).awaitTermination(90)

    def start(self, **trigger: Any) -> Any:
        return (
            self._frame.writeStream.foreachBatch(self._take)
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(**trigger)
            .start()
        )

    def run_until(self, count: int) -> None:
        """Run with a short interval until so many rows have come, then stop."""
        query = self.start(processingTime="100 milliseconds")
        try:
            deadline = time.monotonic() + 90
            while sum(map(len, self.batches.values())) < count:
                if query.exception() is not None:
                    raise query.exception()
                assert time.monotonic() < deadline, self.batches
                time.sleep(0.05)
        finally:
            query.stop()

    def _take(self, frame: DataFrame, batch: int) -> None:
        ids = sorted(row["id"] for row in frame.select("id").collect())
        assert self.batches.setdefault(batch, ids) == ids

    @property
    def ids(self) -> list[int]:
        return sorted(itertools.chain(*self.batches.values()))


# -- shapes -----------------------------------------------------------------------------------------


def test_rows_of_mode_changes(writer: LogWriter, reads: Reads) -> None:
    version = writer.commit(
        [ORDERS, AUDIT],
        [
            insert(ORDERS, [1, None]),
            update(ORDERS, [2, UNCHANGED], [1, None]),
            update(AUDIT, [1, "b"], [1, "a"], b"O"),
            delete(ORDERS, [2, None]),
            pm.truncate(ORDERS.oid, AUDIT.oid),
        ],
    )
    tables = f"{writer.stream}.public.orders,{writer.stream}.public.audit"
    rows = reads.batch(mode=None, tables=tables).orderBy("sequence", "relation").collect()
    short = [
        (r.relation, r.op, r.before, r.after, r.unchanged, r.sequence, r.version) for r in rows
    ]
    assert short == [
        ("public.orders", "I", None, {"id": "1", "note": None}, [], 1, version),
        ("public.orders", "U", {"id": "1"}, {"id": "2"}, ["note"], 2, version),
        (
            *("public.audit", "U", {"order_id": "1", "what": "a"}),
            *({"order_id": "1", "what": "b"}, [], 3, version),
        ),
        ("public.orders", "D", {"id": "2"}, None, [], 4, version),
        ("public.audit", "T", None, None, [], 5, version),
        ("public.orders", "T", None, None, [], 5, version),
    ]
    assert {r.stream for r in rows} == {writer.stream}
    assert {(r.xid, r.commit_lsn) for r in rows} == {(701, 0x2000)}
    moment = rows[0].commit_time.replace(tzinfo=dt.UTC)
    assert round(moment.timestamp() * SECOND) == writer.began


def test_rows_of_mode_table(writer: LogWriter, reads: Reads) -> None:
    writer.commit(
        [ORDERS],
        [insert(ORDERS, [1, "a"]), update(ORDERS, [2, UNCHANGED], [1, None])],
        [delete(ORDERS, [2, None]), pm.truncate(ORDERS.oid)],
    )
    frame = reads.batch()
    assert [f.name for f in frame.schema] == [
        *("_op", "_commit_lsn", "_xid", "_commit_time", "_version", "_offset", "_sequence"),
        *("_unchanged", "_before", "id", "note"),
    ]
    rows = frame.orderBy("_sequence").collect()
    assert [(r._op, r.id, r.note, r._unchanged, r._before and r._before.id) for r in rows] == [
        ("I", 1, "a", [], None),
        ("U", 2, None, ["note"], 1),
        ("D", None, None, [], 2),
        ("T", None, None, [], None),
    ]
    assert [r._xid for r in rows] == [701, 701, 702, 702]


def test_columns_and_relations_are_chosen(writer: LogWriter, reads: Reads) -> None:
    commit_orders(writer, 1)
    writer.commit([AUDIT], [insert(AUDIT, [1, "x"])])
    assert [r.asDict()["note"] for r in reads.batch(columns="note").collect()] == ["note 1"]
    assert "id" not in reads.batch(columns="note").columns
    assert reads.batch(mode="changes").select("relation").distinct().count() == 1


def test_an_old_and_a_new_set_of_columns(writer: LogWriter, reads: Reads) -> None:
    """A column that was added is NULL before, and said to be unknown; one that was dropped is left out."""
    commit_orders(writer, 1)
    newer = Table(1, "orders", (("id", 20, -1), ("total", 1700, (9 << 16 | 2) + 4)))
    writer.commit([newer], [insert(newer, [2, "2.50"])])
    rows = reads.batch().orderBy("id").collect()
    assert [(r.id, r.total and str(r.total), r._unchanged) for r in rows] == [
        (1, None, ["total"]),
        (2, "2.50", []),
    ]


def test_a_column_that_comes_while_a_stream_runs_is_not_lost_in_silence(
    writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    commit_orders(writer, 1)
    frame = reads.stream()
    newer = Table(1, "orders", (*ORDERS.columns, ("extra", TEXT, -1)))
    writer.commit([newer], [insert(newer, [2, "n", "e"])])
    with pytest.raises(PySparkException, match=r"SchemaError.*does not have: extra"):
        Collector(frame, tmp_path).run(availableNow=True)


# -- where to begin and end -------------------------------------------------------------------------


def test_17_starting_and_ending_version(writer: LogWriter, reads: Reads) -> None:
    versions = [commit_orders(writer, i) for i in range(4)]

    def ids(**options: Any) -> list[int]:
        return sorted(r.id for r in reads.batch(**options).collect())

    assert ids() == [0, 1, 2, 3]
    assert ids(startingVersion=versions[1]) == [1, 2, 3]
    assert ids(startingVersion=versions[1], endingVersion=versions[2]) == [1, 2]
    assert ids(endingVersion=versions[0]) == [0]
    assert ids(startingVersion=versions[3] + 1) == []
    assert ids(startingVersion="latest") == []
    assert ids(startingVersion="earliest", endingVersion=versions[3] + 99) == [0, 1, 2, 3]


def test_17_a_stream_does_not_begin_before_its_starting_version(
    writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    """It would read the versions from now on, as the named one has yet to come."""
    newest = commit_orders(writer, 1)
    beyond = Collector(reads.stream(startingVersion=newest + 2), tmp_path / "beyond")
    with pytest.raises(
        PySparkException, match=f"{newest + 2} is beyond the end(?s:.)*{newest + 1}"
    ):
        beyond.run(availableNow=True)
    following = Collector(reads.stream(startingVersion=newest + 1), tmp_path / "following")
    following.run(availableNow=True)
    commit_orders(writer, 2)
    following.run(availableNow=True)
    assert following.ids == [2]


def test_17_starting_timestamp(writer: LogWriter, reads: Reads) -> None:
    began = dt.datetime.fromtimestamp(writer.began // SECOND, dt.UTC).replace(second=0)
    micros = int(began.timestamp()) * SECOND
    for i in range(4):
        commit_orders(writer, i, commit_time=micros + i * 60 * SECOND)

    def ids(moment: dt.datetime | str) -> list[int]:
        return sorted(r.id for r in reads.batch(startingTimestamp=str(moment)).collect())

    def after(**time: int) -> dt.datetime:
        return began + dt.timedelta(**time)

    east = dt.timezone(dt.timedelta(hours=2))
    assert ids(after(minutes=1)) == [1, 2, 3]
    assert ids(after(minutes=1, microseconds=1).replace(tzinfo=None)) == [2, 3]
    assert ids(after(minutes=2, seconds=30).astimezone(east)) == [3]
    assert ids("2023-12-31") == [0, 1, 2, 3]
    assert ids(after(days=1)) == []


def test_17_a_stream_does_not_begin_at_a_time_to_come(
    writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    commit_orders(writer, 0)
    tomorrow = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    stream = Collector(reads.stream(startingTimestamp=str(tomorrow)), tmp_path)
    with pytest.raises(PySparkException, match=r"the time is in the future"):
        stream.run(availableNow=True)


def test_17_available_now_reads_everything_and_ends(
    writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    for i in range(6):
        commit_orders(writer, i)
    collector = Collector(reads.stream(), tmp_path)
    collector.run(availableNow=True)
    assert collector.ids == list(range(6))
    for i in range(6, 9):
        commit_orders(writer, i)
    collector.run(availableNow=True)
    collector.run(availableNow=True)
    assert collector.ids == list(range(9))


def test_17_rate_limits_count_versions_and_bytes(
    writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    for i in range(6):
        commit_orders(writer, i)
    limited = reads.stream(maxVersionsPerTrigger=2, availableNow="false")
    collector = Collector(limited, tmp_path / "versions")
    collector.run_until(6)
    assert [ids for ids in collector.batches.values() if ids] == [[0, 1], [2, 3], [4, 5]]

    by_bytes = reads.stream(maxBytesPerTrigger=1, availableNow="false")
    collector = Collector(by_bytes, tmp_path / "bytes")
    collector.run_until(6)
    assert [ids for ids in collector.batches.values() if ids] == [[i] for i in range(6)]


def test_17_a_limited_available_now_never_ends_short(
    writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    """The trigger cannot be seen from here, so a limit without a word on it is refused."""
    for i in range(6):
        commit_orders(writer, i)
    undecided = Collector(reads.stream(maxVersionsPerTrigger=1), tmp_path / "refused")
    with pytest.raises(PySparkException, match=r"UsageError.*availableNow"):
        undecided.run(availableNow=True)
    assert undecided.ids == []
    whole = Collector(reads.stream(maxVersionsPerTrigger=1, availableNow="true"), tmp_path / "all")
    whole.run(availableNow=True)
    assert whole.ids == list(range(6))


def test_17_a_restart_goes_on_exactly_where_the_checkpoint_is(
    writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    """Also with a limit, whose reader counts from what it planned last, and after a batch that failed."""
    collector: Collector | None = None
    for start in range(0, 12, 4):
        for i in range(start, start + 4):
            commit_orders(writer, i)
        limited = reads.stream(maxVersionsPerTrigger=3, availableNow="false")
        collector = Collector(limited, tmp_path, collector)
        collector.run_until(start + 4)
        assert max(map(len, collector.batches.values())) <= 3
        assert collector.ids == list(range(start + 4))

    commit_orders(writer, 12)
    commit_orders(writer, 13)

    with pytest.raises(PySparkException, match=r"the sink broke"):
        Fails(reads.stream(), tmp_path).run(availableNow=True)
    commit_orders(writer, 14)
    again = Collector(reads.stream(), tmp_path, collector)
    again.run(availableNow=True)
    again.run(availableNow=True)
    assert again.ids == list(range(15))


class Fails(Collector):
    """A sink that breaks in each batch."""

    def _take(self, frame: DataFrame, batch: int) -> None:
        raise ValueError("the sink broke")


@pytest.mark.long
def test_19_a_first_batch_that_comes_again_has_the_rows_that_it_had(
    log: ChangeLog, writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    """Spark does not keep its beginning, and `latest` and `earliest` are elsewhere by then."""
    for i in range(2):
        commit_orders(writer, i)
    earliest, latest = tmp_path / "earliest", tmp_path / "latest"
    Collector(reads.stream(startingVersion="latest"), latest).run(availableNow=True)
    for i in range(2, 6):
        commit_orders(writer, i)
    for start, checkpoint in (("earliest", earliest), ("latest", latest)):
        with pytest.raises(PySparkException, match=r"the sink broke"):
            Fails(reads.stream(startingVersion=start), checkpoint).run(availableNow=True)
    # Options are ignored where there is a checkpoint: nothing was lost, and nothing has diverged.
    other = Collector(reads.stream(startingVersion="latest"), tmp_path / "other")
    with pytest.raises(PySparkException, match=r"the sink broke"):
        Fails(reads.stream(), tmp_path / "other").run(availableNow=True)
    other.run(availableNow=True)
    assert other.ids == list(range(6))
    commit_orders(writer, 6)
    again = Collector(reads.stream(startingVersion="latest"), latest)
    again.run(availableNow=True)
    assert again.ids == [2, 3, 4, 5]
    again.run(availableNow=True)
    assert again.ids == [2, 3, 4, 5, 6]
    trim(log, writer.stream, 4)
    with pytest.raises(PySparkException, match=r"(?s)TrimmedError.*kept from offset 4"):
        Collector(reads.stream(), earliest).run(availableNow=True)


def test_a_finished_stream_needs_nothing_of_the_log(
    log: ChangeLog, writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    """One that has read everything up to `endingVersion` ends again when that cut is trimmed."""
    versions = [commit_orders(writer, i) for i in range(4)]
    ended = Collector(reads.stream(endingVersion=versions[1]), tmp_path)
    ended.run(availableNow=True)
    trim(log, writer.stream, 4)
    ended.run(availableNow=True)
    assert ended.ids == [0, 1]
    assert reads.batch(endingVersion=0).collect() == []


def test_a_transaction_of_many_entries_is_never_split(
    writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    for start in (0, 100, 200):
        rows = [insert(ORDERS, [start + i, "x"]) for i in range(50)]
        writer.commit([ORDERS], rows, entries=10)
    limited = reads.stream(maxBytesPerTrigger=1, availableNow="false", partitionBytes=1)
    collector = Collector(limited, tmp_path)
    collector.run_until(150)
    assert [len(ids) for ids in collector.batches.values() if ids] == [50, 50, 50]
    frame = reads.batch(partitionBytes=1)
    assert frame.rdd.getNumPartitions() == 3
    by_partition: dict[int, collections.Counter[int]] = {}
    for row in frame.selectExpr("spark_partition_id() AS part", "_xid").collect():
        by_partition.setdefault(row.part, collections.Counter())[row._xid] += 1
    assert sorted(tuple(c.values()) for c in by_partition.values()) == [(50,), (50,), (50,)]


def test_versions_cut_several_streams_at_once(
    spark: SparkSession, log: ChangeLog, writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    other = LogWriter(log, next(_streams))
    try:
        for i in range(4):
            commit_orders(writer, i)
            commit_orders(other, i + 10)
    finally:
        other.close()
    tables = f"{writer.stream}.public.orders,{other.stream}.public.orders"
    frame = reads.stream(
        mode="changes", tables=tables, maxVersionsPerTrigger=1, availableNow="false"
    )
    collector = Collector(frame.selectExpr("CAST(after['id'] AS INT) AS id"), tmp_path)
    collector.run_until(8)
    assert [ids for ids in collector.batches.values() if ids] == [
        *([0], [10], [1], [11]),
        *([2], [12], [3], [13]),
    ]


def test_a_running_query_follows(writer: LogWriter, reads: Reads, tmp_path: Path) -> None:
    commit_orders(writer, 0)
    collector = Collector(reads.stream(), tmp_path)

    def write() -> None:
        for i in range(1, 6):
            time.sleep(0.3)
            commit_orders(writer, i)

    thread = threading.Thread(target=write)
    thread.start()
    collector.run_until(6)
    thread.join()
    assert collector.ids == list(range(6))


# -- errors by name ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"maxVersionPerTrigger": 1}, "UsageError.*did you mean 'maxVersionsPerTrigger'"),
        ({"mode": "tables"}, "UsageError.*neither changes nor table"),
        ({"startingVersion": "x"}, "UsageError.*not a number"),
        ({"startingVersion": 1, "startingTimestamp": "2024-01-01"}, "UsageError.*either this"),
        ({"startingTimestamp": "yesterday"}, "UsageError.*is not a time"),
        ({"tables": None}, "UsageError.*exactly one table"),
        ({"tables": "public.order"}, "UsageError.*did you mean"),
        ({"columns": "notes"}, "SchemaError.*no column 'notes'"),
        ({"log": None}, "UsageError.*option log is missing"),
        ({"log": "grpc://127.0.0.1:1"}, "UnreachableError"),
    ],
)
def test_wrong_options_are_named(
    writer: LogWriter, reads: Reads, options: dict[str, Any], what: str
) -> None:
    commit_orders(writer, 1)
    with pytest.raises(PySparkException, match=f"(?s){what}"):
        reads.batch(**options).collect()


def test_19_a_trimmed_offset_is_named(
    log: ChangeLog, writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    """For a batch and for a checkpoint that was away for too long; what is kept can still be read."""
    first = commit_orders(writer, 0)
    collector = Collector(reads.stream(), tmp_path)
    collector.run(availableNow=True)
    second = commit_orders(writer, 1)
    last = commit_orders(writer, 2)
    trim(log, writer.stream, 3)

    for version in (first, second):
        with pytest.raises(PySparkException, match=r"(?s)TrimmedError.*kept from offset 3"):
            reads.batch(startingVersion=version).collect()
    with pytest.raises(PySparkException, match=r"(?s)TrimmedError.*kept from offset 3"):
        collector.run(availableNow=True)
    assert [r.id for r in reads.batch(startingVersion=last).collect()] == [2]
    assert [r.id for r in reads.batch().collect()] == [2]


class ForgetfulLog(ChangeLog):
    """Keeps nothing for longer than half a second, unless a consumer needs it."""

    def start_repository(self) -> None:
        self.repository = RepositoryServer(
            self.folder / "repository",
            self.listen,
            log_servers=[f"grpc://{self.log_server_listen}"],
            retention=0.5,
        )
        self.repository.start()


def test_a_consumer_keeps_the_log_until_it_has_read_it(spark: SparkSession, tmp_path: Path) -> None:
    with ForgetfulLog(tmp_path) as log, LogClient(log.address) as client:
        writer = LogWriter(log, "shop")
        try:
            client.register_consumer("job", None, 300.0)
            reads = Reads(spark, log, "shop")
            commit_orders(writer, 0)
            collector = Collector(reads.stream(consumer="job"), tmp_path / "checkpoint")
            collector.run(availableNow=True)
            commit_orders(writer, 1)
            time.sleep(2)
            collector.run(availableNow=True)
            assert collector.ids == [0, 1]
            # Nobody but the query's own consumer held it.
            assert client.status().streams["shop"].low_offset < 3
            client.drop_consumer("job")
            wait_for(lambda: client.status().streams["shop"].low_offset == 3, 30, "the trim")
        finally:
            writer.close()


def test_a_checkpoint_of_another_log_is_named(
    log: ChangeLog, writer: LogWriter, reads: Reads, tmp_path: Path
) -> None:
    commit_orders(writer, 0)
    checkpoint = tmp_path / "checkpoint"
    collector = Collector(reads.stream(), checkpoint)
    collector.run(availableNow=True)
    with ChangeLog(tmp_path) as second:
        moved = LogWriter(second, writer.stream)
        try:
            commit_orders(moved, 1)
            with pytest.raises(PySparkException, match=r"(?s)ConfigError.*position belongs to log"):
                Collector(reads.stream(log=second.address), checkpoint).run(availableNow=True)
        finally:
            moved.close()


def test_a_log_that_is_replaced_inside_a_batch_ends_the_query(tmp_path: Path) -> None:
    """Another log has other rows under the same offsets: what was planned from the first is not read from it."""
    for mode in ("table", "changes"):
        folder = tmp_path / mode
        folder.mkdir()
        with ChangeLog(folder) as log:
            _commit_one(log, 1)
            source = TusklineSource({"log": log.address, "mode": mode, "tables": "public.orders"})
            reader = source.reader(source.schema())
            tasks = reader.partitions()
            batches: Iterator[Any] = (b for task in tasks for b in reader.read(task))
            assert sum(b.num_rows for b in batches) == 1
            log.stop_repository()
            log.kill_log_server()
            for part in ("log-server", "repository"):
                shutil.rmtree(folder / part)
            log.start_log_server()
            log.start_repository()
            _commit_one(log, 2)
            for task in tasks:
                with pytest.raises(ConfigError, match="the position belongs to log"):
                    list(reader.read(task))


def _commit_one(log: ChangeLog, number: int) -> None:
    writer = LogWriter(log, "shop")
    try:
        commit_orders(writer, number)
    finally:
        writer.close()


def test_a_table_of_several_streams_must_be_named_with_its_stream(
    log: ChangeLog, writer: LogWriter, reads: Reads
) -> None:
    other = LogWriter(log, next(_streams))
    try:
        commit_orders(writer, 1)
        commit_orders(other, 2)
    finally:
        other.close()
    with pytest.raises(PySparkException, match=r"(?s)UsageError.*is in the streams"):
        reads.batch(tables="public.orders").collect()


def test_a_value_that_does_not_fit_fails_the_query_by_name(writer: LogWriter, reads: Reads) -> None:
    table = Table(1, "orders", (("id", INT, -1), ("day", 1082, -1)))
    writer.commit([table], [insert(table, [1, "infinity"])])
    named = r"(?s)UnsupportedValueError.*public\.orders\.day.*\.option\(\"mode\", \"changes\"\)"
    with pytest.raises(PySparkException, match=named):
        reads.batch().collect()
    rows = reads.batch(mode="changes").collect()
    assert rows[0].after == {"id": "1", "day": "infinity"}


def _bytes_read(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, filters: list[Any], **options: str
) -> tuple[int, int]:
    """What the reader that Spark makes takes from the log servers: (bytes of entries, rows)."""
    read, count = StreamReader.read, [0]

    def counted(*arguments: Any) -> Iterator[Any]:
        for entry in read(*arguments):
            count[0] += len(entry.data)
            yield entry

    monkeypatch.setattr(StreamReader, "read", counted)
    monkeypatch.setattr(pushdown, "asked", lambda: bool(filters))
    source = TusklineSource(options)
    reader = source.reader(source.schema())
    if filters:
        assert reader.pushFilters(filters) == filters
    batches: Iterator[Any] = (b for task in reader.partitions() for b in reader.read(task))
    rows = sum(batch.num_rows for batch in batches)
    monkeypatch.undo()
    return count[0], rows


def test_18_filters_and_columns_spare_reading(
    spark: SparkSession, log: ChangeLog, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        commit_orders(writer, *range(200 * number, 200 * number + 200))
        last = writer.commit([AUDIT], [insert(AUDIT, [number, "x" * 50])])
    options = {"log": log.address, "pruneByFilters": "true"}
    mine = EqualTo(("stream",), writer.stream)
    audit = EqualTo(("relation",), "public.audit")

    def taken(filters: list[Any], **more: str) -> tuple[int, int]:
        return _bytes_read(spark, monkeypatch, filters, **options, **more)

    names = f"{writer.stream}.public.orders,{writer.stream}.public.audit"
    everything = taken([], tables=names)
    assert everything[1] == 1206
    assert taken([mine]) == everything
    # The log server leaves out entries of other relations; the driver, versions.
    only_audit = taken([mine, audit])
    assert only_audit[1] == 6
    assert only_audit[0] < everything[0] / 3
    assert only_audit == taken([], tables=f"{writer.stream}.public.audit")
    assert taken([mine, GreaterThanOrEqual(("version",), last)])[1] == 1
    assert taken([mine, LessThan(("version",), last), GreaterThan(("version",), last - 1)]) == (
        0,
        0,
    )
    assert taken([mine, In(("relation",), ("public.none",))]) == (0, 0)
    newest = taken(
        [EqualTo(("_version",), last)], mode="table", tables=f"{writer.stream}.public.audit"
    )
    assert newest[1] == 1
    assert newest[0] < only_audit[0] / 3


@pytest.mark.long
def test_18_queries_are_the_same_with_the_setting_and_without(
    spark: SparkSession, writer: LogWriter, reads: Reads
) -> None:
    setting = "spark.sql.python.filterPushdown.enabled"
    commit_orders(writer, 1, 2)
    version = commit_orders(writer, 3)
    writer.commit([AUDIT], [insert(AUDIT, [4, "x"])])

    def answers(load: Callable[..., DataFrame]) -> list[Any]:
        def changes() -> DataFrame:
            return load(mode="changes", tables=None).where(f"stream = '{writer.stream}'")

        return [
            changes().where("relation = 'public.audit'").count(),
            changes().where("relation in ('public.audit', 'public.orders')").count(),
            changes().where("relation = 'public.none'").count(),
            changes().where(f"version = {version} or xid < 0").count(),
            sorted(r.id for r in load().where(f"_version < {version} and id > 1").collect()),
            sorted(r.id for r in load().where(f"_version >= {version}").collect()),
            load().count(),
        ]

    loaded: dict[str, DataFrame] = {}

    def same_frame(**options: Any) -> DataFrame:
        """One DataFrame for several queries, as users have it."""
        return loaded.setdefault(str(options), reads.batch(**options))

    plain = answers(same_frame)
    assert plain == [1, 4, 0, 1, [2], [3], 3]
    loaded.clear()
    spark.conf.set(setting, "true")
    try:
        assert answers(same_frame) == plain
        assert answers(lambda **options: reads.batch(pruneByFilters="true", **options)) == plain
    finally:
        spark.conf.unset(setting)
