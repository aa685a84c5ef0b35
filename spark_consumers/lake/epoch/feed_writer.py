"""Keeps the change feeds of a lake's tables at every epoch, on the driver.

`tables.feeds` decides what is done with each. The executors write the changes that they read for a table as data files of its feed, too
(`feed_rows`); this gives them the target, and commits the files beside the table's: only the link shows both.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from spark_consumers.decode.mode_columns import BESIDE
from spark_consumers.lake.concurrently import each
from spark_consumers.lake.epoch.arranged import arranged
from spark_consumers.lake.epoch.feed_rows import ABOUT, FeedTarget, begin_row
from spark_consumers.lake.epoch.new_tables import NewTables
from spark_consumers.lake.epoch.plan import EpochPlan
from spark_consumers.lake.epoch.stage import Fed
from spark_consumers.lake.format.arranged_files import write_arranged
from spark_consumers.lake.format.data_files import Stage
from spark_consumers.lake.format.table_format import FileInfo, TableFormat, TableWrite
from spark_consumers.lake.layout.arrangement import Arrangement
from spark_consumers.lake.manifest.chain import Chain, Manifest, StreamPosition
from spark_consumers.lake.manifest.feed_version import FeedVersion
from spark_consumers.lake.manifest.table_version import LEFT, LIVE, TableVersion
from spark_consumers.lake.tables.fault import fault_of, reason_of
from spark_consumers.lake.tables.feeds import (
    Action,
    Append,
    Begin,
    Keep,
    Stop,
    decide,
)
from spark_consumers.lake.tables.schema_change import Evolution, schema_hash
from spark_consumers.lake.tables.schema_match import arrays_of, unusable
from spark_consumers.lake.tables.states import stream_of
from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.table_layout import LayoutRule, feed_of
from walsender_bridge.runtime import logs

log = logs.logger()


@dataclass(frozen=True)
class _Work:
    """One feed of an epoch: what is done with it, its name, its table's, and the columns of its rows."""

    action: Action
    name: str
    table: str
    before: FeedVersion | None
    columns: pa.Schema
    target: FeedTarget | None = None


class FeedWriter:
    """Keeps the feeds that `rules` give to tables, for one term of a writer."""

    def __init__(
        self,
        chain: Chain,
        tables: TableFormat,
        term: int,
        rules: Sequence[LayoutRule],
        deletes: Mapping[str, str],
    ) -> None:
        self._chain = chain
        self._format = tables
        self._term = term
        self._rules = rules
        #: A section that gives tables their feeds is not of the feeds, although its pattern may match them.
        self._layouts = [rule for rule in rules if not rule.feed]
        self._new = NewTables(chain, tables, term, deletes)
        self._work: list[_Work] = []
        self._targets: dict[tuple[str, str], tuple[pa.Schema, Arrangement]] = {}

    def plan(
        self,
        head: Manifest,
        plan: EpochPlan,
        followed: Mapping[str, TableVersion],
        evolutions: Mapping[str, Evolution],
        columns: Mapping[str, pa.Schema],
    ) -> dict[str, FeedTarget]:
        """Decide what is done with each feed at this epoch; for the executors those that get changes, by their tables' names.

        `followed`: the tables before they get the epoch's columns (`evolutions`, by path), which are `columns` for those that follow.
        """
        self._new.remove_unnamed(head)
        self._work = []
        in_lake = {name: table.lake_name or name for name, table in plan.tables.items()}
        taken = {*in_lake.values(), *head.view_tables}
        for name, after in plan.tables.items():
            full = feed_of(self._rules, name, in_lake[name])
            if not full:
                continue
            before = head.feeds.get(full)
            if before is not None and before.of != name:
                before = None
            own = _without_beside(columns.get(name, pa.schema([])), after)
            refused = _refusal(full, taken, own) if own.names else ""
            sources = _sources(followed[name], evolutions.get(after.path))
            done = _done(head, name)
            action = decide(before, followed[name], after, sources, done, refused)
            taken.add(full)
            work = _Work(action, full, name, before, pa.schema([*ABOUT, *own]))
            self._work.append(self._with_target(work, head, after))
        return {work.table: work.target for work in self._work if work.target is not None}

    def _with_target(self, work: _Work, head: Manifest, after: TableVersion) -> _Work:
        """The work with the target of its changes. A feed that cannot be opened is stopped."""
        action, before = work.action, work.before
        if not isinstance(action, Append):
            return work
        assert before is not None
        assert before.table is not None
        try:
            files, arrangement = self._opened(work, before.table, action, after.schema_hash)
        except Exception as error:
            return replace(work, action=self._stopped(work, error))
        prefix = f"{self._path(before.table.path)}/data/"
        # Changes come twice only to a table that is shown anew: the others are the same for the executors at each epoch.
        is_fresh = action.is_copied or head.tables[work.table].state != LIVE
        target = FeedTarget(
            prefix, work.columns, files, action.after if is_fresh else 0, arrangement
        )
        return replace(work, target=target)

    def _opened(
        self, work: _Work, feed: TableVersion, action: Append, digest: str
    ) -> tuple[pa.Schema, Arrangement]:
        path, known = self._path(feed.path), (feed.path, digest)
        if action.sources is not None:
            sources = {**{name: name for name in ABOUT.names}, **action.sources}
            # What an attempt makes of it holds for that attempt, until a snapshot has it.
            self._targets = {of: it for of, it in self._targets.items() if of[0] != feed.path}
            # Changes have what was sent: a column that came later is NULL there, whatever its default.
            files = self._format.evolve(
                *(path, self._term, feed.snapshot_id, work.columns, sources, {})
            )
            return files, self._arranged(work.name, path)
        if known not in self._targets:
            there = self._format.schemas(path, feed.snapshot_id)[1]
            files = pa.schema([there.field(name) for name in work.columns.names])
            self._targets[known] = files, self._arranged(work.name, path)
        return self._targets[known]

    def _arranged(self, name: str, path: str) -> Arrangement:
        return arranged(self._format, name, path, self._term, self._layouts)

    def _stopped(self, work: _Work, error: Exception) -> Stop:
        """Why this feed stops. Raises the error if it is not of the feed alone."""
        fault = fault_of(work.name, error)
        if fault is None:
            raise error
        return self._stop(work, fault.error)

    def _stop(self, work: _Work, error: TusklineError) -> Stop:
        feed = work.before and work.before.table
        folder = self._path(feed.path) if feed else ""
        reason = f"{reason_of(error, folder)}; it starts over with the table's next copy: tuskline table resync {work.table}"
        log.error("feed cannot follow", feed=work.name, reason=reason)
        return Stop(reason)

    def write(
        self,
        head: Manifest,
        plan: EpochPlan,
        fed: Mapping[str, Sequence[Fed]],
        stage: Stage,
    ) -> dict[str, FeedVersion]:
        """Commit the epoch's changes to the feeds: all of them, by name. `fed`: of the executors, by the tables' names."""

        def carry_out(_: str, work: _Work) -> FeedVersion:
            its = fed.get(work.table, ())
            files = [file for each in its for file in each.files]
            if faults := [each.fault for each in its if each.fault is not None]:
                stopped = self._stop(work, faults[0].error)
                return self._carried_out(work, stopped, head, plan, (), stage)
            try:
                return self._carried_out(work, work.action, head, plan, files, stage)
            except Exception as error:
                stopped = self._stopped(work, error)
            return self._carried_out(work, stopped, head, plan, (), stage)

        done = each([(work.name, work) for work in self._work], carry_out)
        return {
            work.name: feed
            for work, feed in zip(self._work, done, strict=True)
            if feed != FeedVersion(work.table)
        }

    def _carried_out(
        self,
        work: _Work,
        action: Action,
        head: Manifest,
        plan: EpochPlan,
        files: Sequence[FileInfo],
        stage: Stage,
    ) -> FeedVersion:
        before = work.before or FeedVersion(work.table)
        if isinstance(action, Keep):
            return before
        if isinstance(action, Stop):
            if before.reason != action.reason:
                log.warning("feed is stopped", feed=work.name, reason=action.reason)
            return before.stopped(head.epoch, action.reason)
        after = plan.tables[work.table]
        position = plan.streams[stream_of(work.table)]
        if isinstance(action, Begin):
            log.info("feed begins", feed=work.name, why=action.why)
            feed, schema, arrangement = self._created(work, after)
            rows: list[FileInfo] = []
        else:
            assert before.table is not None
            assert work.target is not None
            feed, rows = before.table, list(files)
            schema, arrangement = work.target.file_schema, work.target.arrangement
        if isinstance(action, Begin) or action.is_copied:
            rows += self._begin(work, feed, position, plan.version, stage, schema, arrangement)
        evolves = isinstance(action, Append) and action.sources is not None
        if rows or evolves:
            feed = self._written(feed, rows, plan.version, stage)
        described = replace(
            feed,
            layout=after.layout,
            text_columns=after.text_columns,
            masks=after.masks,
            schema_hash=schema_hash(work.columns, ()),
        )
        kept = FeedVersion(work.table, after.path, described, start_lsn=after.start_lsn)
        # The same object where nothing is new: what is written is swept for remains.
        return before if kept == before else kept

    def _begin(
        self,
        work: _Work,
        feed: TableVersion,
        position: StreamPosition,
        version: int,
        stage: Stage,
        schema: pa.Schema,
        arrangement: Arrangement,
    ) -> tuple[FileInfo, ...]:
        row = list(begin_row(position, version, work.columns))
        path = f"{self._path(feed.path)}/data/{stage}-begin.parquet"
        return write_arranged(path, row, schema, arrangement)

    def _written(
        self, feed: TableVersion, rows: Sequence[FileInfo], version: int, stage: Stage
    ) -> TableVersion:
        count = feed.rows + sum(file.rows for file in rows)
        base = feed.snapshot_id or None
        write = TableWrite(version, base, str(stage), rows, count=count)
        done = self._format.write(self._path(feed.path), self._term, write)
        return replace(feed, snapshot_id=done.snapshot, stage=done.stage, rows=count)

    def _created(
        self, work: _Work, after: TableVersion
    ) -> tuple[TableVersion, pa.Schema, Arrangement]:
        """A new Iceberg table, without a snapshot; the schema of its data files, and how they are arranged."""
        table = self._new.create(work.name, work.columns, relation_id=after.relation_id)
        path = self._path(table.path)
        arrangement = self._arranged(work.name, path)
        return table, self._format.schemas(path)[1], arrangement

    def _path(self, path: str) -> str:
        return str(self._chain.root / path)


def _refusal(full: str, taken: Collection[str], columns: pa.Schema) -> str:
    """Why a table with these columns cannot have the feed `full`; empty if it can. `taken`: names of tables and views."""
    if full in taken:
        return "a table or view of the lake has its name; choose another one with `feed`"
    for name in columns.names:
        if name in ABOUT.names:
            return f"its table has a column {name!r}, a name that the feed itself uses"
    arrays = [*arrays_of(ABOUT), *arrays_of(columns)]
    return unusable([*ABOUT.names, *columns.names], ABOUT.names, arrays) or ""


def _sources(followed: TableVersion, evolution: Evolution | None) -> dict[str, str] | None:
    """The names that the table's new columns have before, where they are there."""
    if evolution is None:
        return None
    newest = evolution.layouts[-1].columns
    return {
        column[0]: followed.layout[at][0]
        for column, at in zip(newest, evolution.sources, strict=True)
        if at is not None
    }


def _done(head: Manifest, name: str) -> int | None:
    """The offset up to which the head's table, and so its feed, has the changes; None: it is not there, or has left."""
    table = head.tables.get(name)
    if table is None or table.state == LEFT:
        return None
    return head.streams[stream_of(name)].offset if table.state == LIVE else table.offset


def _without_beside(columns: pa.Schema, table: TableVersion) -> pa.Schema:
    """The table's columns that are the source's: a feed has each DELETE itself."""
    beside = {column.name for column in BESIDE[table.mode]}
    return pa.schema([column for column in columns if column.name not in beside])
