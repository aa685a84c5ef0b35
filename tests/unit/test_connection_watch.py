"""The watch over a service's connections looks at the process and its sockets in the order that the limits need."""

import pytest

from walsender_bridge.change_log.calls import Calls
from walsender_bridge.change_log.connection_limits import GROWN_BYTES, HEAD_BYTES
from walsender_bridge.change_log.connection_watch import ConnectionWatch
from walsender_bridge.runtime import processes, tcp_connections
from walsender_bridge.runtime.tcp_connections import TcpConnection


def test_39_what_arrives_during_a_look_is_no_part_of_what_the_process_was_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes that arrived behind the look at the sockets had grown the process in the same look, which then was its usual size."""
    arrived = 0
    ended: list[TcpConnection] = []

    def accepted(_: int) -> list[TcpConnection]:
        nonlocal arrived
        found = TcpConnection(7, 8, "127.0.0.1 9", received=arrived, sent=0)
        arrived = 2 * HEAD_BYTES
        return [found]

    def own_size() -> tuple[int, int]:
        return (10 << 20) + (2 * GROWN_BYTES if arrived else 0), 20

    monkeypatch.setattr(tcp_connections, "accepted", accepted)
    monkeypatch.setattr(tcp_connections, "keep_alive", lambda _: None)
    monkeypatch.setattr(tcp_connections, "shut_down", ended.append)
    monkeypatch.setattr(processes, "own_size", own_size)
    watch = ConnectionWatch(1, Calls())
    watch._look()
    assert not ended
    watch._look()
    watch._look()
    assert ended
