"""Decisions from a quorum of vote replies: rules 1, 2 and 9 on the proposer's side. Pure."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from walsender_bridge.errors import CorruptError, DivergedError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.wal_page import segment_start
from walsender_bridge.quorum.proposer import rivals
from walsender_bridge.quorum.proposer.effects import Limits, Primary
from walsender_bridge.quorum.protocol import terms
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry, divergence
from walsender_bridge.quorum.protocol.messages import SafekeeperGreeting, ServerInfo, VoteReply


def next_term(
    greetings: Collection[SafekeeperGreeting], configuration: Configuration, heard: int = 0
) -> int:
    """The term of the next campaign, which is also its election epoch (rule 2); 0: none, until others greet.

    It exceeds all known terms, except those out of a quorum's reach (`protocol/terms.py`). A safekeeper that has voted in
    such a term refuses this vote; the others are a quorum below the term, as each election needs. If the safekeepers
    without such a vote are a quorum, they are waited for. Otherwise the votes of genuine elections are that far apart, and
    the least term that a quorum follows is chosen.
    """
    known = sorted({heard, *(greeting.node_id.term for greeting in greetings)})
    tries = [(last, terms.MAX_REACH) for last in reversed(known)]
    if not configuration.has_quorum(configuration.trusted - too_far(greetings, configuration)):
        tries += [(last, terms.MAX_LEAP) for last in known]
    for last, most in tries:
        below = {
            each.safekeeper
            for each in greetings
            if each.node_id.term <= last
            and terms.follows(last + 1, each.node_id.term, configuration.term, most)
        }
        if configuration.has_quorum(below):
            return last + 1
    return 0


def too_far(greetings: Collection[SafekeeperGreeting], configuration: Configuration) -> set[int]:
    """The safekeepers whose votes are so far above those of others that no proposer that needs the others campaigns above."""
    own = [each.node_id.term for each in greetings if each.safekeeper in configuration.everyone]
    lowest = max(configuration.term, min(own, default=0))
    return {e.safekeeper for e in greetings if rivals.out_of_reach(e.node_id, lowest)}


def behind(greetings: Iterable[SafekeeperGreeting], primary: Primary | None) -> bool:
    """Whether more WAL is committed than the primary had when it was probed."""
    return primary is not None and any(
        each.timeline == primary.lineage.timeline and each.commit_lsn > primary.flush_lsn
        for each in greetings
    )


def rank(reply: VoteReply) -> tuple[int, Lsn]:
    """How advanced a voter's log is after its vote (rule 1): by election epoch first, by its end second."""
    return reply.history.rank(reply.flush_lsn)


def volume_complete(replies: Collection[VoteReply]) -> VoteReply:
    """The most advanced of a quorum of replies: the end of its log is VCL, its history the log's.

    Committed WAL is on a quorum, every two quorums share a voter, and that voter's log is no more advanced than this one:
    so this log has all committed WAL. Raises `CorruptError` if a voter contradicts that.
    """
    best = max(replies, key=rank)
    vcl = end(best)
    for reply in replies:
        if reply.commit_lsn > vcl:
            raise CorruptError(
                f"{format_lsn(reply.commit_lsn)} was committed, and a quorum ends at "
                f"{format_lsn(vcl)}",
                repair="a safekeeper has lost WAL that it acknowledged: check the disks",
            )
    return best


def outranked(best: VoteReply | None, replies: Iterable[VoteReply]) -> bool:
    """Whether a later vote came from a more advanced log than the one that set VCL."""
    return best is None or any(rank(reply) > rank(best) for reply in replies)


def restart(reply: VoteReply, best: VoteReply, vcl: Lsn) -> Lsn:
    """The LSN up to which every member has the best log, as far as this voter knows.

    Its `restart_lsn` is about its own log, and may lie inside a record that the votes excluded and others replaced: beyond
    the divergence point of the two logs it means nothing.
    """
    point = divergence(reply.history, reply.flush_lsn, best.history, vcl)
    return 0 if point is None else min(reply.restart_lsn, point)


def history(
    best: VoteReply,
    voters: Collection[VoteReply],
    vcl: Lsn,
    successors: Iterable[HistoryEntry],
    server: ServerInfo,
    limits: Limits,
) -> History:
    """The best log's history, then `successors`; pruned to what not all members have, compacted. Raises `NotSupportedError`."""
    everywhere = max(restart(reply, best, vcl) for reply in voters)
    pruned = best.history.succeeded(vcl, successors).pruned(
        everywhere - everywhere % server.segment_size
    )
    return pruned.compacted(limits.epochs, committed(voters))


def committed(voters: Iterable[VoteReply]) -> Lsn:
    """The greatest commit_lsn of the best log that these voters know."""
    return max((reply.commit_lsn for reply in voters), default=0)


def end(reply: VoteReply) -> Lsn:
    """Where a voter's log ends; 0 for an empty one."""
    return rank(reply)[1]


def genesis(primary: Primary | None, kept: Lsn | None, server: ServerInfo) -> Lsn:
    """VCL when no voter holds any WAL: the log begins with the primary's current segment.

    `kept`: the oldest LSN that the primary's slot keeps. A slot is reserved at the redo pointer, which a checkpoint sets before
    that LSN is flushed, and the checkpoint removes the segments below: so the log does not begin below the slot's segment.
    """
    if primary is None:
        raise DivergedError("the safekeepers hold no WAL to fail over to")
    return segment_start(max(primary.flush_lsn, kept or 0), server.segment_size)


def begins_again(
    best: VoteReply, voters: Collection[VoteReply], kept: Lsn | None, server: ServerInfo
) -> bool:
    """Whether the log begins again at `genesis`: it has never held a record, and the primary keeps only later segments.

    A proposer can end between its election and the first byte, and the slot can be lost then. Nothing is skipped that a
    quorum has acknowledged: each acknowledged record is in the log of one of these voters (rule 1), and none of them has
    ever held one. The caller makes sure that no COMMIT waits for WAL in between.
    """
    if kept is None or not best.history:
        return False
    return end(best) < segment_start(kept, server.segment_size) and all(map(_unwritten, voters))


def _unwritten(reply: VoteReply) -> bool:
    """Whether a log has never held a complete record.

    It ends where it begins, and its history begins there, too: that of a log which did a full resync, or whose old WAL was
    removed, reaches further back. And the members never had anything above that.
    """
    if not reply.history:
        return True
    start = reply.history.entries[0].start_lsn
    return reply.begin_lsn == reply.flush_lsn == start >= max(reply.restart_lsn, reply.commit_lsn)


def emptied(reply: VoteReply) -> VoteReply:
    """The reply of a voter without a log."""
    return replace(reply, history=History(), begin_lsn=0, flush_lsn=0, commit_lsn=0, restart_lsn=0)


def ahead(lsn: Lsn, primary: Primary) -> str:
    """Message for a server that lacks WAL of its own that the safekeepers hold."""
    return (
        f"the safekeepers hold WAL up to {format_lsn(lsn)}, this server ends at "
        f"{format_lsn(primary.flush_lsn)}: it was restored, or lost flushed WAL"
    )


def timeline(greetings: Iterable[SafekeeperGreeting], primary: Primary | None) -> int:
    """The timeline to vote for: the primary's; a failover continues the current one."""
    if primary is not None:
        return primary.lineage.timeline
    return max((greeting.timeline for greeting in greetings), default=0)
