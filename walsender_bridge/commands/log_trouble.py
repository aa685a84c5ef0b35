"""Streams whose replica is silent because something on its disk is not what was written."""

from walsender_bridge.change_log.client import LogStatus, ReplicaClient
from walsender_bridge.errors import CorruptError, InvalidReplicaError, TusklineError

#: Seconds for a keeper's answer: one that does not answer is told elsewhere.
_ANSWER = 3.0


def damaged(status: LogStatus) -> TusklineError | None:
    """What the keepers say of the first damaged stream."""
    for stream, cut in status.streams.items():
        try:
            with ReplicaClient(cut.address, timeout=_ANSWER) as replica:
                replica.stream_status(stream)
        except (CorruptError, InvalidReplicaError) as error:
            return error
        except TusklineError:
            continue
    return None
