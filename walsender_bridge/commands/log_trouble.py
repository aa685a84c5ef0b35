"""Streams whose replica is silent because something on its disk is not what was written, or is not there."""

from walsender_bridge.change_log.client import LogStatus, ReplicaClient
from walsender_bridge.change_log.stream_faults import REPAIR
from walsender_bridge.errors import (
    CorruptError,
    InvalidReplicaError,
    TusklineError,
    UnknownStreamError,
)

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
        except UnknownStreamError:
            # One that has just been made is not on its keeper yet.
            if cut.end_offset > 1:
                what = f"the keeper has lost stream {stream}, which is committed up to {cut.end_offset}"
                return CorruptError(what, where=cut.address, repair=REPAIR)
        except TusklineError:
            continue
    return None
