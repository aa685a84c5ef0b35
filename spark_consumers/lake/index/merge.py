"""Runs from the rows of data files, and one run from several: sorted, without what is dead, in bounded memory."""

import uuid
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from spark_consumers.lake.format import checksums
from spark_consumers.lake.index.digests import Digests
from spark_consumers.lake.index.liveness import Liveness, kept
from spark_consumers.lake.index.plan import merged
from spark_consumers.lake.index.run_format import (
    BLOCK,
    RECORD,
    DataFile,
    Records,
    Run,
    RunReader,
    Tables,
    open_runs,
    write_run,
)
from spark_consumers.lake.store.place import place

#: Blocks that are merged together, of all runs: about a million records.
_AT_ONCE = 1500


def records_of(digests: Digests, file: int, positions: np.ndarray | None = None) -> Records:
    """A record for each row of a data file, in the order of the rows; `positions`: theirs, if it is not all rows."""
    records = np.zeros(len(digests), RECORD)
    records["high"], records["low"], records["file"] = digests.high, digests.low, file
    records["position"] = np.arange(len(digests)) if positions is None else positions
    return records


def in_order(records: Records) -> Records:
    """The records in the order of their digests."""
    # `take` is ten times as fast as an index, for records.
    return records.take(Digests(records["high"], records["low"]).order())


def append(
    folder: str, runs: Sequence[Run], name: str, records: Records, tables: Tables
) -> tuple[Run, ...]:
    """The table's runs with a new one, which is merged with the newest others if they are small enough.

    `records`, in any order, are of the files that `tables` names. The new run is written as `name`. Raises `IndexDamagedError`, and
    `CorruptError` for damaged vectors.
    """
    weight = len(records) + len(tables.files) + len(tables.vectors) + len(tables.gone)
    old = len(runs) - merged([run.weight for run in runs], weight)
    if old == len(runs):
        return (*runs, write_run(folder, name, [in_order(records)], tables))
    with open_runs(folder, [run.name for run in runs]) as readers:
        older = {f.name for reader in readers[:old] for f in reader.tables.files}
        source = _Source(readers[old:], records, tables)
        return (*runs[:old], _write_merged(folder, name, source, older, [*readers[:old]]))


def append_parts(
    folder: str,
    runs: Sequence[Run],
    name: str,
    parts: Iterable[tuple[Records, tuple[DataFile, ...]]],
    tables: Tables,
) -> tuple[Run, ...]:
    """As `append`, for more records than are held at once: they come in parts, each of the data files beside it.

    `tables`: what is known besides of the table's files. Each part is sorted in a run of its own beside `name` until all are merged.
    """
    own = [*_sorted_parts(folder, name, parts)]
    try:
        weight = sum(run.weight for run in own) + len(tables.vectors) + len(tables.gone)
        old = len(runs) - merged([run.weight for run in runs], weight)
        with open_runs(folder, [run.name for run in (*runs, *own)]) as readers:
            source = _Source(readers[old:], np.zeros(0, RECORD), tables)
            # What is said of files of other runs stays said, also of runs that are not among these.
            said = {*tables.gone, *(vector.file for vector in tables.vectors)}
            older = {f.name for reader in readers[:old] for f in reader.tables.files} | said
            here = {f.name for reader in readers[old:] for f in reader.tables.files}
            return (*runs[:old], _write_merged(folder, name, source, older - here, readers[:old]))
    finally:
        for run in own:
            checksums.remove(place(folder) / run.name)


def _sorted_parts(
    folder: str, name: str, parts: Iterable[tuple[Records, tuple[DataFile, ...]]]
) -> Iterator[Run]:
    # Another attempt of the task has parts of its own, which it removes.
    stem = f"{name.removesuffix('.run')}-{uuid.uuid4().hex}"
    for number, (records, files) in enumerate(parts):
        yield write_run(folder, f"{stem}.{number}.run", [in_order(records)], Tables(files))


def merge_all(folder: str, names: Sequence[str], name: str, vectors: Tables) -> Run:
    """One run of these, which are the first of the table; `vectors`: what is known besides of its files."""
    with open_runs(folder, names) as readers:
        source = _Source(readers, np.zeros(0, RECORD), vectors)
        return _write_merged(folder, name, source, frozenset(), [])


def merge_some(folder: str, names: Sequence[str], begin: int, end: int, name: str) -> Run:
    """One run of those from `begin` to `end` (exclusive) of a table's runs, the oldest first; it takes their place."""
    with open_runs(folder, names[:end]) as readers:
        older = {f.name for reader in readers[:begin] for f in reader.tables.files}
        source = _Source(readers[begin:], np.zeros(0, RECORD), Tables())
        return _write_merged(folder, name, source, older, readers[:begin])


class _Source:
    """What is merged: runs, and new records with their tables."""

    def __init__(self, readers: Sequence[RunReader], records: Records, tables: Tables) -> None:
        self.readers, self.records, self.tables = readers, in_order(records), tables

    def parts(self, liveness: Liveness) -> Iterator[Records]:
        """All records in the order of their digests, a part at a time, with the numbers that `liveness` has for files."""
        # Of a run whose files are all gone, nothing is read.
        readers = [
            reader
            for reader in self.readers
            if any(file.name not in liveness.gone for file in reader.tables.files)
        ]
        numbers = [liveness.numbers(reader.tables.files) for reader in readers]
        new = liveness.numbers(self.tables.files)
        fences = [reader.fences for reader in readers]
        edges = np.sort(np.concatenate([*fences, self.records["high"][::BLOCK]]))
        # Equal digests are in one part, however many they are.
        cuts = np.unique(edges[_AT_ONCE::_AT_ONCE]).tolist()
        for low, high in zip([0, *cuts], [*cuts, None], strict=True):
            found = [
                _numbered(reader.between(low, high), number)
                for reader, number in zip(readers, numbers, strict=True)
            ]
            begin, end = np.searchsorted(
                self.records["high"], np.array([low, high or 0], np.uint64), "left"
            )
            mine = self.records[begin : end if high is not None else None]
            found.append(_numbered(mine, new))
            yield found[0] if len(found) == 1 else in_order(np.concatenate(found))


def _numbered(records: Records, numbers: np.ndarray) -> Records:
    records = records.copy()
    if len(records):
        records["file"] = numbers[records["file"]]
    return records


def _write_merged(
    folder: str,
    name: str,
    source: _Source,
    older: "set[str] | frozenset[str]",
    others: Sequence[RunReader],
) -> Run:
    known = [reader.tables for reader in (*others, *source.readers)]
    liveness = Liveness(folder, [*known, source.tables])
    own = {f.name for tables in (*known[len(others) :], source.tables) for f in tables.files}
    files: list[DataFile] = [f for f in liveness.current() if f.name in own]
    numbers = np.zeros(len(liveness.files), np.uint32)
    for number, file in enumerate(files):
        found = liveness.number(file.name)
        assert found is not None
        numbers[found] = number

    def living() -> Iterator[Records]:
        for part in source.parts(liveness):
            alive = part.take(np.flatnonzero(liveness.alive(part["file"], part["position"])))
            alive["file"] = numbers[alive["file"]]
            yield alive

    return write_run(folder, name, living(), kept(liveness, files, older))
