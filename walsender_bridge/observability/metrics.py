"""`tuskline metrics`: one endpoint for all configured parts; with `[metrics]`, `up` runs it.

`/metrics` serves Prometheus's text format; docs/metrics.md lists the metrics. `/healthz` answers 200 while the endpoint
itself works. `/readyz` answers 200 if no part has a problem, otherwise 503 with the reasons; both name what is degraded.

Requests within the same second share an observation, and only one is made at a time, so that frequent scrapes do
not query a server more often. The endpoint asks for certificates of the role `monitor`, or listens on a loopback address and
answers its own account, root, and who has the token of `[metrics] token_file`.
"""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from walsender_bridge.config import Config, MetricsSection
from walsender_bridge.config.sections import split_address
from walsender_bridge.errors import ConfigError, TusklineError
from walsender_bridge.observability import lag, quorum_metrics, slots_metrics
from walsender_bridge.observability.bounded_http import BoundedHandler, BoundedServer
from walsender_bridge.observability.metric_family import add_known, counter, gauge
from walsender_bridge.observability.observation import Observation, Observer
from walsender_bridge.observability.scrape_token import ScrapeToken
from walsender_bridge.runtime import listening, logs, peer_account
from walsender_bridge.runtime.certificate_holder import Role, of_certificate
from walsender_bridge.runtime.tls_context import TlsContext

#: Seconds for which an observation is reused.
FRESH: Final = 1.0
#: Whose certificates may read this from other machines.
_READERS: Final = frozenset({Role.MONITOR, Role.OPERATOR})
#: Seconds within which a client has to send its request.
REQUEST_SECONDS: Final = 10.0

_log = logs.logger()


def serve(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` if it cannot listen on the address."""
    section, files = settings.metrics or MetricsSection(), settings.tls_files
    listening.check_strangers(section.listen, tls=files is not None)
    # Probes of this machine need no certificate.
    strangers = files is not None and listening.reaches_strangers(section.listen)
    tls = TlsContext(files, server=True) if files is not None and strangers else None
    token = None if section.token_file is None else ScrapeToken(section.token_file)
    with Observer(settings) as observer:
        try:
            server = Endpoint(
                split_address(section.listen), SharedObservations(observer), tls, token
            )
        except OSError as error:
            raise ConfigError(
                f"could not listen on this address: {error.strerror}",
                where=section.listen,
                repair="choose another [metrics] listen",
            ) from None
        _log.info("listening", address=section.listen)
        with server:
            server.serve_forever()


class SharedObservations:
    """Observations, shared by concurrent requests."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._seen: Observation | None = None
        self._at = 0.0

    def latest(self) -> Observation:
        """An observation that is at most `FRESH` seconds old."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._at > FRESH:
                self._seen = self._observer.observe()
                self._at = time.monotonic()
            return self._seen


class Endpoint(BoundedServer):
    """The HTTP server; see `server_address` for where it listens. `tls`: for certificates of the role `monitor`.

    `token`: of scrapers of other accounts, without `tls`.
    """

    def __init__(
        self,
        address: tuple[str, int],
        observations: SharedObservations,
        tls: TlsContext | None = None,
        token: ScrapeToken | None = None,
    ) -> None:
        self.observations = observations
        self.token = token
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(observations))
        super().__init__(address, _Handler, tls=tls)


class _Handler(BoundedHandler):
    server: Endpoint
    timeout = REQUEST_SECONDS
    server_version = "tuskline"
    sys_version = ""

    def do_GET(self) -> None:  # noqa: N802  # the base class's name
        if (refused := self._refused()) is not None:
            self._json(403, {"error": refused})
            return
        match self.path.partition("?")[0]:
            case "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, encode(self.server.registry), content_type)
            case "/healthz":
                self._json(200, {"healthy": True})
            case "/readyz":
                seen = self.server.observations.latest()
                record = {"ready": not seen.problems, "reasons": seen.problems}
                self._json(503 if seen.problems else 200, {**record, "degraded": seen.degraded})
            case _:
                self._json(
                    404, {"error": "not found; this endpoint serves /metrics, /healthz and /readyz"}
                )

    def _refused(self) -> str | None:
        """Why the client may not read this; None: it may."""
        try:
            if not isinstance(self.request, ssl.SSLSocket):
                return self._refused_without_certificate()
            holder = of_certificate(self.request.getpeercert())
        except TusklineError as error:
            return error.what
        if holder.roles & _READERS:
            return None
        return f"the certificate of {holder} lacks the role {Role.MONITOR}"

    def _refused_without_certificate(self) -> str | None:
        given = self.headers.get("Authorization")
        if given is not None and self.server.token is not None:
            try:
                return None if self.server.token.is_in(given) else "this is not the token"
            except ConfigError as error:
                _log.error("no token is accepted", reason=error.what, file=error.where)
                return "no token is accepted now; the endpoint's log says why"
        peer_account.check(self.request)
        return None

    def _json(self, code: int, record: dict[str, Any]) -> None:
        self._answer(code, json.dumps(record).encode() + b"\n", "application/json")

    def _answer(self, code: int, body: bytes, content_type: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class's name
        """Scrapes are not logged."""


class _Collector(Collector):
    """An observation as metric families. docs/metrics.md lists them; a test compares the two."""

    def __init__(self, observations: SharedObservations) -> None:
        self._observations = observations

    def describe(self) -> list[Metric]:
        """Nothing: registering must not query the parts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families."""
        seen = self._observations.latest()
        build = GaugeMetricFamily(
            "tuskline_build_info",
            "Version of Tuskline that serves this endpoint.",
            labels=["version"],
        )
        build.add_metric([metadata.version("tuskline")], 1)
        yield build
        ready = GaugeMetricFamily(
            "tuskline_ready", "1 if no part has a problem (/readyz answers 200), otherwise 0."
        )
        ready.add_metric([], float(not seen.problems))
        yield ready
        degraded = gauge(
            "degraded", "1 if a part works and is less safe than configured, otherwise 0."
        )
        degraded.add_metric([], float(bool(seen.degraded)))
        yield degraded
        yield _certificate(seen)
        yield from _processes(seen)
        yield from _captures(seen)
        yield from _gates(seen)
        yield from _slots(seen)
        yield from _streams(seen)
        yield from _lags(seen)
        yield from _lake(seen)
        yield from _equality(seen)
        yield from _maintenance(seen)
        yield from quorum_metrics.families(seen.quorum)
        yield from slots_metrics.families(seen.slots)


def _certificate(seen: Observation) -> Metric:
    left = gauge(
        "certificate_expires_in_seconds",
        "Seconds until this machine's certificate of [tls] expires; negative: it has expired.",
        "file",
    )
    its = seen.certificate
    if its is not None and its.error is None:
        left.add_metric([its.file], its.ends - seen.at)
    return left


def _processes(seen: Observation) -> Iterator[Metric]:
    up = gauge("process_up", "1 while the process runs, otherwise 0.", "process")
    restarts = counter(
        "process_restarts", "Restarts of the process since its supervisor started.", "process"
    )
    started = gauge(
        "process_start_time_seconds", "Unix time of the process's last start.", "process"
    )
    memory = gauge(
        "process_resident_memory_bytes", "Resident memory of the process in bytes.", "process"
    )
    cpu = counter(
        "process_cpu_seconds", "User and system CPU time of the process in seconds.", "process"
    )
    for process in seen.processes:
        label = [process.name]
        up.add_metric(label, float(process.state == "running"))
        restarts.add_metric(label, process.restarts)
        started.add_metric(label, process.started_at)
        memory.add_metric(label, process.memory)
        cpu.add_metric(label, process.cpu_seconds)
    yield from (up, restarts, started, memory, cpu)


def _captures(seen: Observation) -> Iterator[Metric]:
    streaming = gauge(
        "capture_streaming", "1 while capture streams changes from the slot, otherwise 0.", "source"
    )
    lsn = gauge("capture_lsn_bytes", "WAL position of capture, in bytes.", "source", "position")
    transactions = counter(
        "capture_transactions", "Transactions captured in this session.", "source"
    )
    messages = counter("capture_messages", "Messages received in this session.", "source")
    flight = gauge(
        "capture_in_flight_bytes",
        "Bytes sent to the log server and not acknowledged yet.",
        "source",
    )
    age = gauge(
        "capture_status_age_seconds", "Seconds since capture last wrote its status.", "source"
    )
    for source in seen.sources:
        capture, label = source.capture, [source.name]
        streaming.add_metric(label, float(source.state == "streaming"))
        if capture is None:
            continue
        for position, value in (
            ("server", capture.server_lsn),
            ("received", capture.received_lsn),
            ("logged", capture.logged_lsn),
            ("committed", capture.committed_lsn),
            ("confirmed", capture.confirmed_lsn),
        ):
            lsn.add_metric([source.name, position], value)
        transactions.add_metric(label, capture.transactions)
        messages.add_metric(label, capture.messages)
        flight.add_metric(label, capture.in_flight_bytes)
        age.add_metric(label, max(0.0, seen.at - capture.updated_at))
    yield from (streaming, lsn, transactions, messages, flight, age)


def _gates(seen: Observation) -> Iterator[Metric]:
    position = gauge(
        "gate_lsn_bytes", "LSN up to which transactions pass the commit gate.", "source"
    )
    stuck = gauge(
        "gate_stuck_seconds",
        "Seconds since a transaction passed while others wait; 0 if none waits.",
        "source",
    )
    opened = gauge(
        "gate_open",
        "1 while the gate is open because no candidate is left to wait for, otherwise 0.",
        "source",
    )
    counted = gauge(
        "gate_candidate_counted",
        "1 while the gate waits for the candidate, otherwise 0.",
        "source",
        "candidate",
    )
    held = gauge(
        "gate_candidate_lsn_bytes",
        "LSN up to which the candidate has the WAL.",
        "source",
        "candidate",
    )
    away = gauge(
        "gate_candidate_away",
        "1 while no standby streams from the candidate's slot, otherwise 0.",
        "source",
        "candidate",
    )
    for source in seen.sources:
        gate = source.gate
        if gate is None:
            continue
        position.add_metric([source.name], gate.position_lsn)
        opened.add_metric([source.name], float(gate.open))
        since = gate.stuck_since
        stuck.add_metric([source.name], 0.0 if since is None else max(0.0, seen.at - since))
        for each in gate.candidates:
            label = [source.name, each.slot]
            counted.add_metric(label, float(each.standing == "counted"))
            held.add_metric(label, each.flush_lsn)
            away.add_metric(label, float(bool(each.away)))
    yield from (position, stuck, opened, counted, held, away)


def _slots(seen: Observation) -> Iterator[Metric]:
    reachable = gauge("source_up", "1 if the server answers, otherwise 0.", "source")
    bare = gauge(
        "source_unidentified_tables",
        "Number of published tables without a replica identity.",
        "source",
    )
    active = gauge(
        "slot_active", "1 while a client streams from the slot, otherwise 0.", "source", "slot"
    )
    retained = gauge(
        "slot_retained_bytes", "Bytes of WAL that the server keeps for the slot.", "source", "slot"
    )
    status = gauge(
        "slot_wal_status", "1 for the current wal_status of the slot.", "source", "slot", "status"
    )
    for source in seen.sources:
        server, label = source.server, [source.name, source.slot]
        reachable.add_metric([source.name], float(server is not None))
        if server is not None:
            bare.add_metric([source.name], len(source.unidentified))
        if server is None or server["active"] is None:
            continue
        active.add_metric(label, float(server["active"]))
        retained.add_metric(label, server["retained_bytes"] or 0)
        if server["wal_status"] is not None:
            status.add_metric([*label, server["wal_status"]], 1)
    yield from (reachable, bare, active, retained, status)


def _streams(seen: Observation) -> Iterator[Metric]:
    up = gauge("log_up", "1 if the log's repository answers, otherwise 0.")
    version = gauge("log_version", "Newest version of the log that can be read.")
    size = counter("log_stream_bytes", "Bytes of committed entries since the first.", "source")
    kept = gauge(
        "log_stream_entries", "Number of committed entries that the log retains.", "source"
    )
    if seen.asks_log:
        up.add_metric([], float(seen.log is not None))
    if seen.log is not None:
        version.add_metric([], seen.log.version)
        for cut in seen.log.streams.values():
            size.add_metric([cut.stream], cut.bytes_total)
            kept.add_metric([cut.stream], cut.end_offset - cut.low_offset)
    in_sync = gauge(
        "log_replica_in_sync",
        "1 if the replica is in sync, otherwise 0.",
        *("source", "log_server"),
    )
    missing = gauge(
        "log_replicas_missing", "Number of replicas that should be in sync and are not.", "source"
    )
    for stream in seen.replicas:
        missing.add_metric([stream.stream], stream.missing)
        for place in stream.places:
            label = [stream.stream, place.address or place.log_server]
            in_sync.add_metric(label, float(place.in_sync))
    yield from (up, version, size, kept, in_sync, missing)


def _lags(seen: Observation) -> Iterator[Metric]:
    size = gauge(
        "lag_bytes", "Bytes of WAL between a stage and the previous one.", "source", "stage"
    )
    versions = gauge(
        "lag_versions", "Number of versions that a stage lags behind.", "source", "stage"
    )
    seconds = gauge("lag_seconds", "Seconds that a stage lags behind.", "source", "stage")
    for each in lag.of_sources(seen):
        label = [each.source, each.stage]
        add_known(size, label, each.bytes)
        add_known(versions, label, each.versions)
        add_known(seconds, label, each.seconds)
    yield from (size, versions, seconds)


def _lake(seen: Observation) -> Iterator[Metric]:
    epoch = gauge("lake_epoch", "Newest published epoch.")
    term = gauge("lake_term", "Term of the writer.")
    published = gauge(
        "lake_published_timestamp_seconds", "Unix time at which the newest epoch was published."
    )
    took = gauge("lake_round_seconds", "Seconds that it took to write the newest epoch.")
    rows = gauge("lake_table_rows", "Rows of the table in the newest epoch.", "table")
    not_copied = gauge(
        "lake_table_not_copied",
        "1 for a table whose copy failed, or that cannot get its name in the lake.",
        "table",
    )
    quarantined = gauge("lake_table_quarantined_rows", "Quarantined rows of the table.", "table")
    skipped = gauge(
        "lake_table_skipped_rows",
        "Quarantined rows of the table that an operator skipped.",
        "table",
    )
    behind = gauge(
        "lake_table_behind", "1 for a table whose rows are of an earlier epoch.", "table", "state"
    )
    copies = [
        gauge(f"lake_copy_{name}", f"{text} of the running copy of the table.", "table")
        for name, text in (
            ("rows", "Rows written"),
            ("bytes", "Bytes written"),
            ("pieces", "Ranges"),
            ("pieces_done", "Finished ranges"),
        )
    ]
    if seen.lake is not None:
        epoch.add_metric([], seen.lake.epoch)
        term.add_metric([], seen.lake.term)
        published.add_metric([], seen.lake.published_at)
        took.add_metric([], seen.lake.seconds)
        at_sources = seen.lake.at_sources
        for full, table in seen.lake.readable.items():
            name = at_sources.get(full, full)
            if full not in at_sources and full in seen.lake.tables:
                # A view or feed with the name that a table has only at its source: two samples of one name are none.
                name = f"{full} (in the lake)"
            rows.add_metric([name], table.rows)
            quarantined.add_metric([name], table.quarantined_rows - table.skipped_rows)
            skipped.add_metric([name], table.skipped_rows)
            if table.state != "live":
                behind.add_metric([name, table.state], 1)
        for name in seen.lake.not_copied:
            not_copied.add_metric([name], 1)
    for name, copy in seen.copying.items():
        values = (copy.rows, copy.bytes, copy.pieces, copy.pieces_done)
        for family, value in zip(copies, values, strict=True):
            family.add_metric([name], value)
    yield from (
        epoch,
        term,
        published,
        took,
        rows,
        quarantined,
        skipped,
        not_copied,
        behind,
        *copies,
    )


def _equality(seen: Observation) -> Iterator[Metric]:
    """The last result of `tuskline verify`."""
    ended = gauge(
        "lake_equality_ended_timestamp_seconds", "Unix time at which the last verification ended."
    )
    tables = gauge("lake_equality_tables", "Tables of the last verification, by result.", "result")
    if seen.equality is not None:
        if seen.equality.ended_at:
            ended.add_metric([], seen.equality.ended_at)
        for result in ("pending", "equal", "different", "not compared"):
            tables.add_metric([result], seen.equality.count(result))
    yield from (ended, tables)


def _maintenance(seen: Observation) -> Iterator[Metric]:
    """What the lake's maintainer has done since it began."""
    known = seen.maintenance
    for name, text, value in (
        ("looked_timestamp_seconds", "Unix time of the maintainer's last look.", "looked_at"),
        ("rewritten_timestamp_seconds", "Unix time of the last accepted offer.", "rewritten_at"),
        ("offers_accepted", "Offers that the driver accepted.", "accepted"),
        ("offers_refused", "Offers that the driver refused.", "refused"),
        ("offers_waiting", "Offers that the driver has not decided on.", "waiting"),
        ("files_before", "Data files that were rewritten.", "files_before"),
        ("files_after", "Data files that they became.", "files_after"),
        ("rewritten_bytes", "Bytes of the data files that were rewritten.", "rewritten_bytes"),
        ("due_bytes", "Bytes of data files that are left to rewrite.", "due_bytes"),
    ):
        found = gauge(f"lake_maintenance_{name}", text)
        if known is not None:
            found.add_metric([], getattr(known, value))
        yield found
