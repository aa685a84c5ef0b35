"""The status of the log, the replicas of its streams, and the first damaged one.

Importing the log's client takes longer than the query: it is imported once something answers.
"""

from typing import TYPE_CHECKING

from walsender_bridge.errors import (
    CorruptError,
    InvalidReplicaError,
    TusklineError,
    UnavailableError,
    UnknownStreamError,
)
from walsender_bridge.runtime import listening

if TYPE_CHECKING:
    from collections.abc import Iterable

    from walsender_bridge.change_log.client import LogStatus, StreamCut
    from walsender_bridge.change_log.repository_messages import DescribeAnswer, StreamDescription
    from walsender_bridge.config import Config
    from walsender_bridge.observability.replica_view import StreamReplicas

#: Seconds to wait for an answer. A log server that does not answer is reported elsewhere.
_ANSWER = 3.0


def log_status(settings: "Config") -> "LogStatus":
    """The status that the metadata repository reports. Raises `UnavailableError`."""
    if all(listening.is_refused(each, seconds=_ANSWER) for each in settings.repository_listens):
        raise UnavailableError(
            "the log does not answer",
            where=settings.log_address,
            repair="start it (tuskline up), or correct [log] listen or repositories",
        )
    from walsender_bridge.change_log.client import LogClient

    with LogClient(settings.log_address, timeout=_ANSWER) as log:
        return log.status()


def described(settings: "Config") -> "DescribeAnswer":
    """The whole state of the log, as the repository has it. Raises `UnavailableError`."""
    from walsender_bridge.change_log.operator_client import OperatorLog

    with OperatorLog(settings.log_address, timeout=_ANSWER) as log:
        return log.describe()


def as_configured(
    settings: "Config", streams: "Iterable[StreamDescription]"
) -> "tuple[StreamReplicas, ...]":
    """The replicas of these streams, compared with the configuration where that names all log servers."""
    from walsender_bridge.observability import replica_view

    if "repository" not in settings.parts:
        # Elsewhere, the configuration need not name all log servers.
        return replica_view.of_streams(streams, None)
    configured = {each.listen for each in settings.log_server}
    return replica_view.of_streams(streams, settings.replicas, configured)


def damaged(status: "LogStatus") -> TusklineError | None:
    """The error of the first damaged replica, as its log server reports it."""
    replicas = ((cut, address) for cut in status.streams.values() for address in cut.addresses)
    found = (_damage(cut, address) for cut, address in replicas)
    return next((error for error in found if error is not None), None)


def _damage(cut: "StreamCut", address: str) -> TusklineError | None:
    from walsender_bridge.change_log.client import ReplicaClient

    try:
        with ReplicaClient(address, timeout=_ANSWER) as replica:
            replica.stream_status(cut.stream)
    except (CorruptError, InvalidReplicaError) as error:
        return error
    except UnknownStreamError:
        # A stream that was just created is not on its log server yet.
        if cut.end_offset > 1:
            from walsender_bridge.change_log.repository.stream_faults import REPAIR

            what = f"the log server has lost stream {cut.stream}, which is committed up to {cut.end_offset}"
            return CorruptError(what, where=address, repair=REPAIR)
    except TusklineError:
        return None
    return None
