"""Where a laggard's WAL comes from, when one source after the other has it no more."""

from walsender_bridge.proposer import effects as e
from walsender_bridge.proposer.peer import Peer, PeerState
from walsender_bridge.proposer.streaming import Streaming
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration
from walsender_bridge.safekeeper.history import EpochEntry, History

SEGMENT = 100


def lagging() -> tuple[Streaming, Peer]:
    """Three safekeepers: 11 and 12 have [100, 5000), 13 ends at 200; the primary keeps from 4900 on."""
    peers = {number: Peer(number) for number in range(3)}
    members = frozenset({11, 12, 13})
    for number, peer in peers.items():
        peer.greeting = m.SafekeeperGreeting(
            11 + number, m.ServerInfo(), m.NodeId(), Configuration(1, members), 0, 0, 1
        )
        peer.begin_lsn = 100
    streaming = Streaming(
        peers,
        Configuration(1, members),
        History((EpochEntry(1, 100, 1),)),
        epoch_start=100,
        commit_lsn=100,
        restart_lsn=100,
        segment_size=SEGMENT,
        limits=e.Limits(queue_bytes=50, inflight_bytes=50, append_bytes=50, max_laggard_bytes=1000),
        primary_begin=100,
    )
    streaming.end = streaming.queue_begin = 5000
    streaming.primary_begin = 4900
    for number in (0, 1):
        streaming.start(peers[number], 5000)
    streaming.received(5000, 5000)
    assert streaming.rebuild == {13}
    assert streaming.restart_lsn == 5000
    return streaming, peers[2]


def test_27_a_laggard_whose_wal_everybody_has_removed_is_rebuilt():
    streaming, laggard = lagging()
    done = streaming.start(laggard, 200)
    tried = []
    for _ in range(10):
        if laggard.state != PeerState.STREAMING:
            break
        for effect in done:
            if isinstance(effect, e.ReadWal):
                tried.append(effect.donor)
                done = streaming.was_read(laggard, effect.begin_lsn, effect.begin_lsn)  # it failed
                break
        else:
            done = streaming.heartbeat()
    # Each of the others once: what one has removed it does not get back.
    assert tried == [0, 1]
    assert laggard.state == PeerState.AWAY
    assert not streaming.can_feed(200)


def test_8_a_donor_that_still_has_it_feeds_the_laggard():
    streaming, laggard = lagging()
    (read,) = [x for x in streaming.start(laggard, 200) if isinstance(x, e.ReadWal)]
    assert (read.source, read.donor) == (e.Source.PEER, 0)
    done = streaming.was_read(laggard, 200, read.end_lsn)
    assert e.SendWal(2, 200, 250, 5000, 5000) in done
