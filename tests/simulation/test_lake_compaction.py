"""Offers of maintainers under everything that a table meets between a plan and the decision: production's decisions, in memory.

A maintainer prepares an offer; then epochs insert, remove and rewrite rows, the table is emptied, copied again, or gets a
column, an epoch is pinned, another maintainer offers the same, and writers are taken over, with and without the loss of the
newest links. Then the offer is decided on, by the writer or by one that was suspended before. After each step has to hold:

- the table's rows are those that were inserted and not removed, each where the row index says that it is;
- every snapshot that is in a link or a pin has the rows and the files that it had.

All of this also with a row index that is wrong: that of a lake that forgets which files an offer has replaced.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from pyroaring import BitMap64

from spark_consumers.lake.compaction import decide as decisions
from spark_consumers.lake.compaction.decide import Accepted, CurrentFile, Refused
from spark_consumers.lake.compaction.offer import NewFile, Offer, OldFile, bitmap
from spark_consumers.lake.manifest.table_version import LIVE, TableVersion

TABLE = "s.p.docs"


class ViolationError(Exception):
    """A reader gets other rows than PostgreSQL had, or the index another place."""


@dataclass(frozen=True)
class Snapshot:
    """A table's files, each with the name of its vector and what that removes, and the rows that it has to have."""

    table: TableVersion
    files: Mapping[str, tuple[str, frozenset[int]]]
    rows: frozenset[int]


@dataclass
class Lake:
    """One table, its writer, and writers that were suspended when they were taken over."""

    copy_on_write: bool = False
    #: Whether the row index goes on to have the files that an accepted offer has replaced.
    forgets: bool = False
    #: Files that only the row index has.
    strays: dict[str, tuple[str, frozenset[int]]] = field(default_factory=dict)
    #: The rows of each file that is there, by position.
    disk: dict[str, list[int]] = field(default_factory=dict)
    links: list[Snapshot] = field(default_factory=list)
    pins: list[Snapshot] = field(default_factory=list)
    term: int = 1
    names: Any = field(default_factory=lambda: itertools.count(1))
    next_row: int = 1
    offers: list[Offer] = field(default_factory=list)
    suspended: list[tuple[int, Snapshot]] = field(default_factory=list)
    accepted: int = 0
    #: Offers that a writer of this term has tried to commit.
    committed: set[tuple[int, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        table = TableVersion("docs%1", "iceberg", 1, "", ("id",), (), 0, 0, 0, 1, runs=())
        self.links.append(Snapshot(table, {}, frozenset()))
        for _ in range(4):
            self.insert(4)
        for nth in (1, 5, 6, 11):
            self.remove(nth)

    @property
    def head(self) -> Snapshot:
        return self.links[-1]

    @property
    def indexed(self) -> dict[str, tuple[str, frozenset[int]]]:
        """The files that the row index has."""
        return {**self.strays, **self.head.files}

    def name(self, kind: str) -> str:
        return f"{kind}-t{self.term}-{next(self.names)}"

    def publish(self, **changes: Any) -> None:
        self.links.append(replace(self.head, **changes))

    # -- what an epoch does -------------------------------------------------------------------------

    def insert(self, count: int) -> None:
        rows = list(range(self.next_row, self.next_row + count))
        self.next_row += count
        file = self.name("data")
        self.disk[file] = rows
        files = {**self.head.files, file: ("", frozenset[int]())}
        self.publish(files=files, rows=self.head.rows | set(rows))

    def find(self, row: int) -> tuple[str, int]:
        """Where the row index has it: what was written of a file, without what is removed."""
        found = [
            (file, position)
            for file, (_, removed) in self.head.files.items()
            for position, each in enumerate(self.disk[file])
            if each == row and position not in removed
        ]
        if len(found) != 1:
            raise ViolationError(f"row {row} is at {found}")
        return found[0]

    def remove(self, nth: int) -> None:
        """Remove a row of those that are there, the nth."""
        if not self.head.rows:
            return
        row = sorted(self.head.rows)[nth % len(self.head.rows)]
        file, position = self.find(row)
        files = dict(self.head.files)
        removed = files.pop(file)[1] | {position}
        living = [r for p, r in enumerate(self.disk[file]) if p not in removed]
        if self.copy_on_write and living:
            made = self.name("data")
            self.disk[made] = living
            files[made] = ("", frozenset())
        elif living:
            files[file] = (self.name("vector"), removed)
        self.publish(files=files, rows=self.head.rows - {row})

    def update(self) -> None:
        self.remove(3)
        self.insert(1)

    def rewrite(self) -> None:
        """An epoch makes its two oldest files one."""
        files, made = dict(self.head.files), self.name("data")
        old = list(files)[:2]
        self.disk[made] = [r for file in old for r in self.living(file)]
        for file in old:
            del files[file]
        self.publish(files={**files, made: ("", frozenset())})

    def living(self, file: str) -> list[int]:
        return [r for p, r in enumerate(self.disk[file]) if p not in self.head.files[file][1]]

    def truncate(self) -> None:
        self.publish(files={}, rows=frozenset())
        self.insert(2)

    def copy_again(self) -> None:
        table = replace(self.head.table, path=self.name("docs%"))
        file = self.name("data")
        self.disk[file] = sorted(self.head.rows)
        self.strays.clear()
        self.publish(table=table, files={file: ("", frozenset())})

    def add_column(self) -> None:
        self.publish(table=replace(self.head.table, schema_hash=self.name("hash")))

    def pause(self) -> None:
        state = "paused" if self.head.table.state == LIVE else LIVE
        self.publish(table=replace(self.head.table, state=state))

    def pin(self) -> None:
        self.pins.append(self.head)

    def take_over(self) -> None:
        self.suspended.append((self.term, self.head))
        self.term += 1
        self.publish()

    def lose_links(self) -> None:
        """The three newest links are lost and given up; a new writer goes on from the one before."""
        self.suspended.append((self.term, self.head))
        self.term += 1
        del self.links[max(1, len(self.links) - 3) :]
        self.publish()

    # -- maintainers --------------------------------------------------------------------------------

    def plan(self) -> None:
        """Prepare an offer that makes all files two."""
        old: list[OldFile] = []
        new: list[NewFile] = []
        indexed = self.indexed
        files = [file for file in indexed if file in self.disk]
        half = (len(files) + 1) // 2
        for number, group in enumerate(part for part in (files[:half], files[half:]) if part):
            then = [(f, len(self.disk[f]), indexed[f][0], BitMap64(indexed[f][1])) for f in group]
            old += decisions.mapped(then, number)
            made = self.name("compacted")
            self.disk[made] = [
                row
                for file in group
                for position, row in enumerate(self.disk[file])
                if position not in indexed[file][1]
            ]
            new.append(NewFile(made, len(self.disk[made]), 0))
        table = self.head.table
        self.offers.append(
            Offer(
                self.name("offer"),
                TABLE,
                table.path,
                self.term,
                table.key,
                tuple(old),
                tuple(new),
                "run",
                1,
            )
        )

    def deliver(self, which: int) -> None:
        """The writer decides on an offer."""
        if which < len(self.offers):
            offer = self.offers[which]
            files = self.decided(offer, self.term, self.head)
            if files is None:
                self.refused(offer, self.term)
            else:
                self.accepted += 1
                if self.forgets:
                    self.strays |= {n: f for n, f in self.head.files.items() if n not in files}
                self.publish(files=files)

    def suspended_decides(self) -> None:
        """A writer that was taken over goes on with an offer that it had read: its commit is refused."""
        for term, head in self.suspended:
            for offer in self.offers:
                if self.decided(offer, term, head) is None:
                    self.refused(offer, term)

    def decided(self, offer: Offer, term: int, head: Snapshot) -> Any:
        """The files of the table with the offer; None if it is refused. As `Compactions` does it."""
        current = (
            {
                file: CurrentFile(vector, partial(BitMap64, gone))
                for file, (vector, gone) in {**self.strays, **head.files}.items()
            }
            if head.table.path == offer.path
            else {}
        )
        verdict = decisions.decide(
            offer,
            head.table,
            term,
            current,
            head.files.keys,
            copies_on_write=self.copy_on_write,
        )
        if isinstance(verdict, Refused) or any(f.name not in self.disk for f in offer.files):
            return None
        removed = verdict.removed
        old = {file.name for file in offer.old}
        files = {name: each for name, each in head.files.items() if name not in old}
        for number, file in enumerate(offer.files):
            gone = frozenset(removed.get(number, ()))
            files[file.name] = (self.name("vector") if gone else "", gone)
        self.committed.add((term, offer.name))
        return files

    def refused(self, offer: Offer, term: int) -> None:
        """Remove its files: those of an offer that may have been accepted only if no snapshot needs them."""
        needed = {name for each in (*self.links, *self.pins) for name in each.files}
        for file in offer.files:
            unseen = removes(offer, term, (term, offer.name) in self.committed)
            if unseen or file.name not in needed:
                self.disk.pop(file.name, None)

    # -- what has to hold ---------------------------------------------------------------------------

    def check(self) -> None:
        for each in (*self.links, *self.pins):
            lost = [file for file in each.files if file not in self.disk]
            if lost:
                raise ViolationError(f"{lost} were removed, and a snapshot needs them")
            rows = [
                row
                for file, (_, gone) in each.files.items()
                for position, row in enumerate(self.disk[file])
                if position not in gone
            ]
            if sorted(rows) != sorted(each.rows):
                raise ViolationError(f"a snapshot has {sorted(rows)}, not {sorted(each.rows)}")
            if self.copy_on_write and any(gone for _, gone in each.files.values()):
                raise ViolationError("a table that is copied on write has removed rows")


def removes(offer: Offer, term: int, committed: bool) -> bool:
    """Whether a writer of this term removes a refused offer's files without a look at the snapshots."""
    return offer.term == term and not committed


STEPS: dict[str, Callable[[Lake], None]] = {
    "insert": lambda lake: lake.insert(2),
    "remove": lambda lake: lake.remove(2),
    "remove the last": lambda lake: lake.remove(-1),
    "update": Lake.update,
    "rewrite": Lake.rewrite,
    "truncate": Lake.truncate,
    "copy again": Lake.copy_again,
    "add a column": Lake.add_column,
    "pause or resume": Lake.pause,
    "pin": Lake.pin,
    "take over": Lake.take_over,
    "lose links": Lake.lose_links,
    "plan": Lake.plan,
    "deliver": lambda lake: lake.deliver(0),
    "deliver the second": lambda lake: lake.deliver(1),
    "a suspended writer decides": Lake.suspended_decides,
}


def run(steps: tuple[str, ...], kind: str = "") -> Lake:
    lake = Lake(copy_on_write=kind == "copy on write", forgets=kind == "forgets")
    lake.plan()
    for step in (*steps, "deliver", "remove", "update", "a suspended writer decides"):
        STEPS[step](lake)
        lake.check()
    return lake


#: The kinds of lakes.
KINDS = ("", "copy on write", "forgets")


def explored(length: int) -> int:
    """Run every sequence of so many steps between a plan and its delivery; how many offers were accepted."""
    accepted = 0
    for steps in itertools.product(STEPS, repeat=length):
        for kind in KINDS:
            try:
                accepted += run(steps, kind).accepted
            except ViolationError as error:
                raise ViolationError(f"{error}, after {steps}") from None
    return accepted


def explored_up_to(length: int) -> None:
    """Run all sequences of up to so many steps."""
    for each in range(length + 1):
        explored(each)


@pytest.mark.parametrize("length", [0, 1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_compaction_changes_no_row_of_any_snapshot(length):
    assert explored(length) > 0


def test_long_histories_change_no_row_of_any_snapshot(seed):
    accepted = 0
    for number in range(300):
        choose = random.Random(seed + number)
        steps = tuple(choose.choices(list(STEPS), k=choose.randrange(4, 16)))
        print(seed + number, steps)
        accepted += run(steps, choose.choice(KINDS)).accepted
    assert accepted > 20


def ignoring(word: str) -> Callable[..., Accepted | Refused]:
    """The decision without a look at this."""
    decide = decisions.decide

    def mutant(
        offer: Offer, table: Any, term: int, current: Any, there: Any, **options: Any
    ) -> Any:
        match word:
            case "term":
                offer = replace(offer, term=term)
            case "missing":
                current = {**{f.name: CurrentFile(f.vector) for f in offer.old}, **current}
                there = current.keys
            case "snapshot":
                there = current.keys
            case "copies":
                options["copies_on_write"] = False
        found = decide(offer, table, term, current, there, **options)
        if word == "changed" and isinstance(found, Accepted):
            return Accepted({})
        return found

    return mutant


def carries(how: str) -> Callable[..., dict[int, BitMap64]]:
    """The carrying over with a fault."""
    carried = decisions.carried

    def mutant(offer: Offer, current: Mapping[str, CurrentFile]) -> dict[int, BitMap64]:
        if how == "all that is removed now":
            old = tuple(replace(file, removed=b"") for file in offer.old)
            return carried(replace(offer, old=old), current)
        if how == "by the first file":
            old = tuple(replace(file, start=0) for file in offer.old)
            return carried(replace(offer, old=old), current)
        found: dict[int, BitMap64] = {}
        for file in offer.old:
            now = current.get(file.name)
            gone = BitMap64(range(file.rows)) if now is None else now.removed()
            for position in gone - bitmap(file.removed):
                found.setdefault(file.new, BitMap64()).add(file.start + position)
        return found

    return mutant


MUTANTS = {
    "a later writer accepts": ("decide", ignoring("term")),
    "a replaced file is not noticed": ("decide", ignoring("missing")),
    "a file that only the row index has is replaced": ("decide", ignoring("snapshot")),
    "what was removed since is forgotten": ("decide", ignoring("changed")),
    "vectors come into a table without": ("decide", ignoring("copies")),
    "what was removed before is removed again": ("carried", carries("all that is removed now")),
    "positions are those of the first file": ("carried", carries("by the first file")),
    "positions are not moved up": ("carried", carries("positions as they were")),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_decision_is_found(monkeypatch, name):
    attribute, mutant = MUTANTS[name]
    monkeypatch.setattr(decisions, attribute, mutant)
    with pytest.raises((ViolationError, KeyError, IndexError)):
        explored_up_to(3)


@pytest.mark.parametrize(
    "broken", [lambda o, term, _: o.term == term, lambda *a: not a[2]], ids=["twice", "later"]
)
def test_files_of_an_offer_that_may_be_needed_are_not_removed_unseen(monkeypatch, broken):
    monkeypatch.setattr("tests.simulation.test_lake_compaction.removes", broken)
    with pytest.raises(ViolationError, match="were removed"):
        explored_up_to(3)
