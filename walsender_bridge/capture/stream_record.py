"""The position of a stream without a writer: from the log, or, while that does not run, from capture's status file."""

from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.capture.source import LogPosition
from walsender_bridge.capture.status_record import KeptPosition
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.runtime import status_file

#: Seconds that the log has to answer before capture's status file is used instead.
_ANSWER_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class KnownPosition:
    """The committed position of a stream. `behind`: the slot may have been confirmed further since."""

    log: LogPosition
    behind: bool = False


def ask(address: str, written: Path | None, stream: str) -> KnownPosition | None:
    """The position from the log at `address`, or else from capture's status file `written`; None if neither has one."""
    try:
        with LogClient(address, timeout=_ANSWER_SECONDS) as log:
            position = of_log(log, stream)
    except TusklineError:
        status = None if written is None else status_file.read(written, KeptPosition)
        return None if status is None else of_status(status)
    return None if position is None else KnownPosition(position)


def of_log(log: LogClient, stream: str) -> LogPosition | None:
    """The committed position in the log; None if there is no such stream. Raises the errors of the log's services."""
    cut = log.status().streams.get(stream)
    if cut is None:
        return None
    with StreamReader.of(cut) as reader:
        status = reader.status()
    timeline = cut.timeline if cut.last_end_lsn else 0
    return LogPosition(timeline, cut.last_end_lsn, status.confirmed_to, status.system_id)


def of_status(status: KeptPosition) -> KnownPosition | None:
    """The position in capture's status; None if no session has started yet."""
    if not status.confirmed_lsn:
        return None
    confirmed = WalPosition(status.timeline, status.confirmed_lsn)
    position = LogPosition(status.timeline, status.committed_lsn, confirmed, status.system_id)
    return KnownPosition(position, behind=status.behind)
