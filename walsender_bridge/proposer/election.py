"""What a quorum of vote replies decides. Pure: the whole of rules 1, 2 and 9 on the proposer's side."""

from collections.abc import Collection, Iterable

from walsender_bridge.errors import CorruptError
from walsender_bridge.safekeeper.history import divergence
from walsender_bridge.safekeeper.messages import SafekeeperGreeting, VoteReply
from walsender_bridge.wire.lsn import format_lsn


def next_term(greetings: Iterable[SafekeeperGreeting]) -> int:
    """The term to be elected in: above all that were heard of. It is the new epoch, too (rule 2)."""
    return max((greeting.node_id.term for greeting in greetings), default=0) + 1


def rank(reply: VoteReply) -> tuple[int, int]:
    """How advanced a voter's log is after its vote (rule 1): by epoch first, by its end second."""
    return reply.history.rank(reply.flush_lsn)


def volume_complete(replies: Collection[VoteReply]) -> VoteReply:
    """The most advanced of a quorum of replies: the end of its log is VCL, its history the log's.

    What was committed is on a quorum, every two quorums share a voter, and that voter's log is no more
    advanced than this one: so this log has everything that was committed. Raises `CorruptError` if a voter
    knows better.
    """
    best = max(replies, key=rank)
    vcl = end(best)
    for reply in replies:
        if reply.commit_lsn > vcl:
            raise CorruptError(
                f"{format_lsn(reply.commit_lsn)} was committed, and a quorum ends at "
                f"{format_lsn(vcl)}",
                repair="a safekeeper has lost WAL that it acknowledged: look for a failing disk",
            )
    return best


def restart(reply: VoteReply, best: VoteReply, vcl: int) -> int:
    """Up to where every member has the best log, as far as this voter can tell.

    Its `restart_lsn` is about its own log, and may lie inside a record that votes went back from and that others
    replaced: beyond where the two logs part it says nothing.
    """
    point = divergence(reply.history, reply.flush_lsn, best.history, vcl)
    return 0 if point is None else min(reply.restart_lsn, point)


def end(reply: VoteReply) -> int:
    """Where a voter's log ends; 0 for an empty one."""
    return rank(reply)[1]
