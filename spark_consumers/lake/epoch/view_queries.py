"""Statements over DataFrames, for the views of an epoch."""

import threading
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class ViewQueries:
    """Runs statements over DataFrames, which have temporary views of their own until `close`. Safe to use from several threads.

    `spark.sql(text, name=frame)` would drop them at once, and whoever drops a temporary view has the rows of its DataFrame
    removed from the cache.
    """

    def __init__(self, spark: "SparkSession") -> None:
        self._spark = spark
        self._names: dict[int, str] = {}
        #: Kept, so that no other one gets its identity.
        self._frames: list[DataFrame] = []
        self._kept: list[DataFrame] = []
        self._lock = threading.Lock()

    def query(self, text: str, frames: Mapping[str, "DataFrame"]) -> "DataFrame":
        """The statement with these frames in the places `{name}`."""
        used = {name: frame for name, frame in frames.items() if f"{{{name}}}" in text}
        return self._spark.sql(text.format(**{n: self._name(frame) for n, frame in used.items()}))

    def _name(self, frame: "DataFrame") -> str:
        with self._lock:
            if id(frame) not in self._names:
                self._frames.append(frame)
                name = self._names[id(frame)] = f"tuskline_{uuid.uuid4().hex}"
                frame.createOrReplaceTempView(name)
            return self._names[id(frame)]

    def kept(self, frame: "DataFrame") -> "DataFrame":
        """The frame, whose rows Spark's cache keeps until `release`.

        Spark has one entry for equal plans. So a view may have the rows of another one's, and whoever removes them while that one's query
        still runs has them cached a second time, by nobody's name.
        """
        frame.cache()
        with self._lock:
            self._kept.append(frame)
        return frame

    def release(self) -> None:
        """Remove the rows of all `kept` frames, when no query runs that may read them."""
        # Those that read others first, or Spark would plan them again without these.
        while self._kept:
            self._kept.pop().unpersist()

    def close(self) -> None:
        """Drop the temporary views, and what is kept."""
        self.release()
        for name in self._names.values():
            self._spark.catalog.dropTempView(name)
        self._names.clear()
        self._frames.clear()
