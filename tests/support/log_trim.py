"""Have a log server forget, whoever still needs it."""

from pyarrow import flight

from tests.support.capture_stack import ChangeLog
from tests.support.waiting import wait_for
from walsender_bridge.change_log import actions
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.log_server_messages import TRIM, TrimRequest
from walsender_bridge.change_log.protocol import MAX_COUNT


def trim(log: ChangeLog, stream: str, low: int | None = None) -> int:
    """Have the log server forget what lies below `low` (None: all that is committed); the first that is kept."""
    with LogClient(log.address) as client:
        cut = client.status().streams[stream]
        low = cut.end_offset if low is None else low
        log_server = flight.FlightClient(cut.addresses[0])
        request = TrimRequest(stream, low, MAX_COUNT)

        def trimmed() -> bool:
            # Again and again: a log server trims no further than the commits that it has learned of.
            actions.call(log_server, cut.addresses[0], TRIM, request, 10.0)
            return client.status().streams[stream].low_offset == low

        wait_for(trimmed, 30, "the trim")
        log_server.close()
    return low
