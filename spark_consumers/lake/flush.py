"""FLUSH and SYNC: everything that was committed before the call is readable when it returns.

Why it holds: for each source the WAL insert position L is read first, and then a row of the published
one-row table `tuskline.flush` is written. Every earlier commit of the caller ends at or below L; the
row's own commit ends above L. When the log has committed a position beyond L, everything up to L is in it
(transactions enter the log in commit order), and a barrier forced then is a version that holds it all. It is readable when
an epoch of that version is published, and every published table is in it.

L is compared with the log's position only once that is on the server's timeline. The log may reach farther on one that the
server has left: it has diverged then, or is about to find out. The row that was written is on the server's timeline.

SYNC forces no barrier: it waits for an epoch that cuts each stream beyond L, on the server's timeline. An epoch's cut is a prefix
of its stream, so it then has everything up to L. The row is written all the same, since an idle stream would never pass L.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import psycopg

from spark_consumers.lake.manifest.chain import Chain, Manifest, open_chain, wait_for_epoch
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, StoreOptions
from spark_consumers.lake.tables.noticed import known, unshown
from spark_consumers.lake.tables.shape import Publication
from spark_consumers.lake.tables.sources import Source, read_publication
from spark_consumers.lake.tables.states import is_undecided, unreadable
from spark_consumers.lake.writer import adopt
from spark_consumers.snapshot import flush_mark
from walsender_bridge.change_log.client import LogClient, LogStatus
from walsender_bridge.errors import (
    ConfigError,
    ConnectionFailedError,
    DeadlineError,
    DivergedError,
    PrivilegeError,
    TusklineError,
    UnavailableError,
    UnknownStreamError,
    UsageError,
)
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.protocol.lsn import WalPosition, format_lsn
from walsender_bridge.postgres.protocol.refusals import connection_error
from walsender_bridge.runtime.sql import load

#: Tables that an error names.
_NAMED = 10
_POLL_SECONDS = 0.1
_POLL_SOURCES_SECONDS = 1.0
#: Seconds to wait for a suspended table, since a request for it may be about to be carried out.
_UNDECIDED = 10.0
#: Seconds between two checks whether waiting is useful.
_ASK_AGAIN = 2.0
#: SQLSTATE of a token that another server or database has given (sql/flush/functions.sql).
_OF_ANOTHER_SERVER = "TK004"

#: What a flush waits for: that the log has the commit, that an epoch is published, or that it has all tables.
CAPTURE, LOG, EPOCH, TABLES = "capture", "log", "epoch", "tables"


def force_barrier(log: str, sources: Mapping[str, str], *, timeout: float = 60.0) -> int:
    """Write to each source (stream name -> DSN) and force a barrier; the version that holds the writes.

    Raises `ConfigError` (`init` has not run), the errors of `connection_error`, `PrivilegeError`, `DeadlineError`,
    `UnavailableError`.
    """
    return _Patience(timeout, None).barrier(log, _written(sources))


class AwaitedProcesses(Protocol):
    """The state of the processes that flush waits for."""

    def starting(self) -> bool:
        """Whether log and captures run, or are being started: who does not answer yet, or knows no stream yet, will."""

    def hopeless(self) -> TusklineError | None:
        """Why waiting is of no use; None: what is waited for may come."""


class _Patience:
    """How long is waited, all in all, and whether that is of use."""

    def __init__(
        self,
        seconds: float,
        parts: AwaitedProcesses | None,
        held: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._deadline = time.monotonic() + seconds
        self._parts = parts
        self.held = held
        self._ask_at = 0.0

    @property
    def left(self) -> float:
        """Seconds."""
        return self._deadline - time.monotonic()

    def check(self) -> None:
        """Raise what makes waiting useless."""
        if self._parts is None or time.monotonic() < self._ask_at:
            return
        self._ask_at = time.monotonic() + _ASK_AGAIN
        if error := self._parts.hopeless():
            raise error

    def barrier(self, log: str, written: Mapping[str, WalPosition]) -> int:
        """The version that holds the positions."""
        positions = {stream: position.lsn for stream, position in written.items()}
        while True:
            try:
                with LogClient(log) as client:
                    _check_timelines(client.status(), written)
                    return client.barrier(positions, timeout=max(0.0, min(self.left, _ASK_AGAIN)))
            except DeadlineError as error:
                if self.left <= 0:
                    raise
                self.held(CAPTURE, error.what)
                time.sleep(_POLL_SECONDS)
            except (UnknownStreamError, UnavailableError) as error:
                if self._parts is None or self.left <= 0 or not self._parts.starting():
                    raise
                self.held(LOG, error.what)
                time.sleep(_POLL_SECONDS)
            self.check()

    def epoch(self, chain: Chain, version: int) -> Manifest:
        """The newest epoch, once it is at or past a version."""
        while True:
            try:
                wait = max(0.0, min(self.left, _ASK_AGAIN))
                return wait_for_epoch(chain, version, timeout=wait)
            except DeadlineError as error:
                if self.left <= 0:
                    raise
                self.held(EPOCH, error.what)
            self.check()

    def cut(self, chain: Chain, written: Mapping[str, WalPosition]) -> Manifest:
        """The newest epoch, once it is past the positions."""
        pause = max(_POLL_SECONDS, chain.store.pause)
        say_at = time.monotonic() + _ASK_AGAIN
        while True:
            head = chain.head()
            behind = passed_not(head, written)
            if head is not None and not behind:
                return head
            if self.left <= 0:
                raise DeadlineError(
                    behind,
                    where=chain.store.location,
                    repair="check `tuskline status` and `tuskline table list`; wait longer, or have an epoch written"
                    " now with `tuskline flush`",
                )
            if time.monotonic() >= say_at:
                self.held(EPOCH, behind)
                say_at = time.monotonic() + _ASK_AGAIN
            self.check()
            time.sleep(min(pause, max(self.left, 0.0)))


def flush(
    lake: str,
    log: str,
    sources: Sequence[Source],
    *,
    timeout: float = 60.0,
    parts: AwaitedProcesses | None = None,
    waiting: Callable[[Mapping[str, str]], None] = lambda _: None,
    held: Callable[[str, str], None] = lambda *_: None,
    store: StoreOptions = FROM_ENVIRONMENT,
) -> int:
    """Wait until all that was committed in `sources` before this call is readable in `lake`.

    That is: an epoch holds it, with every table that is published now, as it is at its source. A table that is being
    copied is waited for; one that is suspended until an operator acts, for ten seconds; paused tables are not waited for, nor
    those that are dropped meanwhile.

    Returns the epoch (a later one may be published already). `timeout` is in seconds; `waiting` is called repeatedly with
    the missing tables and the reasons, `held` with the stage (`CAPTURE`, `LOG`, `EPOCH`, `TABLES`) that a longer wait is at, and why;
    `store` says how a bucket is reached; `parts` may end the wait early, and lets it begin before the log can answer. Raises
    the errors of `parts` and `force_barrier`, `UnavailableError`, `PublicationError` if the table that marks positions is
    not published, `DivergedError` if the log is behind the lake, `LakeError` if the log is not the lake's, and
    `DeadlineError` if no epoch came in time, or tables are missing, which it names.
    """
    dsns = {source.stream: source.dsn for source in sources}
    patience = _Patience(timeout, parts, held)
    chain = _opened(lake, store)
    before = chain.head()
    seen = _poll_marked(chain, sources)
    version = patience.barrier(log, _written(dsns))
    while before is not None and version <= before.epoch:
        # An epoch of that number is published, and is of another history than what was just committed.
        _check_awaited(chain, before, log, version)
        if patience.left <= 0:
            raise DeadlineError(
                "the lake does not yet continue with the log that answers",
                where=lake,
                repair="check that `tuskline lake run` is running, or wait longer with --timeout",
            )
        patience.check()
        patience.held(EPOCH, "the lake does not yet continue with the log that answers")
        time.sleep(_POLL_SECONDS)
        version = patience.barrier(log, _written(dsns))
    head = patience.epoch(chain, version)
    force = partial(patience.barrier, log)
    return _readable(chain, head, sources, seen, patience, waiting, lambda: force(_written(dsns)))


def sync(
    lake: str,
    sources: Sequence[Source],
    *,
    timeout: float = 600.0,
    parts: AwaitedProcesses | None = None,
    waiting: Callable[[Mapping[str, str]], None] = lambda _: None,
    held: Callable[[str, str], None] = lambda *_: None,
    store: StoreOptions = FROM_ENVIRONMENT,
) -> int:
    """Wait as `flush`, but for an epoch that the lake writes in its own time; none is forced.

    Returns the epoch. Parameters and errors are those of `flush`; the log is not contacted.
    """
    patience = _Patience(timeout, parts, held)
    chain = _opened(lake, store)
    seen = _poll_marked(chain, sources)
    head = patience.cut(chain, _written({source.stream: source.dsn for source in sources}))
    return _readable(chain, head, sources, seen, patience, waiting, lambda: None)


def check_token(token: str, sources: Sequence[Source]) -> str:
    """The stream of the source on which the token's transaction has committed (`tuskline.flush_token()`).

    A flush that begins now includes it. Raises `UsageError` with the server's reason if it has not committed, or is of none of
    these sources; `ConfigError` where `init` has not made the functions; and connection errors.
    """
    for source in sources:
        try:
            with BoundedConnection.open(source.dsn) as connection:
                flush_mark.check_owners(connection, source.stream)
                connection.execute(load("flush/committed"), {"token": token})
        except (psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName):
            raise ConfigError(
                "the functions for flush tokens do not exist",
                where=source.stream,
                repair="run `tuskline init`",
            ) from None
        except psycopg.Error as error:
            if error.sqlstate is None:
                raise connection_error(str(error), source.stream) from None
            if error.sqlstate != _OF_ANOTHER_SERVER or source is sources[-1]:
                where = source.stream if error.sqlstate != _OF_ANOTHER_SERVER else ""
                raise UsageError(
                    error.diag.message_primary or str(error),
                    where=where,
                    repair=error.diag.message_hint or "",
                ) from None
        else:
            return source.stream
    raise UsageError("no source is given", where="flush token")


def passed_not(head: Manifest | None, written: Mapping[str, WalPosition]) -> str:
    """Why an epoch may lack what was committed before these positions; empty if it has all of it. Pure.

    Positions are compared on one timeline only: an epoch may end at a greater LSN of a timeline that the server has left.
    """
    for stream, position in written.items():
        cut = None if head is None else head.streams.get(stream)
        if head is None or cut is None:
            return f"no epoch has anything of stream {stream} yet"
        if cut.timeline != position.timeline:
            return (
                f"epoch {head.epoch} ends stream {stream} on timeline {cut.timeline}, and the source is on"
                f" timeline {position.timeline}"
            )
        if cut.lsn <= position.lsn:
            return (
                f"epoch {head.epoch} ends stream {stream} at {format_lsn(cut.lsn)}, before the awaited"
                f" {format_lsn(position.lsn)}"
            )
    return ""


def _opened(lake: str, store: StoreOptions) -> Chain:
    chain = open_chain(lake, store)
    if chain.exists():
        chain.identity()
    return chain


def _poll_marked(chain: Chain, sources: Sequence[Source]) -> dict[str, Publication]:
    """The publications. Raises `PublicationError` for one that does not publish the mark."""
    seen = _poll_sources(chain, sources)
    for source in sources:
        if not seen[source.stream].marked:
            raise flush_mark.not_published(source.publication, source.stream)
        if not seen[source.stream].updates:
            raise flush_mark.without_updates(source.publication, source.stream)
    return seen


def _readable(
    chain: Chain,
    head: Manifest,
    sources: Sequence[Source],
    seen: dict[str, Publication],
    patience: _Patience,
    waiting: Callable[[Mapping[str, str]], None],
    next_epoch: Callable[[], object],
) -> int:
    """Wait until all tables that were published at the call are in the newest epoch, and follow it; return that epoch."""
    wanted = _published(seen)
    poll_at = 0.0
    shown: set[str] = set()
    since: dict[str, float] = {}
    while missing := {**unreadable(head, wanted), **unshown(head, seen)}:
        undecided = {n for n in missing if n in head.tables and is_undecided(head.tables[n])}
        since = {name: since.get(name, time.monotonic()) for name in undecided}
        too_long = any(time.monotonic() - at > _UNDECIDED for at in since.values())
        if patience.left <= 0 or too_long:
            raise _unreadable(missing, head.epoch, chain.store.location)
        patience.check()
        waiting(missing)
        patience.held(TABLES, _named(missing))
        copies = [head.copies[name] for name in missing if name in head.copies]
        copied = {copy.path for copy in copies if not copy.is_partial}
        if copied - shown:
            # A copy is shown by the first epoch that has passed it, which would come in its own time.
            shown |= copied
            next_epoch()
        time.sleep(_POLL_SECONDS)
        head = chain.head() or head
        # A table that matches a later state of its source is sufficient too: it has all that was committed before.
        if time.monotonic() >= poll_at:
            seen, wanted = _poll_again(chain, sources, head, seen, wanted)
            poll_at = time.monotonic() + _POLL_SOURCES_SECONDS
    return head.epoch


def _poll_again(
    chain: Chain,
    sources: Sequence[Source],
    head: Manifest,
    seen: dict[str, Publication],
    wanted: set[str],
) -> tuple[dict[str, Publication], set[str]]:
    """What tables are compared with, and which are waited for: not those that are published no longer.

    Raises the errors of a poll, if tables wait for that alone.
    """
    needed = unshown(head, seen)
    try:
        found = _poll_sources(chain, sources, head)
    except TusklineError:
        if needed:
            raise
        return seen, wanted
    return found if needed else seen, wanted & _published(found)


def _published(seen: Mapping[str, Publication]) -> set[str]:
    return {f"{stream}.{name}" for stream, found in seen.items() for name in found.shapes}


def _poll_sources(
    chain: Chain, sources: Sequence[Source], head: Manifest | None = None
) -> dict[str, Publication]:
    head = head or chain.head()
    return {
        source.stream: read_publication(
            source, known(head, source.stream) if head is not None else ()
        )
        for source in sources
    }


def _check_awaited(chain: Chain, before: Manifest, log: str, version: int) -> None:
    """Raise why waiting is of no use, unless the lake was requested to continue with this log, which then skips such versions."""
    with LogClient(log) as client:
        log_id = client.status().log_id
    if adopt.log_of(chain, before) == log_id:
        raise DivergedError(
            f"the log was rolled back: it issued version {version}, but epoch {before.epoch} is published",
            where=log,
            repair="check that `tuskline lake run` is running: it names the tables and two repairs",
        )
    adopt.wanted(chain, chain.head(), log_id)


def _named(missing: Mapping[str, str]) -> str:
    named = [f"{name} ({why})" for name, why in sorted(missing.items())]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return f"{', '.join(named[:_NAMED])}{more}"


def _unreadable(missing: Mapping[str, str], epoch: int, lake: str) -> DeadlineError:
    return DeadlineError(
        f"epoch {epoch} is published, without {_named(missing)}",
        where=lake,
        repair="check `tuskline table list`; wait longer with --timeout, or pause tables that flush should not wait for",
    )


def _check_timelines(status: LogStatus, written: Mapping[str, WalPosition]) -> None:
    """Raise `DeadlineError` if the log is not on the timeline of a source."""
    for stream, position in written.items():
        cut = status.streams.get(stream)
        if cut is not None and cut.timeline != position.timeline:
            raise DeadlineError(
                f"the source is on timeline {position.timeline}, but the log ends on timeline {cut.timeline}",
                where=stream,
                repair="check that capture follows the source (`tuskline status`), or wait longer with --timeout",
            )


def _written(sources: Mapping[str, str]) -> dict[str, WalPosition]:
    """Where the WAL of each source was before a row was written to it."""
    return {stream: _write(stream, dsn) for stream, dsn in sources.items()}


def _write(stream: str, dsn: str) -> WalPosition:
    try:
        with BoundedConnection.open(dsn) as connection:
            row = connection.execute(load("flush/position")).fetchone()
            flush_mark.write(connection, stream)
    except psycopg.errors.InsufficientPrivilege as error:
        raise PrivilegeError(
            str(error).strip(), where=stream, repair="grant UPDATE on tuskline.flush to this role"
        ) from None
    except psycopg.errors.UndefinedTable:
        raise ConfigError(
            "the table tuskline.flush does not exist", where=stream, repair="run `tuskline init`"
        ) from None
    except psycopg.Error as error:
        if error.sqlstate is None:
            raise connection_error(str(error), stream) from None
        raise ConnectionFailedError(
            str(error).strip(),
            where=stream,
            repair="check that it accepts connections",
        ) from None
    if row is None:
        raise ConnectionFailedError("the server returned no position", where=stream)
    return WalPosition(timeline=int(row[1]), lsn=int(row[0]))
