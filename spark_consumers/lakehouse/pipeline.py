"""The lake's writer: a plain loop that takes over, copies what is missing, and publishes epochs.

One writer at a time counts, by its term (`manifest`). What it needs after a crash is in the chain of
manifests and in the change log, so it keeps nothing of its own; whatever fails is tried again from there,
with growing pauses, for as long as no newer writer has come (`FencedError` ends it).
"""

import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import structlog
from pyspark.sql import SparkSession

from spark_consumers.lakehouse.bootstrap import Copier, Copies, CopyRequest, Source
from spark_consumers.lakehouse.departures import departed, without_departed
from spark_consumers.lakehouse.epoch import EpochWriter
from spark_consumers.lakehouse.files import orphans
from spark_consumers.lakehouse.iceberg import IcebergFormat
from spark_consumers.lakehouse.leases import Leases
from spark_consumers.lakehouse.looks import Looks
from spark_consumers.lakehouse.manifest import (
    COPIED,
    LEFT,
    LIVE,
    Manifest,
    StreamPosition,
    TableVersion,
    open_chain,
)
from walsender_bridge.change_log.client import LogClient, LogStatus
from walsender_bridge.errors import (
    FencedError,
    LakeError,
    NotSupportedError,
    TusklineError,
    UnavailableError,
)

__all__ = ["Lakehouse", "Source"]

#: How often the log is asked whether there is something to do, in seconds.
_TICK = 0.1
#: Pauses after failures, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
#: How often what is past its retention is removed, in seconds, at most.
_HOUSEKEEPING = 60.0
#: Links in which a takeover looks for files that belong to nobody.
_RECENT_LINKS = 100

log = structlog.get_logger()


@dataclass
class _Writer:
    """What a writer has while its term lasts. `last_use`: the last link of each snapshot of each table."""

    head: Manifest
    epochs: EpochWriter
    last_use: dict[str, dict[int, int]] = field(default_factory=dict)
    cleaned_at: float = 0.0


class Lakehouse:
    """The pipeline from a change log into one lake.

    `lake` is the lake's folder, `log` the repository's address. `epoch_interval` and `retention_seconds`
    are in seconds, `max_bytes_per_epoch` in bytes of the log as it is stored. `catalog` names the Spark
    catalog in which users of this session see the tables.
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
    ) -> None:
        if format != IcebergFormat.name:
            raise NotSupportedError(
                f"format {format!r} is not supported by this version", repair="use iceberg"
            )
        self.catalog = catalog
        self._spark = spark
        self._chain = open_chain(lake)
        self._address = log
        self._sources = {source.stream: source for source in sources}
        self._interval = epoch_interval
        self._retention = retention_seconds
        self._max_bytes = max_bytes_per_epoch
        self._client: LogClient | None = None
        self._leases = Leases()
        self._writer: _Writer | None = None
        #: When the last round began: the interval is from start to start, however long a round takes.
        self._began_at = float("-inf")
        self._copied: dict[str, TableVersion] = {}
        self._left: set[str] = set()
        self._set_aside: dict[str, str] = {}
        self._lake = ""
        self._format: IcebergFormat | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._copying: dict[str, Future[Copies]] = {}
        self._looks = Looks(sources)
        self._copy_after: dict[str, float] = {}

    def run(self, stop: threading.Event) -> None:
        """Take over and publish epochs until `stop` is set.

        Outlives what restarts: log, PostgreSQL, a full disk. Raises `FencedError` when a newer writer has
        come, `LakeError` for a lake of another log, and whatever is raised when the JVM is gone.
        """
        pause = _FIRST_PAUSE
        try:
            while not stop.is_set():
                try:
                    self.run_once()
                    pause = _FIRST_PAUSE
                    stop.wait(_TICK)
                except (FencedError, LakeError):
                    raise
                except Exception as error:
                    self._failed(error, pause)
                    stop.wait(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            self.close()

    def run_once(self, *, force: bool = False) -> Manifest | None:
        """One look: publish the next epoch if it is time (or with `force`, if there is anything new).

        Returns what was published. What `run` would try again is raised here.
        """
        if not self._jvm_is_alive():
            # Nothing else would tell while there is nothing to write.
            raise UnavailableError("its JVM is gone", where="lake", repair="start the driver again")
        writer = self._writer or self._take_over()
        self._leases.renew(self._log(), time.monotonic())
        self._look_for_tables(writer.head)
        self._collect_copies()
        status = self._status()
        self._check(status)
        head = writer.head
        now = time.monotonic()
        due = force or now - self._began_at >= self._interval or status.forced_version > head.epoch
        if status.version <= head.epoch or not due:
            # What could not be shown after its epoch; mostly there is nothing.
            writer.epochs.show(head)
            return None
        following = without_departed(self._with_departures(head), self._sources)
        manifest = writer.epochs.write(following, status, self._copied, self._set_aside)
        # A backlog that one epoch could not take is gone on with at once.
        self._began_at = now if manifest.epoch >= status.version else float("-inf")
        self._after(writer, manifest)
        return manifest

    def close(self) -> None:
        """End the connection to the log, and wait for a copy that runs. The lake stays as it is."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._looks.close()
        self._forget_client()

    def _after(self, writer: _Writer, manifest: Manifest) -> None:
        self._adopt(writer, manifest)
        self._lease(manifest)
        writer.epochs.show(manifest)
        if time.monotonic() - writer.cleaned_at >= min(_HOUSEKEEPING, self._retention):
            self._expire(writer)

    def _adopt(self, writer: _Writer, head: Manifest) -> None:
        """Go on from this link, which is ours."""
        writer.head = head
        self._copied = {
            n: t
            for n, t in self._copied.items()
            if head.tables.get(n) is None or head.tables[n].path != t.path
        }
        self._remember(writer, head)
        self._remove_orphans(head, {head.link: head})

    # -- taking over ------------------------------------------------------------------------------------

    def _take_over(self) -> _Writer:
        """Fence every earlier writer, in the chain first and then in each table."""
        while True:
            try:
                return self._try_to_take_over()
            except FencedError as error:
                # The earlier writer has published once more in between. Its next link is ours, or the
                # one after that: it publishes far more slowly than this is tried.
                log.info("takeover tried again", reason=error.what)

    def _try_to_take_over(self) -> _Writer:
        status = self._status()
        self._lake = self._chain.initialise(status.log_id, IcebergFormat.name)
        self._format = IcebergFormat(self._spark, self._lake)
        before = self._chain.head()
        if before is None:
            head = Manifest(
                lake=self._lake,
                link=1,
                epoch=status.version,
                previous_epoch=0,
                term=1,
                published_at=time.time(),
                streams={
                    s: StreamPosition(c.timeline, c.last_end_lsn, c.last_commit_time, c.end_offset)
                    for s, c in status.streams.items()
                },
            )
        else:
            head = before.next(term=before.term + 1, set_aside=before.set_aside)
        self._chain.publish(head, before)
        self._lease(head)
        for table in head.tables.values():
            path = str(self._chain.root / table.path)
            self._format.take_over(path, table.snapshot_id, head.term, head.epoch)
        epochs = EpochWriter(
            self._spark, self._chain, self._format, head.term, max_bytes=self._max_bytes
        )
        writer = _Writer(head, epochs)
        for manifest in self._chain.links():
            self._remember(writer, manifest)
        self._sweep(head)
        if gone := departed(head, self._sources):
            log.warning("no source for these tables: they stay as they are", tables=gone)
        log.info("took over", term=head.term, epoch=head.epoch, link=head.link)
        self._writer = writer
        return writer

    def _sweep(self, head: Manifest) -> None:
        """Remove what earlier writers left unfinished. Raises `FencedError` if a later one has come by now."""
        newest = self._chain.head()
        if newest is None or newest.link != head.link:
            raise FencedError(
                "another writer has taken over",
                where=str(self._chain.root),
                repair="nothing: the newer writer goes on",
            )
        self._chain.sweep()
        shutil.rmtree(self._chain.staging, ignore_errors=True)
        recent = {m.link: m for m in self._chain.newest(_RECENT_LINKS)}
        self._remove_orphans(head, recent)
        # A table's folder that no manifest names is a copy that was not finished.
        named = {t.path for m in self._chain.links() for t in m.tables.values()}
        for metadata in self._chain.root.glob("tables/*/*/*/metadata"):
            folder = metadata.parent
            if str(folder.relative_to(self._chain.root)) not in named:
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_orphans(self, head: Manifest, links: dict[int, Manifest]) -> None:
        """Remove data files of rounds that were not published, for these links."""
        for name, table in head.tables.items():
            stages = {
                link: manifest.tables[name].stage if name in manifest.tables else ""
                for link, manifest in links.items()
            }
            for file in list(orphans(self._chain.root / table.path, stages)):
                log.info("orphan removed", file=file.name, table=name)
                file.unlink(missing_ok=True)

    # -- tables that come and go ------------------------------------------------------------------------

    def _look_for_tables(self, head: Manifest) -> None:
        """Ask for copies of tables that are in a publication and not in the lake."""
        free = [s for s in self._sources if s in head.streams and s not in self._copying]
        for stream, wanted in self._looks.answers(free):
            self._look_at(head, self._sources[stream], wanted, time.monotonic())

    def _look_at(self, head: Manifest, source: Source, wanted: set[str], now: float) -> None:
        stream = source.stream
        ours = {
            name.removeprefix(f"{stream}."): table
            for name, table in {**head.tables, **self._copied}.items()
            if name.startswith(f"{stream}.")
        }
        present = {relation for relation, table in ours.items() if table.state != LEFT}
        self._left |= {f"{stream}.{relation}" for relation in present - wanted}
        missing = frozenset(
            relation
            for relation in wanted - present
            if self._copy_after.get(f"{stream}.{relation}", 0.0) <= now
        )
        if not missing:
            return
        replica = self._log().status().streams[stream].address
        request = CopyRequest(source, missing, replica, head.streams[stream].offset, head.term)
        assert self._format is not None
        copier = Copier(self._spark, self._chain.root, self._format)
        if not self._waiting(head, stream):
            # While the copy runs the lake goes on: what the copy needs of the log is kept for it. A lease
            # that an earlier copy still needs is older, and stays as it is.
            self._leases.hold(self._log(), self._copy_consumer(stream), head.epoch, now)
        log.info("copying", stream=stream, tables=sorted(missing), offset=request.offset)
        self._copying[stream] = self._pool.submit(copier.copy, request)

    def _waiting(self, head: Manifest, stream: str) -> bool:
        """Whether a table of the stream is copied and not yet shown."""
        unshown = {name for name, table in head.tables.items() if table.state == COPIED}
        return any(name.startswith(f"{stream}.") for name in unshown | set(self._copied))

    def _copy_consumer(self, stream: str) -> str:
        return f"lake-{self._lake}-copy-{stream}"

    def _collect_copies(self) -> None:
        """Take in what has been copied; plan anew what failed."""
        for stream, future in list(self._copying.items()):
            if not future.done():
                continue
            del self._copying[stream]
            try:
                copies = future.result()
            except Exception as error:
                log.warning("copy failed", stream=stream, error=str(error))
                continue
            self._copied |= copies.tables
            for name in copies.tables:
                self._set_aside.pop(name, None)
                self._left.discard(name)
            for name, reason in copies.failed.items():
                log.warning("table not copied", table=name, error=str(reason))
                self._set_aside[name] = str(reason)
                self._copy_after[name] = time.monotonic() + 30.0

    def _with_departures(self, head: Manifest) -> Manifest:
        """The head, with tables that are no longer published marked as such."""
        tables = {
            name: replace(table, state=LEFT)
            if name in self._left and table.state == LIVE
            else table
            for name, table in head.tables.items()
        }
        return replace(head, tables=tables)

    # -- the log ----------------------------------------------------------------------------------------

    def _log(self) -> LogClient:
        if self._client is None:
            self._client = LogClient(self._address)
        return self._client

    def _status(self) -> LogStatus:
        """The log's status, of this lake's streams only."""
        status = self._log().status()
        ours = {s: cut for s, cut in status.streams.items() if s in self._sources}
        return replace(status, streams=ours)

    def _forget_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _check(self, status: LogStatus) -> None:
        known = self._chain.identity()["log_id"]
        if status.log_id != known:
            raise LakeError(
                f"the log is {status.log_id}, this lake is of {known}",
                where=str(self._chain.root),
                repair="name another folder for the lake, or attach the log that wrote it",
            )

    def _lease(self, head: Manifest) -> None:
        """Let the log keep what is not published; a lease that fails is renewed with the next look.

        A table that is copied and not yet shown still needs the log from where its copy began.
        """
        try:
            self._leases.hold(self._log(), f"lake-{self._lake}", head.epoch, time.monotonic())
            for stream in self._sources:
                if stream not in self._copying and not self._waiting(head, stream):
                    self._leases.drop(self._log(), self._copy_consumer(stream))
        except TusklineError as error:
            log.warning("no lease at the log", error=str(error))

    def _failed(self, error: Exception, pause: float) -> None:
        """Say what happened, and start the next attempt from what is durable."""
        if not self._jvm_is_alive():
            raise error
        log.warning("round failed", error=str(error)[:2000], again_in_seconds=pause)
        self._forget_client()
        if self._writer is not None:
            # A link may have been published although publishing it has failed.
            head = self._chain.head()
            if head is not None and head.term > self._writer.head.term:
                raise FencedError(
                    f"term {head.term} has taken over",
                    where=str(self._chain.root),
                    repair="nothing: the newer writer goes on",
                ) from error
            if head is not None and head.link > self._writer.head.link:
                self._adopt(self._writer, head)

    def _jvm_is_alive(self) -> bool:
        try:
            return not self._spark._jsc.sc().isStopped()  # noqa: SLF001  # no public way
        except Exception:
            return False

    # -- retention --------------------------------------------------------------------------------------

    def _remember(self, writer: _Writer, manifest: Manifest) -> None:
        for table in manifest.tables.values():
            writer.last_use.setdefault(table.path, {})[table.snapshot_id] = manifest.link

    def _expire(self, writer: _Writer) -> None:
        """Remove epochs past their retention, then the snapshots and files that only they needed."""
        writer.cleaned_at = time.monotonic()
        removed = self._chain.retire(time.time() - self._retention)
        oldest = next(iter(islice(self._chain.links(), 1)), None)
        if oldest is None or self._format is None:
            return
        files = 0
        for table in writer.head.tables.values():
            uses = writer.last_use[table.path]
            for snapshot in [s for s, link in uses.items() if link < oldest.link]:
                del uses[snapshot]
            path = str(self._chain.root / table.path)
            files += self._format.expire(path, writer.head.term, set(uses))
        if removed or files:
            log.info("expired", links=removed, files=files, oldest_epoch=oldest.epoch)
