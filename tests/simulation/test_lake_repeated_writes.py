"""Epochs that failed at any point and are repeated: production's write, index, offers and cleanup, over real files.

The write of a table fails before it is made; it is made and raises all the same (the answer of a catalog was lost); it is made
later, when the next attempt is at work; or another part of the epoch fails behind it. In between, a maintainer's offer is
refused. Whichever attempt's write the link names at last: its files are there, and the row index is of these files, or there is
none, and the next epoch builds it.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from spark_consumers.lake.compaction.offer import OFFERS, Offer
from spark_consumers.lake.compaction.rewrite import liveness_of
from spark_consumers.lake.epoch.draft import Draft
from spark_consumers.lake.epoch.epoch_writer import EpochWriter
from spark_consumers.lake.epoch.stage import Staged
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import Stage, remove_orphans, write_data
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.format.iceberg_schema import arrow_schema, iceberg_schema
from spark_consumers.lake.format.table_format import TableWrite, Written
from spark_consumers.lake.index.build import Identity, add_files
from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.manifest.sealed_json import dump
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.writer import pipeline, requests
from spark_consumers.lake.writer.compactions import Compactions
from spark_consumers.lake.writer.lake_site import LakeSite
from walsender_bridge.errors import UnavailableError

PATH, NAME = "tables/s/public/docs%t2-aa", "s.public.docs"
LINK, TERM = 10, 2
COLUMNS = arrow_schema(iceberg_schema(pa.schema([("id", pa.int64()), ("n", pa.int64())])))
NOT_MADE, MADE_AND_RAISED, MADE_LATER, NOT_PUBLISHED = "not made", "raised", "late", "unpublished"
OFFER = "an offer is refused"
EVENTS = (NOT_MADE, MADE_AND_RAISED, MADE_LATER, NOT_PUBLISHED, OFFER)


class ViolationError(Exception):
    """The link names files that are gone, or an index of other files."""


@dataclass(frozen=True)
class Snapshot:
    """On the writer's branch, as Iceberg's library shows it."""

    identity: str
    id: int
    of: TableWrite

    def summary(self) -> dict[str, str]:
        return {
            "tuskline.table": self.identity,
            "tuskline.version": str(self.of.version),
            "tuskline.base": str(self.of.base),
            "tuskline.stage": self.of.stage,
        }

    def parentId(self) -> int | None:  # noqa: N802  # Iceberg's name
        return self.of.base


class Tables:
    """The writer's branch in the table, and a catalog whose answers get lost; what is done already is told by production."""

    def __init__(self, lake: str) -> None:
        self.rules = object.__new__(IcebergFormat)
        self.rules._lake = lake
        self.branch: Snapshot | None = None
        self.under_way: Snapshot | None = None
        self.event = ""
        self.ids = itertools.count(100)

    def write(self, path: str, _: int, write: TableWrite) -> Written:
        if self.under_way is not None:
            self.branch, self.under_way = self.under_way, None
        if self.branch is not None and self.rules._is_done(self.branch, path, write):
            return Written(self.branch.id, self.branch.of.stage)
        made = Snapshot(self.rules._identity(path), next(self.ids), write)
        if self.event == MADE_LATER:
            self.under_way = made
        elif self.event != NOT_MADE:
            self.branch = made
        if self.event in {NOT_MADE, MADE_LATER, MADE_AND_RAISED}:
            raise UnavailableError("the catalog did not say whether it has made the commit")
        return Written(made.id, made.of.stage)


class Run:
    """One lake with one table, its writer, and the epoch after link 10."""

    def __init__(self, root: Path) -> None:
        self.chain = open_chain(root)
        lake = self.chain.initialise("log", "iceberg")
        self.chain.store.prepare(OFFERS)
        for each in ("data", "index"):
            (root / PATH / each).mkdir(parents=True)
        self.folder = str(root / PATH)
        old = str(Stage(4, TERM, 1))
        table = TableVersion(PATH, "iceberg", 7, "", ("id",), (), 0, 0, 0, 1, stage=old, runs=())
        self.head = Manifest("lake", LINK, 100, 99, TERM, 0.0, tables={NAME: table})
        self.tables = Tables(lake)
        self.epochs = object.__new__(EpochWriter)
        self.epochs.__dict__.update(
            _format=self.tables, _chain=self.chain, _term=TERM, _indexes={}, _attempt=0
        )
        self.house = object.__new__(pipeline.Lakehouse)
        self.house._chain = self.chain
        self.offers: list[requests.Request] = []
        self.writer: Any = SimpleNamespace(
            head=self.head,
            has_failed=False,
            delta=None,
            epochs=self.epochs,
            compactions=Compactions(self.chain, self.tables, {}),  # type: ignore[arg-type]
            tables=SimpleNamespace(
                of_maintainers=lambda _: self.offers, forget=lambda _: self.offers.clear()
            ),
            kept=SimpleNamespace(remember=lambda _: None),
            site=LakeSite(self.chain, self.tables),  # type: ignore[arg-type]
        )

    def refuse_an_offer(self) -> None:
        """A maintainer was at work when the lake was taken over."""
        offer = Offer("t1-abc-1", NAME, PATH, TERM - 1, ("id",))
        self.chain.store.create(f"{OFFERS}/{offer.name}", dump(offer.to_json()))
        self.offers.append(requests.Request("1", requests.COMPACT, (NAME,), offer=offer.name))
        self.house._compact(self.writer)

    def attempt(self, event: str) -> TableVersion:
        """Write the epoch: its files, its index, and the table."""
        self.tables.event = event
        stage = self.epochs.next_stage(self.head)
        # What a round leaves whose tasks still write when it has failed, or whose store does not remove it.
        Path(str(self.chain.staging / str(stage))).mkdir(parents=True)
        prefix = f"{self.folder}/data/{stage}"
        target = Target(NAME, "public.docs", prefix, COLUMNS, COLUMNS, ("id",), 0, 1)
        info = write_data(f"{prefix}.parquet", [pa.array([1, 2, 3])] * 2, COLUMNS)
        assert info is not None
        draft = Draft(target, Staged(NAME, 0, 3, rows=(info,), added=3), 7, ())
        identity = Identity.of(("id",), COLUMNS)
        draft.runs = add_files(self.folder, (), f"index/{stage}.run", identity, [info])
        plan: Any = SimpleNamespace(version=101, tables=self.head.tables)
        made = self.epochs._write_table(plan, stage, draft.staged, draft, target)
        if event == NOT_PUBLISHED:
            raise UnavailableError("another table's write has failed")
        return made

    def round(self, event: str) -> None:
        if event == OFFER:
            self.refuse_an_offer()
            return
        try:
            table = self.attempt(event)
        except UnavailableError:
            self.writer.has_failed = True
            return
        self.publish(table)

    def publish(self, table: TableVersion) -> None:
        link = replace(self.head, link=LINK + 1, tables={NAME: table})
        self.house._adopt(self.writer, link)
        self.check(table)

    def check(self, table: TableVersion) -> None:
        branch = self.tables.branch
        assert branch is not None
        assert (branch.id, branch.of.stage) == (table.snapshot_id, table.stage)
        files = {Path(file.path).relative_to(self.folder).as_posix() for file in branch.of.rows}
        lost = {file for file in files if not Path(self.folder, file).exists()}
        if lost:
            raise ViolationError(f"files of the table were removed: {lost}")
        if table.runs is None:
            return
        indexed = {file.name for file in liveness_of(self.folder, table).current()}
        if indexed != files:
            raise ViolationError(f"the index is of {indexed}, and the table has {files}")


def test_the_epoch_after_failed_rounds_removes_what_they_have_staged_and_nothing_of_a_newer_writer(
    tmp_path,
):
    run = Run(tmp_path)
    newer = run.chain.staging / str(Stage(LINK + 1, TERM + 1, 1))
    # Of a table that is brought level meanwhile.
    level = run.chain.staging / f"copy-t{TERM}-0a1b"
    for path in (newer, level):
        Path(str(path)).mkdir(parents=True)
    run.round(NOT_MADE)
    run.round(NOT_PUBLISHED)
    assert len([*run.chain.staging.glob("*")]) == 4
    run.round("published")
    assert {path.name for path in run.chain.staging.glob("*")} == {newer.name, level.name}


def ran(root: Path, events: Iterable[str]) -> TableVersion | None:
    """The table as it is published, after these rounds and one that goes well."""
    run = Run(root)
    for event in (*events, "published"):
        run.round(event)
        if run.writer.head.link > LINK:
            break
    head = run.writer.head
    assert not run.writer.has_failed
    found: TableVersion | None = head.tables[NAME]
    return found


def explored(root: Path, length: int = 2) -> None:
    """Run every sequence of up to so many rounds."""
    numbers = itertools.count()
    for each in range(length + 1):
        for events in itertools.product(EVENTS, repeat=each):
            try:
                ran(root / str(next(numbers)), events)
            except ViolationError as error:
                raise ViolationError(f"{error}, after {events}") from None


@pytest.mark.parametrize("length", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_repeated_epoch_names_files_and_an_index_of_these_files(tmp_path, length):
    explored(tmp_path, length)


@pytest.mark.parametrize(
    ("event", "is_known"), [(NOT_MADE, True), (NOT_PUBLISHED, True), (MADE_AND_RAISED, False)]
)
def test_only_an_index_of_another_attempt_s_files_is_built_again(tmp_path, event, is_known):
    table = ran(tmp_path, [event])
    assert table is not None
    assert (table.runs is not None) == is_known


def test_a_refused_offer_does_not_hide_that_a_round_has_failed(tmp_path):
    run = Run(tmp_path)
    run.round(OFFER)
    assert not run.writer.has_failed
    run.round(NOT_MADE)
    run.round(OFFER)
    assert run.writer.has_failed


def test_an_offer_that_could_not_be_published_is_a_round_that_has_failed(tmp_path, monkeypatch):
    def fails(*_: object) -> bool:
        raise UnavailableError("the link could not be created")

    run = Run(tmp_path)
    monkeypatch.setattr(run.house, "_publish", fails)
    with pytest.raises(UnavailableError):
        run.round(OFFER)
    assert run.writer.has_failed


def test_an_index_of_this_attempt_for_an_earlier_one_s_files_is_found(tmp_path, monkeypatch):
    write_table = EpochWriter._write_table

    def broken(self: Any, plan: Any, stage: Stage, staged: Any, draft: Any, target: Any) -> Any:
        own = tuple((run.name, run.weight) for run in draft.runs)
        made = write_table(self, plan, stage, staged, draft, target)
        return made if made.runs is not None else replace(made, runs=own)

    monkeypatch.setattr(EpochWriter, "_write_table", broken)
    with pytest.raises(ViolationError, match="the index is of"):
        explored(tmp_path)


def test_a_refused_offer_that_removes_other_attempts_files_is_found(tmp_path, monkeypatch):
    def broken(lake: Any, tables: Iterable[TableVersion], stage: Stage) -> None:
        named = {table.path: table for table in tables}
        remove_orphans(lake, named, {stage.link: {}}, stage.term)

    monkeypatch.setattr(pipeline, "remove_attempt", broken)
    with pytest.raises(ViolationError, match="were removed"):
        explored(tmp_path)
