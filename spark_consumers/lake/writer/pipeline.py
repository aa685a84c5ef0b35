"""The lake's writer: a loop that takes over, copies missing tables, and publishes epochs.

Only the writer with the highest term can publish (`manifest`). After a crash, the chain of manifests and the change log
have all that it needs, so it keeps no state. A failed round is retried from there, with growing pauses, until a newer
writer takes over (`FencedError`).
"""

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from spark_consumers.decode.masking import recorded
from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.open_catalog import for_reading, for_writing
from spark_consumers.lake.catalog.other_engines import OtherEngines
from spark_consumers.lake.catalog.whole_epochs import WholeEpochs
from spark_consumers.lake.comparison.leveled import record_leveled
from spark_consumers.lake.concurrently import repeated
from spark_consumers.lake.copy.bootstrap import TableCopier
from spark_consumers.lake.copy.running import Copies
from spark_consumers.lake.delta_log.delta_tables import DeltaTables
from spark_consumers.lake.epoch import log_view, rolled_back
from spark_consumers.lake.epoch.epoch_writer import EpochWriter, ShapeChangedError
from spark_consumers.lake.epoch.quarantine import quarantines
from spark_consumers.lake.epoch.view_attempts import ViewAttempts
from spark_consumers.lake.format.data_files import remove_attempt, remove_orphans
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.chain import LIVE, Manifest, open_chain
from spark_consumers.lake.manifest.table_version import RESUMING
from spark_consumers.lake.mask_key import check_key
from spark_consumers.lake.mask_key import mask_key as mask_key_of_environment
from spark_consumers.lake.policy import (
    CHUNK_BYTES,
    WAIT_FOR_COPY,
    Policy,
    deletes_of,
    to_copy_on_write,
    without_vectors,
)
from spark_consumers.lake.status import CopyStatus
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, StoreOptions
from spark_consumers.lake.store.place import options_of
from spark_consumers.lake.tables import feeds, states
from spark_consumers.lake.tables.fault import TableFaultsError, reason_of
from spark_consumers.lake.tables.publication_poller import PublicationPoller
from spark_consumers.lake.tables.removed import departed
from spark_consumers.lake.tables.renamed import Naming
from spark_consumers.lake.tables.sources import Source, mark
from spark_consumers.lake.tables.target_names import Targets
from spark_consumers.lake.views.damaged import without_damaged
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.writer import adopt
from spark_consumers.lake.writer.compactions import Compactions
from spark_consumers.lake.writer.lake_site import LakeSite
from spark_consumers.lake.writer.leases import Leases
from spark_consumers.lake.writer.log_access import LogAccess
from spark_consumers.lake.writer.pins import Pins
from spark_consumers.lake.writer.presence import Presence
from spark_consumers.lake.writer.requests import CLEAN, COMPACT, Request, waiting
from spark_consumers.lake.writer.retention import Retention, clock_after
from spark_consumers.lake.writer.round_failures import RoundFailures
from spark_consumers.lake.writer.standby import Standby
from spark_consumers.lake.writer.table_work import TableWork
from spark_consumers.spark import buckets, executors, requirements
from spark_consumers.spark.lake_catalog import LakeCatalog
from spark_consumers.spark.session import is_alive
from walsender_bridge.change_log.client import LogStatus
from walsender_bridge.errors import (
    CorruptError,
    FencedError,
    LakeError,
    NotSupportedError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.table_layout import (
    LayoutRule,
    RowRules,
    feed_of,
    is_delta,
    layout_of,
    rules_of,
    target_of,
)
from walsender_bridge.runtime import fail_point, logs
from walsender_bridge.runtime.steady_clock import SteadyClock

__all__ = ["Lakehouse", "Source"]

#: Seconds between two polls of the log.
_TICK = 0.1
#: Seconds between two checks of a standby driver whether the active one still runs.
_STANDBY = 0.5
#: Seconds between two reports of what a long epoch does.
_SHOWN = 1.0
#: Pauses after failures, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
#: Links in which a takeover looks for orphaned files.
_RECENT_LINKS = 100
#: Names of tables of which it is remembered what they are in the lake.
_KNOWN_NAMES = 100_000

log = logs.logger()


@dataclass
class _Writer:
    """What a writer has while its term lasts."""

    head: Manifest
    epochs: EpochWriter
    tables: TableWork
    site: LakeSite
    kept: Retention
    engines: OtherEngines | WholeEpochs
    pins: Pins
    compactions: Compactions
    #: The tables' Delta logs, if there are to be some.
    delta: DeltaTables | None
    #: Paths of tables that were damaged: before one is written again, it is taken over.
    damaged: set[str] = field(default_factory=set)
    #: Whether a round has failed since the last link: it may have written files of any table.
    has_failed: bool = False
    #: Streams of which the log has another history than the lake, and why (`rolled_back`).
    apart: dict[str, str] = field(default_factory=dict)


class Lakehouse:
    """The pipeline from a change log into one lake.

    `lake` is the lake's folder, `log` the repository's address. `epoch_interval` and `retention_seconds`
    are in seconds, `max_bytes_per_epoch` in bytes of the log as it is stored, `copy_rate` in bytes a second;
    large tables are copied in chunks of `copy_chunk_bytes` (`copy.chunk`).
    `catalog` names the Spark catalog in which users of this session see the tables. `failing_table`: whether epochs wait for
    a suspended table (`policy`). `progress` is called with the progress of each table's copy (`status.CopyStatus`), about
    ten times a second. `on_unrepresentable_value`: `fail` or `quarantine`, by table and as `default`. `deletes`: `vectors`,
    `position-deletes` or `copy-on-write`, likewise (`policy`). `layouts`: how the rows of tables are laid out, and their columns masked;
    `mask_key`: by which columns are hashed (by default that of the environment). `failing` is
    called with the error of each failed round, and with None when the next one has succeeded. `views`: kept with the tables. `store`: how a bucket is
    reached. `rest`: the REST catalog that has the tables' metadata, instead of the folder. `delta`: whether the tables are Delta tables, too,
    of which `layouts` has exceptions.
    """

    def __init__(
        self,
        spark: SparkSession,
        lake: str | Path,
        log: str,
        sources: Sequence[Source],
        *,
        catalog: str = "tuskline",
        epoch_interval: float = 60.0,
        retention_seconds: float = 86_400.0,
        max_bytes_per_epoch: int = 256 << 20,
        format: str = "iceberg",  # noqa: A002  # the configuration's own word
        failing_table: str = WAIT_FOR_COPY,
        copy_rate: float | None = None,
        copy_chunk_bytes: int = CHUNK_BYTES,
        progress: Callable[[Mapping[str, CopyStatus]], None] | None = None,
        on_unrepresentable_value: Mapping[str, str] | None = None,
        deletes: Mapping[str, str] | None = None,
        layouts: Sequence[LayoutRule] = (),
        views: Sequence[ViewDefinition] = (),
        mask_key: bytes | None = None,
        failing: Callable[[TusklineError | None], None] | None = None,
        store: StoreOptions = FROM_ENVIRONMENT,
        rest: LakeCatalog | None = None,
        delta: bool = False,
    ) -> None:
        requirements.check_driver(spark)
        if format != IcebergFormat.name:
            raise NotSupportedError(
                f"format {format!r} is not supported by this version", repair="use iceberg"
            )
        self.catalog = catalog
        self._spark = spark
        self._chain = open_chain(lake, store)
        self._sources = {source.stream: source for source in sources}
        self._log = LogAccess(log, self._sources)
        self._interval = epoch_interval
        self._retention = retention_seconds
        self._max_bytes = max_bytes_per_epoch
        self._leases = Leases()
        self._poller = PublicationPoller(sources)
        self._presence = Presence(self._chain.store)
        self._standby = Standby(self._chain, self._presence)
        self._writer: _Writer | None = None
        #: The link of a takeover that failed behind it.
        self._takeover: Manifest | None = None
        #: When the last round began: the interval is from start to start, however long a round takes.
        self._began_at = float("-inf")
        self._lake = ""
        self._format: IcebergFormat | None = None
        self._rest = rest
        self._delta = delta
        #: Where a catalog of others has the tables; and what is wrong with it, if anything is.
        self._whole: WholeEpochs | None = None
        self._trouble: Callable[[], TusklineError | None] = lambda: None
        self._policy = Policy(
            failing_table,
            copy_rate,
            keep_paused=retention_seconds,
            copy_chunk_bytes=copy_chunk_bytes,
        )
        self._progress = progress
        self._on_unrepresentable_value = dict(on_unrepresentable_value or {})
        self._deletes = dict(deletes or {})
        self._layouts = tuple(layouts)
        self._views = tuple(views)
        self._view_attempts = ViewAttempts(spark, self._chain.store)
        self._mask_key = mask_key_of_environment() if mask_key is None else mask_key
        check_key(self._layouts, self._mask_key)
        self._failures = RoundFailures(self._chain.root, failing or (lambda _: None))

    @property
    def is_writer(self) -> bool:
        """Whether this driver has taken the lake over, and no other has since, as far as it knows."""
        return self._writer is not None

    def run(self, stop: threading.Event) -> None:
        """Take over and publish epochs until `stop` is set; while another driver is at work, wait for its end.

        Survives restarts of the log and of PostgreSQL, and a full disk. Raises `FencedError` when a newer writer has
        come, `LakeError` for a lake of another log without a request (`adopt`), `UnavailableError` once the JVM has ended.
        """
        pause = _FIRST_PAUSE
        try:
            while not stop.is_set():
                try:
                    if self._writer is None and self._standby.stands_by():
                        self._failures.went_well()  # The other one says how its rounds go.
                        stop.wait(max(_STANDBY, self._chain.store.pause))
                        continue
                    self.run_once()
                    pause = _FIRST_PAUSE
                    self._failures.went_well(self._poller.overdue() or self._trouble())
                    stop.wait(max(_TICK, self._chain.store.pause))
                except LakeError as error:
                    self._failures.ended(error)
                    raise
                except FencedError as error:
                    if self._writer is not None:
                        raise
                    # Overtaken before we had begun: the later driver is at work, and we wait.
                    log.info("takeover abandoned", reason=error.what)
                    if (refused := self._refused(error)) is not None:
                        self._failed(refused, pause)
                    pause = _paused(stop, pause)
                except Exception as error:
                    self._failed(error, pause)
                    pause = _paused(stop, pause)
        finally:
            self.close()

    def run_once(self, *, force: bool = False) -> Manifest | None:
        """One look: publish the next epoch if it is time (or with `force`, if there is anything new).

        The first one takes over, even if another driver is at work. Returns what was published. Raises what `run` would retry.
        """
        if not is_alive(self._spark):
            raise _jvm_ended()  # nothing else detects this while there is nothing to write
        writer = self._writer or self._take_over()
        self._standby.check(writer.head.term)
        if writer.delta is not None:
            # What an earlier driver has published waits for no epoch, which may be long, or fail.
            writer.delta.show()
        status = self._log.status()
        if adopt.wanted(self._chain, writer.head, status.log_id):
            self._forget(writer)
            return None
        head, now = writer.head, time.monotonic()
        due = force or now - self._began_at >= self._interval or status.forced_version > head.epoch
        if status.version >= head.epoch:
            self._leases.renew(self._log.client, now)
        status = self._same_history(writer, status, due=due)
        self._update_tables(writer, status)
        head = writer.head
        if self._policy.holds_streams:
            rolled_back.check(head, writer.apart, str(self._chain.root))
        new = status.version > head.epoch
        awaited = writer.tables.awaited(head, status) if new else None
        if awaited is None or not (due or awaited):
            # What could not be shown after its epoch; mostly there is nothing.
            writer.engines.show(head)
            return None
        wanted, follow = writer.tables.poll_again(writer.head)
        self._publish(writer, wanted)
        if not follow:
            return None
        manifest = self._write(writer, status, everything=awaited)
        if manifest is None:
            return None
        # A backlog that one epoch could not take is gone on with at once.
        self._began_at = now if manifest.epoch >= status.version else float("-inf")
        self._after(writer, manifest)
        return manifest

    def close(self) -> None:
        """End the copies that run, and the connection to the log. The lake stays as it is."""
        if self._writer is not None:
            self._writer.tables.close()
        self._poller.close()
        self._presence.close()
        self._log.close()

    def _same_history(self, writer: _Writer, status: LogStatus, *, due: bool) -> LogStatus:
        """The log without the streams that the lake must not follow any more (`rolled_back`), which are held."""
        head, known = writer.head, writer.apart
        thorough = due or bool(known or head.copies or states.held(head))
        writer.apart = log_view.apart(head, status, self._sources, thorough=thorough)
        for stream in writer.apart.keys() - known.keys():
            log.error("the log has another history", stream=stream, reason=writer.apart[stream])
        head = rolled_back.hold(head, writer.apart, holds=self._policy.holds_streams)
        head, lost = log_view.without_lost(head, status)
        if rolled_back.given_up(head, writer.apart) and status.version < head.epoch:
            self._log.client.raise_version(head.epoch)
        writer.tables.drop_copies({*writer.apart, *lost})
        self._publish(writer, rolled_back.begin_again(head, writer.apart, status))
        return rolled_back.without(status, writer.apart)

    def _update_tables(self, writer: _Writer, status: LogStatus) -> None:
        """Publish changed table states, and start the copies that are due."""
        wanted = writer.tables.step(writer.head, status, self._log.client, writer.apart)
        wanted = rolled_back.hold(wanted, writer.apart, holds=self._policy.holds_streams)
        changed = self._publish(writer, wanted)
        writer.tables.settled(writer.head)
        changed |= self._publish(writer, writer.pins.settled(writer.head))
        self._compact(writer)
        self._clean(writer, writer.tables.of_maintainers(CLEAN))
        writer.tables.start_copies(writer.head, status, self._log.client)
        writer.tables.write_status(writer.head, changed=changed)

    def _compact(self, writer: _Writer) -> None:
        """Decide on what maintainers offer."""
        offers = writer.tables.of_maintainers(COMPACT)
        if not offers:
            return
        stage = writer.epochs.next_stage(writer.head)
        try:
            decided = writer.compactions.decided(writer.head, offers, stage)
            published = self._publish(writer, writer.compactions.head_with(writer.head, decided))
        except Exception:
            # Files and commits may have been made that are not published.
            writer.has_failed = True
            raise
        fail_point.hit("compaction-published")
        refused = {
            one.offer.table: writer.head.tables[one.offer.table]
            for one in decided
            if one.offer is not None and not one.made and one.offer.table in writer.head.tables
        }
        if published:
            links = {stage.link: writer.head.readable}
            remove_orphans(self._chain.root, refused, links, stage.term)
        else:
            # An epoch that failed at this link is repeated, and may continue from what it has written.
            remove_attempt(self._chain.root, refused.values(), stage)
        writer.compactions.settle(writer.head, decided)
        writer.tables.forget([one.request for one in decided])

    def _publish(self, writer: _Writer, wanted: Manifest) -> bool:
        """Publish other states of tables, at the epoch that there is; whether there was anything to publish."""
        if wanted == writer.head:
            return False
        link = writer.head.next(
            writer.kept.clock.now(),
            tables=wanted.tables,
            copies=wanted.copies,
            not_copied=wanted.not_copied,
            answered=wanted.answered,
            streams=wanted.streams,
            pins=wanted.pins,
            views=wanted.views,
            feeds=wanted.feeds,
            seconds=writer.head.seconds,
        )
        self._chain.publish(link, writer.head)
        self._adopt(writer, link)
        return True

    def _write(self, writer: _Writer, status: LogStatus, *, everything: bool) -> Manifest | None:
        """Write the next epoch; None if a table turned out not to follow, which is then in the chain."""
        tables = writer.tables
        head = tables.named(writer.head)
        former = {now: name for name, now in tables.moves.items()}
        again = [
            t for t in head.written if t.path in writer.damaged and t.state in {LIVE, RESUMING}
        ]
        effects = [takeover.TakeTable(t.path, t.snapshot_id, head.term, head.epoch) for t in again]
        found = {effect.path: writer.site.do(effect) for effect in effects}
        if any(found.values()):
            self._give_up(writer, {path: error for path, error in found.items() if error})
            return None
        writer.damaged -= set(found)
        try:
            writer.epochs.is_maintained = writer.compactions.is_maintained()
            manifest = self._try_to_write(writer, head, status, everything=everything)
        except ShapeChangedError as changed:
            # Names move with an epoch alone.
            self._publish(writer, tables.reshape(writer.head, changed.under(former)))
            return None
        except TableFaultsError as failed:
            found = failed.by_path()
            # One that was being resumed has its lease, from where it had stopped.
            live = {n for n, table in head.tables.items() if table.state == LIVE}
            names = {former.get(name, name) for name in live & failed.names}
            tables.keep_log(names, head.epoch, self._log.client)
            if not self._give_up(writer, found):
                raise next(iter(found.values())) from None
            return None
        except (CorruptError, NotSupportedError) as error:
            path = states.path_of(head, self._chain.root, error.where)
            if path is None or not self._give_up(writer, {path: error}):
                raise
            return None
        tables.written(head, manifest)
        return manifest

    def _try_to_write(
        self, writer: _Writer, head: Manifest, status: LogStatus, *, everything: bool
    ) -> Manifest:
        known = writer.tables.evolutions, writer.tables.polled

        def show() -> None:
            writer.tables.show_epoch(writer.head, writer.epochs.progress.now())

        try:
            with repeated(show, max(_SHOWN, self._chain.store.pause)):
                return writer.epochs.write(head, status, *known, everything=everything)
        except Exception:
            writer.has_failed = True
            raise

    def _give_up(self, writer: _Writer, errors: Mapping[str, TusklineError]) -> bool:
        """Suspend these tables, by path, and continue with the others; return whether any was not suspended before."""
        damage = (CorruptError, NotSupportedError)
        writer.damaged |= {path for path, error in errors.items() if isinstance(error, damage)}
        wanted = writer.tables.give_up(writer.head, errors)
        reasons = {p: reason_of(e, str(self._chain.root / p)) for p, e in errors.items()}
        left = feeds.without_damaged(wanted.feeds, reasons, wanted.epoch)
        return self._publish(writer, replace(without_damaged(wanted, reasons), feeds=left))

    def _after(self, writer: _Writer, manifest: Manifest) -> None:
        self._adopt(writer, manifest)
        self._lease(manifest)
        _show(writer, manifest)
        if writer.kept.is_due(self._retention):
            self._expire(writer)

    def _clean(self, writer: _Writer, asked: Sequence[Request]) -> None:
        """Look at the tables that a maintainer names, also while there is nothing to publish.

        The request goes when that is done: a writer that dies before leaves it to the next one.
        """
        if asked and writer.kept.is_due(self._retention):
            writer.kept.mark({path for request in asked for path in request.tables})
            self._expire(writer)
            fail_point.hit("clean-expired")
            done = [each for each in asked if writer.kept.has_looked_at(each.tables)]
            writer.tables.forget(done)

    def _expire(self, writer: _Writer) -> None:
        maintained = writer.compactions.is_maintained()
        leveling = writer.tables.leveling
        writer.kept.expire(writer.head, self._retention, others=not maintained, busy=leveling)
        writer.compactions.sweep(writer.head, writer.tables.of_maintainers(COMPACT))

    def _adopt(self, writer: _Writer, head: Manifest) -> None:
        """Continue from this link, which this writer published."""
        before, writer.head = writer.head, head
        writer.kept.remember(head)
        if writer.delta is not None:
            writer.delta.remember(head)
        written = {
            name: table
            for name, table in head.readable.items()
            if writer.has_failed or table is not before.readable.get(name)
        }
        if writer.has_failed:
            writer.site.remove_staging(head.term)
        writer.has_failed = False
        remove_orphans(self._chain.root, written, {head.link: head.readable}, head.term)

    # -- taking over ------------------------------------------------------------------------------------

    def _refused(self, error: FencedError) -> TusklineError | None:
        """Why there is no takeover; None if another driver is at work, which says how its rounds go."""
        try:
            if self._standby.stands_by():
                return None
        except TusklineError as found:
            return found
        return UnavailableError(
            f"the lake cannot be taken over, and no other driver is at work: {error.what}",
            where=error.where,
            repair="check that no other program writes the lake; the takeover is retried by itself",
        )

    def _take_over(self) -> _Writer:
        """Fence every earlier writer, in the chain first and then in each table."""
        requirements.check(self._spark)
        executors.check(self._spark, self._chain.root)
        store = options_of(self._chain.root)
        buckets.use(self._spark, self._chain.root, store.endpoint, store.region)
        self._standby.confirm()
        status = self._log.status()
        self._lake = self._chain.initialise(status.log_id, IcebergFormat.name)
        site = self._opened()
        clock = clock_after(self._takeover)

        def propose(before: Manifest | None, term: int) -> Manifest:
            nonlocal clock
            clock = clock_after(before)
            asked = adopt.wanted(self._chain, before, status.log_id)
            if before is None:
                first = log_view.first_link(self._lake, status, clock.now())
                head = replace(first, term=term, writer=uuid.uuid4().hex)
            else:
                head = before.next(clock.now(), term=term, writer=uuid.uuid4().hex)
            if asked:
                head = self._with_another_log(head, asked)
            self._presence.claim(head.term)
            return head

        def do(effect: takeover.Effect) -> Any:
            if isinstance(effect, takeover.TakeTable):
                self._take_catalog()
            answer = site.do(effect)
            if isinstance(effect, takeover.Publish) and answer is None:
                self._takeover = effect.link
                self._presence.forget_overtaken(effect.link.term)
                self._lease(effect.link)
            return answer

        try:
            if self._takeover is not None:
                self._presence.claim(self._takeover.term)
            steps = takeover.take_over(propose, self._takeover, self._standby.decided)
            taken = takeover.carry_out(steps, do)
            head = taken.head
            self._take_catalog()
            writer = self._new_writer(head, site, clock)
            self._sweep(writer)
            if taken.damaged:
                self._give_up(writer, taken.damaged)
        except Exception:
            self._presence.claim(0)
            raise
        if gone := departed(head, self._sources):
            log.warning("no source for these tables: their rows stay as they are", tables=gone)
        log.info("took over", term=head.term, epoch=head.epoch, link=head.link)
        replaced = to_copy_on_write(self._deletes, head.tables)
        for stream in {name.partition(".")[0] for name in replaced} & self._sources.keys():
            # With the next epoch, and there may be nothing else for one.
            mark(self._sources[stream])
        self._announce_derived(head)
        self._writer = writer
        return writer

    def _announce_derived(self, head: Manifest) -> None:
        """Let an epoch come if views or feeds are configured in another way than the head has them: there may be nothing else for one."""
        views = {view.name: view.sql for view in self._views}
        names = {name: feed_of(self._layouts, name) for name in head.tables}
        wanted = views, {feed: name for name, feed in names.items() if feed}
        has = {name: view.sql for name, view in head.views.items()}
        if wanted != (has, {feed: each.of for feed, each in head.feeds.items()}) and head.tables:
            for source in self._sources.values():
                try:
                    mark(source)
                except TusklineError as error:
                    # One that does not answer is no reason to wait: they come with the next epoch.
                    log.warning(
                        "views and feeds wait for an epoch", stream=source.stream, error=str(error)
                    )

    def _opened(self) -> LakeSite:
        """The lake's tables, by their catalog."""
        catalog = for_writing(self._chain, self._rest)
        self._format = IcebergFormat(self._spark, self._lake, catalog)
        if isinstance(catalog, FolderCatalog):
            return LakeSite(self._chain, self._format)
        if not catalog.supports_v3:
            self._deletes = without_vectors(self._deletes, self._rest.uri if self._rest else "")
        self._whole = WholeEpochs(catalog, self._lake, self._format.empty_snapshot)
        self._trouble = self._whole.trouble
        return LakeSite(self._chain, self._format, self._whole.term)

    def _take_catalog(self) -> None:
        """Fence earlier writers in a catalog of others, once their link is overtaken. Raises `FencedError`."""
        if self._whole is not None and self._takeover is not None:
            self._whole.take_over(self._takeover)

    def _with_another_log(self, link: Manifest, asked: Sequence[Request]) -> Manifest:
        """The takeover's link, from which on the lake is of the log that answers (`adopt`)."""
        status = self._log.raised(link.epoch)
        holds = self._policy.holds(copied_again=True)
        made = adopt.adopted(link, status, self._sources, asked, holds=holds)
        log.warning("the lake continues with another log", log=status.log_id, epoch=link.epoch)
        return made

    def _forget(self, writer: _Writer) -> None:
        """End this writer: after a takeover, the lake continues with another log, of which this writer has nothing."""
        writer.tables.close()
        self._writer = self._takeover = None
        self._leases = Leases()

    def _new_writer(self, head: Manifest, site: LakeSite, clock: SteadyClock) -> _Writer:
        assert self._format is not None
        epochs = EpochWriter(
            self._spark,
            self._chain,
            self._format,
            head,
            clock=clock,
            max_bytes=self._max_bytes,
            unchanged=self._log.unchanged,
            on_unrepresentable_value=self._on_unrepresentable_value,
            deletes=self._deletes,
            layouts=self._layouts,
            views=self._views,
            attempts=self._view_attempts,
            mask_key=self._mask_key,
        )
        copier = TableCopier(
            *(self._spark, self._chain.root, self._format),
            *(self._on_unrepresentable_value, self._deletes, self._layouts),
            mask_key=self._mask_key,
            catalog=for_reading(self._chain),
            leveled=partial(record_leveled, self._chain),
        )
        pins = Pins(self._chain, self._format)
        tables = TableWork(
            self._chain,
            self._lake,
            self._sources,
            Copies(copier),
            self._leases,
            self._poller,
            self._policy,
            clock,
            self._progress,
            pins=pins,
            rules=self._rules_of,
            # In a catalog of others a table is found by the name that its folder had.
            naming=Naming(self._settings_of, self._feed_of) if self._whole is None else None,
            targets=Targets(
                lru_cache(_KNOWN_NAMES)(partial(target_of, self._layouts)),
                partial(feed_of, self._layouts),
                is_set=any(rule.name for rule in self._layouts),
                # In a catalog of others a table is found by the name that its folder had.
                move=self._whole is None,
            ),
        )
        delta = None
        if self._delta or any(rule.delta for rule in self._layouts):
            delta = DeltaTables(self._chain, self._format, self._is_delta)
        kept = Retention.begin(
            self._chain, self._format, site, clock, None if delta is None else delta.clean
        )
        engines = self._whole or OtherEngines(self._chain, self._format, head)
        compactions = Compactions(self._chain, self._format, self._deletes)
        return _Writer(head, epochs, tables, site, kept, engines, pins, compactions, delta)

    def _rules_of(self, name: str) -> RowRules:
        """What the lake is to have of the rows of a table, as its version has it."""
        rules = rules_of(self._layouts, name)
        return rules._replace(masks=recorded(rules.masks, self._mask_key))

    def _settings_of(self, name: str) -> object:
        """All that the configuration says of a table by its name."""
        return (
            self._rules_of(name),
            layout_of(self._layouts, name),
            bool(self._feed_of(name)),
            deletes_of(self._deletes, name),
            quarantines(self._on_unrepresentable_value, name),
        )

    def _is_delta(self, name: str | None) -> bool:
        return self._delta if name is None else is_delta(self._layouts, name, default=self._delta)

    def _feed_of(self, name: str) -> str:
        return feed_of(self._layouts, name)

    def _sweep(self, writer: _Writer) -> None:
        """Remove what earlier writers left unfinished. Raises `FencedError` if a later one has come by now."""
        takeover.carry_out(takeover.sweep(writer.head), writer.site.do)
        recent = {m.link: m.readable for m in self._chain.newest(_RECENT_LINKS)}
        remove_orphans(self._chain.root, writer.head.readable, recent, writer.head.term)
        writer.compactions.sweep(writer.head, list(waiting(self._chain)))

    # -- the log ----------------------------------------------------------------------------------------

    def _lease(self, head: Manifest) -> None:
        """Let the log keep what is not published; a lease that fails is renewed with the next look."""
        try:
            self._leases.hold(self._log.client, f"lake-{self._lake}", head.epoch, time.monotonic())
            if self._writer is not None:
                self._writer.tables.release(head, self._log.client)
        except TusklineError as error:
            log.warning("could not renew the lease at the log", error=str(error))

    def _failed(self, error: Exception, pause: float) -> None:
        """Say what happened, and start the next attempt from what is durable: a newest link that is lost may be given up."""
        self._failures.failed(error, pause)
        if not is_alive(self._spark):
            raise _jvm_ended() from error
        self._log.close()
        if self._writer is not None:
            # A link may have been published although publishing it has failed.
            try:
                head = self._chain.head()
            except UnavailableError:
                # Nor does the store answer now. The next publication is refused then, and the link found after that.
                return
            if head is not None and head.term > self._writer.head.term:
                raise takeover.overtaken(head.term) from error
            if head is not None and head.link > self._writer.head.link:
                self._adopt(self._writer, head)
            elif (
                not self._chain.has(self._writer.head.link)
                and self._chain.recorded_newest() is None
            ):
                self._forget(self._writer)


def _show(writer: _Writer, manifest: Manifest) -> None:
    """Let those see what was published that read no manifests."""
    writer.engines.show(manifest)
    if writer.delta is not None:
        writer.delta.show()


def _jvm_ended() -> UnavailableError:
    return UnavailableError("its JVM has ended", where="lake", repair="start the driver again")


def _paused(stop: threading.Event, seconds: float) -> float:
    """Pause, or until `stop`; how long the next pause is."""
    stop.wait(seconds)
    return min(2 * seconds, _LONGEST_PAUSE)
