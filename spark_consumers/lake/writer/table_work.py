"""Applies publications, requests, copies and schema changes to the states of the lake's tables.

The pipeline calls `step` once a round, and publishes what has changed as a separate link at the current epoch, so the
state of a table is durable before anything depends on it. `states`, `requests` and `schema_change` decide; this module
passes them the publications, the log and the copies.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from spark_consumers.decode.mode_columns import unkept
from spark_consumers.lake.copy.bootstrap import CopyRequest, StartOver
from spark_consumers.lake.copy.running import Copies, NotBegun, Result
from spark_consumers.lake.epoch import quarantined_rows, rolled_back
from spark_consumers.lake.epoch.epoch_writer import ShapeChangedError
from spark_consumers.lake.epoch.log_view import version_before
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion
from spark_consumers.lake.manifest.table_version import (
    ANOTHER_LOG,
    LEFT,
    LIVE,
    PAUSED,
    REATTACHED,
    RESUMING,
)
from spark_consumers.lake.policy import Policy
from spark_consumers.lake.status import CopyStatus, EpochStatus, write_status
from spark_consumers.lake.tables import expected, noticed, states
from spark_consumers.lake.tables.disclosed import disclosed
from spark_consumers.lake.tables.evolve import evolve
from spark_consumers.lake.tables.fault import reason_of
from spark_consumers.lake.tables.origin import Joins, joins
from spark_consumers.lake.tables.publication_poller import PublicationPoller
from spark_consumers.lake.tables.reconfigured import reconfigured
from spark_consumers.lake.tables.recorded import TableRecord
from spark_consumers.lake.tables.removed import without_departed
from spark_consumers.lake.tables.renamed import Naming, moved, renamed
from spark_consumers.lake.tables.schema_change import (
    Evolution,
    FullResync,
    evaluate,
    first_layout,
    not_plain,
    of_filter,
)
from spark_consumers.lake.tables.schema_match import SchemaMismatch
from spark_consumers.lake.tables.shape import Publication, Shape, others_by_now
from spark_consumers.lake.tables.sources import Source, columns_now, mark
from spark_consumers.lake.tables.states import stream_of
from spark_consumers.lake.tables.table_filter import filter_of
from spark_consumers.lake.tables.target_names import (
    AS_AT_SOURCES,
    REFUSED,
    Given,
    Targets,
    given,
    names_in,
    others_in,
    pending,
    with_names,
)
from spark_consumers.lake.writer import adopt, pins, requests
from spark_consumers.lake.writer.leases import Leases
from walsender_bridge.change_log.client import LogClient, LogStatus
from walsender_bridge.errors import (
    CorruptError,
    DivergedError,
    TrimmedError,
    TusklineError,
    UnsupportedValueError,
)
from walsender_bridge.postgres.table_layout import RowRules
from walsender_bridge.runtime import fail_point, logs
from walsender_bridge.runtime.steady_clock import SteadyClock

#: After which a copy that failed is tried again, in seconds.
_AFTER_FAILURE = 30.0
#: After which a copy is tried again that could not begin, in seconds.
_NOT_BEGUN = 2.0
#: Why a table is copied that lacks nothing but changes: most of its rows may be the source's.
_LEVELED = frozenset({REATTACHED, ANOTHER_LOG})
#: How often that is tried before the table is copied instead.
_LEVEL_ATTEMPTS = 2
#: How often the status is written while something is copied, in seconds.
_STATUS = 1.0

log = logs.logger()


class TableWork:
    """The tables of one lake, for one writer's term."""

    def __init__(
        self,
        chain: Chain,
        lake: str,
        sources: Mapping[str, Source],
        copies: Copies,
        leases: Leases,
        poller: PublicationPoller,
        policy: Policy,
        clock: SteadyClock,
        progress: Callable[[Mapping[str, CopyStatus]], None] | None = None,
        *,
        pins: pins.Pins,
        rules: Callable[[str], RowRules] = lambda _: RowRules(),
        naming: Naming | None = None,
        targets: Targets = AS_AT_SOURCES,
    ) -> None:
        self._chain = chain
        self._lake = lake
        self._sources = sources
        self._copies = copies
        self._leases = leases
        self._poller = poller
        self._policy = policy
        self._clock = clock
        self._progress = progress
        self._pins = pins
        #: By a table's name, what the lake is to have of its rows; whether the chain has what came of comparing that.
        self._rules = rules
        self._is_compared = False
        #: What depends on a table's name; None: the catalog finds tables by their first names, so renamed ones are copied.
        self._naming = naming
        #: Under which names tables are to be in the lake; the published ones that cannot have theirs, and why.
        self._targets = targets
        self._refused: dict[str, str] = {}
        #: The streams that the lake must not follow now.
        self._apart: frozenset[str] = frozenset()
        #: The names that tables have at their sources by now, and which they have in the lake until the next epoch; for which of these an
        #: epoch was asked for; the names that move with the epoch that is being written.
        self._former: dict[str, str] = {}
        self._announced: dict[str, str] = {}
        self.moves: dict[str, str] = {}
        #: By stream: the tables in its publication, `stream.schema.table`, when it was last seen.
        self._published: dict[str, set[str]] = {}
        #: By stream and name: the OID of each of these tables.
        self._oids: dict[str, dict[str, int]] = {}
        self._copy_after: dict[str, float] = {}
        #: How often each table that is to be brought level has not been.
        self._not_level: Counter[str] = Counter()
        self._seen_shapes: noticed.Seen = {}
        #: Changes of columns that the catalog has shown, and that are to come in the log.
        self._expected = expected.Expected()
        #: When what came of a copy, or of partitions in the log, came (monotonic seconds): a look that began before says
        #: nothing of it.
        self._arrived_at: dict[str, float] = {}
        #: What came of copies and is in no link yet, in its order; requests that a link may have answered.
        self._arrived: dict[str, list[Result]] = {}
        self._asked: list[requests.Request] = []
        #: By name: the folders of copies of which some chunks are still to come.
        self._partials: dict[str, str] = {}
        #: When requests without an answer were first seen, by id, and when each stream's last look began (monotonic seconds).
        self._seen_at: dict[str, float] = {}
        self._polled_at: dict[str, float] = {}
        self._hears = True
        self._looked_at = float("-inf")
        requests.make_room(chain)
        #: For tables by path: how their columns change in the epoch that is being written.
        self.evolutions: dict[str, Evolution] = {}
        #: The streams whose publication was read after `poll_again` was called.
        self.polled: set[str] = set()
        self._status_at = float("-inf")
        #: Tables that are paused, or stopped by a fault, for which this writer has a lease.
        self._paused: set[str] = set()

    # -- one round --------------------------------------------------------------------------------------

    def step(
        self, head: Manifest, status: LogStatus, client: LogClient, apart: Mapping[str, str]
    ) -> Manifest:
        """The head with all that has changed about its tables; `settled` is called when that is durable.

        `apart`: the streams that are not in `status`, as the log has another history of them, and why.
        """
        self._read_requests()
        asked = [r for r in self._asked if r.kind not in requests.OF_MAINTAINERS]
        new = [request for request in asked if request.id not in head.answered]
        if any(request.id not in self._seen_at for request in new):
            self._poller.soon()
        now = time.monotonic()
        self._seen_at = {request.id: self._seen_at.get(request.id, now) for request in new}
        self._apart = frozenset(apart)
        publications = self._poll(head)
        changed = without_departed(self._reconfigured(head), self._sources)
        moves = self._renamed(changed)
        targets = self._given(changed, moves)
        self._announce({**moves, **pending(changed, targets)})
        self._former = {now: name for name, now in moves.items()}
        for stream, names in self._published.items():
            changed = states.without(changed, self._by_former(names), stream)
        changed = pins.ended(changed, self._clock.now()) if changed.pins else changed
        later: set[str] = set()
        for request in self._ready(new):
            if request.pin in later or pins.waits(changed, request):
                later.add(request.pin)
            else:
                changed = self._carry_out(changed, request, status, client, apart)
        changed = self._without_names(changed, targets)
        changed = self._with_arrived(changed, status)
        changed = self._without_disclosed(changed)
        changed, _ = self._compare(changed, publications)
        changed, outrun = states.without_outrun(changed, status.streams)
        for name, copy in outrun.items():
            log.warning("copy discarded", table=name, timeline=copy.timeline, lsn=copy.start_lsn)
        low = {stream: cut.low_offset for stream, cut in status.streams.items()}
        for name, reason in states.trimmed(changed, low).items():
            log.error("table cannot follow", table=name, reason=reason)
            holds = self._policy.holds(copied_again=False)
            changed = states.stop(changed, name, reason, holds=holds, full_resync=False)
        return self._policy.released(changed, rolled_back.REASON)

    def _reconfigured(self, head: Manifest) -> Manifest:
        """The head without tables of other rules than the configuration's, before anything is done with one."""
        if self._is_compared:
            return head
        holds = self._policy.holds(copied_again=True)
        head, others = reconfigured(head, self._rules, holds=holds)
        for name in others:
            log.warning("masks, mode or row filter of table changed", table=name)
        return head

    def _renamed(self, head: Manifest) -> dict[str, str]:
        """The tables of the head that have another name at their source by now, and which."""
        moves: dict[str, str] = {}
        if self._naming is None:
            return moves
        for stream, oids in self._oids.items():
            if stream in head.streams and stream not in self._apart:
                moves |= renamed(head, stream, oids, self._naming)
        return moves

    def _by_former(self, names: Iterable[str]) -> set[str]:
        """These names of published tables as the lake has them now."""
        return {self._former.get(name, name) for name in names}

    def named(self, head: Manifest) -> Manifest:
        """The head for the next epoch, with which names move: each of its tables has the name that it has at its source, and its target name."""
        self.moves = self._renamed(head)
        names = self._given(head, self.moves)
        if self._naming is not None and self.moves:
            for name, now in self.moves.items():
                log.info("table renamed in place", table=name, to=now)
            head = moved(head, self.moves, self._naming)
        for name, to in pending(head, names).items():
            log.info("table has another name in the lake", table=name, to=to)
        return with_names(head, names, self._targets.feed, self.moves.values())

    def _given(self, head: Manifest, moves: Mapping[str, str]) -> Given:
        """The names in the lake of the tables of the next epoch, by those that they have at their sources then."""
        if not self._targets.is_set and not any(t.lake_name for t in head.tables.values()):
            return Given({}, {})
        in_lake = names_in(head)
        before = {
            moves.get(n, n): in_lake[n] for n in in_lake if n in moves or n not in moves.values()
        }
        published = {n for names in self._published.values() for n in names} | head.copies.keys()
        wanted = {name: self._targets.of(name) for name in published - before.keys()}
        if self._targets.move:
            follow = {moves.get(n, n) for n, t in head.tables.items() if t.state != LEFT}
            wanted |= {name: self._targets.of(name) for name in follow & before.keys()}
        return given(wanted, before, others_in(head))

    def _without_names(self, head: Manifest, names: Given) -> Manifest:
        """The head with the reasons why tables do not have their target names; copies that have none are dropped."""
        reasons = {n: REFUSED + why for n, why in names.refused.items()}
        for name, reason in reasons.items():
            if head.not_copied.get(name) != reason:
                log.error("table does not have its target name", table=name, reason=reason)
        self._refused = {n: why for n, why in reasons.items() if n not in names.names}
        copies = {n: copy for n, copy in head.copies.items() if n not in self._refused}
        for name in head.copies.keys() - copies.keys():
            self._copies.drop(name)
        kept = {n: why for n, why in head.not_copied.items() if not why.startswith(REFUSED)}
        if copies == head.copies and {**kept, **reasons} == head.not_copied:
            return head
        return replace(head, copies=copies, not_copied={**kept, **reasons})

    def _announce(self, moves: Mapping[str, str]) -> None:
        """Let an epoch come that moves these names: there may be nothing else for one."""
        new = moves.items() - self._announced.items()
        for stream in {stream_of(name) for name, _ in new}:
            mark(self._sources[stream])
        self._announced = dict(moves)

    def _without_disclosed(self, head: Manifest) -> Manifest:
        """The head with the reasons why renamed tables are not copied, if their earlier names had masks."""
        reasons: dict[str, str] = {}
        for oids in self._oids.values():
            reasons |= disclosed(head, oids, self._rules)
        for name, reason in reasons.items():
            if head.not_copied.get(name) != reason:
                log.error("table not copied", table=name, reason=reason)
        if reasons.items() <= head.not_copied.items():
            return head
        return replace(head, not_copied={**head.not_copied, **reasons})

    def _read_requests(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < self._chain.store.pause:
            return
        self._looked_at = now
        hears = requests.removable(self._chain)
        if self._hears and not hears:
            log.error(
                "requests are not carried out: they cannot be removed",
                path=requests.room(self._chain),
                repair="grant the user of `tuskline lake run` write permission on this folder",
            )
        self._hears = hears
        self._asked = list(requests.waiting(self._chain))

    def _ready(self, new: Sequence[requests.Request]) -> Iterator[requests.Request]:
        """The requests that can be decided: a poll that began after the request shows whether its tables are published.

        What waits for one keeps its place before later requests about its tables.
        """
        published = {name for found in self._published.values() for name in found}
        waiting: set[str] = set()
        for request in new:
            unknown = {
                name
                for name in request.tables
                if name not in published
                and (stream := stream_of(name)) in self._sources
                and self._polled_at.get(stream, float("-inf")) < self._seen_at[request.id]
            }
            if (request.kind in requests.OF_PUBLISHED and unknown) or waiting & set(request.tables):
                waiting |= set(request.tables)
            else:
                yield request

    def poll_again(self, head: Manifest) -> tuple[Manifest, bool]:
        """The head after the sources that answer were polled; whether all tables follow as before.

        For an epoch, after the log was asked for its cut: what was committed before that is in the catalogs by now.
        """
        now = time.monotonic()
        publications = self._poll(head, at_once=True)
        self.polled = {stream for stream, began, _ in publications if began >= now}
        self._former = {now: name for name, now in self._renamed(head).items()}
        return self._compare(head, publications)

    def of_maintainers(self, kind: str) -> list[requests.Request]:
        """The requests of that kind (`requests.OF_MAINTAINERS`) that are not forgotten."""
        return [request for request in self._asked if request.kind == kind]

    def forget(self, decided: Collection[requests.Request]) -> None:
        """Remove requests that are decided."""
        for request in decided:
            requests.forget(self._chain, request)
        self._asked = [request for request in self._asked if request not in decided]

    def settled(self, head: Manifest) -> None:
        """What `step` or `reshape` changed is in the chain."""
        self._is_compared = True
        for request in self._asked:
            if request.id in head.answered:
                requests.forget(self._chain, request)
        self._asked = [request for request in self._asked if request.id not in head.answered]
        arrived = [result for results in self._arrived.values() for result in results]
        if any(isinstance(result, TableVersion) for result in arrived):
            fail_point.hit("copy-kept")
        self._arrived = {}
        partials = {name: copy.path for name, copy in head.copies.items() if copy.is_partial}
        for name, path in self._partials.items():
            if path not in {v.path for v in (head.copies.get(name), head.tables.get(name)) if v}:
                self._copies.drop(name)
        self._partials = partials

    def written(self, head: Manifest, after: Manifest) -> None:
        """The epoch `after` this head is published."""
        arrived = {self.moves[n]: at for n, at in self._arrived_at.items() if n in self.moves}
        self._arrived_at = {n: at for n, at in self._arrived_at.items() if n not in self.moves}
        self._arrived_at |= arrived
        self._expected.written(after, self.evolutions)
        self.evolutions.clear()
        for name, table in after.tables.items():
            before = head.copies.get(name) or head.tables.get(name)
            if before is not None and table.shape != before.shape:
                self._arrived_at[name] = time.monotonic()

    def start_copies(self, head: Manifest, status: LogStatus, client: LogClient) -> None:
        """Have copied what is published and not in the lake, or is to be copied again."""
        now = time.monotonic()
        self._keep_log_for_copies(head, status, client)
        self._release_copies(head, client)
        for stream, published in self._published.items():
            names = self._by_former(published)
            if stream not in head.streams or stream not in status.streams:
                continue
            refused = disclosed(head, self._oids[stream], self._rules)
            wanted = {
                name
                for name in states.wanted_copies(head, names) - self._copies.running
                if self._copy_after.get(name, 0.0) <= now
                and name not in refused
                and name not in self._refused
            }
            if not wanted:
                continue
            if not self._needs_log(head, stream):
                # While the copy runs, epochs continue; the log is kept from where the copy needs it. A
                # lease that an earlier copy still needs is older, and stays as it is.
                self._leases.hold(client, self._copy_consumer(stream), head.epoch, now)
            cut = status.streams[stream]
            request = CopyRequest(
                self._sources[stream],
                frozenset(name.removeprefix(f"{stream}.") for name in wanted),
                cut,
                head.term,
                self._policy.copy_rate,
                {name: head.copies[name] for name in wanted if name in head.copies},
                self._policy.copy_chunk_bytes,
                levels=self._levels(head, wanted),
                lake_names={name: self._lake_name(head, name) for name in wanted},
            )
            log.info("copying", stream=stream, tables=sorted(wanted), offset=cut.end_offset)
            self._copies.start(request)

    def _lake_name(self, head: Manifest, name: str) -> str:
        """The name that a copy of this table will have in the lake, after which its folder is named."""
        table = head.tables.get(name)
        if table is not None and not self._targets.move:
            return table.lake_name or name
        return self._targets.of(name)

    def _levels(self, head: Manifest, wanted: Collection[str]) -> dict[str, TableVersion]:
        """The tables that are to be brought level instead of being copied: nothing but changes is missing in them."""
        found = {}
        for name in wanted:
            table = head.tables.get(name)
            if table is None or table.resync not in _LEVELED or name in head.copies:
                continue
            why = table.unfit
            if why is None and self._not_level[name] >= _LEVEL_ATTEMPTS:
                why = "it could not be brought level"
            if why is None:
                found[name] = table
            else:
                log.info("table cannot be brought level", table=name, reason=why)
        return found

    @property
    def leveling(self) -> set[str]:
        """The folders of tables that are brought level now, or have been and are in no link as such yet."""
        return self._copies.leveled({*self._copies.running, *self._arrived})

    def drop_copies(self, streams: Collection[str]) -> None:
        """Discard copies of these streams that run, or are complete and in no link."""
        for name in self._copies.running:
            if stream_of(name) in streams:
                self._copies.drop(name)
        for name in [name for name in self._arrived if stream_of(name) in streams]:
            for result in self._arrived.pop(name):
                self._copies.discard(result)

    def close(self) -> None:
        """End the copies that run."""
        self._copies.close()

    # -- what the epochs wait for -----------------------------------------------------------------------

    def awaited(self, head: Manifest, status: LogStatus) -> bool | None:
        """Whether the next epoch is to bring back tables that were held: None if that has to wait.

        Raises `TrimmedError` or `CorruptError` for a table that waits for an operator.
        """
        held = states.held(head)
        for name, table in held.items():
            copy = head.copies.get(name)
            if copy is None:
                if not table.resync:
                    raise _undecided(name, table.reason)
                return None
            cut = status.streams.get(stream_of(name))
            if cut is None or joins(copy, cut.timeline, cut.last_end_lsn) is not Joins.NOW:
                return None
        return bool(held)

    def reshape(self, head: Manifest, changed: ShapeChangedError) -> Manifest:
        """The head after changes of another shape came: tables that take them as they are, and that cannot."""
        by_table: dict[str, list[SchemaMismatch]] = defaultdict(list)
        for one in changed.mismatches:
            by_table[one.table].append(one)
        for name in sorted({*by_table, *changed.records}):
            table, records = changed.tables[name], changed.records.get(name, ())
            verdict = self._verdict(name, table, by_table[name], records)
            if isinstance(verdict, Evolution):
                columns = [column for column, _, _ in verdict.layouts[-1].columns]
                reason = unkept(columns, verdict.key, table.mode)
                verdict = verdict if reason is None else FullResync(reason)
            if isinstance(verdict, Evolution) and table.row_filter:
                condition = filter_of(name, table)
                assert condition is not None
                reason = of_filter(table, verdict, condition.columns)
                verdict = verdict if reason is None else FullResync(reason)
            if isinstance(verdict, Evolution):
                columns = [column for column, _, _ in verdict.layouts[-1].columns]
                log.info("columns of table changed in place", table=name, columns=columns)
                self.evolutions[table.path] = verdict
                continue
            log.warning("columns of table changed", table=name, reason=verdict.reason)
            self.evolutions.pop(table.path, None)
            self._copy_after.pop(name, None)
            self._copies.drop(name)
            holds = self._policy.holds(copied_again=True)
            head = states.stop(head, name, verdict.reason, holds=holds, full_resync=True)
            self._poller.soon()
        return head

    def _verdict(
        self,
        name: str,
        table: TableVersion,
        mismatches: Sequence[SchemaMismatch],
        records: Sequence[TableRecord],
    ) -> Evolution | FullResync:
        """How the table follows: in place, or why it has to be copied again. `table`: as it was before."""
        if table.masks:
            # Which column a mask is of is known by its name, and by nothing else.
            first = next((one.reason for one in mismatches if one.reason), "")
            return FullResync(first or "its columns changed, some of which are masked")
        known = self.evolutions.get(table.path)
        if records and (known is None or known.places != {one.place for one in records}):
            return evolve(table, records)
        if known is not None and known.places and mismatches:
            what = "its changes have other columns than were recorded"
            return FullResync(mismatches[0].reason or what)
        layouts = first_layout(table) if known is None else known.layouts
        verdict = evaluate(table, layouts, mismatches)
        if isinstance(verdict, FullResync):
            return verdict
        catalog = columns_now(self._sources[stream_of(name)], table.relation_id)
        names = [column for column, _, _ in verdict.layouts[-1].columns]
        if table.shape and others_by_now(names, Shape.load(table.shape)):
            return FullResync(
                f"its column {verdict.added[0][0]!r} was added, and has been replaced since"
            )
        if reason := not_plain(verdict.added, catalog):
            return FullResync(reason)
        return verdict.evolution(table)

    def give_up(self, head: Manifest, errors: Mapping[str, TusklineError]) -> Manifest:
        """The head after the changes of these tables, by path, could not be applied to them."""
        reasons = {path: reason_of(e, str(self._chain.root / path)) for path, e in errors.items()}
        for path, reason in reasons.items():
            log.error("table cannot follow", path=path, reason=reason)
        return states.damaged(head, reasons, holds=self._policy.holds(copied_again=False))

    # -- leases -----------------------------------------------------------------------------------------

    def release(self, head: Manifest, client: LogClient) -> None:
        """End the leases that nothing needs any more."""
        for stream in self._sources:
            if not self._needs_log(head, stream):
                self._leases.drop(client, self._copy_consumer(stream))
        for name in list(self._paused):
            table = head.tables.get(name)
            needed = table is not None and (
                table.state in {PAUSED, RESUMING} or states.is_undecided(table)
            )
            if not needed:
                client.drop_consumer(self._pause_consumer(name))
                self._paused.discard(name)

    def _release_copies(self, head: Manifest, client: LogClient) -> None:
        """End this writer's leases of copies that have ended without an epoch, which would be renewed until there is one.

        A copy ends so that fails, or whose table is not wanted any more.
        """
        for stream in self._sources:
            consumer = self._copy_consumer(stream)
            if self._leases.holds(consumer) and not self._needs_log(head, stream):
                self._leases.drop(client, consumer)

    def keep_log(self, names: Iterable[str], version: int, client: LogClient) -> None:
        """Keep what tables lack that stop at this version: they may be resumed for as long as paused ones."""
        for name in names:
            client.register_consumer(self._pause_consumer(name), version, self._policy.keep_paused)
            self._paused.add(name)

    def _keep_log_for_copies(self, head: Manifest, status: LogStatus, client: LogClient) -> None:
        """Go on with the leases of copies that an earlier writer has begun: it died, or has lost the lake.

        Each at the version that the oldest copy needs, as that writer had it: the lake's own epoch may be far ahead of it.
        """
        needed: dict[str, int] = {}
        for name, copy in head.copies.items():
            stream = stream_of(name)
            needed[stream] = min(copy.offset, needed.get(stream, copy.offset))
        for stream, offset in needed.items():
            consumer = self._copy_consumer(stream)
            if stream in status.streams and not self._leases.holds(consumer):
                version = version_before(status.streams[stream], offset, status.version)
                self._leases.hold(client, consumer, version, time.monotonic())

    def _needs_log(self, head: Manifest, stream: str) -> bool:
        """Whether a table of the stream is being copied, or copied and not yet shown."""
        waiting = any(stream_of(name) == stream for name in [*head.copies, *self._arrived])
        return waiting or self._copies.of_stream(stream)

    def _copy_consumer(self, stream: str) -> str:
        return f"lake-{self._lake}-copy-{stream}"

    # -- parts of a round -------------------------------------------------------------------------------

    def _poll(
        self, head: Manifest, *, at_once: bool = False
    ) -> list[tuple[str, float, Publication]]:
        """The publications that have been read, and since when they hold."""
        streams = [stream for stream in self._sources if stream in head.streams]
        found = list(
            self._poller.answers(streams, lambda s: noticed.known(head, s), at_once=at_once)
        )
        for stream, began, publication in found:
            self._polled_at[stream] = began
            self._oids[stream] = {
                f"{stream}.{relation}": shape.oid for relation, shape in publication.shapes.items()
            }
            self._published[stream] = set(self._oids[stream])
        return found

    def _compare(
        self, head: Manifest, publications: Sequence[tuple[str, float, Publication]]
    ) -> tuple[Manifest, bool]:
        """The head after these polls, and whether no table must be copied again."""
        reasons: dict[str, str] = {}
        for stream, began, publication in publications:
            later = {name for name, at in self._arrived_at.items() if at >= began}
            holds = self._policy.holds(copied_again=True)
            seen = {f"{stream}.{name}": shape for name, shape in publication.shapes.items()}
            # Another table may have an earlier name by now: until the name moves, it is not the one that the lake has under it.
            shapes = seen | {was: seen[now] for now, was in self._former.items() if now in seen}
            gone = self._former.keys() - {*self._former.values()}
            own = {n.removeprefix(f"{stream}."): s for n, s in shapes.items() if n not in gone}
            head, found = noticed.compare(
                *(head, stream, replace(publication, shapes=own), later),
                holds=holds,
                seen=self._seen_shapes,
                expected=self._expected,
            )
            reasons |= found
        for name, reason in reasons.items():
            log.warning("table changed at its source", table=name, reason=reason)
            self._copy_after.pop(name, None)
        return head, not reasons

    def _carry_out(
        self,
        head: Manifest,
        request: requests.Request,
        status: LogStatus,
        client: LogClient,
        apart: Mapping[str, str],
    ) -> Manifest:
        if request.kind == requests.SKIP:
            return self._skip(head, request)
        if request.kind in {requests.PIN, requests.UNPIN}:
            return self._pins.carry_out(head, request, self._clock.now())
        if request.kind == requests.ADOPT:
            # The lake is of the log that answers: there is nothing to do, or it is refused.
            log.info("request carried out", kind=request.kind, log=request.log_id)
            return adopt.answered(head, request, status.log_id, self._clock.now(), {})
        names = {name for found in self._published.values() for name in found}
        low = {stream: cut.low_offset for stream, cut in status.streams.items()}
        changed = requests.carry_out(head, request, names, low, self._clock.now(), apart)
        for name in request.tables:
            before, after = head.tables.get(name), changed.tables.get(name)
            if before is not None and after is not None and before.state != after.state:
                if after.state == PAUSED:
                    # Before the table stops. A log that was rolled back may not have come so far. One that has stopped
                    # already lacks what came since then.
                    since = head.epoch if before.resync else before.as_of or head.epoch
                    self.keep_log([name], min(since, status.version), client)
                elif after.state in {RESUMING, LIVE}:
                    mark(self._sources[stream_of(name)])
            if after is not None and after.retry_quarantined and stream_of(name) in self._sources:
                # The rows are tried with the next epoch, and there may be nothing else for one.
                mark(self._sources[stream_of(name)])
            self._copy_after.pop(name, None)
            if request.kind in {requests.PAUSE, requests.RESYNC}:
                self._copies.drop(name)
        outcome = changed.answered[request.id]["tables"]
        log.info("request carried out", kind=request.kind, tables=outcome)
        return changed

    def _skip(self, head: Manifest, request: requests.Request) -> Manifest:
        """Skip rows; their new file is durable before the link that names it."""
        outcome = {}
        for name in request.tables:
            table = head.tables.get(name)
            if table is None:
                outcome[name] = "refused: it is not in the lake"
                continue
            made, missing = quarantined_rows.skip(
                self._chain.root, name, table, request.rows, head.term
            )
            head = replace(head, tables={**head.tables, name: made})
            outcome[name] = f"{made.skipped_rows} of {made.quarantined_rows} rows are skipped"
            if missing:
                outcome[name] = f"refused: no such quarantined row: {', '.join(sorted(missing))}"
        log.info("request carried out", kind=request.kind, tables=outcome)
        return requests.answered(head, request, outcome, self._clock.now())

    def _pause_consumer(self, name: str) -> str:
        return f"lake-{self._lake}-paused-{name}"

    def _with_arrived(self, head: Manifest, status: LogStatus) -> Manifest:
        """The head with all that has come of copies, one after the other: a chunk counts, even if the next one has failed by now."""
        for name, result in self._copies.finished():
            arrived = self._arrived.setdefault(name, [])
            if isinstance(result, TableVersion):
                arrived.append(rolled_back.marked(result, status, stream_of(name)))
            else:
                arrived.append(result)
            self._arrived_at[name] = time.monotonic()
            self._count(head, name, result)
        for name, results in self._arrived.items():
            for result in results:
                head = self._take(head, name, result)
        return head

    def _count(self, head: Manifest, name: str, result: Result) -> None:
        """Count the attempts at bringing a table level, when they end: a round that fails takes the same result again."""
        table = head.tables.get(name)
        if isinstance(result, TableVersion):
            self._not_level.pop(name, None)
        elif isinstance(result, TusklineError) and table and table.resync in _LEVELED:
            self._not_level[name] += 1

    def _take(self, head: Manifest, name: str, result: Result) -> Manifest:
        """The head with what came of a copy."""
        not_copied = {n: reason for n, reason in head.not_copied.items() if n != name}
        if result is None:
            return replace(head, not_copied=not_copied)
        if isinstance(result, NotBegun):
            log.warning("copy not started", table=name, error=str(result.reason))
            self._copy_after[name] = time.monotonic() + _NOT_BEGUN
            return head
        if isinstance(result, StartOver):
            log.warning("copy begins again", table=name, reason=result.reason)
            return replace(head, copies={n: c for n, c in head.copies.items() if n != name})
        if isinstance(result, TusklineError):
            log.warning(
                "table not copied",
                table=name,
                error=result.what,
                where=result.where,
                repair=result.repair,
                again_in_seconds=_AFTER_FAILURE,
            )
            self._copy_after[name] = time.monotonic() + _AFTER_FAILURE
            return replace(head, not_copied={**not_copied, name: str(result)})
        if not states.wanted_copies(head, {name}):
            # Paused since the copy began; or this is in the chain already.
            if result.path not in {version.path for version in head.versions}:
                self._copies.discard(result)
            return head
        if name in self._refused or name in disclosed(
            head, {name: result.relation_id}, self._rules
        ):
            # Another table has its target name by now; or tables were renamed since the copy began, and it is of another than the one that was looked at.
            if result.is_partial:
                self._copies.drop(name)
            if result.path not in {version.path for version in head.versions}:
                self._copies.discard(result)
            return replace(head, copies={n: c for n, c in head.copies.items() if n != name})
        before = head.copies.get(name)
        if len(result.chunks) > 1 and (before is None or before.path != result.path):
            # A chunk more of a copy that was given up meanwhile.
            self._copies.drop(name)
            return head
        return replace(head, copies={**head.copies, name: result}, not_copied=not_copied)

    def write_status(self, head: Manifest, *, changed: bool) -> None:
        """Write the status, when something has changed or is under way."""
        now = time.monotonic()
        copying = self._copies.status()
        if self._progress is not None:
            self._progress(copying)
        if changed or (now - self._status_at >= _STATUS and (copying or self._status_at < 0)):
            self._status_at = now
            write_status(self._chain, head, copying)

    def show_epoch(self, head: Manifest, writing: EpochStatus | None) -> None:
        """Write the status with the epoch after `head`, which is under way: another thread may call it meanwhile."""
        write_status(self._chain, head, self._copies.status(), writing)


def _undecided(name: str, reason: str) -> TusklineError:
    """The error while a table is suspended until an operator decides."""
    kind: type[TusklineError] = TrimmedError if "trimmed" in reason else CorruptError
    if "on_unrepresentable_value" in reason:
        kind = UnsupportedValueError
    repair = f"tuskline table resync {name} (or pause it, so that epochs continue)"
    if reason.startswith(rolled_back.REASON):
        # The log that the lake was written from is back: otherwise this is said before.
        kind, repair = (
            DivergedError,
            f"tuskline table resume {name}: the log has the lake's history again",
        )
    return kind(f"holds the epochs back: {reason}", where=name, repair=repair)
