"""Serves FLUSH and SYNC of SQL sessions: listens at each source, and reports there what the lake shows.

A thread for each source holds one connection that is idle until a session waits. It only listens and reports, beside the
writer's loop: a source that hangs, or refuses the report, delays no epoch. While this driver stands by for another one, it
does not listen. Which requests are carried out is decided in `awaited`.
"""

import contextlib
import json
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import psycopg
from psycopg import sql

from spark_consumers.lake.awaited import FLUSH, SYNC, XidSnapshot, asked, unserved
from spark_consumers.lake.flush import flush, sync
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, StoreOptions
from spark_consumers.lake.tables.sources import Source
from spark_consumers.snapshot import flush_mark
from walsender_bridge.errors import ConfigError, DeadlineError, TusklineError
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.hosts import same_server
from walsender_bridge.postgres.client.replication_connection import (
    ReplicationConnection,
    pinned_conninfo,
)
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.sql import load

#: As sql/flush/functions.sql looks for it.
APPLICATION_NAME: Final = "tuskline-lake"
#: The first version of the server in which a procedure's COMMIT sends notifications; seconds between two queries of an older one.
NOTIFIES: Final = 130005
_LOOK: Final = 0.5
#: Seconds to let requests gather, so that sessions that wait at the same time share one barrier.
_GATHER: Final = 0.1
#: Seconds for which arriving notifications are read, at most, before what they ask for is looked at.
_READ: Final = 0.5
#: Seconds between two checks whether this driver still writes the lake, and is to stop. No query is sent for it.
_CHECK: Final = 1.0
#: Seconds after the last notification until nobody waits: sessions notify once a second.
_FORGOTTEN: Final = 5.0
#: Seconds that a round may take. The next one continues if sessions still wait.
_ROUND: Final = 3600.0
#: Seconds between two reports of what a round waits for.
_SAY: Final = 1.0
#: Seconds after which the same report is repeated.
_SAY_AGAIN: Final = 5.0
#: Pauses before another attempt to connect, in seconds; and where `init` has not made the functions.
_FIRST_PAUSE, _LONGEST_PAUSE, _NOT_MADE = 0.5, 5.0, 30.0

#: The transaction that a session waits for, by its server process and the kind of its request.
_Heard = dict[tuple[int, str], int]

log = logs.logger()


class FlushService:
    """In the block, sessions at the sources can wait for the lake. `writes`: whether this driver is the one at work."""

    def __init__(
        self,
        lake: str,
        log_address: str,
        sources: Sequence[Source],
        writes: Callable[[], bool],
        store: StoreOptions = FROM_ENVIRONMENT,
    ) -> None:
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=_Listener(lake, log_address, source, writes, store, self._stop).run,
                name=f"flush-{source.stream}",
                daemon=True,
            )
            for source in sources
        ]

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            # One that waits for a server that hangs ends with the process.
            thread.join(2 * _CHECK)


class _Said:
    """Reports what a round waits for: at most once a second, and every five seconds if it is still the same.

    Sessions do not count a report that is older (sql/flush/functions.sql).
    """

    def __init__(self, report: Callable[[str, str], None] = lambda *_: None) -> None:
        self._report = report
        self._last = ("", "")
        self._at = float("-inf")
        #: Where the round is.
        self.stage = "source"

    def held(self, stage: str, reason: str, *, at_once: bool = False) -> None:
        """See `flush`. A report that fails is repeated with the next one."""
        self.stage = stage
        age = time.monotonic() - self._at
        if age < (_SAY_AGAIN if (stage, reason) == self._last else _SAY) and not at_once:
            return
        self._at = time.monotonic()
        with contextlib.suppress(TusklineError, psycopg.Error, OSError):
            self._report(stage, reason)
            self._last = stage, reason


@dataclass
class _Requests:
    """What sessions at one server wait for: of one kind."""

    waiting: frozenset[int] = frozenset()
    last_at: float = 0.0
    thread: threading.Thread | None = None
    said: _Said = field(default_factory=_Said)


@dataclass
class _Server:
    """The server of one connection: all of its work ends with it."""

    source: Source
    timeline: int
    #: On which sessions notify. Its name is not known to those that may not wait (sql/flush/functions.sql).
    channel: str
    ended: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: dict[str, _Requests] = field(
        default_factory=lambda: {FLUSH: _Requests(), SYNC: _Requests()}
    )
    shown: XidSnapshot | None = None
    #: When the snapshot that was reported last was taken (monotonic seconds).
    shown_at: float = float("-inf")


class _Listener:
    """The thread of one source."""

    def __init__(
        self,
        lake: str,
        log_address: str,
        source: Source,
        writes: Callable[[], bool],
        store: StoreOptions,
        stop: threading.Event,
    ) -> None:
        self._lake = lake
        self._log = log_address
        self._source = source
        self._writes = writes
        self._store = store
        self._stop = stop
        self._said = ""
        #: The lake's UUID, once it is known.
        self._id = ""

    def run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._stop.is_set():
            if not self._writes():
                self._stop.wait(_FIRST_PAUSE)
                continue
            try:
                with self._connected() as connection:
                    if not _installed(connection):
                        self._say(
                            "the functions for FLUSH from SQL do not exist, or are of an earlier version: run `tuskline init`"
                        )
                        self._stop.wait(_NOT_MADE)
                        continue
                    server = self._registered(connection)
                    self._said, pause = "", _FIRST_PAUSE
                    try:
                        self._listen(connection, server)
                    finally:
                        server.ended.set()
            except Exception as error:
                # Whatever it is, the next attempt may succeed; without this thread, sessions would wait in vain.
                self._say(_why(error))
                self._stop.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _say(self, reason: str) -> None:
        if reason != self._said:
            log.warning("cannot serve FLUSH from SQL", stream=self._source.stream, error=reason)
        self._said = reason

    @contextmanager
    def _connected(self) -> Iterator[BoundedConnection]:
        conninfo = pinned_conninfo(
            self._source.dsn,
            application_name=APPLICATION_NAME,
            keepalives_idle="15",
            keepalives_interval="5",
            keepalives_count="3",
        )
        with BoundedConnection.connect(conninfo, autocommit=True) as connection:
            yield connection

    def _registered(self, connection: BoundedConnection) -> _Server:
        """Report this driver to the server, and listen there."""
        flush_mark.check_owners(connection, self._source.stream)
        here = replace(self._source, dsn=same_server(self._source.dsn, connection))
        with ReplicationConnection.connect(
            here.dsn, application_name=APPLICATION_NAME
        ) as walsender:
            timelines = walsender.history(walsender.identify().timeline)
        row = connection.execute(load("flush/channel").encode()).fetchone()
        if row is None or row[0] is None:
            raise ConfigError(
                "tuskline.request_channel has no row",
                where=here.stream,
                repair="run `tuskline init`",
            )
        connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(row[0])))
        names = {
            "lake": self._lake_id(),
            "stream": here.stream,
            "publication": here.publication,
            "timelines": json.dumps(to_json(timelines)),
        }
        connection.execute(load("flush/report_driver"), names)
        return _Server(here, timelines.timeline, row[0])

    def _lake_id(self) -> str:
        self._id = self._id or str(open_chain(self._lake, self._store).identity()["lake"])
        return self._id

    def _listen(self, connection: BoundedConnection, server: _Server) -> None:
        """Start rounds for what sessions ask for, until the connection breaks or another driver is at work."""
        marks = connection.info.server_version < NOTIFIES
        pause = _LOOK if marks else _CHECK
        while not self._stop.is_set() and not server.ended.is_set() and self._writes():
            heard: _Heard = {}
            ready, _, _ = select.select([connection.fileno()], [], [], pause)
            if marks:
                heard = _marked(connection)
            elif ready:
                self._stop.wait(_GATHER)
                heard = _heard(connection, server.channel.encode())
            if not heard:
                continue
            allowed = self._allowed(server, {pid for pid, _ in heard})
            for kind in (FLUSH, SYNC):
                xids = {xid for (pid, of), xid in heard.items() if of == kind and pid in allowed}
                if xids:
                    self._ask(server, kind, frozenset(xids))

    def _allowed(self, server: _Server, pids: set[int]) -> set[int]:
        """Of sessions that notified: those whose role may wait. Anyone may notify; a session's ID is the server's word."""
        if not pids:
            return set()
        with BoundedConnection.open(server.source.dsn) as connection:
            rows = connection.execute(load("flush/may_flush"), {"pids": list(pids)})
            return {pid for (pid,) in rows}

    def _ask(self, server: _Server, kind: str, xids: frozenset[int]) -> None:
        with server.lock:
            requests = server.requests[kind]
            requests.last_at = time.monotonic()
            requests.waiting |= unserved(xids, server.shown)
            if not requests.waiting or requests.thread is not None:
                return
            requests.thread = threading.Thread(
                target=self._rounds,
                args=(server, kind),
                name=f"{kind}-{server.source.stream}",
                daemon=True,
            )
            requests.thread.start()

    # -- the thread of the rounds of one kind --------------------------------------------------------------

    def _rounds(self, server: _Server, kind: str) -> None:
        requests = server.requests[kind]
        while True:
            with server.lock:
                waiting = unserved(requests.waiting, server.shown)
                requests.waiting = frozenset()
                if not waiting or self._over(server, requests):
                    requests.thread = None
                    return
            requests.said = _Said(
                lambda stage, reason: self._report(server, stage=stage, reason=reason)
            )
            try:
                self._round(server, kind, requests)
            except Exception as error:
                if not self._over(server, requests):
                    reason = _why(error)
                    requests.said.held(requests.said.stage, reason, at_once=True)
                    self._say(reason)
                # Sessions that still wait ask again.
                server.ended.wait(_FIRST_PAUSE)

    def _over(self, server: _Server, requests: _Requests) -> bool:
        return (
            server.ended.is_set()
            or self._stop.is_set()
            or time.monotonic() - requests.last_at > _FORGOTTEN
        )

    def _round(self, server: _Server, kind: str, requests: _Requests) -> None:
        """Have everything readable that is committed by now, and report that."""
        taken_at = time.monotonic()
        with BoundedConnection.open(server.source.dsn) as connection:
            row = connection.execute(load("flush/snapshot").encode()).fetchone()
            assert row is not None
            visible, timeline = str(row[0]), int(row[1])
        if timeline != server.timeline:
            server.ended.set()
            raise DeadlineError(
                f"the server has gone on from timeline {server.timeline} to {timeline}",
                where=server.source.stream,
            )
        parts = _Asked(lambda: self._over(server, requests), server.source.stream)
        options: dict[str, Any] = {
            "timeout": _ROUND,
            "parts": parts,
            "held": requests.said.held,
            "store": self._store,
        }
        if kind == FLUSH:
            epoch = flush(self._lake, self._log, [server.source], **options)
        else:
            epoch = sync(self._lake, [server.source], **options)
        with server.lock:
            if taken_at <= server.shown_at:
                return
            self._report(server, timeline=timeline, visible=visible, epoch=epoch)
            server.shown, server.shown_at = XidSnapshot.parse(visible), taken_at

    def _report(self, server: _Server, **values: Any) -> None:
        empty = dict.fromkeys(("timeline", "visible", "epoch", "stage", "reason"))
        names = {"lake": self._lake_id(), "stream": server.source.stream, **empty, **values}
        with BoundedConnection.open(server.source.dsn) as connection:
            flush_mark.check_owners(connection, server.source.stream)
            try:
                connection.execute(load("flush/report_lake"), names)
            except psycopg.Error:
                # Its row or the functions may be gone: the driver registers again, or says what is missing.
                server.ended.set()
                raise


def _marked(connection: BoundedConnection) -> _Heard:
    """What sessions ask for by a lock, on a server where a notification would come only after the wait."""
    connection.pgconn.consume_input()
    while connection.pgconn.notifies():
        pass
    found = connection.execute(load("flush/marked").encode()).fetchall()
    return {(pid, kind): xid for pid, kind, xid in found}


def _heard(connection: BoundedConnection, channel: bytes) -> _Heard:
    """The transaction that each session (process, kind of request) has asked for last: it waits for one at a time.

    Reads all that has arrived. What a listener leaves stays in the server's queue, before the requests of others, and once the
    queue is full, no session can NOTIFY. However much was sent, the result has two values for each session at most.
    """
    heard: _Heard = {}
    until = time.monotonic() + _READ
    while True:
        connection.pgconn.consume_input()
        while found := connection.pgconn.notifies():
            if found.relname == channel and (request := asked(found.extra)) is not None:
                kind, xid = request
                heard[found.be_pid, kind] = xid
        if not select.select([connection.fileno()], [], [], 0)[0] or time.monotonic() >= until:
            return heard


def _why(error: Exception) -> str:
    return error.what if isinstance(error, TusklineError) else str(error).strip() or repr(error)


def _installed(connection: BoundedConnection) -> bool:
    row = connection.execute(load("flush/installed").encode()).fetchone()
    return row is not None and bool(row[0])


class _Asked:
    """Ends a round when no session waits for it any more."""

    def __init__(self, over: Callable[[], bool], stream: str) -> None:
        self._over = over
        self._stream = stream

    def starting(self) -> bool:
        """A log that does not answer may come back while sessions wait."""
        return True

    def hopeless(self) -> TusklineError | None:
        """Whether nobody waits."""
        if self._over():
            return DeadlineError("no session waits any more", where=self._stream)
        return None


def to_json(timelines: ServerTimelines) -> dict[str, Any]:
    """The timelines of a server, as tuskline.lakes has them: the present one, and where each earlier one ends."""
    ends = {str(each.timeline): format_lsn(each.lsn) for each in timelines.ancestors}
    return {"timeline": timelines.timeline, "ends": ends}
