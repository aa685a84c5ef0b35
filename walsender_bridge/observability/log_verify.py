"""`tuskline log verify`: the replicas, of a running system or of data directories, the progress and the report."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from walsender_bridge.change_log import verification
from walsender_bridge.change_log.log_server_messages import ReplicaDescription
from walsender_bridge.change_log.operator_client import OperatorLog, OperatorReplica
from walsender_bridge.change_log.replica import fatal_segments
from walsender_bridge.change_log.replica.core import ReplicaState
from walsender_bridge.change_log.replica.disk import IndexRow, RecoveryOutcome, evaluate
from walsender_bridge.change_log.repository_messages import (
    DescribeAnswer,
    ReplicaPlace,
    StreamDescription,
)
from walsender_bridge.change_log.stored_replica import DataDirectoryLock, StoredReplicaFiles
from walsender_bridge.change_log.verification import EntryRow, StatedReplica, Violation
from walsender_bridge.errors import (
    Cause,
    InvalidReplicaError,
    TusklineError,
    UnknownStreamError,
)
from walsender_bridge.observability import log_view
from walsender_bridge.observability.verify_bar import verify_bar
from walsender_bridge.runtime import tls_files
from walsender_bridge.runtime.output import Output

#: Seconds to wait for an answer of a log server that is busy.
_ANSWER: Final = 30.0
#: Bytes between two updates of the progress.
_STEP: Final = 4 << 20


@dataclass(slots=True)
class VerifyReport:
    """`rows`: one for each replica. `version`: up to which the global ranges of all streams were checked; None: they were not."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    version: int | None = None

    def record(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "replicas": self.rows,
            "global_ranges_to_version": self.version,
            "violations": [
                {
                    "invariant": each.invariant or None,
                    "stream": each.stream,
                    "replica": each.replica,
                    "offset": each.offset,
                    "what": each.what,
                    "code": each.cause.name,
                }
                for each in self.violations
            ],
            "notes": self.notes,
        }


# -- a running system -------------------------------------------------------------------------------


class RunningReplica:
    """A replica that its log server reads; see `Source`. `name`: the log server's address."""

    def __init__(self, client: OperatorReplica, stream: str) -> None:
        self.stream, self.name = stream, client.address
        self._client = client

    def stated(self) -> StatedReplica:
        """Raises `InvalidReplicaError` if it is LEARNING."""
        found = [each for each in self._client.replicas().replicas if each.stream == self.stream]
        if not found or found[0].status is None or found[0].state == ReplicaState.LEARNING:
            reason = found[0].reason if found else "the log server has lost it"
            raise InvalidReplicaError(reason.splitlines()[0], where=self.name)
        return stated(found[0], self.name)

    def rows(self, stated: StatedReplica) -> Iterator[IndexRow]:
        """As the log server answers."""
        return self._client.commits(self.stream, stated.low_offset, stated.committed_end)

    def entries(self, stated: StatedReplica) -> Iterator[EntryRow]:
        """As it serves them."""
        for each in self._client.read(self.stream, stated.low_offset, stated.committed_end):
            yield EntryRow(each.offset, each.version, each.global_offset, each.data)


def stated(replica: ReplicaDescription, name: str) -> StatedReplica:
    """What a running replica states of itself."""
    status = replica.status
    assert status is not None, "a replica that takes part has a status"
    return StatedReplica(
        stream=replica.stream,
        replica=name,
        state=replica.state,
        low_offset=status.low_offset,
        committed_end=status.committed_end,
        end_offset=status.end_offset,
        version=status.version,
        context=replica.context,
        sealed_at=replica.sealed_at,
    )


def verify_running(address: str, streams: Sequence[str], output: Output) -> VerifyReport:
    """Verify all replicas of these streams (none: of all). Raises `UnknownStreamError`, `UnavailableError`."""
    report = VerifyReport()
    seen = log_view.observe(address)
    with OperatorLog(address, timeout=log_view.ANSWER) as log:
        after = log.describe()
    _, tls = tls_files.split(address)
    chosen = _chosen(seen.log, streams)
    with ExitStack() as clients:
        sources: dict[str, list[verification.Source]] = {}
        total = 0
        for stream in chosen:
            sources[stream.stream] = []
            for place in stream.replicas:
                found = seen.replica(stream.stream, place)
                if not _takes_part(found, stream, place, after, report):
                    continue
                assert isinstance(found, ReplicaDescription)
                assert found.status is not None
                total += found.status.bytes_total - (found.low_bytes or 0)
                client = OperatorReplica(place.address, timeout=_ANSWER, tls=tls)
                clients.callback(client.close)
                sources[stream.stream].append(RunningReplica(client, stream.stream))
        _verify(sources, total, report, output)
        _verify_ranges(
            sources,
            report,
            complete=len(chosen) == len(seen.log.streams) and all(sources.values()),
            described={each.stream: each for each in chosen},
        )
    return report


def _chosen(log: DescribeAnswer, names: Sequence[str]) -> list[StreamDescription]:
    known = {each.stream: each for each in log.streams}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnknownStreamError(
            f"stream {unknown[0]!r:.60} does not exist in this log",
            repair=f"existing streams: {', '.join(sorted(known)) or 'none'}",
        )
    return [known[name] for name in sorted(set(names) or known)]


def _takes_part(
    found: ReplicaDescription | TusklineError,
    stream: StreamDescription,
    place: ReplicaPlace,
    after: DescribeAnswer,
    report: VerifyReport,
) -> bool:
    """Whether a replica can be verified; if not, the report says why."""
    address = place.address
    if isinstance(found, TusklineError):
        what = f"could not be verified: {found.what}"
        report.violations.append(Violation("", what, stream.stream, address, None, found.cause))
        return False
    if found.state == ReplicaState.LEARNING or found.status is None:
        what = f"it is learning: {found.reason.splitlines()[0]}"
        if found.syncing_from:
            report.notes.append(f"stream {stream.stream}, replica {address}: not verified; {what}")
        else:
            cause = Cause.INVALID_REPLICA
            report.violations.append(Violation("I13", what, stream.stream, address, None, cause))
        return False
    violation = verification.against_repository(
        stated(found, address), stream.end_offset, after.version, in_sync=place.in_sync
    )
    if violation is not None:
        report.violations.append(violation)
    elif not place.in_sync:
        what = f"it is not in sync, and ends at {found.status.end_offset}; the stream ends at {stream.end_offset}"
        report.notes.append(f"stream {stream.stream}, replica {address}: {what}")
    return True


# -- data directories -------------------------------------------------------------------------------


def verify_stopped(folders: Sequence[Path], streams: Sequence[str], output: Output) -> VerifyReport:
    """Verify the replicas in data directories of log servers that are stopped, and compare those of one stream.

    Raises `ConfigError`, `RunningError`, or `CorruptError` for a log server's own record; `UnknownStreamError`.
    """
    report = VerifyReport()
    with ExitStack() as locks:
        files: dict[str, list[StoredReplicaFiles]] = {}
        for folder in folders:
            lock = locks.enter_context(DataDirectoryLock(folder))
            for replica in lock.replicas():
                files.setdefault(replica.stream, []).append(replica)
        unknown = [name for name in streams if name not in files]
        if unknown:
            raise UnknownStreamError(
                f"stream {unknown[0]!r:.60} is in none of the data directories",
                repair=f"existing streams: {', '.join(sorted(files)) or 'none'}",
            )
        chosen = {name: files[name] for name in sorted(set(streams) or files)}
        readable = _readable(chosen, report)
        total = sum(each.disk_bytes for its in readable.values() for each in its)
        sources: dict[str, list[verification.Source]] = {n: [*its] for n, its in readable.items()}
        _verify(sources, total, report, output)
        for each in (each for its in readable.values() for each in its):
            _recovers(each, report)
        # Streams on other machines have their shares of the global offsets, too.
        _verify_ranges(sources, report, complete=False)
    return report


def _readable(
    replicas: Mapping[str, Sequence[StoredReplicaFiles]], report: VerifyReport
) -> dict[str, list[StoredReplicaFiles]]:
    """Those whose files do not end their reader with a signal: a child process reads them first, all in one."""
    places = {path: each for its in replicas.values() for each in its for path in each.segments}
    fatal = set()
    for path, reason in fatal_segments.find_fatal(places):
        each = places[path]
        fatal.add((each.stream, each.name))
        what = f"{reason} ({path / 'data.mdb'})"
        report.violations.append(Violation("I13", what, each.stream, each.name, None))
    return {
        stream: [each for each in its if (stream, each.name) not in fatal]
        for stream, its in replicas.items()
    }


def _recovers(replica: StoredReplicaFiles, report: VerifyReport) -> None:
    """Add what recovery would say: as a violation, unless one of this replica is known more exactly."""
    place = replica.stream, replica.name
    known = any((each.stream, each.replica) == place for each in report.violations)
    try:
        outcome, reason = evaluate(replica.found())
    except TusklineError:
        return  # its violation is known: nothing of it could be read
    if outcome == RecoveryOutcome.INVALID and not known:
        report.violations.append(Violation("I13", reason, *place, None))
    elif reason:
        report.notes.append(f"stream {replica.stream}, replica {replica.name}: {reason}")


# -- both -------------------------------------------------------------------------------------------


def _verify(
    sources: Mapping[str, Sequence[verification.Source]],
    total: int,
    report: VerifyReport,
    output: Output,
) -> None:
    """Verify each stream, and compare its replicas."""
    with verify_bar(output) as show:
        progress = _Progress(show, total)
        for its in sources.values():
            rows = [_row(each) for each in its]
            report.rows += rows
            _verify_stream(its, rows, report, progress)


class _Progress:
    """Counts bytes, and shows them at times. `total`: of all replicas, as far as known."""

    def __init__(self, show: Callable[[str, int, int], None], total: int) -> None:
        self._show, self._total = show, total
        self._done = self._shown = 0

    def add(self, stream: str, size: int) -> None:
        """So many bytes of a stream have been verified."""
        self._done += size
        if self._done >= self._shown + _STEP:
            self._shown = self._done
            self._show(stream, self._done, max(self._total, self._done))


def _row(source: verification.Source) -> dict[str, Any]:
    return {
        "stream": source.stream,
        "replica": source.name,
        "first_offset": None,
        "last_offset": None,
        "entries": 0,
        "bytes": 0,
        "whole": True,
    }


def _verify_stream(
    sources: Sequence[verification.Source],
    rows: Sequence[dict[str, Any]],
    report: VerifyReport,
    progress: _Progress,
) -> None:
    for each in verification.verify_stream(sources):
        if isinstance(each, Violation):
            report.violations.append(each)
            for row in rows:
                row["whole"] = row["whole"] and row["replica"] != each.replica
            continue
        row, size = rows[each.number], len(each.row.data)
        row["first_offset"] = row["first_offset"] or each.offset
        row["last_offset"] = each.offset
        row["entries"] += 1
        row["bytes"] += size
        progress.add(row["stream"], size)


def _verify_ranges(
    sources: Mapping[str, Sequence[verification.Source]],
    report: VerifyReport,
    *,
    complete: bool,
    described: Mapping[str, StreamDescription] | None = None,
) -> None:
    """Verify the global ranges of all streams, from one replica of each; only if no violation is known."""
    if report.violations or not any(sources.values()):
        return
    chosen = {}
    try:
        for stream, its in sources.items():
            for source in its[:1]:
                stated = source.stated()
                chosen[stream] = (stated, source.rows(stated))
        # Only what has not been committed to since.
        last_versions = {
            name: each.version
            for name, each in (described or {}).items()
            if name in chosen and chosen[name][0].committed_end == each.end_offset
        }
        violation = verification.verify_global_ranges(
            chosen, complete=complete, last_versions=last_versions
        )
    except TusklineError as error:
        report.notes.append(f"the global ranges could not be compared: {error.what}")
        return
    if violation is not None:
        report.violations.append(violation)
    else:
        report.version = min(stated.version for stated, _ in chosen.values())
