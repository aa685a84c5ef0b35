"""A standby that is none: it streams from a physical slot, and says what a test wants it to have flushed."""

import select
import threading
import time
from typing import Self

from tests.support.waiting import wait_for
from walsender_bridge.errors import SlotInUseError
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.protocol.replication import quote_slot, status_update


class FakeStandby:
    """Streams from `slot` from the server's end of WAL on; `replays` is False for one that acts as pg_receivewal.

    One that does not `speak` receives, and reports nothing. `ahead`: bytes more than the server's WAL that it reports.
    """

    def __init__(
        self,
        dsn: str,
        slot: str,
        *,
        replays: bool = True,
        speaks: bool = True,
        ahead: int = 0,
    ) -> None:
        self._connection = ReplicationConnection.connect(dsn, replication="true")
        identity = self._connection.identify()
        command = (
            f"START_REPLICATION SLOT {quote_slot(slot)} PHYSICAL {format_lsn(identity.flush_lsn)}"
            f" TIMELINE {identity.timeline}"
        )
        wait_for(lambda: self._streams(command), 30, f"slot {slot} is free")
        self._replays = replays
        self.speaks = speaks
        #: What it says that it has; a test sets it.
        self.flushed = identity.flush_lsn + ahead
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._connection.close()

    def _streams(self, command: str) -> bool:
        """Begin to stream; the walsender of whoever did before may have the slot for a moment."""
        try:
            self._connection._ask(command, 30, copies=True)
        except SlotInUseError:
            return False
        return True

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not self._ended.is_set():
            poll.poll(20)
            self._connection.receive()
            if not self.speaks:
                continue
            lsn = self.flushed
            self._connection.send(
                status_update(
                    write=lsn,
                    flush=lsn,
                    apply=lsn if self._replays else 0,
                    now_us=time.time_ns() // 1000,
                )
            )
            self._connection.flush()
