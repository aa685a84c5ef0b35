"""What Spark computes: sums of the digests of the lake's rows, by tasks that return some numbers a chunk.

The rows are those of a `Snapshot` at the cut: an epoch before it, with the log's tail up to it (`at_cut`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.decode.spans import Int64s, of_numbers
from spark_consumers.decode.types import ColumnType, column_type
from spark_consumers.lake.comparison.chunks import Chunks
from spark_consumers.lake.comparison.forms import forms, joined
from spark_consumers.lake.comparison.sums import DIGEST, KeyAndDigest, Sums, digests, halves, split
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.snapshot.key_ranges import least_uuid

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

#: Ranges of a sample that Spark is given as conditions, so that it skips files; of more the tasks choose.
_CONDITIONS: Final = 50
_SUMS: Final = "chunk long, first long, second long"
_KEYS: Final = "chunk long, key array<string>, digest binary"
_VALUES: Final = "digest binary, forms array<string>, texts array<string>"
_MARKS: Final = "digest binary, is_wanted boolean"
#: The name of the column behind a table's own that has the digest of each row.
DIGESTS: Final = "_tuskline_digest"


@dataclass(frozen=True)
class Division:
    """A table's columns, its key, its chunks, and which of these are wanted, for a task. `key`: places among the columns."""

    kinds: tuple[ColumnType, ...]
    key: tuple[int, ...]
    chunks: Chunks
    wanted: frozenset[int]

    @classmethod
    def of(cls, table: TableVersion, chunks: Chunks, wanted: Collection[int]) -> "Division":
        """Of a table of the lake."""
        names = [name for name, *_ in table.layout]
        kinds = tuple(column_type(oid, typmod) for _, oid, typmod in table.layout)
        return cls(kinds, tuple(names.index(n) for n in table.key), chunks, frozenset(wanted))

    def digested(self, values: Sequence[pa.Array]) -> "Digested":
        """Of rows with these columns."""
        rows = len(values[0])
        columns = [forms(value, kind) for value, kind in zip(values, self.kinds, strict=True)]
        digested = digests(joined(columns, rows))
        if self.chunks.column:
            numbers = self.chunks.of_keys(values[self.key[0]])
        elif self.key:
            numbers = self.chunks.of_digests(digests(joined([columns[i] for i in self.key], rows)))
        else:
            numbers = self.chunks.of_digests(digested)
        return Digested(columns, digested, numbers)


@dataclass(frozen=True)
class Digested:
    """Rows: the forms of their columns, their digests end to end, and their chunks."""

    columns: list[pa.Array]
    rows: bytes
    chunks: Int64s

    def digests(self) -> pa.Array:
        """Their digests, as an array."""
        kind = pa.binary(DIGEST)
        buffers = [None, pa.py_buffer(self.rows)]
        return pa.Array.from_buffers(kind, len(self.chunks), buffers).cast(pa.binary())

    def rows_of(self, places: Sequence[int]) -> pa.Array:
        """The forms of these columns, a list for each row."""
        return _lists([self.columns[place] for place in places], len(self.chunks))


def sums_of(frame: "DataFrame", division: Division) -> dict[int, Sums]:
    """The sums of the table's wanted chunks; none of one without rows."""
    from pyspark.sql import functions as f

    digested = _digested(_chosen(frame, division), _Sums(division), _SUMS)
    # A sum of longs would overflow.
    halves = [f.sum(f.col(half).cast("decimal(20,0)")).alias(half) for half in ("first", "second")]
    found = digested.groupBy("chunk").agg(f.count("*").alias("rows"), *halves).collect()
    return {
        row.chunk: Sums().plus(Sums(row.rows, int(row.first), int(row.second)))
        for row in (_Row(*each) for each in found)
        if row.chunk in division.wanted
    }


class _Row(NamedTuple):
    chunk: int
    rows: int
    first: Decimal
    second: Decimal


def keys_of(frame: "DataFrame", division: Division) -> Mapping[KeyAndDigest, int]:
    """The keys and digests of all rows of the wanted chunks."""
    from pyspark.sql import functions as f

    digested = _digested(_chosen(frame, division), _Keys(division), _KEYS)
    chosen = digested.filter(f.col("chunk").isin(sorted(division.wanted)))
    found = chosen.groupBy("key", "digest").agg(f.count("*")).collect()
    return {(tuple(key), bytes(digest)): count for key, digest, count in found}


def values_of(
    frame: "DataFrame", division: Division, wanted: Collection[bytes]
) -> dict[bytes, tuple[list[str | None], list[str | None]]]:
    """The forms and the texts of the columns of the rows with these digests, by digest."""
    from pyspark.sql import functions as f

    digested = _digested(_chosen(frame, division), _Values(division), _VALUES)
    found = digested.filter(f.col("digest").isin(list(map(bytearray, wanted)))).collect()
    return {bytes(digest): (list(ours), list(texts)) for digest, ours, texts in found}


def rows_with(frame: "DataFrame", division: Division, wanted: frozenset[bytes]) -> "DataFrame":
    """The rows with these digests, of the wanted chunks, and behind their columns `DIGESTS`."""
    from pyspark.sql import functions as f

    chosen = _chosen(frame, division)
    made = _made(chosen, _Marks(division, wanted), _MARKS)
    names = [f.col(_quoted(name)) for name in frame.columns]
    marked = chosen.select(*names, made).filter("made.is_wanted")
    return marked.select(*names, f.col("made.digest").alias(DIGESTS))


def _digested(frame: "DataFrame", task: "_Task", kind: str) -> "DataFrame":
    """What the task makes of each row."""
    return frame.select(_made(frame, task, kind)).select("made.*")


def _made(frame: "DataFrame", task: "_Task", kind: str) -> "Column":
    """The column `made`: what the task makes of each row."""
    from pyspark.sql import functions as f
    from pyspark.sql.pandas.functions import arrow_udf

    # Spark takes the kind of the function from these types.
    def run(rows: pa.Array) -> pa.Array:
        return task(rows)

    made = arrow_udf(run, kind)  # type: ignore[call-overload]  # PySpark's stubs want the kind, and warn of it when it is given
    columns = (f.col(_quoted(name)).alias(f"c{i}") for i, name in enumerate(frame.columns))
    found: Column = made(f.struct(*columns)).alias("made")
    return found


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _chosen(frame: "DataFrame", division: Division) -> "DataFrame":
    """The rows of the wanted chunks, and maybe others."""
    from pyspark.sql import functions as f

    chunks = division.chunks
    if not chunks.column or len(division.wanted) == chunks.count:
        return frame
    column = f.col(_quoted(chunks.column))

    def bound(number: int) -> "str | int":
        return least_uuid(number) if chunks.is_uuid else number

    def condition(begin: int | None, end: int | None) -> "Column":
        found = column.isNotNull()
        if begin is not None:
            found &= column >= f.lit(bound(begin))
        return found if end is None else found & (column < f.lit(bound(end)))

    runs = _runs(sorted(division.wanted))
    if len(runs) > _CONDITIONS:
        runs = [(runs[0][0], runs[-1][1])]
    limits = [(chunks.limits(a)[0], chunks.limits(b)[1]) for a, b in runs]
    return frame.filter(reduce(lambda x, y: x | y, (condition(a, b) for a, b in limits)))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers: the first and the last of each."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


_Task = Callable[[pa.StructArray], pa.StructArray]


@dataclass(frozen=True)
class _Sums:
    """A task: the chunk of each row, and the halves of its digest."""

    division: Division

    def __call__(self, rows: pa.StructArray) -> pa.StructArray:
        found = self.division.digested(rows.flatten())
        both = halves(found.rows)
        columns = map(of_numbers, (found.chunks, both[:, 0], both[:, 1]))
        return pa.StructArray.from_arrays([*columns], ["chunk", "first", "second"])


@dataclass(frozen=True)
class _Keys:
    """A task: the chunk, the key and the digest of each row."""

    division: Division

    def __call__(self, rows: pa.StructArray) -> pa.StructArray:
        found = self.division.digested(rows.flatten())
        columns = [of_numbers(found.chunks), found.rows_of(self.division.key), found.digests()]
        return pa.StructArray.from_arrays(columns, ["chunk", "key", "digest"])


@dataclass(frozen=True)
class _Values:
    """A task: the digest, the forms and the texts of each row."""

    division: Division

    def __call__(self, rows: pa.StructArray) -> pa.StructArray:
        values = rows.flatten()
        found = self.division.digested(values)
        texts = [_texts(column) for column in values]
        columns = [
            found.digests(),
            found.rows_of(range(len(values))),
            _lists(texts, len(rows)),
        ]
        return pa.StructArray.from_arrays(columns, ["digest", "forms", "texts"])


@dataclass(frozen=True)
class _Marks:
    """A task: the digest of each row, and whether it is among those wanted."""

    division: Division
    wanted: frozenset[bytes]

    def __call__(self, rows: pa.StructArray) -> pa.StructArray:
        found = self.division.digested(rows.flatten())
        digests = found.digests()
        marks = pa.array([each in self.wanted for each in split(found.rows)], pa.bool_())
        return pa.StructArray.from_arrays([digests, marks], ["digest", "is_wanted"])


def _texts(column: pa.Array) -> pa.Array:
    """A column's values, for people."""
    return pa.array([_text(value) for value in column.to_pylist()], pa.string())


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return "\\x" + value.hex() if isinstance(value, bytes) else str(value)


def _lists(columns: Sequence[pa.Array], rows: int) -> pa.Array:
    """The values of the columns, a list for each row."""
    if not columns:
        return pc.fill_null(
            pa.nulls(rows, pa.list_(pa.string())), pa.scalar([], pa.list_(pa.string()))
        )
    width = len(columns)
    order = np.arange(width * rows).reshape(width, rows).T.ravel()
    whole = pa.concat_arrays([column.cast(pa.string()) for column in columns])
    ends = of_numbers(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
    return pa.ListArray.from_arrays(ends, whole.take(of_numbers(order)))
