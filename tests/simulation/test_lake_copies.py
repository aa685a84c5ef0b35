"""Copies in chunks whose attempts fail at each point: production's chunks, commits and hand-over, and the fold of what they lack.

A chunk's read fails; or its commit is made, and what comes behind it fails; its copy goes on and has failed by the time at which
the writer takes the chunk; a newer writer takes over. The table changes all the time. Whatever came in between: the rows of the
copy, with the changes that it lacks, are the table's; its files are there; and no chunk that was handed over is read again.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_consumers.fold.keyed import fold
from spark_consumers.lake.copy.bootstrap import TableCopier
from spark_consumers.lake.copy.chunk import NextChunk
from spark_consumers.lake.copy.initial_copy import CopyProgress
from spark_consumers.lake.copy.running import NotBegun
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.format.table_format import FileInfo, TableWrite, Written
from spark_consumers.lake.manifest.chain import COPIED, Manifest, TableVersion
from spark_consumers.lake.tables.chunks import missing
from spark_consumers.lake.writer.table_work import TableWork
from tests.simulation.test_lake_repeated_writes import Snapshot, ViolationError
from tests.unit.test_copy_chunks import COLUMNS, changes
from tests.unit.test_fold import KEY, D, I, U, apply
from walsender_bridge.errors import TusklineError, UnavailableError
from walsender_bridge.postgres.table_layout import RowRules

NAME = "s.public.t"
#: Where chunks end.
ENDS: Any = (10, 20, None)
KEPT, NOT_READ, BEHIND_COMMIT, LOST, NEW_WRITER = "kept", "not read", "behind", "lost", "new writer"
EVENTS = (KEPT, NOT_READ, BEHIND_COMMIT, LOST, NEW_WRITER)

Row = tuple[int, str, str, float]
Rows = dict[tuple[int, ...], Row]


class Source:
    """The table, and the log of its changes: each transaction has one."""

    def __init__(self) -> None:
        self.rows: Rows = {(key,): (key, "", "", 0.0) for key in range(30)}
        self.events: list[Any] = []
        self.lsns: list[int] = []
        self.lsn = 100
        self.choose = random.Random(7)

    def change(self) -> None:
        """Some rows of each chunk change, come and go, and move to another."""
        for kind in "UUUIDM":
            (key,) = self.choose.choice(sorted(self.rows))
            free = [k for k in range(30) if (k,) not in self.rows]
            self.commit(kind, key, self.choose.choice(free) if free else 100 + len(self.events))

    def commit(self, kind: str, key: int, free: int) -> None:
        target = key if kind in "UD" else free
        row = (target, f"v{len(self.events)}", "", 0.0)
        old = (key, None, None, None)
        event: Any = (U, row, (), None, "")
        if kind == "I":
            event = (I, row, (), None, "")
        elif kind == "D":
            event = (D, None, (), old, "K")
        elif kind == "M":
            event = (U, row, (), old, "K")
        if kind in "DM":
            del self.rows[key,]
        if kind != "D":
            self.rows[target,] = row
        self.events.append(event)
        self.lsns.append(self.lsn)
        self.lsn += 10


class Format:
    """The branches of tables, by folder. What counts as made already is told by production."""

    def __init__(self) -> None:
        self.rules = object.__new__(IcebergFormat)
        self.rules._lake = "lake"
        self.branches: dict[str, Snapshot] = {}
        self.files: dict[int, list[FileInfo]] = {}
        self.ids = itertools.count(1)

    def write(self, folder: str, _: int, write: TableWrite) -> Written:
        head = self.branches.get(folder)
        if head is not None and self.rules._is_done(head, folder, write):
            return Written(head.id, head.of.stage)
        made = Snapshot(self.rules._identity(folder), next(self.ids), write)
        self.files[made.id] = [*(self.files[write.base] if write.base else ()), *write.rows]
        assert sum(file.rows for file in self.files[made.id]) == write.count
        self.branches[folder] = made
        return Written(made.id, write.stage)

    def scan(self, _: str, snapshot: int) -> list[FileInfo]:
        return self.files[snapshot]


class Copier(TableCopier):
    """Reads chunks of a source."""

    def __init__(self, root: Path, source: Source, tables: Any) -> None:
        self._root, self._format, self.source = root, tables, source
        self.content: dict[str, Rows] = {}
        self.event = ""
        self.reads = 0

    def _read(self, table: Any, folder: str, chunk: Any, progress: Any) -> Any:
        if self.event == NOT_READ:
            raise UnavailableError("the server does not answer")
        self.reads += 1
        (begin, end), term = chunk.ranges, table.request.term
        path = Path(folder, "data", f"copy-t{term}-{self.reads}.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        rows = {
            key: row
            for key, row in self.source.rows.items()
            if key[0] >= begin and (end is None or key[0] < end)
        }
        self.content[str(path)] = rows
        return [FileInfo(str(path), len(rows), 0)], []

    def _indexed(self, *_: Any) -> Any:
        if self.event == BEHIND_COMMIT:
            raise UnavailableError("no space left on device")
        return SimpleNamespace(runs=())


class Run:
    """One copy."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.source, self.tables = Source(), Format()
        self.copier = Copier(root, self.source, self.tables)
        self.results: list[Any] = []
        self.work = object.__new__(TableWork)
        self.work.__dict__.update(
            _arrived={},
            _arrived_at={},
            _copy_after={},
            _copies=self,
            _not_level=Counter(),
            _refused={},
            _rules=lambda _: RowRules(),
        )
        self.head = Manifest("lake", 1, 1, 0, 1, 0.0, 0.0)
        self.failed = 0

    # What a writer asks of its copies.

    def finished(self) -> Iterable[Any]:
        found, self.results = self.results, []
        return [(NAME, result) for result in found]

    def drop(self, name: str) -> None:
        raise ViolationError(f"the copy of {name} was given up")

    def round(self, event: str) -> None:
        """The next chunk is read, and the writer takes what has come."""
        self.source.change()
        if event == NEW_WRITER:
            self.take_over()
        partial = self.head.copies.get(NAME)
        before = partial or TableVersion(
            *(f"t%t{self.head.term}-{self.copier.reads:x}", "iceberg", 0, "", ("id",), (), 0, 0, 0),
            relation_id=1,
            state=COPIED,
        )
        number = len(before.chunks)
        begin: Any = ENDS[number - 1] if number else -1000
        chunk = NextChunk(ENDS[number], (begin, ENDS[number]))
        snapshot = SimpleNamespace(lsn=self.source.lsn)
        request = SimpleNamespace(term=self.head.term)
        table: Any = SimpleNamespace(name=NAME, request=request, snapshot=snapshot)
        self.copier.event = event
        try:
            self.results.append(self.copier._with_next(table, before, chunk, CopyProgress()))
        except TusklineError as error:
            self.failed += event == BEHIND_COMMIT
            self.results.append(error)
        if event == LOST:
            self.results.append(NotBegun(UnavailableError("the server was restarted")))
        status: Any = SimpleNamespace(streams={})
        self.head = self.work._with_arrived(self.head, status)
        self.work._arrived = {}

    def take_over(self) -> None:
        """The branch of the new term begins where the newest link is."""
        self.head = replace(self.head, term=self.head.term + 1)
        folders = {str(self.root / copy.path): copy for copy in self.head.copies.values()}
        kept = {copy.snapshot_id for copy in folders.values()}
        self.tables.branches = {
            folder: Snapshot("", copy.snapshot_id, TableWrite(-1, None, ""))
            for folder, copy in folders.items()
        }
        assert kept <= self.tables.files.keys()

    def check(self) -> None:
        copy = self.head.copies[NAME]
        files = self.tables.files[copy.snapshot_id]
        if lost := [file.path for file in files if not Path(file.path).exists()]:
            raise ViolationError(f"files of the copy were removed: {lost}")
        if self.copier.reads > len(ENDS) + self.failed:
            raise ViolationError("a chunk that was handed over is read again")
        copied: Rows = {}
        for file in files:
            copied |= self.copier.content[file.path]
        self.source.change()
        batch = changes(self.source.events, self.source.lsns)
        lacks, reason = missing(batch, copy.start_lsn, copy.chunks, ("id",), COLUMNS)
        assert reason is None
        try:
            found = apply(copied, fold([lacks], KEY))
        except AssertionError:
            found = {}
        if found != self.source.rows:
            raise ViolationError("the copy and what it lacks are not the table")


def ran(root: Path, events: Sequence[str]) -> None:
    run = Run(root)
    for event in itertools.chain(events, itertools.repeat(KEPT, len(ENDS))):
        run.round(event)
        copy = run.head.copies.get(NAME)
        if copy is not None and not copy.is_partial:
            break
    run.check()


def explored(root: Path, length: int) -> None:
    """Run every sequence of so many rounds."""
    for number, events in enumerate(itertools.product(EVENTS, repeat=length)):
        try:
            ran(root / str(number), events)
        except ViolationError as error:
            raise ViolationError(f"{error}, after {events}") from None


@pytest.mark.parametrize("length", [3, pytest.param(4, marks=pytest.mark.long)])
def test_chunks_whose_attempts_fail_make_the_table(tmp_path, length):
    explored(tmp_path, length)


def test_a_chunk_that_is_taken_over_from_an_earlier_attempt_is_found(tmp_path, monkeypatch):
    really = IcebergFormat._is_done

    def broken(self: Any, snapshot: Any, path: str, write: TableWrite) -> bool:
        return really(self, snapshot, path, replace(write, stage="a copy's"))

    monkeypatch.setattr(IcebergFormat, "_is_done", broken)
    with pytest.raises(ViolationError, match=r"not the table|were removed"):
        explored(tmp_path, 3)


def test_a_chunk_that_is_lost_as_the_next_one_fails_is_found(tmp_path, monkeypatch):
    really = Run.finished
    monkeypatch.setattr(Run, "finished", lambda run: list(really(run))[-1:])
    with pytest.raises(ViolationError, match="is read again"):
        explored(tmp_path, 3)
