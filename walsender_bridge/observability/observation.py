"""The state of a running Tuskline at one moment: the single source of `status`, `lag`, `top` and `/metrics`.

Each part is observed where it reports: supervisors and captures through their files in the run folder,
the log through its repository, the lake through its newest manifest, the servers through SQL. A part that
does not answer yields an error in its place; an observation takes seconds at worst, and never fails as a whole.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row

from walsender_bridge.capture.status_record import CaptureStatus, GateStatus
from walsender_bridge.config import Config, SourceSection
from walsender_bridge.errors import Cause, TusklineError, UnavailableError
from walsender_bridge.observability import (
    bridge_view,
    certificate_view,
    delta_view,
    equality_view,
    etcd_view,
    former_sources,
    gate_view,
    lake_leases,
    lake_status,
    log_problems,
    log_server_folders,
    maintenance_view,
    quorum_view,
    slots_view,
    table_problems,
)
from walsender_bridge.observability.bridge_view import BridgeStatus
from walsender_bridge.observability.certificate_view import CertificateView
from walsender_bridge.observability.etcd_view import EtcdView
from walsender_bridge.observability.lake_chain import lake_chain
from walsender_bridge.observability.quorum_server import QuorumServer, ServerQuorum
from walsender_bridge.observability.quorum_view import QuorumView
from walsender_bridge.observability.slots_view import SlotsView
from walsender_bridge.postgres.client.replication_connection import describe, pinned_conninfo
from walsender_bridge.postgres.protocol.refusals import connection_error
from walsender_bridge.provisioning import table_notes
from walsender_bridge.provisioning.configured import capture_source
from walsender_bridge.runtime import disk_full, pid_file, processes, status_file
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.sql import load
from walsender_bridge.runtime.supervisor import GOOD_LIFE, ChildState, read_states

if TYPE_CHECKING:
    from spark_consumers.lake.comparison.leveled import Leveled
    from spark_consumers.lake.delta_log.record import DeltaRecord
    from spark_consumers.lake.equality.record import EqualityRecord
    from spark_consumers.lake.maintenance.state import Summary
    from spark_consumers.lake.status import CopyStatus, EpochStatus
    from walsender_bridge.change_log.client import LogStatus
    from walsender_bridge.observability.replica_view import StreamReplicas

#: Supervisors by the names of their files. Under `up`, or a demo, the other two are its children.
SUPERVISORS = ("up", "demo", "log-server", "bridge")
#: Seconds after which a capture that has not updated its status counts as hung.
STALE = 15.0
#: Seconds after which a server that has WAL to send and sends nothing is reported.
SILENT = 120.0
#: Ends in a row after which a process counts as failing repeatedly.
_FAILURES = 3
#: Seconds between two polls of a source's tables.
TABLES_SECONDS = 10.0
#: Seconds after which a source is connected to again: a password or privilege that has changed counts for new sessions.
CONNECTED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process of Tuskline. `state` is `running`, `restarting`, `ended` (for good), `stopped` or `gone`.

    `memory`: resident bytes, including children that are not listed themselves (the JVM of `lake`).
    """

    name: str
    pid: int | None
    state: str
    restarts: int
    exit_code: int | None
    started_at: float
    memory: int = 0
    cpu_seconds: float = 0.0
    #: The number of ends in a row, each within a minute of the start (`supervisor.GOOD_LIFE`).
    failures: int = 0
    #: The pid of the process itself, or of a child, if a signal or a debugger has stopped it.
    suspended: int | None = None

    def problems(self, now: float) -> Iterator[str]:
        """The problems of the process, as sentences."""
        code = self.exit_code
        known = code in set(Cause) and f", {Cause(code).name.lower().replace('_', ' ')}"
        ended = f" (exit code {code}{known or ''})" if code is not None else ""
        if self.state != "running":
            # The supervisor did not see the end of a process that is gone: the exit code is that of an earlier end.
            yield f"process {self.name} is {self.state}{'' if self.state == 'gone' else ended}"
        elif self.suspended is not None:
            yield f"process {self.name} is stopped by a signal or a debugger; run kill -CONT {self.suspended}"
        elif self.failures >= _FAILURES and now - self.started_at < GOOD_LIFE:
            yield f"process {self.name} keeps failing, {self.failures} times in a row{ended}"


@dataclass(frozen=True, slots=True)
class SourceView:
    """A source: the status of its capture, and its server (sql/observability/source.sql).

    `process`: of the capture, if its bridge runs here.
    """

    name: str
    slot: str
    process: Process | None
    #: None: it has never written one.
    capture: CaptureStatus | None
    server: dict[str, Any] | None
    error: TusklineError | None
    #: Published tables without a replica identity: the server refuses their UPDATEs and DELETEs.
    unidentified: tuple[str, ...] = ()
    #: The quorum as the server shows it; None: it is another source's, or the server was not asked.
    quorum: ServerQuorum | None = None
    #: What a role with more privileges has to do (`provisioning.table_notes`).
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The capture's state.

        Or `unknown` (it has never written a status), `starting` (the status is of a previous process), or
        `hung` (no update for `STALE` seconds).
        """
        status, process = self.reported, self.process
        if process is not None and process.state != "ended" and process.pid != (status.pid or None):
            return "starting"
        if status.state == "streaming" and time.time() - status.updated_at > STALE:
            return "hung"
        return status.state

    @property
    def silent(self) -> str:
        """The problem of a session whose server has sent nothing for long; empty: it sends."""
        seconds = self.reported.silent_seconds
        if self.state != "streaming" or seconds < SILENT:
            return ""
        return (
            f"the server of {self.name} has WAL to send, but has sent nothing for {seconds:.0f} s: its walsender is "
            f"decoding a long transaction, or hangs; check the wait_event of the active_pid of slot {self.slot}. If it "
            "hangs, run SELECT pg_terminate_backend(active_pid); nothing is lost"
        )

    @property
    def reason(self) -> str:
        """Why it is not streaming, to follow its state in a sentence; empty if it reports no error."""
        error = self.reported.error
        if error is None:
            return ""
        before = ": the previous process ended with: " if self.state == "starting" else ": "
        return f"{before}{error.sentence}"

    @property
    def reported(self) -> CaptureStatus:
        """The status of its capture; without one, all positions are unknown."""
        return self.capture or CaptureStatus(source=self.name, state="unknown", behind=True)

    @property
    def gate(self) -> GateStatus | None:
        """Its commit gate; None: there is none, or it is unknown."""
        return self.reported.gate

    @property
    def server_lsn(self) -> int:
        """The end of the server's WAL, as the server reports it or capture last saw it; 0: unknown."""
        now: int | None = (self.server or {}).get("server_lsn")
        return now or self.reported.server_lsn


@dataclass(frozen=True, slots=True)
class Observation:
    """All parts at one moment. `lake`: the newest manifest; None before the first one, or without `[lake]`.

    `copying`: the progress of the tables that the lake copies now (docs/tables.md).
    """

    at: float
    up: int | None
    processes: list[Process]
    sources: list[SourceView]
    log: "LogStatus | None"
    lake: Any | None
    errors: dict[str, TusklineError] = field(default_factory=dict)
    copying: "Mapping[str, CopyStatus]" = field(default_factory=dict)
    #: The epoch that the lake writes now; None if it has not taken a second yet, or none is written.
    writing: "EpochStatus | None" = None
    #: None: no safekeepers are configured.
    quorum: QuorumView | None = None
    #: None: no copies of slots are configured.
    slots: SlotsView | None = None
    #: None: there is no `[tls]`.
    certificate: CertificateView | None = None
    #: Whether a lake is written here.
    lake_configured: bool = True
    #: Whether a part of this machine needs the log; otherwise its state is unknown.
    asks_log: bool = True
    #: The replicas of the log's streams.
    replicas: "tuple[StreamReplicas, ...]" = ()
    #: The leases of lakes that end soon, as sentences.
    leases: tuple[str, ...] = ()
    #: None: no part of this machine uses etcd.
    etcd: EtcdView | None = None
    #: None: the bridge of this machine, if any, is not one of several.
    bridge: BridgeStatus | None = None
    #: None: no maintainer has looked at the lake.
    maintenance: "Summary | None" = None
    #: The last result of `tuskline verify`; None if there is none.
    equality: "EqualityRecord | None" = None
    #: What came of the tables that were to be brought level, by name.
    leveled: "Mapping[str, Leveled]" = field(default_factory=dict)
    #: What the Delta logs show; None if the lake has none.
    delta: "DeltaRecord | None" = None

    @property
    def notes(self) -> list[str]:
        """What an administrator should do although everything runs, as sentences."""
        # A server that two sources share yields the same note twice.
        return [*dict.fromkeys(note for source in self.sources for note in source.notes)]

    @property
    def degraded(self) -> list[str]:
        """What works and is less safe than configured, or has another name, as sentences with their repairs; no reason to count as dead."""
        found = [each for stream in self.replicas for each in stream.degraded()]
        found += self.leases
        if self.lake is not None:
            found += table_problems.sentences(table_problems.misnamed(self.lake))
        if what := equality_view.trouble(self.equality):
            found.append(f"{what}; {equality_view.REPAIR}")
        if what := delta_view.trouble(self.delta):
            found.append(f"{what}; {delta_view.REPAIR}")
        return found + self._etcd(fatal=False) + self._certificate(over=False)

    def _etcd(self, *, fatal: bool) -> list[str]:
        """The faults of etcd with which nothing is committed (`fatal`), or the others."""
        faults = self.etcd.faults if self.etcd is not None else ()
        return [sentence("etcd", each.error) for each in faults if each.fatal == fatal]

    def _certificate(self, *, over: bool) -> list[str]:
        """What is wrong with the certificate: that it will end, or (`over`) that nobody accepts it any more."""
        its = self.certificate
        if its is None or its.is_over(self.at) != over or not (what := its.problem(self.at)):
            return []
        return [f"{what}; {certificate_view.REPAIR}"]

    @property
    def problems(self) -> list[str]:
        """The problems of all parts, as sentences; empty if there are none."""
        found = self.quorum.problems if self.quorum is not None else []
        found += [
            problem
            for source in self.sources
            for problem in (source.quorum.problems if source.quorum is not None else ())
        ]
        found += self.slots.problems if self.slots is not None else []
        found += [problem for process in self.processes for problem in process.problems(self.at)]
        found += self._certificate(over=True)
        found += self._etcd(fatal=True)
        found += [each for stream in self.replicas for each in stream.problems()]
        if self.bridge is not None and self.bridge.problem:
            found.append(self.bridge.problem)
        if not self.processes:
            found.append("no process of Tuskline runs here")
        found += [
            f"capture of {source.name} is {source.state}{source.reason}"
            for source in self.sources
            # Without any process, its state is of earlier.
            if source.state != "streaming" and self.processes
        ]
        found += [source.silent for source in self.sources if source.silent]
        found += [
            sentence(f"source {source.name}", source.error)
            for source in self.sources
            if source.error
        ]
        found += [
            problem
            for source in self.sources
            if source.state == "streaming"
            for problem in gate_view.problems(source.name, source.gate, self.at)
        ]
        if self.lake is not None:
            found += table_problems.sentences(table_problems.problems(self.lake))
        elif self.lake_configured and "lake" not in self.errors:
            found.append("lake: no epoch has been published yet")
        found += [
            f"table {name} of source {source.name} has no replica identity: the server refuses its UPDATEs "
            f"and DELETEs; ALTER TABLE {name} REPLICA IDENTITY FULL, or give it a primary key"
            for source in self.sources
            for name in source.unidentified
        ]
        faults = self.log.faults if self.log is not None else {}
        found += [
            f"log: {sentence(f'stream {name} has stopped', fault)}"
            for name, fault in faults.items()
        ]
        return found + [sentence(part, error) for part, error in self.errors.items()]


def sentence(part: str, error: TusklineError) -> str:
    """An error of a part in one line, with its place and its repair."""
    place = f" ({error.where})" if error.where else ""
    return f"{part}: {error.what}{place}" + (f"; {error.repair}" if error.repair else "")


class Observer(Closing):
    """Observes the parts of a configuration; keeps its connections between observations."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        #: By source: the connection, and when it was opened, in monotonic seconds.
        self._connections: dict[str, tuple[psycopg.Connection[dict[str, Any]], float]] = {}
        #: By source: when its tables were polled (monotonic seconds), those without a replica identity, and the notes.
        self._tables: dict[str, tuple[float, tuple[str, ...], tuple[str, ...]]] = {}
        self._quorum = QuorumServer(settings)

    def close(self) -> None:
        """Close the connections."""
        for connection, _ in self._connections.values():
            connection.close()

    def observe(self) -> Observation:
        """Observe all parts."""
        bridge = bridge_view.observe(self._settings)
        settings = bridge_view.without_standby(self._settings, bridge)
        errors = dict[str, TusklineError]()
        status: LogStatus | None = None
        replicas: tuple[StreamReplicas, ...] = ()
        leases: tuple[str, ...] = ()
        try:
            status = log_problems.log_status(settings) if settings.asks_log else None
            if status is not None:
                described = log_problems.described(settings)
                replicas = log_problems.as_configured(settings, described.streams)
                ending = lake_leases.ending(described.consumers, time.time())
                leases = tuple(lease.sentence for lease in ending)
            damage = log_problems.damaged(status) if status is not None else None
            if damage is not None:
                errors["log"] = damage
        except TusklineError as error:
            from walsender_bridge.change_log.repository import part as repository_part

            errors["log"] = repository_part.trouble(settings.run_dir) or error
        full = disk_full.of_folder(settings.data_dir)
        if full is not None:
            errors["disk"] = full
        lost = log_server_folders.lost(settings)
        errors |= {f"log server {listen}": error for listen, error in lost.items()}
        manifest = None
        copying: Mapping[str, CopyStatus] = {}
        writing: EpochStatus | None = None
        maintenance, equality = None, None
        leveled: Mapping[str, Leveled] = {}
        delta: DeltaRecord | None = None
        if settings.lake is not None and "lake" in settings.parts:
            from spark_consumers.lake import folder
            from spark_consumers.lake.comparison.leveled import read_leveled
            from spark_consumers.lake.delta_log.record import read_record as read_delta
            from spark_consumers.lake.equality.record import read_record
            from spark_consumers.lake.status import copying_now, moved, read_status, writing_now

            moved_at = 0.0
            try:
                chain = lake_chain(settings.lake)
                manifest = chain.head()
                maintenance = maintenance_view.observe(chain)
                equality = read_record(chain)
                leveled = read_leveled(chain)
                delta = read_delta(chain.store) if settings.lake.has_delta else None
                if manifest is not None:
                    now, shown = time.time(), read_status(chain)
                    copying = copying_now(manifest, shown, now)
                    writing = writing_now(manifest, shown, now)
                    moved_at = moved(manifest, shown, now)
                problem = lake_status.problem(settings.run_dir, settings.lake.uri, moved_at)
                if problem is not None:
                    errors["lake"] = problem
            except (TusklineError, OSError) as error:
                errors["lake"] = folder.why(error, settings.lake.uri)
        up = pid_file.owner(settings.run_dir)
        running = seen_processes(settings.run_dir, up)
        by_name = {process.name: process for process in running}
        sources = self._sources(by_name) if "bridge" in settings.parts else []
        return Observation(
            at=time.time(),
            up=up,
            processes=running,
            sources=sources,
            log=status,
            lake=manifest,
            errors=errors,
            copying=copying,
            writing=writing,
            quorum=_with_required(quorum_view.observe(settings), sources),
            slots=slots_view.observe(settings),
            certificate=certificate_view.observe(settings),
            lake_configured="lake" in settings.parts,
            asks_log=settings.asks_log,
            replicas=replicas,
            leases=leases,
            etcd=etcd_view.observe(self._settings),
            bridge=bridge,
            maintenance=maintenance,
            equality=equality,
            leveled=leveled,
            delta=delta,
        )

    def _sources(self, running: Mapping[str, Process]) -> list[SourceView]:
        """Observe all sources in parallel: several that do not answer take no longer than one."""

        def observe(section: SourceSection) -> SourceView:
            return self._source(section, running.get(f"bridge/capture-{section.name}"))

        sections = self._settings.source
        if not sections:
            return []
        with ThreadPoolExecutor(len(sections)) as pool:
            return [*pool.map(observe, sections)]

    def _source(self, section: SourceSection, process: Process | None) -> SourceView:
        capture = status_file.read(self._settings.capture_status(section), CaptureStatus)
        server, failure = None, None
        quorum: ServerQuorum | None = None
        try:
            with self._connection(section) as connection:
                names = {"slot": section.slot_name}
                server = connection.execute(load("observability/source").encode(), names).fetchone()
                self._poll_tables(section, connection)
                if section is self._settings.quorum_source:
                    quorum = self._quorum.observe(connection)
        except TusklineError as error:
            failure = error
        _, unidentified, notes = self._tables.get(section.name, (0.0, (), ()))
        return SourceView(
            *(section.name, section.slot_name, process, capture, server, failure, unidentified),
            quorum,
            notes,
        )

    def _poll_tables(
        self, section: SourceSection, connection: psycopg.Connection[dict[str, Any]]
    ) -> None:
        """Check the tables; less often than the rest, because the query covers every table."""
        polled_at, *_ = self._tables.get(section.name, (float("-inf"), (), ()))
        if time.monotonic() - polled_at < TABLES_SECONDS:
            return
        names = {"publication": section.publication_name}
        rows = connection.execute(load("doctor/published_unidentified").encode(), names).fetchall()
        unidentified = tuple(row["name"] for row in rows)
        formers = former_sources.former_sources(self._settings)
        left = former_sources.left_slots(connection, formers)
        notes = (
            *table_notes.notes(connection, capture_source(section)),
            *(f"{each.what}; {each.repair}" for each in left),
        )
        self._tables[section.name] = (time.monotonic(), unidentified, notes)

    @contextmanager
    def _connection(self, section: SourceSection) -> Iterator[psycopg.Connection[dict[str, Any]]]:
        where = describe(section.dsn)
        try:
            connection, opened_at = self._connections.get(section.name, (None, 0.0))
            if connection is not None and time.monotonic() - opened_at > CONNECTED_SECONDS:
                self._drop_connection(section)
                connection = None
            if connection is None:
                conninfo = pinned_conninfo(
                    section.dsn, connect_timeout="3", application_name="tuskline-observer"
                )
                connection = psycopg.connect(conninfo, autocommit=True, row_factory=dict_row)
                connection.execute(load("observability/begin").encode())
                self._connections[section.name] = connection, time.monotonic()
            yield connection
        except psycopg.Error as error:
            self._drop_connection(section)
            if error.sqlstate is None:
                raise connection_error(str(error), where) from None
            raise UnavailableError(str(error.diag.message_primary), where=where) from None

    def _drop_connection(self, section: SourceSection) -> None:
        connection, _ = self._connections.pop(section.name, (None, 0.0))
        if connection is not None:
            connection.close()


def _with_required(seen: QuorumView | None, sources: Sequence[SourceView]) -> QuorumView | None:
    """The quorum, with whether commits wait for it, as its source shows."""
    shown = next((source.quorum for source in sources if source.quorum is not None), None)
    return seen if seen is None or shown is None else replace(seen, required=shown.required)


def seen_processes(run_dir: Path, up: int | None) -> list[Process]:
    """The processes that run here, or have run. `up`: the pid of a running `up`."""
    found, running = [], processes.stats()
    if up is not None:
        found.append(_process("up", ChildState(up, "running")))
    for supervisor in SUPERVISORS:
        for name, child in read_states(run_dir, supervisor).children.items():
            if up is None and child.state == "stopped":
                continue  # as its supervisor, it was told to end
            if supervisor == "up" and up is None:
                # The file is of an `up` that was killed: its children died with it.
                child.state, child.pid = "gone", None
            shown = name if supervisor == "up" else f"{supervisor}/{name}"
            found.append(_process(shown, child))
    listed = {process.pid for process in found if process.pid is not None}
    return [
        process
        if process.pid is None
        else replace(
            process,
            memory=processes.memory_of(process.pid, running, listed),
            suspended=processes.suspended_of(process.pid, running, listed),
        )
        for process in found
    ]


def _process(name: str, child: ChildState) -> Process:
    pid, state = child.pid, child.state
    its = None if pid is None else processes.stat(pid)
    if pid is not None and its is None:
        state, pid = "gone", None
    return Process(
        name=name,
        pid=pid,
        state=state,
        restarts=child.restarts,
        exit_code=child.exit_code,
        started_at=child.started_at,
        cpu_seconds=0.0 if its is None else its.cpu_seconds,
        failures=child.failures,
    )
