"""A job whose tasks die while they write, once each: Spark runs them again. Prints the files that were written.

python -m tests.support.retry_job FOLDER
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import TaskContext

from spark_consumers.lake.format.data_files import write_table
from spark_consumers.lake.format.table_format import FileInfo
from spark_consumers.spark.session import session


def write(path: str) -> FileInfo:
    """Write a file; the first attempt ends in the middle, with its process."""
    context = TaskContext.get()
    assert context is not None
    if context.attemptNumber() == 0:
        pq.ParquetWriter = _half
    return write_table(path, pa.table({"id": range(1000)}))


def _half(file: Any, *_: Any, **options: Any) -> None:
    del options
    file.write(b"PAR1 and some rows")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str) -> None:
    # A task may fail twice in this local cluster of threads.
    spark = session("retry", "local[2,3]", conf={"spark.log.level": "OFF"})
    paths = [f"{folder}/data/{number:020d}-t1-a1.parquet" for number in range(2)]
    made = spark.sparkContext.parallelize(paths, 2).map(write).collect()
    spark.stop()
    print(json.dumps([asdict(file) for file in made]))


if __name__ == "__main__":
    main(sys.argv[1])
