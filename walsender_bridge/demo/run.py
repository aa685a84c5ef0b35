"""`tuskline demo` from start to end: servers, load, kills, flush, comparison, figures.

The parts run exactly as users run them: `tuskline log-server run`, `bridge run` and `lake run`, with a
configuration file that is left in the demo's folder, under the same supervisor.
"""

import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.tables.sources import Source
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.config import load_config
from walsender_bridge.demo import catalog
from walsender_bridge.demo.bank import TABLES, Clients, open_bank
from walsender_bridge.demo.bucket import FOLDER, S3, LakePlace, lake_place
from walsender_bridge.demo.local_server import LocalServer, by_major, free_port
from walsender_bridge.demo.log_servers import DemoLogServers
from walsender_bridge.demo.nemesis import Nemesis, Victim, kill
from walsender_bridge.demo.quorum import DemoQuorum, section
from walsender_bridge.demo.standby import DemoStandby
from walsender_bridge.demo.standby import section as gate_section
from walsender_bridge.demo.view import Progress, View
from walsender_bridge.errors import DeadlineError, LakeError, TusklineError
from walsender_bridge.report import recording
from walsender_bridge.report.page import page
from walsender_bridge.report.recorder import Recorder
from walsender_bridge.runtime.durable import replace_file
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.processes import children
from walsender_bridge.runtime.sql import load
from walsender_bridge.runtime.supervisor import Child, Supervisor, read_states, stop_on_signals

STREAMS = ("north", "south")
EPOCH_INTERVAL = 2.0
_SAMPLE_SECONDS = 0.5
#: Seconds that the first epoch (Spark's start and the initial copy) and the last flush may take.
FIRST_EPOCH_TIMEOUT = 240.0
FLUSH_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line. `rate`: transactions per second in each database.

    `log_servers`: their number, each with a replica of the log; with `kill`, one of several loses its disk.
    `safekeepers`: their number; commits wait for a majority of them; 0: none. `standby`: whether to create one, and promote
    it halfway through the load. `lake`: `folder`, `s3`, or the URL of a lake in a bucket (`bucket`).
    """

    seconds: float
    kill: bool
    seed: int | None
    rate: float
    directory: Path | None
    log_servers: int = 1
    safekeepers: int = 0
    standby: bool = False
    lake: str = FOLDER
    #: What has the tables' metadata (`demo.catalog`).
    catalog: str = "folder"
    #: The file for a report of the run, if one is wanted.
    report: Path | None = None


def run_demo(options: DemoOptions, output: Output) -> dict[str, Any]:
    """Run the demo and return its figures. Raises a `TusklineError` when a part cannot be run."""
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(2**31)
    directory = _prepare(options.directory)
    output.note(f"seed {seed}, all files are in {directory}")
    with _postgres(directory, output) as server, contextlib.ExitStack() as stack:
        place = stack.enter_context(lake_place(options.lake, directory))
        for stream in STREAMS:
            with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
                connection.execute(f"CREATE DATABASE {stream}")
            open_bank(server.dsn(stream))
        standby = None
        if options.standby:
            output.note("creating a standby")
            standby = DemoStandby(server, directory / "standby")
            stack.callback(standby.destroy)
        sources = {stream: (standby or server).dsn(stream) for stream in STREAMS}
        demo = _Demo(options, output, directory, server, standby, sources, seed, place)
        figures = asyncio.run(demo.run())
        if demo.log_servers.verdict:
            output.note(demo.log_servers.verdict)
        if demo.quorum is not None:
            output.note("comparing the safekeepers' WAL, byte for byte")
            figures |= demo.quorum.compare(output)
        output.note("comparing every table")
        found, delays = _verify(demo, output)
        figures |= found
        if options.report is not None:
            _write_report(demo, options.report, figures, delays)
            output.note(f"the report is in {options.report}")
    if options.lake == S3:
        output.note("the server of S3 has ended; its files are in " + str(directory / "s3"))
    else:
        _print_snippet(output, demo.lake)
    return figures


def _prepare(directory: Path | None) -> Path:
    if directory is None:
        folder = Path(tempfile.mkdtemp(prefix="tuskline-demo-"))
    else:
        folder = directory.absolute()
        if folder.exists() and any(folder.iterdir()):
            raise LakeError(
                "the folder is not empty",
                where=str(folder),
                repair="choose a new folder, or omit --dir",
            )
        folder.mkdir(parents=True, exist_ok=True)
    # If the demo runs as root, the server has another account, which needs access.
    folder.chmod(0o755)
    return folder


@contextlib.contextmanager
def _postgres(directory: Path, output: Output) -> Iterator[LocalServer]:
    found = by_major()
    server = LocalServer.create(found[max(found)], directory / "postgres", progress=output.note)
    server.start()
    try:
        yield server
    finally:
        # Only the lake remains; the server's data may be elsewhere (see `LocalServer.create`).
        server.destroy()


class _Demo:
    """The running parts, and their progress."""

    def __init__(
        self,
        options: DemoOptions,
        output: Output,
        directory: Path,
        server: LocalServer,
        standby: DemoStandby | None,
        sources: dict[str, str],
        seed: int,
        place: LakePlace,
    ) -> None:
        self.options = options
        self.output = output
        self.server = server
        self.standby = standby
        self.sources = sources
        self.seed = seed
        self.place = place
        self.lake = place.uri
        self.directory = directory
        self.log_address = f"grpc://127.0.0.1:{free_port()}"
        self.progress = Progress()
        self.clients = {
            stream: Clients(dsn, rate=options.rate, seed=seed + number)
            for number, (stream, dsn) in enumerate(sources.items())
        }
        self.log_servers = DemoLogServers(directory, options.log_servers)
        self._catalog = catalog.section(options.catalog, options.lake)
        self.config = self._write_config()
        self.quorum = DemoQuorum(self.config) if options.safekeepers else None
        self.recorder: Recorder | None = None
        self.strikes: Sequence[tuple[float, str]] = ()

    @property
    def run_dir(self) -> Path:
        return self.directory / "log" / "run"

    def _write_config(self) -> Path:
        lines = [
            "[log]",
            'data_dir = "log"',
            f'listen = "{self.log_address.removeprefix("grpc://")}"',
            "",
            *self.log_servers.sections(),
            "[lake]",
            f'uri = "{self.lake}"',
            *self.place.lines,
            f"epoch_interval = {EPOCH_INTERVAL}",
            *self._catalog,
        ]
        if self.options.safekeepers:
            lines += ["", *section(self.options.safekeepers)]
        if self.standby is not None:
            lines += ["", *gate_section()]
        for stream, dsn in self.sources.items():
            lines += ["", "[[source]]", f'name = "{stream}"', f'dsn = "{dsn}"']
        path = self.directory / "tuskline.toml"
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o600)
        return path

    async def run(self) -> dict[str, Any]:
        """Load, kills and flush. Returns the figures of the run."""
        stop = asyncio.Event()
        stop_on_signals(stop)
        supervisor = Supervisor("demo", self._children(), run_dir=self.run_dir)
        running = asyncio.create_task(supervisor.run(stop))
        kills: dict[str, int] = {}
        try:
            with View(self.progress, self.output.progress) as view:
                watching = asyncio.create_task(self._watch(view))
                try:
                    await self._first_epoch(stop)
                    if self.quorum is not None:
                        self.progress.phase = "commits wait for the quorum"
                        await asyncio.to_thread(self.quorum.require)
                    # Until the lake has all: what the last kills cost is seen after the load.
                    with self._recorded():
                        kills = await self._load(stop)
                        self.progress.phase = "flush"
                        began = time.monotonic()
                        await self._flush()
                        flush_seconds = time.monotonic() - began
                    settled = await asyncio.to_thread(self.quorum.settle) if self.quorum else {}
                    self.progress.phase = "comparing the log servers"
                    settled |= await asyncio.to_thread(self.log_servers.settle, self.log_address)
                finally:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)
        finally:
            stop.set()
            await running
        return {
            "seed": self.seed,
            "seconds": self.options.seconds,
            "transactions": sum(c.figures.transactions for c in self.clients.values()),
            "kills": kills,
            "flush_seconds": round(flush_seconds, 2),
            "restarts": {name: state.restarts for name, state in supervisor.states.items()},
            **settled,
            **self._takeover(),
        }

    def _recorded(self) -> contextlib.AbstractContextManager[object]:
        """Record for the report, if one is wanted."""
        if self.options.report is None:
            return contextlib.nullcontext()
        self.recorder = Recorder(load_config(self.config), _SAMPLE_SECONDS)
        return self.recorder

    def _takeover(self) -> dict[str, Any]:
        if self.standby is None:
            return {}
        return self.standby.figures([*sorted((self.directory / "log" / "gate").glob("*.jsonl"))])

    def _children(self) -> list[Child]:
        logs = self.directory / "logs"
        return [
            Child(
                part,
                [
                    sys.executable,
                    "-m",
                    "walsender_bridge.cli.app",
                    part,
                    "run",
                    "--config",
                    str(self.config),
                ],
                log_file=logs / f"{part}.log",
            )
            for part in ("log-server", "bridge", "lake")
        ]

    async def _first_epoch(self, stop: asyncio.Event) -> None:
        self.progress.phase = "starting Spark, copying the tables"
        deadline = time.monotonic() + FIRST_EPOCH_TIMEOUT
        while self.progress.tables < len(STREAMS) * len(TABLES):
            if time.monotonic() > deadline or stop.is_set():
                raise DeadlineError(
                    "no epoch with all tables was published in time",
                    where=self.lake,
                    repair=f"read the logs in {self.directory / 'logs'}",
                )
            await asyncio.sleep(0.2)

    async def _load(self, stop: asyncio.Event) -> dict[str, int]:
        self.progress.phase = "load"
        ended = asyncio.Event()
        clients = [asyncio.create_task(c.run(ended)) for c in self.clients.values()]
        nemesis = self._nemesis()
        killing = asyncio.create_task(nemesis.run()) if nemesis else None
        takeover = asyncio.create_task(self._take_over())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), self.options.seconds)
        # The load continues until the last kill, even if a busy machine delays it.
        await asyncio.gather(takeover, *([killing] if killing else []))
        ended.set()
        await asyncio.gather(*clients)
        if nemesis is None:
            return {}
        self.strikes = nemesis.strikes
        return nemesis.kills

    async def _take_over(self) -> None:
        if self.standby is None:
            return
        await asyncio.sleep(self.options.seconds / 2)
        self.progress.phase = "promoting the standby"
        slots = [f"tuskline_{stream}" for stream in STREAMS]
        await asyncio.to_thread(self.standby.take_over, slots)
        self.progress.phase = "load on the new primary"

    def _nemesis(self) -> Nemesis | None:
        if not self.options.kill:
            return None

        def of_supervisor(name: str, prefix: str) -> Callable[[], list[int]]:
            def pids() -> list[int]:
                return [
                    child.pid
                    for each, child in read_states(self.run_dir, name).children.items()
                    if each.startswith(prefix) and child.pid is not None
                ]

            return pids

        def with_children(name: str) -> Callable[[], list[int]]:
            def pids() -> list[int]:
                own = of_supervisor("demo", name)()
                return own + [child for pid in own for child in children(pid)]

            return pids

        def power_cut() -> None:
            if self.standby is not None:
                self.standby.cut_power()
                return
            self.server.kill()
            self.server.start()

        victims = [
            Victim("bridge", of_supervisor("demo", "bridge")),
            Victim("capture", of_supervisor("bridge", "capture-")),
            Victim("log-server", with_children("log-server")),
            Victim("driver", with_children("lake")),
            Victim("postgres", list, power_cut),
        ]
        if self.options.log_servers > 1:
            replicas = of_supervisor("log-server", "replicas")

            whole = with_children("log-server")

            def lose_disk() -> None:
                # With its supervisor, which would take a disk that is suddenly empty for one that is not mounted.
                with self.log_servers.wiped():
                    for pid in whole():
                        kill(pid)

            victims += [Victim("replicas", replicas), Victim("disk", list, lose_disk, rounds=1)]
        if self.quorum is not None:
            victims += [
                Victim("safekeeper", of_supervisor("log-server", "safekeeper-")),
                Victim("wal_server", of_supervisor("log-server", "wal-server-")),
                Victim("proposer", of_supervisor("bridge", "proposer")),
            ]
        nemesis = Nemesis(victims, seconds=self.options.seconds, seed=self.seed)
        self.progress.kills = {}
        return nemesis

    async def _flush(self) -> None:
        deadline = time.monotonic() + FLUSH_TIMEOUT
        while True:
            try:
                left = max(1.0, deadline - time.monotonic())
                sources = [Source(s, dsn, f"tuskline_{s}") for s, dsn in self.sources.items()]
                await asyncio.to_thread(flush, self.lake, self.log_address, sources, timeout=left)
                return
            except TusklineError:
                # The part that was killed last may still be starting.
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)

    async def _watch(self, view: View) -> None:
        while True:
            await asyncio.to_thread(self._poll)
            view.tick()
            await asyncio.sleep(0.4)

    def _poll(self) -> None:
        progress = self.progress
        progress.transactions = sum(c.figures.transactions for c in self.clients.values())
        if self.quorum is not None:
            self.quorum.poll(progress)
        # Any part may be down at this moment; its figures then stay as they are.
        with contextlib.suppress(TusklineError, psycopg.Error):
            with LogClient(self.log_address, timeout=2.0) as log:
                status = log.status()
            progress.version = status.version
            for stream, dsn in self.sources.items():
                with psycopg.connect(dsn, connect_timeout=2, autocommit=True) as connection:
                    row = connection.execute(load("flush/position")).fetchone()
                if row is not None and stream in status.streams:
                    progress.lag[stream] = max(0, row[0] - status.streams[stream].last_end_lsn)
        with contextlib.suppress(TusklineError):
            manifest = open_chain(self.lake).head()
            if manifest is not None and manifest.readable:
                progress.epochs += manifest.epoch != progress.epoch
                progress.epoch = manifest.epoch
                progress.rows = manifest.rows
                progress.tables = len(manifest.readable)
                newest = max(position.commit_time for position in manifest.streams.values())
                progress.freshness = max(0.0, manifest.published_at - newest / 1e6)


def _verify(demo: _Demo, output: Output) -> tuple[dict[str, Any], "np.ndarray[Any, Any]"]:
    """The figures of all comparisons, and `verify.freshness`."""
    from spark_consumers import read
    from spark_consumers.spark.scratch import scratch, settings
    from spark_consumers.spark.session import session
    from walsender_bridge.demo import verify

    with scratch(demo.directory / "scratch") as place:
        spark = session("tuskline-demo-verify", lake=demo.lake, conf=settings(place))
        # For each new table, Iceberg's hadoop catalog warns that it does not exist yet.
        spark.sparkContext.setLogLevel("ERROR")
        try:
            epochs = verify.published_epochs(demo.lake)
            snapshot = read(spark, demo.lake)
            tables = verify.compare_all(snapshot, demo.sources)
            for table in tables:
                for example in table.examples:
                    output.note(f"{table.table}: {example}")
            planted = verify.planted_error_found(
                spark, snapshot, STREAMS[0], demo.sources[STREAMS[0]], demo.directory / "planted"
            )
            # Of a long run this is most of the time: on a busy machine ten epochs take minutes.
            output.note(f"comparing the sums at each of {len(epochs)} epochs")
            violations = verify.check_epochs(spark, demo.lake, epochs, STREAMS)
            for violation in violations:
                output.note(f"epoch {violation.epoch}, {violation.stream}: {violation.what}")
        finally:
            spark.stop()
    shutil.rmtree(demo.directory / "planted", ignore_errors=True)
    commits = {stream: client.figures.commits for stream, client in demo.clients.items()}
    delays = verify.freshness(epochs, commits)
    gaps = np.diff([manifest.published_at for manifest in epochs])
    figures = {
        "changes": sum(manifest.changes for manifest in epochs),
        "epochs": len(epochs),
        "epoch_gap_seconds": _quantiles(gaps, p50=50, max=100),
        "invariant_violations": len(violations),
        "epochs_checked": len(epochs),
        "tables_compared": len(tables),
        "tables_equal": sum(table.equal for table in tables),
        "rows_compared": sum(table.rows for table in tables),
        "planted_error_found": planted,
        "freshness_seconds": _quantiles(delays[:, 1], p50=50, p99=99),
        "commits_timed": len(delays),
        "lake": demo.lake,
    }
    return figures, delays


def _write_report(
    demo: _Demo, path: Path, figures: dict[str, Any], delays: "np.ndarray[Any, Any]"
) -> None:
    """What happened during the load and the flush, and what was found at the end, as a page."""
    assert demo.recorder is not None
    samples = demo.recorder.samples
    since, until = samples[0].at, samples[-1].at
    marks = recording.epochs(open_chain(demo.lake).newest_first(), since)
    equal, compared = figures["tables_equal"], figures["tables_compared"]
    made = recording.Recording(
        f"tuskline demo, seed {demo.seed}",
        _SAMPLE_SECONDS,
        samples,
        [mark for mark in marks if mark.at <= until],
        [recording.Kill(at, what) for at, what in demo.strikes],
        [recording.Delay(at, waited) for at, waited in delays.tolist() if since <= at <= until],
        {
            "transactions": f"{figures['transactions']:,}",
            "epochs with a wrong sum": f"{figures['invariant_violations']} of {figures['epochs_checked']}",
            "tables equal at the end": f"{equal} of {compared}",
        },
    )
    replace_file(path, page(made).encode())


def _quantiles(values: "np.ndarray[Any, Any]", **percentiles: int) -> dict[str, float | None]:
    return {
        name: round(float(np.percentile(values, percentile)), 2) if len(values) else None
        for name, percentile in percentiles.items()
    }


def _print_snippet(output: Output, lake: str) -> None:
    for line in (
        "",
        "Read it yourself, with .venv/bin/python:",
        "",
        "    from tuskline import read, session",
        f'    spark = session("me", lake={lake!r})',
        f'    bank = read(spark, {lake!r})["north.bank.accounts"]',
        '    bank.selectExpr("count(*)", "sum(balance)").show()',
        "",
    ):
        output.note(line)
