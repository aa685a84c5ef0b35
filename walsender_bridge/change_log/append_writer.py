"""The writer of one replica; `StreamWriter` writes to all replicas of a stream."""

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.protocol import Ack, ReplicaStatus
from walsender_bridge.errors import TusklineError, UnavailableError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, WalPosition
from walsender_bridge.runtime import tls_files
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.tls_files import TlsFiles

#: Seconds allowed for closing an append.
_CLOSING = 0.8

#: An append as it is sent: a batch with the columns kind and data, and an encoded `AppendRequest`. Immutable.
BuiltAppend = tuple[pa.RecordBatch, bytes]


def build(
    entries: Sequence[bytes],
    *,
    schemas: Sequence[bytes] = (),
    confirm_to: WalPosition | None = None,
    gate_lsn: Lsn = MAX_LSN,
    system_id: int | None = None,
) -> BuiltAppend:
    """The append for which `AppendWriter.send` has the same parameters."""
    kinds = [protocol.KIND_SCHEMA] * len(schemas) + [protocol.KIND_ENTRY] * len(entries)
    batch = pa.record_batch(
        [
            protocol.int_array(kinds, pa.uint8(), np.uint8),
            protocol.binary_array([*schemas, *entries]),
        ],
        schema=protocol.APPEND_SCHEMA,
    )
    return batch, actions.encode(m.AppendRequest(confirm_to, gate_lsn, system_id))


class AppendWriter(Closing):
    """The writer of a stream. `send` and `next_ack` may be called from different threads.

    `status` is that of the replica when the writer was opened: appends continue from there. Two threads of the writer
    communicate with the log server, so that no call here waits for a log server that hangs; the caller bounds the
    appends in flight. Any error ends the writer, and every later call raises it. `deliver`: receives acknowledgements and
    errors as they arrive, instead of `next_ack`.
    """

    def __init__(
        self,
        address: str,
        stream: str,
        term: int,
        timeout: float,
        deliver: Callable[[Ack | TusklineError], None] | None = None,
        *,
        tls: TlsFiles | None = None,
    ) -> None:
        place, files = tls_files.split(address)
        self._tls = tls or files
        self.address = place if self._tls is None else tls_files.with_scheme(place)
        self.stream = stream
        self.term = term
        self._error: TusklineError | None = None
        self._batches: queue.SimpleQueue[BuiltAppend | None] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[ReplicaStatus | TusklineError] = queue.SimpleQueue()
        self._acks: queue.SimpleQueue[Ack | TusklineError] = queue.SimpleQueue()
        self._deliver = deliver or self._acks.put
        self._sender = threading.Thread(
            target=self._send_all, name=f"appends to {stream}", daemon=True
        )
        self._sender.start()
        try:
            first = self._opened.get(timeout=timeout)
        except queue.Empty:
            first = UnavailableError(
                "the log server did not open the append in time", where=address
            )
        if isinstance(first, TusklineError):
            self.close()
            raise first
        self.status = first

    def send(
        self,
        entries: Sequence[bytes],
        *,
        schemas: Sequence[bytes] = (),
        confirm_to: WalPosition | None = None,
        gate_lsn: Lsn = MAX_LSN,
        system_id: int | None = None,
    ) -> None:
        """Append the entries, in one durable step with their schemas; each call is acknowledged once.

        `confirm_to`: the position to record before the slot is confirmed. `gate_lsn`: transactions that end
        above it must not be committed yet. `system_id`: of the cluster, recorded permanently. Without
        entries, this is a heartbeat. Does not wait for the log server.
        """
        self.send_built(
            build(
                entries,
                schemas=schemas,
                confirm_to=confirm_to,
                gate_lsn=gate_lsn,
                system_id=system_id,
            )
        )

    def send_built(self, append: BuiltAppend) -> None:
        """As `send`, of an append that is built already: the writers of several replicas share one."""
        if self._error is not None:
            raise self._error.with_traceback(None)
        self._batches.put(append)

    def next_ack(self, timeout: float | None = None) -> Ack | None:
        """Return the next acknowledgement, in the order of `send`; None if none arrives within `timeout`."""
        try:
            ack = self._acks.get(timeout=timeout) if timeout != 0 else self._acks.get_nowait()
        except queue.Empty:
            return None
        if isinstance(ack, TusklineError):
            self._acks.put(ack)
            raise ack.with_traceback(None)
        return ack

    def close(self) -> None:
        """End the append, and any `next_ack` in progress.

        Acknowledged appends are durable; others may or may not be. Waits at most a second
        for a log server that hangs.
        """
        self._batches.put(None)
        self._sender.join(_CLOSING)
        self._fail(UnavailableError("the writer is closed", where=self.address))

    def _fail(self, error: TusklineError) -> None:
        """End the writer. The first error is the one that later calls raise."""
        self._error = self._error or error
        self._opened.put(self._error)
        self._deliver(self._error)

    def _send_all(self) -> None:
        """Send the queued batches until the call is to end, or the log server ends it; then fail with its reason.

        Everything but the reading of acknowledgements is done here: gRPC ends the process with SIGABRT if one thread
        closes a call while another one sends.
        """
        path = flight.FlightDescriptor.for_path("append", self.stream, str(self.term))
        try:
            with (
                actions.at(self.address),
                connect(self.address, self._tls, streams=[self.stream]) as client,
            ):
                writer, reader = client.do_put(path, protocol.APPEND_SCHEMA)
                listener = threading.Thread(
                    target=self._listen, args=(reader,), name="acks", daemon=True
                )
                listener.start()
                with contextlib.suppress(flight.FlightError, pa.ArrowException, OSError):
                    while (handed := self._batches.get()) is not None:
                        writer.write_with_metadata(*handed)
                    writer.done_writing()
                listener.join()
                # Only here does Flight report why a call ended.
                writer.close()
            self._fail(UnavailableError("the append has ended", where=self.address))
        except TusklineError as error:
            self._fail(error)

    def _listen(self, reader: Any) -> None:
        """Deliver acknowledgements until the log server ends the call."""
        try:
            with actions.at(self.address):
                buffer = reader.read()
                if buffer is not None:
                    self._opened.put(actions.decode(ReplicaStatus, buffer.to_pybytes()))
                while buffer is not None and (buffer := reader.read()) is not None:
                    self._deliver(actions.decode(Ack, buffer.to_pybytes()))
        except TusklineError as error:
            self._fail(error)
        finally:
            # Wake the sender, which waits for more batches.
            self._batches.put(None)
