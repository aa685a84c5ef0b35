"""The channel between capture's poll loop and the replica's writer.

The loop must never block on the replica: the server expects status updates even while a log server hangs. The
writer sends on its own threads; the channel adds one thread that waits for acknowledgements and wakes the loop
through a pipe. The core bounds the bytes in flight (`core.IN_FLIGHT_BYTES`).
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator

from walsender_bridge.capture.events import AppendToReplica
from walsender_bridge.change_log.client import Ack, StreamWriter
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.waker import Waker


class AppendChannel:
    """Sends appends, and collects acknowledgements on a thread."""

    def __init__(self, writer: StreamWriter, waker: Waker) -> None:
        self._writer = writer
        self._waker = waker
        self._acks: queue.SimpleQueue[tuple[Ack, float] | TusklineError] = queue.SimpleQueue()
        #: When each append was sent that is not acknowledged, the oldest first.
        self._sent: deque[float] = deque()
        self._listener = threading.Thread(target=self._listen, name="listen", daemon=True)
        self._listener.start()

    def put(self, append: AppendToReplica) -> None:
        """Queue an append without blocking. Raises the error that ended the writer."""
        self._sent.append(time.monotonic())
        self._writer.send(
            append.entries,
            schemas=append.schemas,
            confirm_to=append.confirm_to,
            gate_lsn=append.gate_lsn,
        )

    def acks(self) -> Iterator[tuple[Ack, float]]:
        """Yield the acknowledgements that have arrived, and the seconds each took. Raises the error that ended the writer."""
        while True:
            try:
                arrived = self._acks.get_nowait()
            except queue.Empty:
                return
            if isinstance(arrived, TusklineError):
                raise arrived
            yield arrived

    def close(self) -> None:
        """Close the writer, which ends the thread; a log server that hangs delays this by about a second."""
        self._writer.close()
        self._listener.join()

    def _listen(self) -> None:
        while True:
            try:
                ack = self._writer.next_ack()
            except TusklineError as error:
                self._acks.put(error)
                self._waker.wake()
                return
            if ack is not None:
                self._acks.put((ack, time.monotonic() - self._sent.popleft()))
                self._waker.wake()
