"""Trimming on an operator's request: `tuskline log trim`. What a consumer's lease holds is not trimmed.

The decision is pure, and made while the state is locked; the log servers are asked afterwards, one after the other, which may
take seconds each. So it is made again before each of them is told to trim, and recorded: a lease may have been granted meanwhile, or
another repository may lead.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from walsender_bridge.change_log import log_server_messages as of_log_server
from walsender_bridge.change_log import repository_messages as m
from walsender_bridge.change_log.actions import Empty
from walsender_bridge.change_log.repository import status
from walsender_bridge.change_log.repository.core import Repository, StreamCommit
from walsender_bridge.change_log.repository.log_server_link import LogServerLink
from walsender_bridge.errors import TusklineError, UnavailableError, UsageError
from walsender_bridge.runtime.error_record import ErrorRecord

#: A time later than that of any commit (microseconds).
_FOREVER: Final = 2**62
#: Seconds: a hundred years.
_LONGEST: Final = 100 * 365 * 86_400.0
_START_IT: Final = "check that `tuskline log-server run` is running there, and see its output"


@dataclass(frozen=True, slots=True)
class TrimOrder:
    """What may be trimmed. `up_to`: a local offset. `version`: only commits up to this one, which the replicas know better.

    `before_time`, `now`: see `HostedReplica.trim_point`. `replicas`: their log servers, with their addresses.
    """

    stream: str
    up_to: int
    version: int | None
    before_time: int
    now: int
    replicas: dict[str, str]
    held_by: tuple[m.Holder, ...]


def decide(state: Repository, request: m.TrimStreamRequest, now: float) -> TrimOrder:
    """What may be trimmed of an existing stream.

    Raises `UsageError` if a version is named that cannot be read yet, or a part of it is held by a lease.
    """
    name, version, older_than = request.stream, request.to_version, request.older_than
    if older_than is not None and not 0 <= older_than < _LONGEST:
        raise UsageError(f"{older_than} s is not between 0 and {_LONGEST:.0f} s")
    stream = state.streams[name]
    if version is not None and version > state.published:
        raise UsageError(
            f"version {version} cannot be read yet; the newest is {state.published}",
            where=f"stream {name}",
            repair=f"name a version up to {state.published}, or leave --to-version out",
        )
    at = stream.at(state.published if version is None else version)
    held_by = _holders(state, name, at or version, now)
    if version is not None and held_by:
        raise _held(name, version, held_by)
    limit = state.trim_limit(name, now)
    before_time, latest = _FOREVER, _FOREVER
    if older_than is not None:
        before_time, latest = int((now - older_than) * 1e6), int(now * 1e6)
    return TrimOrder(
        stream=name,
        up_to=limit if at is None else min(limit, at.context.end),
        # Without that history, a replica's index knows where the version ends; nobody with a lease needs it.
        version=version if at is None else None,
        before_time=max(before_time, 0),
        now=latest,
        replicas={each: state.log_servers.get(each, "") for each in stream.replicas},
        held_by=held_by,
    )


def _holders(
    state: Repository, name: str, upto: StreamCommit | int | None, now: float
) -> tuple[m.Holder, ...]:
    """The consumers that need entries of a commit or before it, the one that needs the most first.

    `upto`: the commit, or of one further back than the history, a version at which it was in effect.
    """
    stream = state.streams[name]
    found = []
    for consumer, lease in state.consumers.items():
        offset = status.needed(stream, lease).offset
        if isinstance(upto, StreamCommit):
            needs = offset < upto.context.end
        else:
            needs = (lease.version or 0) < (upto or 0)
        if lease.until > now and needs:
            found.append(m.Holder(consumer, lease.version, offset, lease.until - now))
    return tuple(sorted(found, key=lambda each: (each.offset, each.consumer)))


def _held(name: str, version: int, held_by: tuple[m.Holder, ...]) -> UsageError:
    first = held_by[0]
    has = "nothing yet" if first.version is None else f"version {first.version} only"
    others = f", and {len(held_by) - 1} other consumers" if len(held_by) > 1 else ""
    return UsageError(
        f"cannot trim to version {version}: consumer {first.consumer!r:.210} has published {has},"
        f" and its lease holds the entries from {first.offset} on{others}",
        where=f"stream {name}",
        repair="without --to-version, what no lease holds is trimmed; a lease ends when its consumer has stopped for the"
        f" duration of the lease ({first.lease_seconds:.0f} s from now)",
    )


def perform(
    decided: Callable[[], TrimOrder],
    recorded: Callable[[str, int], of_log_server.TrimRequest],
    log_servers: Iterable[LogServerLink],
) -> m.TrimStreamAnswer:
    """Have each replica trim. Raises `UnavailableError` if none of its log servers answers.

    `decided`: what may be trimmed now; it raises what forbids that, and `NotLeaderError` if another repository may lead.
    `recorded`: the request for a trim of a stream up to an offset at most, once that is recorded.
    """
    order = decided()
    links = {link.log_server_id: link for link in log_servers}
    if not any(replica in links for replica in order.replicas):
        raise UnavailableError(
            "no log server with a replica of the stream answers",
            where=f"stream {order.stream}",
            repair=_START_IT,
        )
    replicas = []
    for replica, address in order.replicas.items():
        try:
            if replica not in links:
                raise UnavailableError(
                    "log server does not answer", where=address, repair=_START_IT
                )
            replicas.append(_trimmed(order, decided, recorded, replica, links[replica]))
        except TusklineError as error:
            record = ErrorRecord.of(error)
            replicas.append(m.TrimmedReplica(replica, address, 0, 0, 0, 0, record))
    return m.TrimStreamAnswer(order.up_to, tuple(replicas), order.held_by)


def _trimmed(
    order: TrimOrder,
    decided: Callable[[], TrimOrder],
    recorded: Callable[[str, int], of_log_server.TrimRequest],
    replica: str,
    link: LogServerLink,
) -> m.TrimmedReplica:
    before = _described(order.stream, link)
    up_to = order.up_to
    if order.version is not None:
        request = of_log_server.CutBeforeRequest(order.stream, order.version + 1)
        cut = link.call(of_log_server.CUT_BEFORE, request).cut
        up_to = min(up_to, 1 if cut is None else cut.end_offset)
    up_to = min(up_to, decided().up_to)
    asked = of_log_server.TrimPointRequest(order.stream, up_to, order.before_time, order.now)
    point = link.call(of_log_server.TRIM_POINT, asked).up_to
    link.call(of_log_server.TRIM, recorded(order.stream, point))
    after = _described(order.stream, link)
    low = after.status.low_offset if after.status else 0
    entries = low - before.status.low_offset if before.status and after.status else 0
    known = before.low_bytes is not None and after.low_bytes is not None
    freed = (after.low_bytes or 0) - (before.low_bytes or 0) if known else 0
    disk = before.disk_bytes - after.disk_bytes
    return m.TrimmedReplica(replica, link.address, low, entries, freed, max(disk, 0), None)


def _described(stream: str, link: LogServerLink) -> of_log_server.ReplicaDescription:
    for each in link.call(of_log_server.REPLICAS, Empty()).replicas:
        if each.stream == stream:
            if each.status is None:
                raise UnavailableError(
                    f"the replica cannot be read: {each.reason.splitlines()[0]}",
                    where=f"stream {stream}, {link.address}",
                )
            return each
    raise UnavailableError(
        "the log server has no replica of the stream",
        where=f"stream {stream}, {link.address}",
        repair="see `tuskline log status`",
    )
