"""Both ends of a safekeeper's connection with TLS: frames longer than a record and than the socket's buffers."""

import select
import socket

import pytest

from tests.support.tls import HOSTS, Authority
from walsender_bridge.errors import AuthenticationError
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.frames import MAX_WAL_BYTES
from walsender_bridge.quorum.protocol.tls_wire import TlsWireEnd
from walsender_bridge.runtime.tls_context import TlsContext


@pytest.fixture
def ends(tmp_path):
    authority = Authority(tmp_path)
    ours, theirs = socket.socketpair()
    server = TlsContext(authority.issue("safekeeper", hosts=HOSTS), server=True)
    client = TlsContext(authority.issue("proposer"))
    pair = (
        TlsWireEnd(ours, "the safekeeper", client, "localhost"),
        TlsWireEnd(theirs, "the proposer", server),
    )
    yield pair
    for end in pair:
        end.close()


def turn(*ends):
    """What their loops do with what poll shows; False: it shows nothing."""
    poll = select.poll()
    for end in ends:
        poll.register(end, end.events)
    ready = dict(poll.poll(0))
    for end in ends:
        if ready.get(end.fileno(), 0) & select.POLLIN:
            end.receive()
        if ready.get(end.fileno(), 0) & select.POLLOUT:
            end.flush()
    return bool(ready)


@pytest.mark.parametrize("every", [1, 400], ids=["taken at once", "taken when it is full"])
def test_wal_arrives_whole_and_nothing_waits_where_poll_does_not_see_it(ends, every):
    proposer, safekeeper = ends
    wal = bytes(range(256)) * (MAX_WAL_BYTES // 256)
    # The first three are a little longer than the buffer.
    pieces = [wal, wal, wal[:100_001]]
    if every == 1:
        pieces += [wal[:1], b"", wal[: 16 << 10], wal]
    for piece in pieces:
        proposer.send(m.Append(1, 0, 0, 0, len(piece)), [memoryview(piece)])
    proposer.flush()
    safekeeper.trust()
    arrived: list[bytes] = []
    while len(arrived) < len(pieces):
        for _ in range(every):
            shown = turn(proposer, safekeeper)
        found = [bytes(body) for _, body in safekeeper.frames()]
        assert shown or found, "nothing to poll for, and frames are missing"
        arrived += found
    assert arrived == pieces
    assert not proposer.sending


def test_nothing_is_sent_before_the_handshake_and_nothing_spins(ends):
    """While the peer is silent, the socket is writable, and there is nothing to write."""
    proposer, safekeeper = ends
    proposer.send(m.ProposerGreeting(m.ServerInfo(1, 16, 1 << 20), 0))
    proposer.flush()
    assert proposer.events == select.EPOLLIN
    assert not turn(proposer)
    assert proposer.sending
    while turn(proposer, safekeeper):
        pass
    assert [header.kind.name for header, _ in safekeeper.frames()] == ["PROPOSER_GREETING"]
    assert safekeeper.holder.name == "proposer"


def test_a_name_that_was_not_dialled_is_refused_on_both_sides(tmp_path):
    authority = Authority(tmp_path)
    ours, theirs = socket.socketpair()
    context = TlsContext(authority.issue("safekeeper", hosts=("localhost",)), server=True)
    proposer = TlsWireEnd(ours, "it", TlsContext(authority.issue("proposer")), "127.0.0.1")
    safekeeper = TlsWireEnd(theirs, "it", context)
    proposer.flush()
    safekeeper.receive()
    with pytest.raises(AuthenticationError, match="IP address mismatch"):
        proposer.receive()
    with pytest.raises(AuthenticationError, match="refused this certificate"):
        safekeeper.receive()
    proposer.close()
    safekeeper.close()
