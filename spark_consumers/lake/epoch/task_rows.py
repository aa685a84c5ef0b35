"""`format("tuskline-live")`: runs tasks of a live read on the executors. Not for users: `read(..., live=True)` makes its options.

A data source, since that is what both a session with a JVM and one of Spark Connect can run with Arrow, and without pandas.
"""

import base64
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from spark_consumers.decode.types import spark_schema
from spark_consumers.lake.store.place import carried

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NAME: Final = "tuskline-live"
#: The option with the tasks. They have rows of tables: Spark shows no option whose name has this word.
_TASKS: Final = "secretTasks"


class LiveTask(Protocol):
    """What an executor runs. Pickled with the driver's, and made of our own classes."""

    def run(self) -> Iterable[pa.RecordBatch]:
        """The rows."""


def frame_of(spark: "SparkSession", schema: pa.Schema, tasks: Sequence[LiveTask]) -> "DataFrame":
    """The rows of these tasks, one partition each."""
    spark.dataSource.register(LiveSource)
    content = pickle.dumps((carried(_run), list(tasks)), pickle.HIGHEST_PROTOCOL)
    return (
        spark.read.format(_NAME)
        .option("schema", spark_schema(schema).json())
        .option(_TASKS, base64.b64encode(content).decode())
        .load()
    )


def _run(task: LiveTask) -> Iterable[pa.RecordBatch]:
    return task.run()


class LiveSource(DataSource):
    """The data source."""

    @classmethod
    def name(cls) -> str:
        """Its name."""
        return _NAME

    def schema(self) -> StructType:
        """The rows' schema."""
        return StructType.fromJson(json.loads(self.options["schema"]))

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader."""
        del schema
        return _Reader(base64.b64decode(self.options[_TASKS]))


@dataclass
class _Task(InputPartition):
    """A partition: the task's number. All partitions share the tasks, as they share tables."""

    number: int


class _Reader(DataSourceReader):
    def __init__(self, content: bytes) -> None:
        self._content = content

    def partitions(self) -> list[InputPartition]:
        _, tasks = self._opened()
        return [_Task(number) for number in range(len(tasks))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Task)
        run, tasks = self._opened()
        yield from run(tasks[partition.number])

    def _opened(self) -> tuple[Callable[[LiveTask], Iterable[pa.RecordBatch]], list[LiveTask]]:
        opened: tuple[Callable[[LiveTask], Iterable[pa.RecordBatch]], list[LiveTask]]
        opened = pickle.loads(self._content)  # noqa: S301  # our driver has pickled it
        return opened
