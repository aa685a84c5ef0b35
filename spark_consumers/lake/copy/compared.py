"""Compares a table of the lake with its source at one snapshot: which of its chunks differ, and which rows of these.

First the source computes the sums of all chunks, one query after the other, and Spark those of the lake's snapshot, in one job. Then the digests
of the rows of chunks that differ are read on both sides, of as many chunks at a time as the driver's memory is for.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from spark_consumers.lake.comparison.chunks import Chunks, buckets_of
from spark_consumers.lake.comparison.lake import Division, keys_of, sums_of
from spark_consumers.lake.comparison.level import Level, is_too_much, level, twice
from spark_consumers.lake.comparison.leveled import Counts
from spark_consumers.lake.comparison.source import Part, SourceRows
from spark_consumers.lake.comparison.sums import KeyAndDigest, RowDifference, Sums, differing
from spark_consumers.lake.copy.initial_copy import CopyProgress
from spark_consumers.lake.manifest.chain import TableVersion
from spark_consumers.snapshot.exported import PublishedTable
from walsender_bridge.errors import CorruptError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Bytes of a table, as PostgreSQL stores it, for one chunk, and for one query of a table in buckets.
CHUNK_BYTES: Final = 32 << 20
#: The same of a bucket, of which the digests are read if it differs: the whole table is read for that, once for as many as possible.
BUCKET_BYTES: Final = 1 << 20
#: Rows of differing chunks whose digests are in the driver's memory at a time, about.
_NARROWED: Final = 500_000


class CopiedInsteadError(Exception):
    """The table has to be copied; the text says why."""


@dataclass
class Found:
    """What is to be written: for each range that differs (all buckets are 0) what it lacks; and of all chunks that differ the source's sums."""

    chunks: Chunks
    sums: Mapping[int, Sums]
    levels: dict[int, Level] = field(default_factory=dict)

    def add(self, number: int, more: Level) -> None:
        """What a range lacks, or some buckets."""
        self.levels[number] = self.levels.get(number, Level()).plus(more)

    @property
    def whole(self) -> Level:
        """Of all chunks."""
        found = Level()
        for each in self.levels.values():
            found = found.plus(each)
        return found


@dataclass
class Compared:
    """One table, as `before` has it, beside `published` at the snapshot of `rows`.

    `check` raises once that is not wanted any more. `described`: what Spark's UI says of the jobs within.
    """

    rows: SourceRows
    published: PublishedTable
    before: TableVersion
    progress: CopyProgress
    check: Callable[[], None]
    described: Callable[[str], AbstractContextManager[None]]
    counts: Counts

    def __post_init__(self) -> None:
        self._relations = self.rows.relations(self.published)

    def run(self, frame: "DataFrame") -> Found:
        """What differs in `frame`, the lake's rows. Raises `CopiedInsteadError` if that is too much (`is_too_much`)."""
        chunks = self._divided()
        sums = self._sums(chunks)
        if beyond := sum(each.beyond for each in sums.values()):
            raise CopiedInsteadError(f"{beyond} of its rows have an unrepresentable value")
        division = Division.of(self.before, chunks, range(chunks.count))
        with self.described("compare"):
            theirs = sums_of(frame, division)
        bad = [n for n, each in sums.items() if not each.equals(theirs.get(n, Sums()))]
        self.counts.chunks, self.counts.different_chunks = chunks.count, len(bad)
        self.counts.rows = sum(each.rows for each in sums.values())
        found = Found(chunks, {n: sums[n] for n in bad})
        for some in in_groups(bad, [sums[n].rows for n in bad], _NARROWED):
            self._narrow(frame, found, some)
            if is_too_much(found.whole, max(self.counts.rows, self.before.rows)):
                raise CopiedInsteadError("too many of its rows differ")
        return found

    def _divided(self) -> Chunks:
        """How the table is divided."""
        chunks = self.rows.divided(self.published, CHUNK_BYTES)
        if chunks.column:
            return chunks
        return buckets_of(sum(r.blocks * r.block_size for r in self._relations), BUCKET_BYTES)

    def parts(self, chunks: Chunks, numbers: Sequence[int]) -> list[Part]:
        """The parts of the source that have the rows of these chunks: of buckets, all of it."""
        if not chunks.column:
            return list(self.rows.blocks(self.published, CHUNK_BYTES))
        relations = [(r.schema, r.name, r.oid) for r in self._relations]
        return [part for number in numbers for part in chunks.ranges(number, relations)]

    def _sums(self, chunks: Chunks) -> dict[int, Sums]:
        """The source's sums of all chunks, one query after the other."""
        numbers = range(chunks.count)
        groups: list[list[int]] = [[n] for n in numbers] if chunks.column else [[]]
        work = [(group, part) for group in groups for part in self.parts(chunks, group)]
        self.progress.begin(len(work))
        found: dict[int, Sums] = dict.fromkeys(numbers, Sums())
        for group, part in work:
            self.check()
            sums = self.rows.sums(self.published, chunks, None, part)
            for bucket, each in sums:
                number = group[0] if group else bucket
                found[number] = found[number].plus(each)
            self.progress.add(sum(each.rows for _, each in sums), 0)
        return found

    def _narrow(self, frame: "DataFrame", found: Found, numbers: Sequence[int]) -> None:
        """Find what these chunks lack, by the digests of their rows."""
        chunks = found.chunks
        source: dict[KeyAndDigest, int] = {}
        for part in self.parts(chunks, numbers):
            self.check()
            for row, count in self.rows.keys(self.published, chunks, numbers, part):
                source[row] = source.get(row, 0) + count
        with self.described("compare rows"):
            lake = keys_of(frame, Division.of(self.before, chunks, numbers))
        differences = differing(source, lake)
        if twice(differences):
            raise CopiedInsteadError("a key occurs twice in the source or in the lake")
        self.counts.read += max(sum(source.values()), sum(lake.values()))
        by_range: dict[int, list[RowDifference]] = defaultdict(list)
        for each in differences:
            by_range[chunks.of_form(each.key[0]) if chunks.column else 0].append(each)
        for number, its in by_range.items():
            found.add(number, level(its))

    def check_level(self, found: Found, frame: "DataFrame") -> None:
        """See that what was written, and is in `frame`, has made the chunks level. Raises `CorruptError`."""
        wanted = sorted(found.sums)
        division = Division.of(self.before, found.chunks, wanted)
        with self.described("compare again"):
            now = sums_of(frame, division)
        wrong = [n for n in wanted if not found.sums[n].equals(now.get(n, Sums()))]
        if wrong:
            raise CorruptError(
                f"{len(wrong)} of {len(wanted)} chunks differ after the rows were written",
                where=self.published.full_name,
            )


def in_groups(numbers: Sequence[int], rows: Sequence[int], most: int) -> list[list[int]]:
    """The chunks in groups of at most so many rows, or of one chunk. `rows`: how many each has."""
    groups: list[list[int]] = []
    total = 0
    for number, its in zip(numbers, rows, strict=True):
        if not groups or total + its > most:
            groups.append([])
            total = 0
        groups[-1].append(number)
        total += its
    return groups
