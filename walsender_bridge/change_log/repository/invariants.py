"""The invariants of the metadata repository. Pure.

Its store checks them after each record that changed the state, before the record is written. The rules are Varlog's, as
cited in core.py.
"""

from collections.abc import Mapping
from typing import NamedTuple

from walsender_bridge.change_log.repository.core import Repository, StreamCommit, StreamState
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant


class Checked(NamedTuple):
    """The state before a record."""

    log_id: str
    version: int
    published: int
    next_global: int
    clock: float
    streams: Mapping[str, "CheckedStream"]


class CheckedStream(NamedTuple):
    """A stream before a record. `last`: its last non-empty commit."""

    term: int
    last: StreamCommit
    members: tuple[str, ...]
    sealed: bool
    trimmed: int


class _Step(NamedTuple):
    core: Repository
    before: Checked


def checked(core: Repository) -> Checked:
    """Capture the core's state before a record, for the check after it."""
    streams = {
        name: CheckedStream(stream.term, stream.last, stream.members, stream.sealed, stream.trimmed)
        for name, stream in core.streams.items()
    }
    numbers = core.version, core.published, core.next_global
    return Checked(core.log_id, *numbers, core.clock, streams)


def check_invariants(core: Repository, before: Checked) -> None:
    """Raises `InvariantError`."""
    invariants.check("metadata repository", INVARIANTS, _Step(core, before), _describe)


def _describe(step: _Step) -> str:
    core, before = step.core, step.before
    ends = [f"{name} to {stream.last.context.end}" for name, stream in sorted(core.streams.items())]
    return (
        f"version {core.version}, published {core.published}, forced {core.forced_version}, next global offset"
        f" {core.next_global}; before: version {before.version}, published {before.published}, next global offset"
        f" {before.next_global}; committed: {', '.join(ends[:10]) or 'nothing'}"
    )


def _streams_stay(step: _Step) -> bool:
    streams = step.core.streams
    return all(
        name in streams and streams[name].term >= before.term
        for name, before in step.before.streams.items()
    )


def _follows(stream: StreamState, before: StreamCommit) -> bool:
    last, known = stream.last, before.context
    if last.context == known:
        return True
    starts = last.context.local_offset, last.context.version
    return starts[0] == known.end and starts[1] > known.version


def _commits_follow(step: _Step) -> bool:
    known = step.before.streams
    return all(
        _follows(stream, known[name].last)
        for name, stream in step.core.streams.items()
        if name in known
    )


def _members_are_assigned(step: _Step) -> bool:
    return all(
        stream.members and set(stream.members) <= set(stream.replicas)
        for stream in step.core.streams.values()
    )


def _members_change_while_sealed(step: _Step) -> bool:
    """And nothing is committed while the stream is sealed, before or after this record."""
    known = step.before.streams
    return all(
        (stream.members == known[name].members or known[name].sealed)
        and (stream.last is known[name].last or not (stream.sealed or known[name].sealed))
        for name, stream in step.core.streams.items()
        if name in known
    )


def _commits_end_transactions(step: _Step) -> bool:
    last = [stream.last for stream in step.core.streams.values()]
    return all(commit.position.end_offset == commit.context.end for commit in last)


def _global_ranges_leave_no_gap(step: _Step) -> bool:
    """The streams share the version's range in the order of their names."""
    core, at = step.core, step.before.next_global
    if core.version > step.before.version:
        for name in sorted(step.before.streams):
            latest = core.streams[name].latest
            if latest.version != core.version or (latest.length and latest.global_offset != at):
                return False
            at += latest.length
    return core.next_global == at


def _history_is_kept(step: _Step) -> bool:
    return all(stream.at(step.core.published) for stream in step.core.streams.values())


def _trims_follow(step: _Step) -> bool:
    known = step.before.streams
    return all(
        known[name].trimmed <= stream.trimmed <= stream.last.context.end
        for name, stream in step.core.streams.items()
        if name in known
    )


def _applied_were_issued(step: _Step) -> bool:
    version = step.core.version
    return all(
        applied <= version
        for stream in step.core.streams.values()
        for applied in stream.applied.values()
    )


INVARIANTS: tuple[Invariant[_Step], ...] = (
    Invariant(
        "log_id_never_changes",
        "a repository is of one log",
        lambda step: step.before.log_id in {"", step.core.log_id},
    ),
    Invariant("streams_and_terms_stay", "a newer writer fences the older one", _streams_stay),
    Invariant(
        "version_never_goes_back",
        "Varlog: versions grow",
        lambda step: step.core.version >= step.before.version,
    ),
    Invariant(
        "published_never_goes_back",
        "a reader never goes back",
        lambda step: step.core.published >= step.before.published,
    ),
    Invariant(
        "published_within_version",
        "only what was issued is published",
        lambda step: max(step.core.published, step.core.forced_version) <= step.core.version,
    ),
    Invariant(
        "clock_never_goes_back",
        "leases and retention follow a steady clock",
        lambda step: step.core.clock >= step.before.clock,
    ),
    Invariant("members_are_assigned", "a commit needs at least one replica", _members_are_assigned),
    Invariant(
        "members_change_while_sealed",
        "Varlog: a stream is sealed before its replicas change",
        _members_change_while_sealed,
    ),
    Invariant("commits_follow_each_other", "Varlog: local ranges leave no gap", _commits_follow),
    Invariant(
        "commit_ends_a_transaction",
        "every committed end is the end of a transaction",
        _commits_end_transactions,
    ),
    Invariant(
        "global_ranges_leave_no_gap",
        "Varlog: a version cuts all streams",
        _global_ranges_leave_no_gap,
    ),
    Invariant(
        "applied_within_version", "Varlog: a replica has what was issued", _applied_were_issued
    ),
    Invariant("trimmed_never_goes_back", "what is committed is trimmed, in order", _trims_follow),
    Invariant("history_reaches_published", "history is kept for readers", _history_is_kept),
)
