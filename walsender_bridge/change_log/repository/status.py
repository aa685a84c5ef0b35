"""The state of the whole log for operators, from the repository's state: action `describe`. Pure."""

from collections.abc import Callable, Iterable, Mapping

from walsender_bridge.change_log import repository_messages as m
from walsender_bridge.change_log.repository.core import Consumer, Repository, StreamState
from walsender_bridge.change_log.repository.stream_faults import LogServer, other_at, problem_at
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.error_record import ErrorRecord


def describe(
    state: Repository,
    faults: Mapping[str, TusklineError],
    failures: Mapping[tuple[str, str], TusklineError],
    log_servers: Iterable[LogServer],
    now: float,
    retention: float,
) -> m.DescribeAnswer:
    """See `DescribeAnswer`. `failures`: see `Replication`. `now`: of the log's steady clock."""
    known = [*log_servers]
    answering = {each.log_server_id for each in known if each.answers}

    def failure(stream: str, log_server: str) -> TusklineError | None:
        if log_server in answering:
            return failures.get((stream, log_server))
        address = state.log_servers.get(log_server, "")
        return problem_at(address, known) or other_at(log_server, address, known)

    return m.DescribeAnswer(
        log_id=state.log_id,
        version=state.version,
        published=state.published,
        forced_version=min(state.forced_version, state.published),
        next_global=state.next_global,
        retention=retention,
        streams=tuple(
            _stream(state, name, failure, answering, now) for name in sorted(state.streams)
        ),
        consumers=tuple(
            _consumer(state, name, consumer, now)
            for name, consumer in sorted(state.consumers.items())
            if consumer.until > now
        ),
        faults={name: ErrorRecord.of(fault) for name, fault in faults.items()},
    )


def _stream(
    state: Repository,
    name: str,
    failure: Callable[[str, str], TusklineError | None],
    answering: set[str],
    now: float,
) -> m.StreamDescription:
    stream = state.streams[name]
    last, published = stream.last, stream.at(state.published)
    assert published is not None, "history reaches down to what is published"
    return m.StreamDescription(
        stream=name,
        term=stream.term,
        version=last.context.version,
        end_offset=last.context.end,
        bytes_total=last.position.bytes_total,
        last_end_lsn=last.position.end_lsn,
        last_commit_time=last.position.commit_time,
        published_end=published.context.end,
        published_bytes=published.position.bytes_total,
        trim_limit=state.trim_limit(name, now),
        history=len(stream.past) + len(stream.history),
        replicas=tuple(
            m.ReplicaPlace(
                log_server=each,
                address=state.log_servers.get(each, ""),
                answers=each in answering,
                version=stream.applied.get(each, 0),
                in_sync=each in stream.members,
                failure=ErrorRecord.of(failed) if (failed := failure(name, each)) else None,
            )
            for each in stream.replicas
        ),
    )


def needed(stream: StreamState, consumer: Consumer) -> m.NeededFrom:
    """Where a consumer still needs a stream from, as `Repository.trim_limit` has it."""
    commit = stream.needed_from(consumer.version)
    if commit is None:
        # It has published nothing, or longer ago than the repository knows: everything is needed.
        return m.NeededFrom(1, None)
    return m.NeededFrom(commit.end, commit.bytes_total)


def _consumer(
    state: Repository, name: str, consumer: Consumer, now: float
) -> m.ConsumerDescription:
    needs = {each: needed(stream, consumer) for each, stream in sorted(state.streams.items())}
    return m.ConsumerDescription(name, consumer.version, consumer.until - now, needs)
