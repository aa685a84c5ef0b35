"""What the log shows of itself, and the streams whose replica is silent because of its disk.

The log's client takes longer to import than a look takes: it is imported once something answers.
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
    from walsender_bridge.change_log.client import LogStatus
    from walsender_bridge.config import Config

#: Seconds for an answer. A log server that does not answer is told elsewhere.
_ANSWER = 3.0


def look(settings: "Config") -> "LogStatus":
    """What the repository says. Raises `UnavailableError`."""
    if listening.is_refused(settings.log.listen, seconds=_ANSWER):
        raise UnavailableError(
            "does not answer", where=settings.log_address, repair="see that it runs there"
        )
    from walsender_bridge.change_log.client import LogClient

    with LogClient(settings.log_address, timeout=_ANSWER) as log:
        return log.status()


def damaged(status: "LogStatus") -> TusklineError | None:
    """What the log servers say of the first damaged stream."""
    from walsender_bridge.change_log.client import ReplicaClient

    for stream, cut in status.streams.items():
        try:
            with ReplicaClient(cut.address, timeout=_ANSWER) as replica:
                replica.stream_status(stream)
        except (CorruptError, InvalidReplicaError) as error:
            return error
        except UnknownStreamError:
            # One that has just been made is not on its log server yet.
            if cut.end_offset > 1:
                from walsender_bridge.change_log.repository.stream_faults import REPAIR

                what = f"the log server has lost stream {stream}, which is committed up to {cut.end_offset}"
                return CorruptError(what, where=cut.address, repair=REPAIR)
        except TusklineError:
            continue
    return None
