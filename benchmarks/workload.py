"""WAL that can be read repeatedly: a server with a load behind a slot, of which each reader gets a copy."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from walsender_bridge.capture import source
from walsender_bridge.demo.local_server import LocalServer, by_major
from walsender_bridge.runtime.sql import load

#: The stream; slot and publication follow from it.
STREAM = "bench"
SLOT = PUBLICATION = f"tuskline_{STREAM}"
_ORIGIN = "bench_origin"
_SETTINGS = {
    "fsync": "off",
    "synchronous_commit": "off",
    "autovacuum": "off",
    "max_wal_size": "16GB",
    "checkpoint_timeout": "1h",
    "shared_buffers": "512MB",
}
#: Rows of one transaction of the wide load.
_WIDE_TRANSACTION = 1000


@dataclass(frozen=True)
class Workload:
    """A running server; what `PUBLICATION` sends ends at `end_lsn`. `rows` is what the load changed."""

    name: str
    server: LocalServer
    tables: tuple[str, ...]
    rows: int
    end_lsn: int

    @property
    def dsn(self) -> str:
        """The connection string of the superuser; the server trusts connections from this machine."""
        return self.server.dsn()

    @contextmanager
    def slot(self, name: str) -> Iterator[str]:
        """A slot that starts where the load started; dropped afterwards."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            copy = "SELECT pg_copy_logical_replication_slot(%s, %s)"
            connection.execute(copy, [_ORIGIN, name])
            yield name
            while True:
                try:
                    connection.execute("SELECT pg_drop_replication_slot(%s)", [name])
                except psycopg.errors.ObjectInUse:
                    connection.execute("SELECT pg_sleep(0.05)")
                else:
                    return


@contextmanager
def server(major: int | None = None) -> Iterator[LocalServer]:
    """A new server of `major` (default: the newest available)."""
    found = by_major()
    installation = found[major or max(found)]
    with tempfile.TemporaryDirectory(prefix="tuskline-bench-") as folder:
        Path(folder).chmod(0o755)
        local = LocalServer.create(
            installation, Path(folder) / "server", settings=_SETTINGS, auth="trust"
        )
        try:
            local.start()
            yield local
        finally:
            local.destroy()


@contextmanager
def tpcb(transactions: int, *, scale: int = 10, major: int | None = None) -> Iterator[Workload]:
    """pgbench's TPC-B: three updates and an insert each."""
    with server(major) as local:
        pgbench(local, "-i", "-q", "-s", str(scale))
        with psycopg.connect(local.dsn(), autocommit=True) as connection:
            connection.execute("ALTER TABLE pgbench_history REPLICA IDENTITY FULL")
            _begin(connection, local)
            clients = min(4, transactions)
            each = -(-transactions // clients)
            pgbench(local, "-n", "-M", "prepared", "-c", str(clients), "-j", "2", "-t", str(each))
            names = ("accounts", "tellers", "branches", "history")
            tables = tuple(f"public.pgbench_{name}" for name in names)
            yield Workload("tpcb", local, tables, 4 * each * clients, _end(connection))


@contextmanager
def wide(rows: int, *, major: int | None = None) -> Iterator[Workload]:
    """Inserts of twelve columns of text, a thousand rows a transaction."""
    with server(major) as local, psycopg.connect(local.dsn(), autocommit=True) as connection:
        connection.execute(load("benchmark/wide").encode())
        _begin(connection, local)
        for first in range(1, rows + 1, _WIDE_TRANSACTION):
            last = min(first + _WIDE_TRANSACTION - 1, rows)
            statement = load("benchmark/wide_fill").encode()
            connection.execute(statement, {"first": first, "last": last})
        yield Workload("wide", local, ("public.wide",), rows, _end(connection))


def execute(server: LocalServer, name: str) -> None:
    """Run the statements of `sql/<name>.sql`."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(load(name).encode())


def pgbench(server: LocalServer, *arguments: str) -> None:
    """Run the server's own pgbench."""
    command = [str(server.installation.tool("pgbench")), *arguments, server.dsn()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"pgbench failed: {done.stderr[-500:]}")


def _begin(connection: psycopg.Connection, server: LocalServer) -> None:
    source.prepare(connection, source.CaptureSource(STREAM, server.dsn(), SLOT, PUBLICATION))
    make = "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')"
    connection.execute(make, [_ORIGIN])


def _end(connection: psycopg.Connection) -> int:
    """End the load with a transaction of its own; the end LSN of that."""
    connection.execute("SET synchronous_commit = on")
    connection.execute("UPDATE tuskline.flush SET token = token + 1")
    row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    # WAL behind the end, so that a reader detects that the load is complete.
    connection.execute("SELECT pg_switch_wal()")
    connection.execute("CHECKPOINT")
    assert row is not None
    return int(row[0])
