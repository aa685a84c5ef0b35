"""Reading a lake: all tables of one epoch, or none.

`read` resolves one manifest, once, and every table of the `Snapshot` is read at the snapshot that this
manifest names. So whatever is joined, at whatever time, is of one epoch; and a Spark session that has read
an epoch is never given an older one by a later `read` that does not ask for it.

While a `Snapshot` is there, and an hour longer, its epoch does not expire (`lake.manifest.reader_leases`).
"""

import difflib
import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from spark_consumers.lake.catalog.open_catalog import for_reading
from spark_consumers.lake.catalog.table_catalog import TableCatalog
from spark_consumers.lake.manifest.chain import (
    LIVE,
    Chain,
    Manifest,
    StreamPosition,
    TableVersion,
    open_chain,
)
from spark_consumers.lake.manifest.newest import is_lost, lost
from spark_consumers.lake.manifest.pinned_links import at_epoch, at_pin, is_kept
from spark_consumers.lake.manifest.reader_leases import lease_on
from spark_consumers.lake.manifest.table_version import HELD, STALE
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.mask_key import mask_key
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, StoreOptions
from spark_consumers.lake.store.place import Place, options_of
from spark_consumers.lake.tables.states import is_behind, without_earlier
from spark_consumers.spark import buckets, requirements
from walsender_bridge.errors import LakeError, TrimmedError, UsageError
from walsender_bridge.postgres.protocol.relation_name import split_relation

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_consumers.lake.live.log_tail import LogTail

#: What reads the tables' files.
ICEBERG, DELTA = "iceberg", "delta"
#: How long a reader waits for a link that it has seen already, in seconds.
_PATIENCE = 10.0
_POLL_SECONDS = 0.1

#: For each Spark application, by its ID, and lake the newest epoch that it has read.
_seen: defaultdict[str, dict[str, int]] = defaultdict(dict)
#: For each Spark application and lake the tables that a live read has shown as of its version, and that of the last one.
_shown: defaultdict[tuple[str, str], dict[str, int]] = defaultdict(dict)
_remembering = threading.Lock()
#: For each Spark session the views that were registered, by lake and prefix.
_views: "WeakKeyDictionary[Any, dict[tuple[Place, str], set[str]]]" = WeakKeyDictionary()


def read(
    spark: "SparkSession",
    lake: str | Path,
    epoch: int | None = None,
    as_of: float | None = None,
    live: bool = False,
    *,
    log: str | None = None,
    consumer: str = "live",
    pin: str | None = None,
    allow_stale: bool = False,
    store: StoreOptions = FROM_ENVIRONMENT,
    mask_key_file: str | Path | None = None,
    format: str = ICEBERG,  # noqa: A002  # Spark's own word
) -> "Snapshot":
    """All tables of the lake at one epoch: the newest, or that of number `epoch`, of the time `as_of`, or of the `pin`.

    `as_of` is in seconds since the Unix epoch: the epoch that was the newest then. `pin` is the name of a pin
    (`tuskline epochs pin`), which alone keeps the epoch for this reader. A suspended table has the rows of an
    earlier epoch, and may lack parts of transactions that others show: it is not in the snapshot, unless `allow_stale`.
    Tables that were paused on request, or have left their publication, are in it. `store`: how a bucket is reached.

    With `live` the snapshot is of the newest version of the change log at the address `log`: the newest epoch with what the log has
    behind it (docs/live-reads.md). `consumer`: what the name of the reader's lease on the log begins with, which a reader's
    certificate has to allow. `mask_key_file`: the key of hashed columns, by default in the variable TUSKLINE_MASK_KEY; without the
    lake's key, live reads leave out the tables that have such columns. `format`: `iceberg`, or `delta`, by which Delta reads the same
    files (docs/delta.md).

    Raises `LakeError` (no lake, no such epoch), `TrimmedError` (past its retention), `CorruptError`, `NotSupportedError` (a
    session that cannot read a lake: `spark.requirements`); with `live`, the log's errors, too.
    """
    if sum(each is not None for each in (epoch, as_of, pin)) > 1:
        raise UsageError(
            "epoch, as_of and pin are mutually exclusive", repair="specify only one of them"
        )
    if live and (log is None or (epoch, as_of, pin) != (None, None, None)):
        raise UsageError(
            "a live read is of the newest version of a change log",
            repair='read(..., live=True, log="grpc://HOST:PORT"), without epoch, as_of and pin',
        )
    if format not in {ICEBERG, DELTA}:
        raise UsageError(f"unknown format {format!r}", repair=f"use {ICEBERG} or {DELTA}")
    chain = open_chain(lake, store)
    root = chain.root
    identity = chain.identity()
    requirements.check(spark)
    reached = options_of(root)
    buckets.use(spark, root, reached.endpoint, reached.region)
    lake_id: str = identity["lake"]
    application = str(spark.conf.get("spark.app.id"))
    seen, shown = _seen[application], _shown[application, lake_id]
    tail = None
    lease = lease_on(chain.store)
    with lease.resolving() if lease is not None else nullcontext():
        if epoch is not None:
            manifest = at_epoch(chain, epoch)
        elif pin is not None:
            manifest = at_pin(chain, pin)
        elif as_of is not None:
            manifest = chain.as_of(as_of)
        elif live and log is not None:
            reader = None if lease is None else lease.reader
            key = mask_key(None if mask_key_file is None else Path(mask_key_file))
            manifest, tail = _live(spark, chain, log, consumer, reader, seen.get(lake_id, 0), key)
        else:
            manifest = _newest(chain, seen.get(lake_id, 0))
        if epoch is None and pin is None and as_of is None:
            manifest = without_earlier(manifest, dict(shown))
        snapshot = Snapshot(
            spark,
            root,
            manifest,
            allow_stale=allow_stale,
            catalog=for_reading(chain),
            tail=tail,
            format=format,
        )
        # What a pin keeps needs no lease, which would keep all later epochs, too.
        if lease is not None and pin is None and chain.has(manifest.link):
            lease.keep(snapshot, manifest.link)
    # Threads may read at once: the newest that one of them has read stays.
    with _remembering:
        seen[lake_id] = max(seen.get(lake_id, 0), manifest.epoch)
        if tail is not None:
            for name, table in manifest.tables.items():
                if table.state == LIVE:
                    shown[name] = max(shown.get(name, 0), manifest.epoch)
    return snapshot


def _live(
    spark: "SparkSession",
    chain: Chain,
    log: str,
    consumer: str,
    reader: str | None,
    least: int,
    key: bytes,
) -> "tuple[Manifest, LogTail]":
    """The newest epoch with the log's tail: as a manifest of the tail's version, which is `least` at least.

    Tables that cannot be shown there are of the epoch.
    """
    from spark_consumers.lake.live.log_tail import open_tail

    deadline = time.monotonic() + _PATIENCE
    while True:
        head = _newest(chain, 0)
        log_id = head.log_id or str(chain.identity()["log_id"])
        try:
            tail = open_tail(spark, chain.root, head, log_id, log, consumer, reader, key)
        except TrimmedError:
            # The log keeps what is behind the newest epoch, which may be another one by now.
            if _newest(chain, 0).epoch == head.epoch or time.monotonic() > deadline:
                raise
            continue
        if tail.version < least:
            if time.monotonic() > deadline:
                raise LakeError(
                    f"this session has read version {least}, and the log can be read up to {tail.version}",
                    where=log,
                    repair="check that this is the log that the lake is written from, not an older copy of it",
                )
            time.sleep(_POLL_SECONDS)
            continue
        tables = {
            name: replace(table, state=HELD, as_of=head.epoch, reason=tail.left_out[name])
            if name in tail.left_out
            else table
            for name, table in tail.tables.items()
        }
        # What came since then gets its rows with its epoch.
        feeds = {
            name: feed.stopped(head.epoch, "a live read has no feeds; read the newest epoch")
            for name, feed in head.feeds.items()
        }
        made = replace(head, epoch=tail.version, streams=tail.streams, tables=tables, feeds=feeds)
        return made, tail


def _newest(chain: Chain, least: int) -> Manifest:
    """The newest link, once it is as new as what this session has read, and what was published.

    On a disk that several machines share, a listing may be older than one seen before. Raises `CorruptError` if the
    newest link is lost: an older one would take this reader back.
    """
    where = chain.store.location
    deadline = time.monotonic() + _PATIENCE
    while True:
        recorded = chain.recorded_newest()
        found = chain.head()
        is_behind = recorded is not None and is_lost(recorded, found)
        if found is not None and found.epoch >= least and not is_behind:
            return found
        if recorded is not None and is_behind and time.monotonic() > deadline:
            raise lost(recorded, found, chain.where(recorded))
        if is_behind:
            time.sleep(_POLL_SECONDS)
            continue
        if found is None and not least:
            raise LakeError(
                "no epoch is published yet",
                where=where,
                repair="check that `tuskline lake run` is running",
            )
        if time.monotonic() > deadline:
            raise LakeError(
                f"this session has read epoch {least}, but the newest here is "
                f"{found.epoch if found is not None else 'gone'}",
                where=where,
                repair="after a live read, read live again, or wait for its epoch: tuskline flush; otherwise check that this is the"
                " same lake, not an older copy of it",
            )
        time.sleep(_POLL_SECONDS)


class Snapshot(Mapping[str, "DataFrame"]):
    """The tables of one epoch, as DataFrames by name: `snapshot["public.orders"]`.

    A name is `stream.schema.table`, or a shorter end of it that only one table has.
    """

    def __init__(
        self,
        spark: "SparkSession",
        root: Place,
        manifest: Manifest,
        *,
        allow_stale: bool = False,
        catalog: TableCatalog | None = None,
        tail: "LogTail | None" = None,
        format: str = ICEBERG,  # noqa: A002  # Spark's own word
    ) -> None:
        self._format = format
        self._catalog = catalog
        self._tail = tail
        self._spark = spark
        self._root = root
        self.manifest = manifest
        self._views = manifest.readable_views
        self._at_sources = manifest.at_sources
        #: Of a live read, the views that it cannot compute: they are those of the epoch.
        self._not_computed = {} if tail is None else self._views_without_tables()
        self._withheld = {} if allow_stale else self._behind()

    @property
    def epoch(self) -> int:
        """The epoch's number: the log's version that it ends with."""
        return self.manifest.epoch

    @property
    def positions(self) -> dict[str, StreamPosition]:
        """Where the epoch cuts each stream."""
        return dict(self.manifest.streams)

    @property
    def tables(self) -> list[str]:
        """The names of the tables that this snapshot gives, `stream.schema.table`, ordered."""
        return sorted(self.manifest.readable.keys() - self._withheld.keys())

    @property
    def stale(self) -> dict[str, str]:
        """The tables whose rows are those of an earlier epoch, and why: paused, stale, copied again, or left."""
        return {
            name: f"as of epoch {table.as_of}: {table.reason or table.state}"
            for name, table in {**self.manifest.readable, **self._not_computed}.items()
            if table.state != LIVE and table.as_of != self.epoch
        }

    def __getitem__(self, name: str) -> "DataFrame":
        """The table as a DataFrame.

        Raises `LakeError` for an unknown or ambiguous name, and for a stale table without `allow_stale`, `TrimmedError` if
        the epoch has expired, `CorruptError` for a damaged file of its metadata.
        """
        from spark_consumers.lake.delta_log.read import read_version
        from spark_consumers.lake.format.iceberg_read import read_snapshot
        from spark_consumers.lake.format.table_format import ROW_ID

        full = self.resolve(name)
        view = self._views.get(full)
        if view is not None and self._tail is not None and full not in self.stale:
            return self._computed(view)
        table: TableVersion = self.manifest.readable[full]
        path = self._root / table.path
        try:
            frame: DataFrame
            if self._format == DELTA:
                order = self.manifest.term, self.manifest.link
                frame = read_version(self._spark, str(path), order, table.snapshot_id)
            else:
                frame = read_snapshot(self._spark, str(path), table.snapshot_id, self._catalog)
        except Exception:
            if path.is_dir() and is_kept(open_chain(self._root), self.manifest):
                raise
            # Spark tells it in its own words, which name a snapshot by a number.
            raise TrimmedError(
                f"epoch {self.epoch} has expired",
                where=full,
                repair="read a later epoch; an epoch is kept only for readers that can write to the lake's folder",
            ) from None
        if view is not None:
            return frame.drop(*view.hidden)
        frame = frame if table.key else frame.drop(ROW_ID)
        # A feed is of no source.
        source = self._at_sources.get(full)
        if self._tail is None or source is None:
            return frame
        return self._tail.merged(source, frame)

    def _computed(self, view: ViewVersion) -> "DataFrame":
        """The rows of a view over this snapshot's tables: a live read has it computed by the query that reads it."""
        from spark_consumers.lake.views.spark_functions import prepare

        prepare(self._spark)
        frames: dict[str, Any] = {
            f"t{number}": self[self.manifest.tables[name].lake_name or name]
            for number, name in enumerate(view.tables)
        }
        found: DataFrame = self._spark.sql(view.query, **frames)
        return found

    def _behind(self) -> dict[str, TableVersion]:
        """What is left out unless it is asked for."""
        head = self.manifest
        behind = {name: t for name, t in head.readable.items() if is_behind(head, t)}
        return behind | self._not_computed

    def _views_without_tables(self) -> dict[str, TableVersion]:
        """The views that a live read cannot compute, since it has not all of their tables at its version."""
        found = {}
        for full, view in self._views.items():
            assert view.table is not None
            tables = {n: self.manifest.tables.get(n) for n in view.tables}
            # A view of a table that is gone is stale in its epoch already.
            lacking = next(
                (n for n, t in tables.items() if t is not None and t.state != LIVE), None
            )
            table = tables.get(lacking or "")
            if table is not None:
                as_of = table.as_of or self.manifest.epoch
                reason = f"it reads {lacking}: {table.reason or table.state}"
                found[full] = replace(view.table, state=STALE, as_of=as_of, reason=reason)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and len(self._matches(name)) == 1

    def resolve(self, name: str) -> str:
        """The full name of the table that is meant. Raises `LakeError`."""
        found = self._matches(name)
        if len(found) == 1:
            return found[0]
        if found:
            raise LakeError(
                f"{name!r} is ambiguous", where=str(self._root), repair=f"name one of {found}"
            )
        stale = _matching(name, self._withheld)
        if stale:
            held = self._withheld[stale[0]]
            raise LakeError(
                f"the rows are those of epoch {held.as_of}, not of epoch {self.epoch}: "
                f"{held.reason or held.state}",
                where=stale[0],
                repair="check `tuskline status`; read(..., allow_stale=True) returns these rows",
            )
        ends = {end: full for full in self.tables for end in _ends(full)}
        close = difflib.get_close_matches(name, ends, n=3, cutoff=0.5)
        nearest = sorted({ends[c] for c in close}) or self.tables[:10]
        reason = self.manifest.not_copied.get(name) or self._reason_of_view(name)
        raise LakeError(
            f"no table {name!r} in epoch {self.epoch}" + (f": {reason}" if reason else ""),
            where=str(self._root),
            repair=f"similar names: {nearest}" if nearest else "no table is published yet",
        )

    def _reason_of_view(self, name: str) -> str:
        """Why a view of this name has no rows; empty if there is none."""
        found = (v for n, v in self.manifest.views.items() if name in {n, n.partition(".")[2]})
        return next((f"view {name}: {view.reason}" for view in found if view.table is None), "")

    def _matches(self, name: str) -> list[str]:
        return _matching(name, self.tables)

    def register_views(self, prefix: str = "") -> dict[str, str]:
        """Make a temporary view of each table, `prefix_schema_table`; by the view's name, the table's.

        With several streams the stream is in the name: `prefix_stream_schema_table`. Dots become underscores, and where
        two names are one to Spark, which ignores case, each gets a few characters of its own. The views stay at this
        epoch. Views of an earlier snapshot that this one does not make again are dropped: they would be of another epoch.
        So is any temporary view that has the name of a table which is left out, as it is replaced where the table is not.
        """
        readable = view_names(self.manifest.readable, prefix)
        names = {view: full for view, full in readable.items() if full not in self._withheld}
        known = _views.setdefault(self._spark, {}).setdefault((self._root, prefix), set())
        # First, as Spark ignores case. A table may have had another name before: a stream, or one of its name, came.
        for view in (known | readable.keys()) - names.keys():
            self._spark.catalog.dropTempView(view)
            known.discard(view)
        for view, full in names.items():
            known.add(view)
            quoted = view.replace("`", "``")
            self[full].createOrReplaceTempView(f"`{quoted}`")
        return names


def view_names(tables: Iterable[str], prefix: str = "") -> dict[str, str]:
    """The names of the views of these tables (`stream.schema.table`), and which table each is of."""
    split = {full: full.partition(".") for full in sorted(tables)}
    several = len({stream for stream, _, _ in split.values()}) > 1
    named = defaultdict(list)
    for full, (stream, _, relation) in split.items():
        parts = [*([prefix] if prefix else []), *([stream] if several else [])]
        view = "_".join([*parts, *split_relation(relation)]).replace(".", "_")
        named[view.casefold()].append((view, full))
    found = {}
    for same in named.values():
        for view, full in same:
            mark = hashlib.sha256(full.encode()).hexdigest()[:6]
            found[view if len(same) == 1 else f"{view}_{mark}"] = full
    return found


def _matching(name: str, tables: Collection[str]) -> list[str]:
    return [name] if name in tables else sorted(t for t in tables if name in _ends(t))


def _ends(full: str) -> list[str]:
    """`stream.schema.table`, `schema.table`, `table`: a table's own name may have dots too."""
    relation = full.partition(".")[2]
    return [full, relation, split_relation(relation)[1]]
