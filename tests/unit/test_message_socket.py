"""One end of a safekeeper's connection, against a plain socket."""

import socket

from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.frames import encode
from walsender_bridge.quorum.protocol.message_socket import WireEnd


def test_27_an_answer_without_wal_is_sent_like_any_other():
    ours, theirs = socket.socketpair()
    end = WireEnd(ours, "a test")
    gone, after = m.Fetched(3, 100, 0), m.AppendAck(3, 200, 100)
    end.send(gone, [memoryview(b"")])
    end.send(after)
    end.flush()
    assert not end.sending
    assert theirs.recv(4096) == encode(gone) + encode(after)
    end.close()
    theirs.close()
