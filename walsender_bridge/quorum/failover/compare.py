"""Whether the candidate's WAL below VCL is the quorum's: its last bytes, compared with those that a safekeeper serves.

The range ends with what the candidate and the quorum both have. It stays within the segment of its last byte, since a
standby may have removed the one before, and it begins where the WAL of the voters begins: nobody can compare what no
voter holds (`same_wal.py` has the same rule for a primary).

Nothing is left to compare if every voter began its log anew exactly where the range ends. That is safe as far as it
goes: the quorum then holds nothing that could contradict the candidate, and what the candidate lacks above continues
its last record, or its recovery stops there (each record names where the one before it began). A safekeeper therefore
keeps the segment of its last byte (`horizon.py`), so that this is an exception, and the log has a warning of it.

The WAL servers of `upstream` are asked one after another: one whose safekeeper was just replaced, or did a full resync,
may lack a segment that the others have.
"""

from collections.abc import Callable

from walsender_bridge.errors import (
    ConnectionFailedError,
    DivergedError,
    SlotError,
    TrimmedError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.client.hosts import each_host
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.failover.plan import PromotionCandidate
from walsender_bridge.quorum.proposer.catch_up.wal_range import read_range
from walsender_bridge.quorum.proposer.primary.wal_source import StandbyStream
from walsender_bridge.runtime import logs

_log = logs.logger()


def compared_range(
    candidate: PromotionCandidate,
    vcl: Lsn,
    held_from: Lsn,
    compare_bytes: int,
    segment_size: int,
) -> tuple[Lsn, Lsn]:
    """[begin, end) of the WAL to compare; empty: there is none. `held_from`: where the oldest WAL of a voter begins.

    Raises `TrimmedError` if the candidate ends below that, and has nothing else to get the WAL from.
    """
    end = min(candidate.end_lsn, vcl)
    if end < held_from and not candidate.restores:
        raise TrimmedError(
            f"the standby ends at {format_lsn(end)}, and the WAL of the safekeepers that answer begins at"
            f" {format_lsn(held_from)}: it cannot receive what it lacks",
            repair="choose a standby that has more, or start the safekeepers that are away, and run this again",
        )
    segment = (end - 1) - (end - 1) % segment_size
    # A server sends one timeline at a time.
    left = [switch.lsn for switch in candidate.lineage.switches if switch.lsn < end]
    return min(end, max([end - compare_bytes, segment, held_from, *left])), end


def compare(
    dsn: str, upstream: str, begin: Lsn, end: Lsn, timeline: int, check: Callable[[], None]
) -> None:
    """Compare [begin, end) of the candidate at `dsn` with what a WAL server of `upstream` has.

    Raises `DivergedError` if the bytes differ, `TrimmedError`, what `check` raises, and errors of the servers.
    """
    if begin == end:
        _log.warning(
            "no safekeeper holds WAL to compare the candidate's with", below=format_lsn(end)
        )
        return
    with StandbyStream.connect(dsn) as own:
        where = own.where
        try:
            held = read_range(own, begin, end, timeline, check)
        except SlotError as error:
            raise TrimmedError(
                f"the standby has removed its WAL below {format_lsn(end)}, which is to be compared: {error.what}",
                where=where,
                repair="choose another standby, or rebuild this one from a base backup",
            ) from None
    if held != _quorums(upstream, begin, end, timeline, check):
        raise DivergedError(
            f"the standby's WAL below {format_lsn(end)} differs from the safekeepers' WAL",
            where=where,
            repair="choose another standby, or rebuild this one from a base backup",
        )


def _quorums(
    upstream: str, begin: Lsn, end: Lsn, timeline: int, check: Callable[[], None]
) -> bytes:
    """The range, from the first WAL server that has it.

    Raises what `check` raises; an error after which it is tried again, if there is one; `TrimmedError` if none has it.
    """
    errors: list[TusklineError] = []
    for dsn in each_host(upstream):
        try:
            with StandbyStream.connect(dsn, replication="true") as theirs:
                return read_range(theirs, begin, end, timeline, check)
        except TusklineError as error:
            check()
            errors.append(error)
    # A safekeeper that has just started does not know yet what is committed: it refuses, and is asked again.
    errors.sort(key=lambda error: not isinstance(error, ConnectionFailedError | UnavailableError))
    if isinstance(errors[0], SlotError):
        raise TrimmedError(
            f"no WAL server of upstream has the WAL from {format_lsn(begin)} to {format_lsn(end)}, which another"
            f" safekeeper holds: {errors[0].what}",
            where=errors[0].where,
            repair="name the WAL servers of all safekeepers in upstream, and run this again",
        )
    raise errors[0]
