"""The invariants of a replica. Pure.

Its host checks them after every step except the hot one, an append, and before the store applies the effects. The rules
are Varlog's, as cited in core.py; a replica that is LEARNING guarantees nothing.
"""

from typing import NamedTuple

from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import Durable
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant

_VOUCHES = frozenset({ReplicaState.APPENDABLE, ReplicaState.SEALING, ReplicaState.SEALED})


class _Step(NamedTuple):
    core: Replica
    before: Durable

    @property
    def now(self) -> Durable:
        return self.core.current


def check_invariants(core: Replica, before: Durable) -> None:
    """`before`: `core.current` as it was before the step. Raises `InvariantError`."""
    if core.state in _VOUCHES:
        part = f"replica of stream {core.current.stream}"
        invariants.check(part, INVARIANTS, _Step(core, before), _describe)


def _describe(step: _Step) -> str:
    now, before, tail = step.now, step.before, step.core.tail
    return (
        f"{step.core.state}, term {now.term}, low {now.low_offset}, committed to {now.committed_end} in version"
        f" {now.version}, whole to {tail.whole.end_offset}, written to {tail.end_offset}, sealed at {now.sealed_at};"
        f" before: term {before.term}, low {before.low_offset}, committed to {before.committed_end} in version"
        f" {before.version}"
    )


def _sealed_takes_nothing(step: _Step) -> bool:
    end = step.now.committed_end
    if step.core.state != ReplicaState.SEALED:
        return True
    return step.core.tail.end_offset == step.now.sealed_at == end


def _state_fits_the_seal(step: _Step) -> bool:
    sealed_at = step.now.sealed_at
    if step.core.state == ReplicaState.APPENDABLE:
        return sealed_at is None
    behind = step.core.state == ReplicaState.SEALING
    return sealed_at is not None and (not behind or sealed_at > step.now.committed_end)


def _uncommitted_ends_follow(step: _Step) -> bool:
    """Checks the first and the last only: there may be very many."""
    ends, whole = step.core.uncommitted_ends, step.core.tail.whole
    if not ends:
        return whole.end_offset == step.now.committed_end
    return step.now.committed_end < ends[0].end_offset and ends[-1] == whole


def _global_offsets_ascend(step: _Step) -> bool:
    now, before = step.now.context, step.before.context
    return before is None or (now is not None and now.global_offset >= before.global_offset)


def _restart_may_be_removed(step: _Step) -> bool:
    restarts = step.core.tail.whole.history_start > step.now.position.history_start
    return restarts or step.now.before_restart is None


INVARIANTS: tuple[Invariant[_Step], ...] = (
    Invariant(
        "stream_never_changes",
        "a replica is of one stream of one log",
        lambda step: (step.now.stream, step.now.log_id) == (step.before.stream, step.before.log_id),
    ),
    Invariant(
        "term_never_goes_back",
        "a newer writer fences the older one",
        lambda step: step.now.term >= step.before.term,
    ),
    Invariant(
        "version_never_goes_back",
        "Varlog: versions grow",
        lambda step: step.now.version >= step.before.version,
    ),
    Invariant(
        "committed_end_never_goes_back",
        "Varlog: what is committed stays",
        lambda step: step.now.committed_end >= step.before.committed_end,
    ),
    Invariant(
        "global_offsets_ascend", "Varlog: commit contexts follow each other", _global_offsets_ascend
    ),
    Invariant(
        "low_watermark_never_goes_back",
        "Varlog: what was trimmed stays so",
        lambda step: step.now.low_offset >= step.before.low_offset,
    ),
    Invariant(
        "trimmed_within_committed",
        "Varlog: only what is committed is trimmed",
        lambda step: 1 <= step.now.low_offset <= step.now.committed_end,
    ),
    Invariant(
        "committed_within_written",
        "Varlog: a commit is of entries that are written",
        lambda step: (
            step.now.committed_end <= step.core.tail.whole.end_offset <= step.core.tail.end_offset
        ),
    ),
    Invariant(
        "commit_ends_a_transaction",
        "every committed end is the end of a transaction",
        lambda step: step.now.position.end_offset == step.now.committed_end,
    ),
    Invariant(
        "uncommitted_ends_follow",
        "what is reported starts where the last commit ended",
        _uncommitted_ends_follow,
    ),
    Invariant(
        "state_fits_the_seal", "Varlog: never sealed behind the last commit", _state_fits_the_seal
    ),
    Invariant(
        "restart_may_be_removed",
        "what is not committed may be removed, and what it replaced is then valid again",
        _restart_may_be_removed,
    ),
    Invariant(
        "sealed_takes_nothing", "Varlog: a rejected entry does not come back", _sealed_takes_nothing
    ),
)
