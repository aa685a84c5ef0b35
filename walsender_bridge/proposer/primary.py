"""The primary as a proposer needs it: who it is, its WAL as a stream, and its older WAL when it is asked for.

`PrimaryStream` is the synchronous standby's connection. `OlderWal` reads ranges over a connection of its own, on a
thread: such a read may wait for the server's disk, and no commit may wait for it. A permanent physical slot, used
by nobody, keeps the WAL that a safekeeper still lacks (the streaming connection has no slot: a slot there would
follow what is reported, and let go of what laggards need).
"""

import queue
import select
import threading
import time
from dataclasses import dataclass

import psycopg

from walsender_bridge.capture.handover import Waker
from walsender_bridge.errors import (
    ConnectionFailedError,
    DeadlineError,
    MalformedMessageError,
    SlotError,
    TusklineError,
)
from walsender_bridge.proposer.effects import Lineage, Primary
from walsender_bridge.safekeeper.messages import ServerInfo
from walsender_bridge.sql import load
from walsender_bridge.wire.bounded import BoundedConnection
from walsender_bridge.wire.connection import (
    ANSWER_SECONDS,
    ReplicationConnection,
    pinned_conninfo,
    server_error,
)
from walsender_bridge.wire.lsn import format_lsn
from walsender_bridge.wire.replication import (
    XLOG_DATA,
    XLOG_HEADER_SIZE,
    parse_xlog_header,
    quote_slot,
    start_physical,
)

#: Seconds that a piece of older WAL may take to arrive.
_OLDER_SECONDS = 30.0
_UNITS = {"": 1, "B": 1, "kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}


class PrimaryStream(ReplicationConnection):
    """A connection that can stream physical WAL."""

    def server_info(self) -> ServerInfo:
        """Whose WAL it is."""
        identity = self.identify()
        ((text,),) = self.command("SHOW wal_segment_size", timeout=ANSWER_SECONDS)
        digits = (text or "").rstrip("BkMG")
        size = int(digits) * _UNITS[(text or "")[len(digits) :]]
        return ServerInfo(identity.system_id, self.server_version // 10000, size)

    def primary(self) -> Primary:
        """Its timelines, and how far its WAL is flushed."""
        identity = self.identify()
        history = self.history(identity.timeline)
        return Primary(Lineage(identity.timeline, history.ancestors), identity.flush_lsn)

    def hold_wal(self, slot: str) -> int:
        """Make the slot that keeps WAL, unless it is there; the oldest WAL that is kept, an LSN.

        Raises `SlotError` for a slot of that name that is none of ours, and what `command` raises.
        """
        asked = load("wal_slot").strip().rstrip(";").replace("%(slot)s", f"'{slot}'")
        rows = self.command(asked, timeout=ANSWER_SECONDS)
        if not rows:
            self.command(
                f"CREATE_REPLICATION_SLOT {quote_slot(slot)} PHYSICAL RESERVE_WAL",
                timeout=ANSWER_SECONDS,
            )
            rows = self.command(asked, timeout=ANSWER_SECONDS)
        ((kind, restart, active),) = rows
        if kind != "physical" or active == "t" or restart is None:
            raise SlotError(
                f"slot {slot!r} is not an idle physical slot that keeps WAL",
                where=self.where,
                repair="drop it, or choose another name for the safekeepers' slot",
            )
        return int(restart)

    def start_physical(self, lsn: int, timeline: int) -> None:
        """Have the WAL of `timeline` sent from `lsn` on; then only `receive`, `send`, `flush` make sense."""
        self._ask(start_physical(lsn, timeline), ANSWER_SECONDS, copies=True)


@dataclass(frozen=True, slots=True)
class Job:
    """A range that is wanted: `tag` says for what. With `advance` set, the slot is moved there instead."""

    tag: object
    begin_lsn: int = 0
    end_lsn: int = 0
    advance: int = 0


class OlderWal:
    """See the module. `ask` from one thread; when `waker` is readable, `answers` has some."""

    def __init__(self, dsn: str, slot: str, timeline_of: Lineage, waker: Waker) -> None:
        self._dsn = dsn
        self._slot = slot
        self._lineage = timeline_of
        self._waker = waker
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Job, bytes]] = queue.SimpleQueue()
        self._stream: PrimaryStream | None = None
        #: Bytes that came and nobody has asked for yet, and where they begin.
        self._held = bytearray()
        self._at = 0
        self._thread = threading.Thread(target=self._work, name="older WAL", daemon=True)
        self._thread.start()

    def ask(self, job: Job) -> None:
        """Have it done after those before it."""
        self._jobs.put(job)

    def answers(self) -> list[tuple[Job, bytes]]:
        """What is done: ranges with their bytes, none of them where it failed."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def close(self) -> None:
        """End the thread; waits for the job at hand for a few seconds."""
        self._jobs.put(None)
        self._thread.join(5.0)

    # -- on the thread ------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                data = b""
                try:
                    if job.advance:
                        self._advance(job.advance)
                        continue
                    data = self._read(job.begin_lsn, job.end_lsn)
                except TusklineError:
                    self._forget()
                self._done.put((job, data))
                self._waker.wake()
        finally:
            self._forget()

    def _forget(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._held.clear()

    def _read(self, begin: int, end: int) -> bytes:
        if self._stream is None or not self._at <= begin <= self._at + len(self._held):
            self._forget()
            self._stream = PrimaryStream.connect(self._dsn, application_name="tuskline-older-wal")
            self._stream.start_physical(begin, self._lineage.timeline_at(begin))
            self._at = begin
        del self._held[: begin - self._at]
        self._at = begin
        self._fill(self._stream, end - begin)
        return bytes(self._held[: end - begin])

    def _fill(self, stream: PrimaryStream, wanted: int) -> None:
        """Wait until so many bytes are here."""
        deadline = time.monotonic() + _OLDER_SECONDS
        poll = select.poll()
        poll.register(stream, select.POLLIN)
        while len(self._held) < wanted:
            for payload in stream.receive():
                if payload[0] == XLOG_DATA:
                    if parse_xlog_header(payload).start_lsn != self._at + len(self._held):
                        raise MalformedMessageError("WAL out of order", where=stream.where)
                    self._held += payload[XLOG_HEADER_SIZE:]
            if len(self._held) < wanted and not poll.poll(
                max(deadline - time.monotonic(), 0) * 1000
            ):
                raise DeadlineError("older WAL does not arrive", where=stream.where)

    def _advance(self, lsn: int) -> None:
        try:
            conninfo = pinned_conninfo(self._dsn, application_name="tuskline-wal-slot")
            with BoundedConnection.connect(conninfo, autocommit=True) as connection:
                connection.execute(
                    load("wal_slot_advance").encode(),
                    {"slot": self._slot, "lsn": format_lsn(lsn)},
                )
        except psycopg.Error as error:
            if error.sqlstate is None:
                raise ConnectionFailedError(str(error), where="the primary") from None
            raise server_error(error.sqlstate, str(error), "the primary") from None
