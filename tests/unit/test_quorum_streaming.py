"""Where a laggard's WAL comes from, when one source after the other has it no more."""

from dataclasses import replace

from walsender_bridge.quorum.proposer import effects as e
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry

SEGMENT = 100


def lagging() -> tuple[Streaming, SafekeeperPeer]:
    """Three safekeepers: 11 and 12 have [100, 5000), 13 ends at 200; the primary keeps from 4900 on."""
    peers = {number: SafekeeperPeer(number) for number in range(3)}
    members = frozenset({11, 12, 13})
    for number, peer in peers.items():
        peer.greeting = m.SafekeeperGreeting(
            11 + number, m.ServerInfo(), m.NodeId(), Configuration(1, members), 0, 0, 1
        )
        peer.begin_lsn = 100
    streaming = Streaming(
        peers,
        Configuration(1, members),
        History((HistoryEntry(1, 100, 1),)),
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
    assert (read.source, read.donor) == (e.WalSource.PEER, 0)
    done = streaming.was_read(laggard, 200, read.end_lsn)
    assert e.SendWal(2, 200, 250, 5000, 5000) in done


def test_12_who_has_the_most_is_asked_first_for_one_that_hangs_falls_behind():
    streaming, laggard = lagging()
    streaming.received(5000, 5010)
    streaming.acknowledged(streaming.peers[1], 5010)
    (read,) = [x for x in streaming.start(laggard, 200) if isinstance(x, e.ReadWal)]
    assert (read.source, read.donor) == (e.WalSource.PEER, 1)


def test_8_a_donor_that_holds_a_segment_damaged_is_asked_for_others_alone():
    streaming, laggard = lagging()
    asked, done = [], streaming.start(laggard, 250)
    while laggard.sent_lsn < 350:
        (read,) = [x for x in done if isinstance(x, e.ReadWal)]
        asked.append((read.donor, read.begin_lsn, read.end_lsn))
        end = read.begin_lsn if (read.donor, read.begin_lsn // SEGMENT) == (0, 2) else read.end_lsn
        done = streaming.was_read(laggard, read.begin_lsn, end)
        streaming.peers[0].begin_lsn = 100  # what it says all the time
        done += streaming.acknowledged(laggard, laggard.sent_lsn) or streaming.heartbeat()
    assert asked == [(0, 250, 300), (1, 250, 300), (0, 300, 350)]


def test_8_a_donor_that_connects_again_is_asked_again():
    streaming, laggard = lagging()
    donor = streaming.peers[0]
    streaming.start(laggard, 200)
    donor.closed()
    done = streaming.was_read(laggard, 200, 200) + streaming.heartbeat()
    assert [x.donor for x in done if isinstance(x, e.ReadWal)] == [1]
    donor.state = PeerState.STREAMING
    assert streaming.source(200, 250) == (e.WalSource.PEER, 250, 0)


def test_8_the_full_disk_of_a_replaced_safekeeper_lets_no_laggard_go():
    streaming, laggard = lagging()
    streaming.rebuild = frozenset()
    streaming.limits = replace(streaming.limits, max_laggard_bytes=1 << 30, full_ticks=1)
    streaming.disk_full(streaming.peers[0])
    members = streaming.configuration.members
    streaming.use(Configuration(2, members, (members - {11}) | {14}))
    assert streaming.full == {11: 5000}  # it counts until the change is complete
    streaming.use(Configuration(3, (members - {11}) | {14}))
    streaming.received(5000, 5050)
    for _ in range(10):
        streaming.heartbeat()
    assert laggard.identity not in streaming.rebuild
