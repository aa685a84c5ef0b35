"""A log server's process with TLS, for attacks on it."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from pyarrow import flight

from tests.support.child import start_child
from tests.support.listeners import of_process
from tests.support.log_entries import SCHEMAS, EntryMaker, append_to
from tests.support.tls import HOSTS, Authority
from tests.support.waiting import wait_for
from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit, ReplicaStatus
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN
from walsender_bridge.runtime.tls_files import TlsFiles

REQUEST = actions.encode(m.AppendRequest(None, MAX_LSN, None))


class LogServer:
    """A log server's process with the stream `shop`, which has one entry."""

    def __init__(self, folder: Path) -> None:
        self.authority = authority = Authority(folder)
        self.writer = authority.issue("writer")
        self.repository = authority.issue("repository", hosts=HOSTS)
        listen = f"127.0.0.1:{free_port()}"
        self.address = f"grpc+tls://{listen}"
        own = authority.issue("log-server", hosts=HOSTS)
        self.process: subprocess.Popen[bytes] = start_child(
            "walsender_bridge.change_log.log_server",
            ReplicaServerSettings(folder / "log-server", listen, tls=own),
            log=folder / "log",
        )
        self.maker = EntryMaker()
        wait_for(self._created, 20, "the log server")
        self.append(self.maker.whole())

    @classmethod
    @contextlib.contextmanager
    def running(cls, folder: Path) -> Iterator[Self]:
        """One that ends with the block, when it is told to."""
        found = cls(folder)
        yield found
        found.process.send_signal(signal.SIGTERM)
        assert found.process.wait(20) == 0

    def client(self, tls: TlsFiles) -> ReplicaClient:
        return ReplicaClient(self.address, tls=tls, timeout=10)

    def _created(self) -> bool:
        try:
            with self.client(self.repository) as client:
                client._call(m.CREATE, m.CreateRequest("shop", "a log"))
        except TusklineError:
            return False
        return True

    def append(self, entry: bytes) -> None:
        with self.client(self.writer) as client:
            term = client.stream_status("shop").term + 1
            with append_to(client, "shop", term) as writer:
                writer.send([entry], schemas=list(SCHEMAS.values()))
                assert writer.next_ack(20) is not None

    def status(self) -> ReplicaStatus:
        with self.client(self.writer) as client:
            return client.stream_status("shop")

    def commit(self, version: int) -> None:
        """Commit all entries."""
        status = self.status()
        begin = status.committed_end
        context = CommitContext(version, begin, begin, status.end_offset - begin)
        with self.client(self.repository) as client:
            answer = client._call(m.COMMIT, m.CommitRequest({"shop": (IssuedCommit(context),)}, 1))
        assert not answer.refused

    def peak(self) -> int:
        """The most memory that the process has had, in bytes."""
        return of_process(self.process.pid, "VmHWM") << 10

    def threads(self) -> int:
        """How many threads the process has."""
        return of_process(self.process.pid, "Threads")

    def files(self) -> int:
        """How many files the process has open."""
        return len([*Path(f"/proc/{self.process.pid}/fd").iterdir()])

    def attack(
        self,
        make: Callable[[], pa.RecordBatch],
        *,
        request: bytes | None = REQUEST,
        options: Any = None,
    ) -> TusklineError:
        """Append what `make` returns as the stream's present writer; returns what the log server says.

        No argument of a test is a malformed batch: pytest would show it where a test fails, and end by a signal.
        """
        batch, before = make(), self.status()
        path = flight.FlightDescriptor.for_path("append", "shop", str(before.term))
        with connect(self.address, self.writer) as client:
            write = flight.FlightCallOptions(timeout=20, write_options=options)
            writer, reader = client.do_put(path, batch.schema, write)
            error: TusklineError | None = None
            try:
                with actions.at(self.address):
                    if batch.schema == protocol.APPEND_SCHEMA:
                        assert reader.read() is not None
                    if request is None:
                        writer.write_batch(batch)
                    else:
                        writer.write_with_metadata(batch, request)
                    writer.done_writing()
                    reader.read()
                    writer.close()
            except TusklineError as raised:
                error = raised
        assert error is not None
        assert self.process.poll() is None
        assert self.status() == before
        return error
