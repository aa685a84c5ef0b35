"""`tuskline metrics`: one endpoint for everything that a configuration names; `up` runs it with `[metrics]`.

`/metrics` is Prometheus's text, with the names of docs/metrics.md. `/healthz` answers 200 while the endpoint
itself works. `/readyz` answers 200 when every part does what it is there for, else 503, with the reasons.

A look at the parts is shared by requests of the same second, and one runs at a time, so that many scrapes do
not ask a server more often. It listens where it is told, on loopback unless told otherwise.
"""

import json
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from walsender_bridge.config import Config, MetricsSection
from walsender_bridge.config.sections import split_address
from walsender_bridge.errors import ConfigError
from walsender_bridge.observability import lag, quorum_metrics, slots_metrics
from walsender_bridge.observability.bounded_http import BoundedHandler, BoundedServer
from walsender_bridge.observability.observation import Observation, Observer

#: Seconds for which a look is good.
FRESH: Final = 1.0
#: Seconds that a client has for its request.
REQUEST_SECONDS: Final = 10.0
_POSITIONS: Final = ("server", "received", "logged", "committed", "confirmed")

_log = structlog.get_logger(__name__)


def serve(settings: Config) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` when the address cannot be had."""
    section = settings.metrics or MetricsSection()
    with Observer(settings) as observer:
        try:
            server = Endpoint(split_address(section.listen), SharedObservations(observer))
        except OSError as error:
            raise ConfigError(
                f"cannot listen: {error.strerror}",
                where=section.listen,
                repair="choose another [metrics] listen",
            ) from None
        _log.info("listening", address=section.listen)
        with server:
            server.serve_forever()


class SharedObservations:
    """Observations, shared by those who ask at the same time."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._seen: Observation | None = None
        self._at = 0.0

    def latest(self) -> Observation:
        """A look that is at most `FRESH` seconds old."""
        with self._lock:
            if self._seen is None or time.monotonic() - self._at > FRESH:
                self._seen = self._observer.look()
                self._at = time.monotonic()
            return self._seen


class Endpoint(BoundedServer):
    """The HTTP server. `server_address` says where it listens."""

    def __init__(self, address: tuple[str, int], looks: SharedObservations) -> None:
        self.looks = looks
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(looks))
        super().__init__(address, _Handler)


class _Handler(BoundedHandler):
    server: Endpoint
    timeout = REQUEST_SECONDS
    server_version = "tuskline"
    sys_version = ""

    def do_GET(self) -> None:  # noqa: N802  # the base class's name
        match self.path.partition("?")[0]:
            case "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(200, encode(self.server.registry), content_type)
            case "/healthz":
                self._json(200, {"healthy": True})
            case "/readyz":
                ill = self.server.looks.latest().ill
                self._json(503 if ill else 200, {"ready": not ill, "reasons": ill})
            case _:
                self._json(404, {"error": "there are /metrics, /healthz and /readyz"})

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

    def __init__(self, looks: SharedObservations) -> None:
        self._looks = looks

    def describe(self) -> list[Metric]:
        """Nothing: registering must not look at the parts."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families."""
        seen = self._looks.latest()
        build = GaugeMetricFamily(
            "tuskline_build_info", "The version that serves this.", labels=["version"]
        )
        build.add_metric([metadata.version("tuskline")], 1)
        yield build
        ready = GaugeMetricFamily("tuskline_ready", "1 when every part does what it is there for.")
        ready.add_metric([], float(not seen.ill))
        yield ready
        yield from _processes(seen)
        yield from _captures(seen)
        yield from _gates(seen)
        yield from _slots(seen)
        yield from _streams(seen)
        yield from _lags(seen)
        yield from _lake(seen)
        yield from quorum_metrics.families(seen.quorum)
        yield from slots_metrics.families(seen.slots)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tuskline_{name}", text, labels=labels)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"tuskline_{name}", text, labels=labels)


def _processes(seen: Observation) -> Iterator[Metric]:
    up = _gauge("process_up", "1 while the process runs.", "process")
    restarts = _counter("process_restarts", "Starts after an end.", "process")
    started = _gauge("process_start_time_seconds", "Unix time of the last start.", "process")
    memory = _gauge("process_resident_memory_bytes", "Resident memory.", "process")
    cpu = _counter("process_cpu_seconds", "User and system time.", "process")
    for process in seen.processes:
        label = [process.name]
        up.add_metric(label, float(process.state == "running"))
        restarts.add_metric(label, process.restarts)
        started.add_metric(label, process.started_at)
        memory.add_metric(label, process.memory)
        cpu.add_metric(label, process.cpu_seconds)
    yield from (up, restarts, started, memory, cpu)


def _captures(seen: Observation) -> Iterator[Metric]:
    streaming = _gauge("capture_streaming", "1 while changes are read from the slot.", "source")
    lsn = _gauge("capture_lsn_bytes", "How far it is, as bytes of WAL.", "source", "position")
    transactions = _counter("capture_transactions", "Transactions of this session.", "source")
    messages = _counter("capture_messages", "Messages of this session.", "source")
    flight = _gauge(
        "capture_in_flight_bytes", "Sent to the log server, not acknowledged.", "source"
    )
    age = _gauge("capture_status_age_seconds", "Since it last told of itself.", "source")
    for source in seen.sources:
        told, label = source.capture, [source.name]
        streaming.add_metric(label, float(source.state == "streaming"))
        if not told:
            continue
        for position in _POSITIONS:
            lsn.add_metric([source.name, position], told[f"{position}_lsn"])
        transactions.add_metric(label, told["transactions"])
        messages.add_metric(label, told["messages"])
        flight.add_metric(label, told["in_flight_bytes"])
        age.add_metric(label, max(0.0, seen.at - told["updated_at"]))
    yield from (streaming, lsn, transactions, messages, flight, age)


def _gates(seen: Observation) -> Iterator[Metric]:
    position = _gauge("gate_lsn_bytes", "What ends at or below may be shown.", "source")
    stuck = _gauge("gate_stuck_seconds", "Since something passed while something waits.", "source")
    opened = _gauge(
        "gate_open", "1 while the gate is open because no candidate is left to wait for.", "source"
    )
    counted = _gauge(
        "gate_candidate_counted", "1 while the gate waits for it.", "source", "candidate"
    )
    held = _gauge("gate_candidate_lsn_bytes", "The WAL that it has.", "source", "candidate")
    away = _gauge("gate_candidate_away", "1 while nobody streams from it.", "source", "candidate")
    for source in seen.sources:
        gate = source.capture.get("gate")
        if not gate:
            continue
        position.add_metric([source.name], gate["position_lsn"])
        opened.add_metric([source.name], float(gate["open"]))
        since = gate["stuck_since"]
        stuck.add_metric([source.name], 0.0 if since is None else max(0.0, seen.at - since))
        for each in gate["candidates"]:
            label = [source.name, each["slot"]]
            counted.add_metric(label, float(each["standing"] == "counted"))
            held.add_metric(label, each["held_lsn"])
            away.add_metric(label, float(bool(each["away"])))
    yield from (position, stuck, opened, counted, held, away)


def _slots(seen: Observation) -> Iterator[Metric]:
    reachable = _gauge("source_up", "1 when the server answers.", "source")
    bare = _gauge("source_unidentified_tables", "Published without a replica identity.", "source")
    active = _gauge("slot_active", "1 while somebody streams from the slot.", "source", "slot")
    retained = _gauge("slot_retained_bytes", "WAL that the slot holds.", "source", "slot")
    status = _gauge("slot_wal_status", "1 for the slot's status.", "source", "slot", "status")
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
    up = _gauge("log_up", "1 when the log's repository answers.")
    version = _gauge("log_version", "The newest version that can be read.")
    size = _counter("log_stream_bytes", "Committed entries since the first.", "source")
    kept = _gauge("log_stream_entries", "Committed entries that are kept.", "source")
    up.add_metric([], float(seen.log is not None))
    if seen.log is not None:
        version.add_metric([], seen.log.version)
        for cut in seen.log.streams.values():
            size.add_metric([cut.stream], cut.bytes_total)
            kept.add_metric([cut.stream], cut.end_offset - cut.low_offset)
    yield from (up, version, size, kept)


def _lags(seen: Observation) -> Iterator[Metric]:
    size = _gauge("lag_bytes", "WAL between a stage and the one before it.", "source", "stage")
    versions = _gauge("lag_versions", "Versions that a stage is behind.", "source", "stage")
    seconds = _gauge("lag_seconds", "Time that a stage is behind.", "source", "stage")
    for each in lag.of_sources(seen):
        label = [each.source, each.stage]
        # What is not known is left out: a number would be taken for one.
        if each.bytes is not None:
            size.add_metric(label, each.bytes)
        if each.versions is not None:
            versions.add_metric(label, each.versions)
        if each.seconds is not None:
            seconds.add_metric(label, each.seconds)
    yield from (size, versions, seconds)


def _lake(seen: Observation) -> Iterator[Metric]:
    epoch = _gauge("lake_epoch", "The newest published epoch.")
    term = _gauge("lake_term", "The writer's term.")
    published = _gauge("lake_published_timestamp_seconds", "Unix time of the newest epoch.")
    took = _gauge("lake_round_seconds", "How long the newest epoch took to write.")
    rows = _gauge("lake_table_rows", "Rows of a table.", "table")
    aside = _gauge("lake_table_set_aside", "1 for a table that is not kept, by name.", "table")
    quarantined = _gauge("lake_table_quarantined_rows", "Rows set aside that wait.", "table")
    skipped = _gauge("lake_table_skipped_rows", "Rows set aside and given up by name.", "table")
    behind = _gauge("lake_table_behind", "1 for a table of an earlier epoch.", "table", "state")
    copy = {
        name: _gauge(f"lake_copy_{name}", f"{text} of a copy that is under way.", "table")
        for name, text in (
            ("rows", "Rows"),
            ("bytes", "Bytes"),
            ("pieces", "Parts"),
            ("pieces_done", "Finished parts"),
        )
    }
    if seen.lake is not None:
        epoch.add_metric([], seen.lake.epoch)
        term.add_metric([], seen.lake.term)
        published.add_metric([], seen.lake.published_at)
        took.add_metric([], seen.lake.seconds)
        for name, table in seen.lake.readable.items():
            rows.add_metric([name], table.rows)
            quarantined.add_metric([name], table.quarantined_rows - table.skipped_rows)
            skipped.add_metric([name], table.skipped_rows)
            if table.state != "live":
                behind.add_metric([name, table.state], 1)
        for name in seen.lake.set_aside:
            aside.add_metric([name], 1)
    for table, progress in seen.copying.items():
        for name, gauge in copy.items():
            gauge.add_metric([table], progress[name])
    yield from (
        epoch,
        term,
        published,
        took,
        rows,
        quarantined,
        skipped,
        aside,
        behind,
        *copy.values(),
    )
