"""The state of the whole log: what the repository knows, and what each log server answers. `tuskline log status`.

Log servers are asked side by side, so one that hangs delays the others by no more than its timeout.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from walsender_bridge.change_log.log_server_messages import ReplicaDescription, ReplicasAnswer
from walsender_bridge.change_log.operator_client import OperatorLog, OperatorReplica
from walsender_bridge.change_log.replica.core import ReplicaState
from walsender_bridge.change_log.replica.damaged_segments import REPAIR
from walsender_bridge.change_log.repository.stream_faults import answers_instead
from walsender_bridge.change_log.repository_messages import (
    ConsumerDescription,
    DescribeAnswer,
    ReplicaPlace,
    StreamDescription,
)
from walsender_bridge.errors import (
    CorruptError,
    InvalidReplicaError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.runtime import tls_files
from walsender_bridge.runtime.times import iso_time_of_microseconds
from walsender_bridge.runtime.tls_files import TlsFiles

#: Seconds to wait for an answer.
ANSWER: Final = 5.0


@dataclass(frozen=True, slots=True)
class LogView:
    """`replicas`: by address, what its log server answers, or the error."""

    log: DescribeAnswer
    replicas: Mapping[str, ReplicasAnswer | TusklineError]

    def replica(self, stream: str, place: ReplicaPlace) -> ReplicaDescription | TusklineError:
        """The replica at that place."""
        answer = self.replicas.get(place.address)
        if answer is None:
            return UnavailableError("log server has not been heard of", where=place.log_server)
        if isinstance(answer, TusklineError):
            return answer
        found = next((each for each in answer.replicas if each.stream == stream), None)
        if found is None:
            return CorruptError(
                f"the log server there has no replica of stream {stream}",
                where=f"{place.log_server} at {place.address}",
                repair="docs/log-lost.md",
            )
        if answer.log_server != place.log_server:
            return answers_instead(answer.log_server, f"{place.log_server} at {place.address}")
        return found


def observe(address: str) -> LogView:
    """Ask the repository, then all log servers. Raises `UnavailableError` if the repository does not answer."""
    with OperatorLog(address, timeout=ANSWER) as log:
        answer = log.describe()
    _, tls = tls_files.split(address)
    addresses = {place.address for each in answer.streams for place in each.replicas}
    asked = sorted(filter(None, addresses))
    with ThreadPoolExecutor(max(len(asked), 1), "log_server") as pool:
        return LogView(answer, dict(zip(asked, pool.map(partial(_ask, tls), asked), strict=True)))


def _ask(tls: TlsFiles | None, address: str) -> ReplicasAnswer | TusklineError:
    try:
        with OperatorReplica(address, timeout=ANSWER, tls=tls) as replica:
            return replica.replicas()
    except TusklineError as error:
        return error


# -- what is shown: plain values --------------------------------------------------------------------


def summary(seen: LogView) -> dict[str, Any]:
    """The log as plain values."""
    log = seen.log
    return {
        "log_id": log.log_id,
        "version": log.version,
        "published": log.published,
        "forced_version": log.forced_version,
        "retention": log.retention,
        "streams": [_stream(seen, each) for each in log.streams],
        "consumers": [_consumer(each) for each in log.consumers],
        "holding": [row for each in log.streams for row in holding(seen, each)],
        "faults": [error.to_wire() for error in faults(seen)],
    }


def _stream(seen: LogView, stream: StreamDescription) -> dict[str, Any]:
    return {
        "stream": stream.stream,
        "version": stream.version,
        "end_offset": stream.end_offset,
        "published_end": stream.published_end,
        "trim_limit": stream.trim_limit,
        "last_end_lsn": format_lsn(stream.last_end_lsn),
        "last_commit_time": iso_time_of_microseconds(stream.last_commit_time),
        "bytes_total": stream.bytes_total,
        "writer_term": stream.term,
        "history": stream.history,
        "replicas": [_replica(seen, stream, place) for place in stream.replicas],
    }


def _replica(seen: LogView, stream: StreamDescription, place: ReplicaPlace) -> dict[str, Any]:
    found = seen.replica(stream.stream, place)
    names = ("term", "low_offset", "committed_end", "end_offset", "version")
    row: dict[str, Any] = {
        "log_server": place.log_server,
        "address": place.address,
        "in_sync": place.in_sync,
    }
    if isinstance(found, TusklineError):
        unknown = (*names, "bytes", "disk_bytes", "lag_entries", "lag_bytes")
        return {**row, "state": "unknown", **dict.fromkeys(unknown), "reason": found.what}
    status, before = found.status, found.low_bytes
    known = None if status is None else status.bytes_total
    return {
        **row,
        "state": found.state,
        **{name: status and getattr(status, name) for name in names},
        "bytes": None if known is None or before is None else known - before,
        "disk_bytes": found.disk_bytes,
        "lag_entries": status and max(stream.end_offset - status.committed_end, 0),
        "lag_bytes": None if known is None else max(stream.bytes_total - known, 0),
        "reason": _reason(found, place),
    }


def _reason(found: ReplicaDescription, place: ReplicaPlace) -> str | None:
    if place.failure is not None and not place.in_sync:
        verb = "could not be synchronized" if place.answers else "is not accepted"
        return f"{verb}: {place.failure.what}"
    return found.reason or None


def _consumer(consumer: ConsumerDescription) -> dict[str, Any]:
    return {
        "consumer": consumer.name,
        "version": consumer.version,
        "lease_seconds": round(consumer.lease_seconds),
    }


def holding(seen: LogView, stream: StreamDescription) -> list[dict[str, Any]]:
    """What holds back trimming: consumers, and replicas that lack commits; the one that holds the most first.

    `entries` and `bytes`: retained for it, of what is committed. `bytes` None: not known.
    """
    low, low_bytes = _low(seen, stream)
    rows = []
    for consumer in seen.log.consumers:
        need = consumer.needs.get(stream.stream)
        if need is None or need.offset >= stream.published_end:
            continue
        beyond = need.offset > low
        before = need.bytes_total if beyond else low_bytes
        size = None if before is None else stream.published_bytes - before
        entries: int | None = stream.published_end - (need.offset if beyond else low)
        rows.append(_holder(stream, f"consumer {consumer.name}", consumer.version, entries, size))
    for place in stream.replicas:
        found = seen.replica(stream.stream, place)
        status = None if isinstance(found, TusklineError) else found.status
        if place.version >= stream.version or not place.in_sync:
            continue
        # What it lacks, all replicas in sync keep, and no version beyond it can be read.
        entries = None if status is None else max(stream.end_offset - status.committed_end, 0)
        size = None if status is None else max(stream.bytes_total - status.bytes_total, 0)
        rows.append(_holder(stream, f"replica {place.address}", place.version, entries, size))
    return sorted(rows, key=lambda row: -(row["entries"] or 0))


def _holder(
    stream: StreamDescription,
    holder: str,
    version: int | None,
    entries: int | None,
    size: int | None,
) -> dict[str, Any]:
    return {
        "stream": stream.stream,
        "holder": holder,
        "version": version,
        "entries": entries,
        "bytes": size,
    }


def _low(seen: LogView, stream: StreamDescription) -> tuple[int, int | None]:
    """The lowest watermark of the replicas, and the bytes in front of it."""
    found = [seen.replica(stream.stream, place) for place in stream.replicas]
    lows = [
        (each.status.low_offset, each.low_bytes)
        for each in found
        if not isinstance(each, TusklineError) and each.status is not None
    ]
    return min(lows, key=lambda low: low[0], default=(1, None))


def faults(seen: LogView) -> list[TusklineError]:
    """What is wrong: as the repository has it, then of replicas that it does not name, each once."""
    found = [fault.error() for fault in seen.log.faults.values()]
    named = set(seen.log.faults)
    found += [
        error
        for each in seen.log.streams
        if each.stream not in named
        for error in _of_replicas(seen, each)
    ]
    return [*{str(error): error for error in found}.values()]


def _of_replicas(seen: LogView, stream: StreamDescription) -> Iterator[TusklineError]:
    for place in stream.replicas:
        replica = seen.replica(stream.stream, place)
        if isinstance(replica, TusklineError):
            yield replica
        elif replica.state == ReplicaState.LEARNING:
            yield learning(replica, place.address)


def learning(replica: ReplicaDescription, address: str) -> TusklineError:
    """The error of a replica that does not take part."""
    return InvalidReplicaError(
        f"its replica is learning: {replica.reason.splitlines()[0]}",
        where=f"stream {replica.stream}, log server {address}",
        repair="wait until it has been synchronized" if replica.syncing_from else REPAIR,
    )
