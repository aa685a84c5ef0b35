"""`format("tuskline-view")`: gives the rows of a query to tasks on the executors, which write files of them. Not for users.

A data source, since that is how Spark gives a query's rows to Python with Arrow, and without pandas. What the tasks have made goes into
a file of the scratch folder, by Spark's commit: so only what a successful attempt of each task has written counts.
"""

import base64
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from spark_consumers.fold.multiset import MultisetFold, compose_multisets, of_signed
from spark_consumers.lake.epoch.stage import Staged, write_fold
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import numbered, whole_file
from spark_consumers.lake.format.table_format import FileInfo
from spark_consumers.lake.store.place import carried, place
from walsender_bridge.errors import NotSupportedError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NAME: Final = "tuskline-view"
#: The option with what is to be done. Spark shows no option whose name has this word.
_TASK: Final = "secretTask"
#: What a task says of a view that has too many rows.
TOO_MANY: Final = "it has more than {} rows (max_rows)"
#: Bytes of rows of which one data file is made.
_HELD: Final = 128 << 20


class SinkTask(Protocol):
    """What an executor does with the rows of a partition. Pickled with the driver's, and made of our own classes."""

    def run(self, batches: Iterator[pa.RecordBatch], attempt: str) -> Any:
        """Take the rows; what it has made. `attempt`: differs between the attempts of all tasks."""


@dataclass(frozen=True)
class StoreRows:
    """Write all rows as data files; `max_rows` of them at most."""

    target: Target
    max_rows: int

    def run(self, batches: Iterator[pa.RecordBatch], attempt: str) -> list[FileInfo]:
        """The files."""
        target, made = self.target, list[FileInfo]()
        for held in _in_parts(batches):
            check_rows(sum(file.rows for file in made) + sum(map(len, held)), self.max_rows)
            columns = _columns(held, target.columns)
            name = numbered(f"{target.prefix}-{attempt}.parquet", len(made))
            made += write_arranged(name, columns, target.file_schema, target.arrangement)
        return made


@dataclass(frozen=True)
class StageChanges:
    """Fold rows with signs, which are in the last column, and stage them as those of a table without a key.

    Equal rows are in one partition. A fold has `max_rows` rows at most.
    """

    target: Target
    scratch: str
    max_rows: int

    def run(self, batches: Iterator[pa.RecordBatch], attempt: str) -> Staged | None:
        """What is staged: the rows to add, and those to remove; None if there are neither.

        When the rows are read again, their order may differ, and so may the files: those of each attempt have names of their own.
        """
        folded: MultisetFold | None = None
        changes = 0
        for held in _in_parts(batches):
            rows = pa.concat_tables(held)
            last = rows.num_columns - 1
            signs = rows.column(last).to_numpy().astype("int64")
            part = of_signed(_columns([rows.remove_column(last)], self.target.columns), signs)
            folded = part if folded is None else compose_multisets(folded, part)
            changes += len(rows)
            check_rows(len(folded), self.max_rows)
        if folded is None or not len(folded):
            return None
        target = replace(self.target, prefix=f"{self.target.prefix}-{attempt}")
        return write_fold(target, folded, f"{self.scratch}/{attempt}", 0, changes)


def check_rows(rows: int, limit: int) -> None:
    """Raise `NotSupportedError` if these are more rows than a view may have."""
    if rows > limit:
        raise NotSupportedError(TOO_MANY.format(limit))


def _in_parts(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.Table]]:
    held: list[pa.Table] = []
    size = 0
    for batch in batches:
        held.append(pa.Table.from_batches([batch]))
        size += batch.nbytes
        if size >= _HELD:
            yield held
            held, size = [], 0
    if held:
        yield held


def _columns(parts: Sequence[pa.Table], schema: pa.Schema) -> list[pa.Array]:
    """The columns of these rows, with the types of the schema."""
    rows = pa.concat_tables(parts)
    return [
        pa.concat_arrays([pa.array([], f.type), *(chunk.cast(f.type) for chunk in column.chunks)])
        for column, f in zip(rows.columns, schema, strict=True)
    ]


def sink(frame: "DataFrame", task: SinkTask, record: str) -> list[Any]:
    """Give the rows of `frame` to the executors; what they have made. `record`: a scratch file for it."""
    session: Any = frame.sparkSession
    session.dataSource.register(ViewSink)
    # Spark looks a data source up in the session that is active in this thread, which may be another one.
    jvm = session._jvm  # noqa: SLF001  # PySpark has no public way to its JVM
    sessions = session._get_j_spark_session_class(jvm)  # noqa: SLF001  # as above
    sessions.setActiveSession(session._jsparkSession)  # noqa: SLF001  # as above
    content = pickle.dumps((carried(_run), carried(_commit), task, record), pickle.HIGHEST_PROTOCOL)
    encoded = base64.b64encode(content).decode()
    frame.write.format(_NAME).option(_TASK, encoded).mode("append").save()
    found: list[Any] = pickle.loads(place(record).read_bytes())  # noqa: S301  # our own task has written it
    return found


def collected(frame: "DataFrame", task: SinkTask, most: int, known: int | None) -> list[Any] | None:
    """Give the rows of `frame` to the task in this process; what it has made. None, and nothing is made, if they are more than `most`.

    `known`: they are no more than this, if that is known. What Spark and its Python workers do for a write by a data source takes longer
    than few rows do.
    """
    if known is not None and known > most:
        return None
    rows = (frame.limit(most + 1) if known is None else frame).toArrow()
    return None if len(rows) > most else [task.run(iter(rows.to_batches()), "collected")]


def _run(work: tuple[SinkTask, Iterator[pa.RecordBatch], str]) -> Any:
    task, batches, attempt = work
    return task.run(batches, attempt)


def _commit(work: tuple[str, list[Any]]) -> None:
    path, made = work
    with whole_file(path, durable=False) as file:
        file.write(pickle.dumps(made, pickle.HIGHEST_PROTOCOL))


@dataclass
class _Made(WriterCommitMessage):
    content: Any


class ViewSink(DataSource):
    """The data source."""

    @classmethod
    def name(cls) -> str:
        """Its name."""
        return _NAME

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:  # noqa: ARG002  # Spark's signature
        """The writer."""
        return _Writer(base64.b64decode(self.options[_TASK]))


class _Writer(DataSourceArrowWriter):
    def __init__(self, content: bytes) -> None:
        self._content = content

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        run, _, task, _ = pickle.loads(self._content)  # noqa: S301  # our driver has pickled it
        context = TaskContext.get()
        assert context is not None
        return _Made(run((task, iterator, f"{context.partitionId()}-{context.taskAttemptId()}")))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _, commit, _, record = pickle.loads(self._content)  # noqa: S301  # as above
        commit((record, [m.content for m in messages if isinstance(m, _Made)]))
