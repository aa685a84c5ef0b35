"""The writer of a stream: sends each append to all replicas in sync, side by side.

An append is acknowledged once every replica has it durably. If one fails, the writer ends with its error, and the next one
goes on with the others: the repository then leaves out those that are in `failed`, unless too few would be left. So
replicas never differ by more than what a writer had in flight, which the seal for the next writer removes.
"""

import queue
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from walsender_bridge.change_log.append_writer import AppendWriter, build
from walsender_bridge.change_log.protocol import Ack, ReplicaStatus
from walsender_bridge.errors import (
    CorruptError,
    DiskFullError,
    DivergedError,
    InvalidReplicaError,
    StreamSealedError,
    TusklineError,
    UnavailableError,
    UnknownStreamError,
)
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, WalPosition
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.tls_files import TlsFiles

#: Errors of one replica, which the others need not share.
_OF_A_REPLICA = (
    UnavailableError,
    DiskFullError,
    CorruptError,
    InvalidReplicaError,
    UnknownStreamError,
)


class StreamWriter(Closing):
    """See the module. `send` and `next_ack` may be called from different threads.

    `addresses`: of the log servers in sync, all of them. `failed`: those that fail are added. `status`: what all replicas
    have, when the writer was opened. Any error ends the writer, and every later call raises it.
    """

    def __init__(
        self,
        stream: str,
        term: int,
        addresses: Sequence[str],
        failed: set[str],
        timeout: float,
        *,
        tls: TlsFiles | None = None,
    ) -> None:
        self.stream = stream
        self.term = term
        self.address = ", ".join(addresses)
        self._addresses = tuple(addresses)
        self._failed = failed
        self._arrived: queue.SimpleQueue[tuple[int, Ack | TusklineError]] = queue.SimpleQueue()
        #: By replica: acknowledgements for which others are awaited.
        self._waiting: list[deque[Ack]] = [deque() for _ in addresses]
        self._writers: list[AppendWriter] = []
        with ExitStack() as stack:
            for number, address in enumerate(addresses):
                try:
                    deliver = partial(self._deliver, number)
                    writer = AppendWriter(address, stream, term, timeout, deliver, tls=tls)
                except TusklineError as error:
                    raise self._error(number, error) from None
                self._writers.append(stack.enter_context(writer))
            self.status = self._common([writer.status for writer in self._writers])
            self._tell_all(timeout)
            stack.pop_all()

    def _deliver(self, number: int, arrived: Ack | TusklineError) -> None:
        self._arrived.put((number, arrived))

    def _error(self, number: int, error: TusklineError) -> TusklineError:
        """The error with which the writer ends. Where others can go on, it is one after which a writer is opened again."""
        shared = isinstance(error, StreamSealedError) or not isinstance(error, _OF_A_REPLICA)
        if len(self._addresses) == 1 or shared:
            return error
        address = self._addresses[number]
        self._failed.add(address)
        return UnavailableError(
            f"the log server at {address} failed: {error.what}",
            where=f"stream {self.stream}",
            repair=error.repair,
        )

    def _common(self, found: Sequence[ReplicaStatus]) -> ReplicaStatus:
        """What all replicas have. They are equal behind a seal, but for what they were told later."""
        ends = {(status.end_offset, status.last_crc) for status in found}
        if len(ends) > 1:
            raise UnavailableError(
                f"the replicas end at {' and '.join(str(end) for end, _ in sorted(ends))}",
                where=f"stream {self.stream}",
                repair="try again; the stream is then sealed first",
            )
        systems = {status.system_id for status in found if status.system_id is not None}
        if len(systems) > 1:
            raise DivergedError(
                f"the replicas are of different clusters: {', '.join(map(str, sorted(systems)))}",
                where=f"stream {self.stream}",
                repair="run `tuskline log verify`; remove the replica that is wrong",
            )
        confirmed = [status.confirmed_to for status in found if status.confirmed_to is not None]
        least = min(found, key=lambda status: status.committed_end)
        return replace(
            least,
            confirmed_to=max(confirmed, default=None),
            system_id=next(iter(systems), None),
        )

    def _tell_all(self, timeout: float) -> None:
        """Record on all replicas what some of them were told: up to there, the slot may have been confirmed."""
        wanted = self.status.confirmed_to, self.status.system_id
        known = {(w.status.confirmed_to, w.status.system_id) for w in self._writers}
        if known == {wanted}:
            return
        self.send([], confirm_to=wanted[0], gate_lsn=0, system_id=wanted[1])
        if self.next_ack(timeout) is None:
            raise UnavailableError("a log server does not answer", where=f"stream {self.stream}")

    def send(
        self,
        entries: Sequence[bytes],
        *,
        schemas: Sequence[bytes] = (),
        confirm_to: WalPosition | None = None,
        gate_lsn: Lsn = MAX_LSN,
        system_id: int | None = None,
    ) -> None:
        """As `AppendWriter.send`, to all replicas: built once, whatever their number."""
        append = build(
            entries,
            schemas=schemas,
            confirm_to=confirm_to,
            gate_lsn=gate_lsn,
            system_id=system_id,
        )
        for number, writer in enumerate(self._writers):
            try:
                writer.send_built(append)
            except TusklineError as error:
                raise self._error(number, error) from None

    def next_ack(self, timeout: float | None = None) -> Ack | None:
        """The next acknowledgement of all replicas, in the order of `send`; None if none arrives within `timeout`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not all(self._waiting):
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            try:
                number, arrived = (
                    self._arrived.get(timeout=left) if left != 0 else self._arrived.get_nowait()
                )
            except queue.Empty:
                return None
            if isinstance(arrived, TusklineError):
                self._arrived.put((number, arrived))
                raise self._error(number, arrived) from None
            self._waiting[number].append(arrived)
        return _least([waiting.popleft() for waiting in self._waiting])

    def close(self) -> None:
        """As `AppendWriter.close`, of all replicas."""
        for writer in self._writers:
            writer.close()


def _least(acks: Sequence[Ack]) -> Ack:
    """What all replicas have acknowledged."""
    if len(acks) == 1:
        return acks[0]
    durable = min(acks, key=lambda ack: ack.durable_end_offset)
    committed = min(acks, key=lambda ack: ack.committed_end_offset)
    confirmed = [ack.confirmed_to for ack in acks]
    return Ack(
        durable.durable_end_offset,
        durable.durable_last_end_lsn,
        committed.committed_end_offset,
        committed.committed_end_lsn,
        None if None in confirmed else min(each for each in confirmed if each is not None),
    )
