"""pgbench runs against a server that `tuskline up` is attached to, while every kind of its processes dies.

At the end every table is equal, row by row: none lost, none twice. Then `detach` leaves the server as it was.
"""

import os
import random
import signal
import subprocess
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from spark_consumers import read
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import Attached, difference, server_state
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.processes import children, command_line, family
from walsender_bridge.runtime.supervisor import read_states

TABLES = {
    "public.pgbench_accounts": 1,
    "public.pgbench_branches": 1,
    "public.pgbench_tellers": 1,
    # No key: a bag.
    "public.pgbench_history": 0,
}
SECRET = "planted-secret-c0de"
ADMIN = ("--admin", "user=postgres")


def named(pid: int, word: str) -> list[int]:
    """The processes below `pid` whose command line has the word."""
    return [child for child in family(pid)[1:] if word in command_line(child)]


class Victims:
    """The kinds of processes, and those of each that live now."""

    def __init__(self, tuskline: Attached, server: LocalServer) -> None:
        self._tuskline = tuskline
        self._server = server
        self.kinds: dict[str, Callable[[], list[int]]] = {
            "up": self._up,
            "log-server": lambda: self._child("up", "log-server"),
            "log server's replicas": lambda: self._child("log-server", "replicas"),
            "bridge": lambda: self._child("up", "bridge"),
            "capture": lambda: self._child("bridge", "capture-shop"),
            "lake's driver": lambda: self._child("up", "lake"),
            "lake's JVM": lambda: self._below_lake("org.apache.spark.deploy.SparkSubmit"),
            "lake's workers": lambda: self._below_lake(
                "spark_consumers.spark.daemon pyspark.worker"
            ),
            "metrics": lambda: self._child("up", "metrics"),
            "PostgreSQL": list,
        }

    def _up(self) -> list[int]:
        process = self._tuskline.process
        return [] if process is None else [process.pid]

    def _child(self, supervisor: str, name: str) -> list[int]:
        states = read_states(self._tuskline.run_dir, supervisor)
        child = states.children.get(name)
        # The file of a supervisor that was killed names what died with it.
        if child is None or child.pid is None or states.pid not in {*self._up(), *self._below_up()}:
            return []
        return [child.pid]

    def _below_up(self) -> list[int]:
        return [child for pid in self._up() for child in children(pid)]

    def _below_lake(self, word: str) -> list[int]:
        return [found for pid in self._child("up", "lake") for found in named(pid, word)]

    def kill(self, kind: str) -> None:
        """SIGKILL one; `up` and PostgreSQL are started again, as whoever supervises them would."""
        if kind == "PostgreSQL":
            self._server.kill()
            self._server.start()
            return
        while True:
            pids = wait_for(self.kinds[kind], 120, f"{kind} lives\n{self._tuskline.logs()}")
            if kind == "up":
                self._tuskline.kill_up()
                self._tuskline.up()
                return
            try:
                os.kill(pids[0], signal.SIGKILL)
            except ProcessLookupError:
                continue
            return


class Pgbench:
    """8 clients at a limited rate, for as long as the block lasts; begun anew when their server has died."""

    def __init__(self, server: LocalServer, rate: int, log: Path) -> None:
        self._command: list[str | Path] = [
            server.installation.tool("pgbench"),
            *("-n", "-c", "8", "-j", "2", "-R", str(rate), "-T", "7200"),
            server.dsn(),
        ]
        self._log = log
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run)
        #: How often it was begun.
        self.slices = 0

    def _run(self) -> None:
        with self._log.open("wb") as output:
            while not self._over.is_set():
                self._process = subprocess.Popen(
                    self._command, stdout=output, stderr=output, start_new_session=True
                )
                self.slices += 1
                if self._over.is_set():
                    self._process.terminate()
                self._process.wait()
                self._over.wait(0.2)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join(30)
        assert not self._thread.is_alive()


def prepare(server: LocalServer, scale: int) -> None:
    done = subprocess.run(
        [server.installation.tool("pgbench"), "-i", "-q", "-s", str(scale), server.dsn()],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER TABLE pgbench_history REPLICA IDENTITY FULL")


def history(server: LocalServer) -> int:
    """Transactions that pgbench has committed."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        row = connection.execute("SELECT count(*) FROM pgbench_history").fetchone()
    assert row is not None
    return int(row[0])


def flush(tuskline: Attached, seconds: float) -> None:
    """`tuskline flush`, again while a part that was killed last comes back."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(5.0, deadline - time.monotonic())
        done = tuskline.run("flush", "--timeout", str(left), "--json", seconds=2 * left + 30)
        if done.returncode == 0:
            return
        assert time.monotonic() < deadline, done.stderr + tuskline.logs()


def assert_equal(server: LocalServer, snapshot) -> dict[str, int]:
    """Each table row by row: by its key, or as a multiset. Returns the numbers of rows."""
    rows = {}
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for table, has_key in TABLES.items():
            with connection.cursor(name="all") as cursor:
                cursor.itersize = 20_000
                cursor.execute(f"SELECT * FROM {table}".encode())
                expected = Counter(cursor)
            found = Counter(tuple(row) for row in snapshot[table].toLocalIterator())
            if has_key:
                keys = Counter(row[0] for row in found.elements())
                assert max(keys.values()) == 1, f"{table}: a key is there twice"
            missing, extra = expected - found, found - expected
            assert not missing, (table, missing.total(), missing.most_common(3))
            assert not extra, (table, extra.total(), extra.most_common(3))
            rows[table] = expected.total()
            assert snapshot.manifest.tables[f"shop.{table}"].rows == rows[table]
    return rows


def epoch_of(tuskline: Attached) -> int:
    """The newest epoch that shows all tables; 0 before."""
    try:
        head = open_chain(tuskline.lake).head()
    except TusklineError:
        return 0
    return head.epoch if head is not None and len(head.readable) == len(TABLES) else 0


def check_views(tuskline: Attached) -> None:
    """What status, lag and /metrics say of a lake that has caught up."""
    wait_for(
        lambda: tuskline.run("status").returncode == 0, 120, f"it is healthy\n{tuskline.logs()}"
    )
    epoch = tuskline.json("status")["lake"]["epoch"]
    lag = tuskline.json("lag")
    assert {(row["table"], row["state"]) for row in lag["tables"]} == {
        (f"shop.{table}", "live") for table in TABLES
    }
    merge = next(row for row in lag["sources"] if row["stage"] == "merge")
    assert merge["bytes"] < 1 << 20
    assert merge["versions"] is not None
    with urllib.request.urlopen(f"http://{tuskline.metrics_listen}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    served = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert float(served["tuskline_lake_epoch"]) >= epoch
    assert float(served['tuskline_lake_table_rows{table="shop.public.pgbench_history"}']) > 100
    assert 'tuskline_lag_versions{source="shop",stage="merge"}' in served
    assert SECRET not in text


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("scale", "rate", "kinds", "rounds", "pause"),
    [
        pytest.param(
            1,
            40,
            ("up", "capture", "log server's replicas", "lake's JVM", "bridge", "PostgreSQL"),
            1,
            1.0,
            id="short",
            # `make test` has the demo under kills, and what detach leaves in cluster/test_attach.py.
            marks=pytest.mark.long,
        ),
        pytest.param(10, 100, (), 3, 4.0, id="full", marks=pytest.mark.long),
    ],
)
def test_pgbench_under_kills_ends_equal_and_detach_leaves_the_server_as_it_was(
    tmp_path, make_server: MakeServer, spark, seed, scale, rate, kinds, rounds, pause
):
    server = make_server(fsync="off", max_connections="60")
    server.start()
    prepare(server, scale)
    before = server_state(server.dsn())
    dsn = server.dsn(user="tuskline_bench", password=SECRET)
    admin = {"PGPASSWORD": str(conninfo_to_dict(server.dsn())["password"])}
    source = {"dsn": dsn, "tables": list(TABLES)}
    with Attached(tmp_path, {"shop": source}, lake=True, metrics=True) as tuskline:
        tuskline.json("init", *ADMIN, env=admin)
        tuskline.up()
        victims = Victims(tuskline, server)
        with Pgbench(server, rate, tmp_path / "pgbench.log") as load:
            first = wait_for(lambda: epoch_of(tuskline), 300, "all tables\n" + tuskline.logs())
            dice = random.Random(seed)
            order = list(kinds or victims.kinds) * rounds
            dice.shuffle(order)
            print(f"seed {seed}: {order}")
            kills: Counter[str] = Counter()
            for kind in order:
                time.sleep(pause * dice.uniform(0.5, 1.0))
                victims.kill(kind)
                kills[kind] += 1
            wait_for(lambda: epoch_of(tuskline) > first, 300, "a new epoch\n" + tuskline.logs())
            at_kills_end = history(server)
            wait_for(lambda: history(server) > at_kills_end, 30, "the load outlasts the kills")
            # Each death of the server ended one pgbench, at least.
            assert load.slices > kills["PostgreSQL"]
        flush(tuskline, 300)
        rows = assert_equal(server, read(spark, str(tuskline.lake)))
        print(f"kills: {sum(kills.values())} {dict(kills)}; rows compared: {rows}")
        assert rows["public.pgbench_accounts"] == scale * 100_000
        assert rows["public.pgbench_history"] > 100
        assert min(kills.values()) >= rounds
        check_views(tuskline)
        assert SECRET not in tuskline.logs(1_000_000)
        for pid in victims.kinds["up"]():
            for each in family(pid):
                assert SECRET not in command_line(each)
        assert tuskline.json("down")["ended"] in victims.kinds["up"]()
        tuskline.json("detach", *ADMIN, env=admin)
    assert difference(before, server_state(server.dsn())) == []
