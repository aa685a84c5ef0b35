"""FLUSH: everything that was committed before the call is readable when it returns.

Why it holds: for each source the WAL insert position L is read first, and then a row of the published
one-row table `tuskline.flush` is written. Every earlier commit of the caller ends at or below L; the
row's own commit ends above L. When the log has committed a position beyond L, everything up to L is in it
(transactions enter the log in commit order), and a barrier forced then is a version that holds it all. It is readable when
an epoch of that version is published, and every published table is in it.

L is compared with the log's position only once that is on the server's timeline. The log may reach farther on one that the
server has left: it has diverged then, or is about to find out. The row that was written is on the server's timeline.
"""

import time
from collections.abc import Callable, Mapping, Sequence
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
)
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.protocol.lsn import WalPosition
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

    def __init__(self, seconds: float, parts: AwaitedProcesses | None) -> None:
        self._deadline = time.monotonic() + seconds
        self._parts = parts
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
            except DeadlineError:
                if self.left <= 0:
                    raise
                time.sleep(_POLL_SECONDS)
            except (UnknownStreamError, UnavailableError):
                if self._parts is None or self.left <= 0 or not self._parts.starting():
                    raise
                time.sleep(_POLL_SECONDS)
            self.check()

    def epoch(self, chain: Chain, version: int) -> Manifest:
        """The newest epoch, once it is at or past a version."""
        while True:
            try:
                wait = max(0.0, min(self.left, _ASK_AGAIN))
                return wait_for_epoch(chain, version, timeout=wait)
            except DeadlineError:
                if self.left <= 0:
                    raise
            self.check()


def flush(
    lake: str,
    log: str,
    sources: Sequence[Source],
    *,
    timeout: float = 60.0,
    parts: AwaitedProcesses | None = None,
    waiting: Callable[[Mapping[str, str]], None] = lambda _: None,
    store: StoreOptions = FROM_ENVIRONMENT,
) -> int:
    """Wait until all that was committed in `sources` before this call is readable in `lake`.

    That is: an epoch holds it, with every table that is published now, as it is at its source. A table that is being
    copied is waited for; one that is suspended until an operator acts, for ten seconds; paused tables are not waited for, nor
    those that are dropped meanwhile.

    Returns the epoch (a later one may be published already). `timeout` is in seconds; `waiting` is called repeatedly with
    the missing tables and the reasons; `store` says how a bucket is reached; `parts` may end the wait early, and lets it begin before the log can answer. Raises
    the errors of `parts` and `force_barrier`, `UnavailableError`, `PublicationError` if the table that marks positions is
    not published, `DivergedError` if the log is behind the lake, `LakeError` if the log is not the lake's, and
    `DeadlineError` if no epoch came in time, or tables are missing, which it names.
    """
    dsns = {source.stream: source.dsn for source in sources}
    chain = open_chain(lake, store)
    if chain.exists():
        chain.identity()
    before = chain.head()
    patience = _Patience(timeout, parts)
    seen = _poll_sources(chain, sources)
    for source in sources:
        if not seen[source.stream].marked:
            raise flush_mark.not_published(source.publication, source.stream)
        if not seen[source.stream].updates:
            raise flush_mark.without_updates(source.publication, source.stream)
    wanted = _published(seen)
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
        time.sleep(_POLL_SECONDS)
        version = patience.barrier(log, _written(dsns))
    poll_at = 0.0
    head = patience.epoch(chain, version)
    shown: set[str] = set()
    since: dict[str, float] = {}
    while missing := {**unreadable(head, wanted), **unshown(head, seen)}:
        undecided = {n for n in missing if n in head.tables and is_undecided(head.tables[n])}
        since = {name: since.get(name, time.monotonic()) for name in undecided}
        too_long = any(time.monotonic() - at > _UNDECIDED for at in since.values())
        if patience.left <= 0 or too_long:
            raise _unreadable(missing, head.epoch, lake)
        patience.check()
        waiting(missing)
        copies = [head.copies[name] for name in missing if name in head.copies]
        copied = {copy.path for copy in copies if not copy.is_partial}
        if copied - shown:
            # A copy is shown by the first epoch that has passed it, which would come in its own time.
            shown |= copied
            patience.barrier(log, _written(dsns))
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


def _unreadable(missing: Mapping[str, str], epoch: int, lake: str) -> DeadlineError:
    named = [f"{name} ({why})" for name, why in sorted(missing.items())]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return DeadlineError(
        f"epoch {epoch} is published, without {', '.join(named[:_NAMED])}{more}",
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
