"""Which rows of a table are alive: what its runs say last of each data file's deletion vector."""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from spark_consumers.lake.format.position_deletes import read_removed
from spark_consumers.lake.format.puffin import positions_of
from spark_consumers.lake.format.table_format import Vector
from spark_consumers.lake.index.run_format import DataFile, Tables
from spark_consumers.lake.store.place import Place

Bools = npt.NDArray[np.bool_]
UInt32s = npt.NDArray[np.uint32]


class Liveness:
    """The state of a table's data files after its runs, the oldest first; vectors are read when they are needed.

    Every data file has a number here, which is the same for all runs. Raises `CorruptError` for damaged vectors.
    """

    def __init__(self, folder: str | Place, runs: Iterable[Tables]) -> None:
        self._folder = folder
        self.files: list[DataFile] = []
        self.vectors: dict[str, Vector] = {}
        self.gone: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._loaded: dict[str, BitMap64] = {}
        for tables in runs:
            self.add(tables)

    def add(self, tables: Tables) -> None:
        """Apply what a newer run says."""
        for file in tables.files:
            self._numbers[file.name] = len(self.files)
            self.files.append(file)
        for vector in tables.vectors:
            self.vectors[vector.file] = vector
            self._loaded.pop(vector.file, None)
        self.gone |= tables.gone

    def numbers(self, files: Sequence[DataFile]) -> npt.NDArray[np.uint32]:
        """The numbers here of a run's files."""
        return np.array([self._numbers[file.name] for file in files], np.uint32)

    def number(self, name: str) -> int | None:
        """The number of a data file; None if no run has it."""
        return self._numbers.get(name)

    def current(self) -> list[DataFile]:
        """The table's data files."""
        return [file for file in self.files if file.name not in self.gone]

    def removed(self, name: str) -> BitMap64:
        """The positions that are removed from a data file."""
        if name not in self._loaded:
            vector = self.vectors.get(name)
            self._loaded[name] = (
                BitMap64() if vector is None else read_removed(self._folder, vector)
            )
        return self._loaded[name]

    def alive(self, files: UInt32s, positions: UInt32s) -> Bools:
        """Which of these rows, each a file's number and a position, are alive."""
        found = np.ones(len(files), np.bool_)
        order = np.argsort(files, kind="stable")
        edges = np.flatnonzero(np.diff(files[order], prepend=-1, append=-1))
        for begin, end in pairwise(edges.tolist()):
            here = order[begin:end]
            name = self.files[files[here[0]]].name
            if name in self.gone:
                found[here] = False
            elif name in self.vectors:
                wanted = positions[here]
                removed = self.removed(name) & BitMap64(wanted.astype(np.uint64))
                if removed:
                    found[here] = ~np.isin(wanted, positions_of(removed))
        return found


def kept(liveness: Liveness, files: Sequence[DataFile], older: Collection[str]) -> Tables:
    """What a merged run says: of its own files, which are `files`, and of the `older` runs' files."""
    names = {file.name for file in files} | set(older)
    return Tables(
        tuple(files),
        tuple(v for name, v in liveness.vectors.items() if name in names - liveness.gone),
        frozenset(liveness.gone & set(older)),
    )
