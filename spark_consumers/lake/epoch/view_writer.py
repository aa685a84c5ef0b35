"""Keeps the views of a lake at every epoch: after its tables are staged, and before its link is published.

`views.plan` decides what is done with each; this carries it out. A view's rows come from a query on Spark over the staged snapshots of the
tables, or over their changes (`table_changes`), and are written on the executors (`view_sink`). A view's table is written, committed,
fenced and cleaned up as any other; only the link shows it.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from spark_consumers.lake.catalog.open_catalog import for_reading
from spark_consumers.lake.epoch.arranged import arranged, by_position
from spark_consumers.lake.epoch.epoch_changes import FEW, EpochChanges, sent
from spark_consumers.lake.epoch.new_tables import NewTables
from spark_consumers.lake.epoch.stage import Staged, joined
from spark_consumers.lake.epoch.table_changes import ChangedFile, Moved, count
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.epoch.view_attempts import ViewAttempts, ViewTimeoutError
from spark_consumers.lake.epoch.view_queries import ViewQueries
from spark_consumers.lake.epoch.view_sink import (
    TOO_MANY,
    StageChanges,
    StoreRows,
    check_rows,
    collected,
    sink,
)
from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.data_files import Stage
from spark_consumers.lake.format.iceberg_read import read_snapshot
from spark_consumers.lake.format.table_format import ROW_ID, FileInfo, TableFormat, TableWrite
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion
from spark_consumers.lake.manifest.table_version import LIVE, STALE
from spark_consumers.lake.manifest.view_version import INCREMENTAL, RECOMPUTED, ViewVersion
from spark_consumers.lake.policy import copies_on_write
from spark_consumers.lake.store.place import files_in, place
from spark_consumers.lake.tables.schema_match import arrays_of, unusable
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.views.incremental import SIGN, Grouped
from spark_consumers.lake.views.plan import (
    FAILED,
    Action,
    Apply,
    Compute,
    Keep,
    Stale,
    Tables,
    decide,
    is_too_much,
)
from spark_consumers.lake.views.spark_functions import prepare
from spark_consumers.lake.views.translate import BaseTable, Translation, base_tables, translate
from spark_consumers.spark.failures import SPARK_ERRORS, line_of
from walsender_bridge.errors import NotSupportedError, TusklineError
from walsender_bridge.postgres.table_layout import LayoutRule
from walsender_bridge.runtime import logs

log = logs.logger()

#: SQLSTATE classes of errors that a query has for the values that it meets, or for its text.
_OF_QUERY = ("22", "42")
#: What an attempt raises that is perhaps the view's own; and what is left to its attempt by itself.
_OF_VIEW: tuple[type[Exception], ...] = (ViewTimeoutError, NotSupportedError, *SPARK_ERRORS)
_OF_ATTEMPT: tuple[type[Exception], ...] = (TusklineError, *_OF_VIEW)
#: Views to which changes are applied at the same time: their queries are planned, and wait, more than they compute.
_THREADS = 4
#: Rows of a view's changes that the driver takes.
_COLLECTED = 10_000
#: In the names of the files of attempts beside others.
_BESIDE = "beside"
#: How Spark says that a data file of a table is damaged, which no attempt mends.
_OF_DAMAGE = ("CorruptError: ", "ChecksumException: ")


@dataclass
class StagedViews:
    """The views of an epoch. `targets` and `staged`: the changes that are still to be written, by the view's full name."""

    views: dict[str, ViewVersion] = field(default_factory=dict)
    targets: dict[str, Target] = field(default_factory=dict)
    staged: dict[str, Staged] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, TableVersion]:
        """The tables of those that are still to be written, as they are before."""
        found = {v.full_name(n): v.table for n, v in self.views.items() if v.table is not None}
        return {name: found[name] for name in self.staged}

    def written(self, tables: Tables) -> dict[str, ViewVersion]:
        """All views, with these tables written."""
        return {
            name: replace(view, table=tables[view.full_name(name)])
            if view.table is not None and view.full_name(name) in self.staged
            else view
            for name, view in self.views.items()
        }


@dataclass(frozen=True)
class _Work:
    """One view, and the epoch that it is kept at: its tables are `tables`, after those of `head`.

    `view`: what it is in the head, with what its translation `made` says; `action`: what becomes of it.
    """

    definition: ViewDefinition
    made: Translation
    view: ViewVersion
    action: Action
    head: Manifest
    tables: Tables
    changes: EpochChanges
    queries: ViewQueries
    version: int
    stage: Stage
    scratch: str
    #: What the names of its data files have behind the stage's.
    part: str = ""


class _Done(NamedTuple):
    """The view's table; with `staged`, before these changes are written to it."""

    table: TableVersion
    target: Target | None = None
    staged: Staged | None = None


class ViewWriter:
    """Keeps the views `definitions` for one term of a writer."""

    def __init__(
        self,
        spark: SparkSession,
        chain: Chain,
        tables: TableFormat,
        term: int,
        definitions: Sequence[ViewDefinition],
        *,
        attempts: ViewAttempts,
        deletes: Mapping[str, str],
        layouts: Sequence[LayoutRule] = (),
    ) -> None:
        self._spark = spark
        self._chain = chain
        self._format = tables
        self._term = term
        self._definitions = definitions
        self._attempts = attempts
        self._deletes = deletes
        self._rules = layouts
        self._catalog = for_reading(chain)
        #: Translations, by the view's name, with the tables' columns that they are made from.
        self._translated: dict[str, tuple[object, Translation | NotSupportedError]] = {}
        self._new = NewTables(chain, tables, term, deletes)

    def stage(
        self,
        head: Manifest,
        tables: Tables,
        moves: Mapping[str, Sequence[Moved]],
        version: int,
        stage: Stage,
        scratch: str,
    ) -> StagedViews:
        """The views of the epoch `version`, whose tables are these, after `head`. `moves`: see `EpochChanges`.

        Raises what makes the epoch fail; a view that fails for itself is stale.
        """
        self._new.remove_unnamed(head)
        found = StagedViews()
        if not self._definitions:
            return found
        refused = self._refused_session()
        known = base_tables(tables)
        made = {each.name: refused or self._translation(each, known) for each in self._definitions}
        usable = [each for each in made.values() if isinstance(each, Translation)]
        changes = EpochChanges(
            *(self._spark, self._format, self._chain.root, head.tables, tables),
            moves,
            usable,
        )
        names = {table.lake_name or name for name, table in tables.items()}

        def work_of(definition: ViewDefinition, translation: Translation) -> _Work:
            view, action = _decided(definition, translation, head, tables, names)
            of_epoch = (head, tables, changes, queries, version, stage, scratch)
            return _Work(definition, translation, view, action, *of_epoch)

        with closing(changes), closing(ViewQueries(self._spark)) as queries:
            works = {
                each.name: work_of(each, translation)
                for each in self._definitions
                if isinstance(translation := made[each.name], Translation)
            }
            done = self._applied_beside([*works.values()], queries)
            for each in self._definitions:
                translation = made[each.name]
                if isinstance(translation, NotSupportedError):
                    text = "; ".join(filter(None, (translation.what, translation.repair)))
                    before = head.views.get(each.name)
                    found.views[each.name] = _stale(before, each, head, text)
                else:
                    self._keep(works[each.name], found, done.get(each.name))
        return found

    def _applied_beside(self, works: Sequence["_Work"], queries: ViewQueries) -> dict[str, "_Done"]:
        """Apply the changes to several views at a time, those for which it took little time before; what is done for these.

        What fails here, or takes longer than such an attempt may, is attempted again by itself, and only that attempt counts: its time, its
        error and its end are the view's own.
        """
        chosen = [
            each
            for each in works
            if isinstance(each.action, Apply) and self._attempts.is_brief(each.definition)
        ]
        if not chosen:
            return {}
        try:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="views") as pool:
                attempts = [*pool.map(self._attempted_beside, chosen)]
        finally:
            queries.release()
        names = [work.definition.name for work in chosen]
        return {name: done for name, done in zip(names, attempts, strict=True) if done}

    def _attempted_beside(self, work: "_Work") -> "_Done | None":
        if self._attempts.waiting(work.definition) is not None:
            return None
        assert isinstance(work.action, Apply)
        # A task that is cancelled may write for a while longer: its files have names of their own.
        own = replace(work, part=f"-{_BESIDE}", scratch=f"{work.scratch}/{_BESIDE}")
        try:
            with self._attempts.attempt(work.definition, beside=True):
                changes = self._applicable(own, work.action)
                return None if changes is None else self._apply(own, changes)
        except _OF_ATTEMPT as error:
            log.debug("view is attempted by itself", view=work.definition.name, reason=str(error))
            return None

    def _refused_session(self) -> NotSupportedError | None:
        """Why no view can be kept in this session."""
        try:
            prepare(self._spark)
        except NotSupportedError as error:
            return error
        return None

    def _translation(
        self, definition: ViewDefinition, known: Mapping[str, BaseTable]
    ) -> Translation | NotSupportedError:
        facts = (definition.sql, tuple(known.items()))
        before = self._translated.get(definition.name)
        if before is None or before[0] != facts:
            made: Translation | NotSupportedError
            try:
                made = _usable(translate(definition.sql, known))
            except NotSupportedError as error:
                log.warning("view cannot be kept", view=definition.name, reason=error.what)
                made = error
            before = self._translated[definition.name] = facts, made
        return before[1]

    def _keep(self, work: "_Work", found: StagedViews, beside: "_Done | None") -> None:
        name, view = work.definition.name, work.view
        done = beside or self._attempted(work)
        if isinstance(done, Stale):
            before = work.head.views.get(name)
            found.views[name] = _stale(before, work.definition, work.head, done.reason)
            return
        table, target, staged = done
        paths = tuple(work.tables[each].path for each in work.made.tables)
        found.views[name] = replace(view, table=table, paths=paths, reason="")
        if staged is not None and target is not None:
            full = view.full_name(name)
            found.targets[full], found.staged[full] = target, staged

    def _attempted(self, work: "_Work") -> "Stale | _Done":
        """What becomes of the view, in the time that it may take (`views.patience`)."""
        action = work.action
        if isinstance(action, Stale):
            return action
        if isinstance(action, Keep):
            assert work.view.table is not None
            return _Done(work.view.table)
        definition, began = work.definition, time.monotonic()
        if (reason := self._attempts.waiting(definition)) is not None:
            return Stale(reason)
        try:
            with self._attempts.attempt(definition):
                done = self._carried_out(work, action)
        except _OF_VIEW as error:
            reason, is_of_query = _why(error, definition)
            took = time.monotonic() - began
            if not self._attempts.failed(definition, reason, took, of_query=is_of_query):
                raise
            return Stale(reason)
        finally:
            work.queries.release()
        self._attempts.succeeded(definition, time.monotonic() - began)
        return done

    def _carried_out(self, work: "_Work", action: Compute | Apply) -> "_Done":
        if isinstance(action, Apply):
            changes = self._applicable(work, action)
            if changes is not None:
                return self._apply(work, changes)
            action = Compute("most rows, or the columns, of its tables have changed")
        return self._compute(work, action)

    # -- computed from the tables -----------------------------------------------------------------------

    def _compute(self, work: "_Work", action: Compute) -> "_Done":
        table, made = work.view.table, work.made
        if action.anew or table is None:
            table = self._created(work)
        log.info("view is computed", view=work.definition.name, why=action.why)
        target = self._target(work, table)
        frame = work.queries.query(made.stored, self._frames(work))
        files = self._stored(work, frame, target)
        rows = sum(file.rows for file in files)
        base = table.snapshot_id or None
        write = TableWrite(
            work.version, base, str(work.stage), files, truncate=base is not None, count=rows
        )
        done = self._format.write(self._path(table), self._term, write)
        return _Done(
            replace(
                table,
                snapshot_id=done.snapshot,
                stage=done.stage,
                rows=rows,
                runs=None,
                state=LIVE,
                as_of=0,
                reason="",
            )
        )

    def _stored(self, work: "_Work", frame: DataFrame, target: Target) -> list[FileInfo]:
        record = f"{work.scratch}/{target.scratch_name}-view.pickle"
        most = work.definition.max_rows
        made: list[list[FileInfo]] = sink(frame, StoreRows(target, most), record)
        files = [file for each in made for file in each]
        check_rows(sum(file.rows for file in files), most)
        self._remove_left(work, target, files)
        return files

    def _remove_left(self, work: "_Work", target: Target, files: Sequence[FileInfo]) -> None:
        """Remove the data files that other attempts of tasks have left: those of this stage that are not among `files`."""
        wanted = {file.path for file in files}
        for file in files_in(place(target.folder) / "data", Stage.names_from(work.stage.link)):
            is_own = Stage.of(file.name.removeprefix(".")) == work.stage
            if is_own and checksums.file_of(file) is None and str(file) not in wanted:
                checksums.remove(file)

    def _created(self, work: "_Work") -> TableVersion:
        full = work.view.full_name(work.definition.name)
        table = self._new.create(full, work.made.columns)
        return replace(table, copy_on_write=copies_on_write(self._deletes, full))

    # -- changes ----------------------------------------------------------------------------------------

    def _applicable(self, work: "_Work", action: Apply) -> dict[str, list[ChangedFile]] | None:
        """The data files with changed rows of these tables, by name; None if data files alone do not tell, or if the rows are too many."""
        found, made = {}, work.made
        for name in {made.tables[number] for number in action.changed}:
            files = work.changes.files(name)
            if files is None:
                return None
            found[name] = files
        rows = sum(work.tables[made.tables[number]].rows for number in action.changed)
        return None if is_too_much(count(found), rows) else found

    def _apply(self, work: "_Work", changes: Mapping[str, Sequence[ChangedFile]]) -> "_Done":
        table, made, form = work.view.table, work.made, work.made.incremental
        assert table is not None
        assert form is not None
        terms = [
            work.queries.query(form.term(number), self._frames_of_term(work, number))
            for number, name in enumerate(made.tables)
            if changes.get(name)
        ]
        if not terms:
            return _Done(table)
        union = terms[0]
        for term in terms[1:]:
            union = union.unionAll(term)
        # How many rows the union has at most, if that is known: a join may multiply them.
        most = count(changes) if len(made.tables) == 1 else None
        if isinstance(form, Grouped):
            union = self._of_groups(work, form, table, union, most)
        target = self._target(work, table)
        staged = self._staged(work, union, target, most)
        if staged is not None:
            check_rows(table.rows + staged.added, work.definition.max_rows)
        return _Done(table, target, staged)

    def _staged(
        self, work: "_Work", frame: DataFrame, target: Target, most: int | None
    ) -> Staged | None:
        """The rows with signs, staged: equal ones by one task. Few rows, by one task without a shuffle, or, in an attempt beside others, by the driver.

        Only there, so that if it has not the memory for them, or takes too long, the attempt by itself does without it.
        """
        record = f"{work.scratch}/{target.scratch_name}-view.pickle"
        # Spark takes a dot in a name that is not quoted for one of a struct's fields.
        names = ["`" + name.replace("`", "``") + "`" for name in frame.columns if name != SIGN]
        is_few = most is not None and most <= FEW
        task = StageChanges(target, work.scratch, work.definition.max_rows)
        made: list[Staged | None] | None = None
        if work.part:
            made = collected(frame, task, _COLLECTED, most)
        if made is None:
            made = sink(frame.coalesce(1) if is_few else frame.repartition(*names), task, record)
        staged = [each for each in made if each is not None]
        self._remove_left(work, target, [file for each in staged for file in each.rows])
        return joined(staged) if staged else None

    def _of_groups(
        self, work: "_Work", form: Grouped, table: TableVersion, union: DataFrame, most: int | None
    ) -> DataFrame:
        """The rows of the view's table that are removed and added, with their signs. `most`: rows of the union."""
        kept = work.queries.kept
        query = work.queries.query
        if not form.unknown:
            groups = query(form.changed_groups, {"u": union})
            return query(form.replaced, {"d": groups, "v": self._read(table)})
        groups = kept(query(form.changed_groups, {"u": kept(union)}))
        frames = {"d": sent(groups, most or groups.count()), "v": self._read(table)}
        unknown = kept(query(form.unknown, frames))
        if not (several := unknown.count()):
            return query(form.replaced, frames)
        frames["r"] = sent(unknown, several)
        computed = query(form.again, {**self._frames(work), "r": frames["r"]})
        removed, added = query(form.removed, frames), query(form.added, frames)
        return removed.unionAll(added).unionAll(computed)

    # -- frames -----------------------------------------------------------------------------------------

    def _frames(self, work: "_Work") -> dict[str, DataFrame]:
        names = work.made.tables
        return {f"t{number}": self._read(work.tables[name]) for number, name in enumerate(names)}

    def _frames_of_term(self, work: "_Work", changed: int) -> dict[str, DataFrame]:
        """The tables of one term: those before the changed one as they are now, those behind it as they were (`incremental`)."""
        frames = {}
        for number, name in enumerate(work.made.tables):
            if number == changed:
                frames[f"t{number}"] = work.changes.frame(name)
            else:
                version = work.tables if number < changed else work.head.tables
                frames[f"t{number}"] = self._read(version[name])
        return frames

    def _read(self, table: TableVersion) -> DataFrame:
        frame: DataFrame = read_snapshot(
            self._spark, self._path(table), table.snapshot_id, self._catalog
        )
        return frame if table.key else frame.drop(ROW_ID)

    def _target(self, work: "_Work", table: TableVersion) -> Target:
        full, path = work.view.full_name(work.definition.name), self._path(table)
        return replace(
            Target.of(
                full,
                table,
                f"{path}/data/{work.stage}{work.part}",
                work.made.columns,
                self._format.schemas(path)[1],
            ),
            copy_on_write=copies_on_write(self._deletes, full),
            by_position=by_position(self._format, self._deletes, full, path),
            arrangement=arranged(self._format, full, path, self._term, self._rules),
        )

    def _path(self, table: TableVersion) -> str:
        return str(self._chain.root / table.path)


def _usable(made: Translation) -> Translation:
    """The translation. Raises `NotSupportedError` for columns that no table of the lake can have."""
    reason = unusable(made.columns.names, (), arrays_of(made.columns))
    if reason is not None:
        raise NotSupportedError(reason, repair="give the column another name with AS")
    return made


def _described(
    before: ViewVersion | None, definition: ViewDefinition, made: Translation
) -> ViewVersion:
    """The view with what its translation says, and the table that it has."""
    return ViewVersion(
        definition.sql,
        table=None if before is None else before.table,
        query=made.query,
        tables=made.tables,
        digest=made.digest,
        kind=RECOMPUTED if made.incremental is None else INCREMENTAL,
        why=made.why,
        hidden=made.hidden,
    )


def _decided(
    definition: ViewDefinition,
    made: Translation,
    head: Manifest,
    tables: Tables,
    names: Collection[str],
) -> tuple[ViewVersion, Action]:
    """The view as its translation describes it, and what becomes of it. `names`: the tables', for readers."""
    before = head.views.get(definition.name)
    view = _described(before, definition, made)
    taken = view.full_name(definition.name) in names
    # A failure of the values is one until these change, but for that of a limit.
    reason = "" if before is None else before.reason
    of_limit = reason.startswith(f"{FAILED}{TOO_MANY.partition('{')[0]}")
    other = of_limit and reason != FAILED + TOO_MANY.format(definition.max_rows)
    return view, decide(before, made, head.tables, tables, taken=taken, has_other_limit=other)


def _stale(
    before: ViewVersion | None, definition: ViewDefinition, head: Manifest, reason: str
) -> ViewVersion:
    """The view with the rows that it had, if there are any."""
    if before is None or before.table is None:
        return ViewVersion(definition.sql, reason=reason)
    table = before.table
    as_of = table.as_of or head.epoch
    return replace(
        before, table=replace(table, state=STALE, as_of=as_of, reason=reason), reason=reason
    )


def _why(error: Exception, definition: ViewDefinition) -> tuple[str, bool]:
    """Why a view is not kept, and whether that is its query's own failure, rather than perhaps the epoch's."""
    if isinstance(error, ViewTimeoutError):
        return (
            f"its query was stopped: it took longer than {definition.timeout:g} s (timeout)",
            True,
        )
    text = str(error)
    state = (error.getSqlState() if isinstance(error, PySparkException) else None) or ""
    lines = text.strip().splitlines()
    if (limit := TOO_MANY.format(definition.max_rows)) in text:
        return f"{FAILED}{limit}", True
    damage = next((line for line in lines if any(word in line for word in _OF_DAMAGE)), "")
    if damage or state.startswith(_OF_QUERY):
        return f"{FAILED}{(damage or lines[0])[:300]}", True
    line = lines[0] if isinstance(error, PySparkException) else line_of(error)
    return f"its query cannot be run: {line[:300]}", False
