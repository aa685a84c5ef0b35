"""Transactions that come while they are in progress: what is spooled, and how it goes into the log."""

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import pgoutput_messages as pg
from tests.support.capture_model import Replica, keepalive, messages_of, schema, xlog
from walsender_bridge.capture import core, events
from walsender_bridge.capture.spool import core as spool
from walsender_bridge.change_log import entry
from walsender_bridge.errors import CorruptError, DivergedError, MalformedMessageError, SpoolError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition

T, U = 16385, 16390
COMMIT = 1000
END = COMMIT + pg.COMMIT_RECORD


def row(number: int, oid: int = T, width: int = 10) -> bytes:
    return pg.insert(oid, [b"%d" % number, b"x" * width])


def block(xid: int, *messages: tuple[int, bytes], first: bool = True) -> list[bytes]:
    """A block of these messages, each with its (sub)transaction."""
    inside = [pg.in_block(subxid, message) for subxid, message in messages]
    return [pg.stream_start(xid, first=first), *inside, pg.stream_stop()]


def described(xid: int, oid: int = T, generation: int = 0) -> list[tuple[int, bytes]]:
    return [(xid, message) for message in schema(oid, generation)]


@dataclass
class Session:
    """A core with a replica that answers at once, and spool files in memory."""

    state: core.CaptureState = field(
        default_factory=lambda: core.CaptureState(
            timeline=1,
            logged_lsn=0,
            committed_lsn=0,
            previous_crc=0,
            confirmed=WalPosition(1, 100),
            now=0.0,
        )
    )
    files: dict[int, bytes] = field(default_factory=dict)
    replica: Replica = field(
        default_factory=lambda: Replica(confirmed_to=WalPosition(1, 100), gate=MAX_LSN)
    )
    #: How many messages of a spool file are given back at a time.
    portion: int = 3
    reports: int = 0
    #: Schema records in the order in which the log was given them.
    schemas: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.perform(core.step(self.state, events.CaptureTick(0.0, MAX_LSN)))

    def perform(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, events.SpoolAppend):
                self.files[effect.xid] = self.files.get(effect.xid, b"") + effect.data
            elif isinstance(effect, events.SpoolCut):
                self.files[effect.xid] = self.files[effect.xid][: effect.length]
                if not effect.length:
                    del self.files[effect.xid]
            elif isinstance(effect, events.AppendToReplica):
                self.schemas += effect.schemas
                self.replica.append(effect)
                self.replica.tick()
                self.perform(core.step(self.state, self.replica.acknowledge(self.state.now)))
            else:
                self.reports += 1

    def receive(self, *messages: bytes, now: float = 0.0) -> None:
        """The messages arrive; then everything that was spooled and has committed is replayed."""
        self.take([xlog(message) for message in messages], now)

    def take(self, payloads: list[bytes], now: float = 0.0) -> None:
        self.perform(core.step(self.state, events.CopyDataReceived(now, payloads)))
        self.replay(now)

    def replay(self, now: float = 0.0) -> None:
        parts: Iterator[list[bytes]] | None = None
        while (xid := self.state.replaying) is not None:
            if parts is None:
                messages, used = spool.split(self.files[xid], len(self.files[xid]))
                assert used == len(self.files[xid])
                parts = iter(
                    [
                        messages[at : at + self.portion]
                        for at in range(0, len(messages), self.portion)
                    ]
                )
            before = self.state.replay
            self.perform(core.step(self.state, events.Replayed(now, next(parts))))
            if self.state.replay is not before:
                parts = None

    def log(self) -> list[bytes]:
        """Every message in the log, after what waits for time."""
        self.perform(core.step(self.state, events.CaptureTick(self.state.now + 0.03, MAX_LSN)))
        return self.replica.messages()


def test_a_streamed_transaction_is_in_the_log_as_an_ordinary_one() -> None:
    session = Session()
    session.receive(*block(7, *described(7), (7, row(0)), (8, row(1))))
    assert session.log() == []
    assert list(session.files) == [7]
    session.receive(pg.begin(500, 9), *schema(U, 0), row(5, U), pg.commit(500, 548))
    session.receive(*block(7, (7, row(2)), first=False))
    session.receive(pg.stream_commit(7, COMMIT, END))
    assert session.log() == [
        *pg.transaction(500, 9, [row(5, U)]),
        *pg.transaction(COMMIT, 7, [row(0), row(1), row(2)]),
    ]
    assert not session.files
    assert session.state.streams.spooled_bytes == 0
    assert session.replica.last_end_lsn == END


def test_a_partition_in_a_block_is_named_with_its_row() -> None:
    session = Session()
    session.receive(
        *block(
            7, *described(7), (7, row(0)), (8, row(1)), *described(7), *described(7, U), (7, row(2))
        )
    )
    session.receive(pg.stream_commit(7, COMMIT, END))
    session.log()
    (data,) = session.replica.entries
    named = [
        (p.relation_id, messages_of(data)[p.number]) for p in entry.read_header(data).partitions
    ]
    assert named == [(U, row(2))]


def test_what_follows_a_commit_waits_for_the_replay() -> None:
    session = Session()
    state = session.state
    messages = [
        *block(7, *described(7), (7, row(0))),
        *block(8, *described(8), (8, row(1))),
        pg.stream_commit(7, COMMIT, END),
        *pg.transaction(2000, 9, [row(2)]),
        pg.stream_commit(8, 3000, 3048),
        *pg.transaction(4000, 10, [row(3)]),
    ]
    session.perform(core.step(state, events.CopyDataReceived(0.0, [xlog(m) for m in messages])))
    assert (state.replaying, state.reading) == (7, False)
    session.replay()
    assert (state.replaying, state.reading) == (None, True)
    assert session.log() == [
        *pg.transaction(COMMIT, 7, [row(0)]),
        *pg.transaction(2000, 9, [row(2)]),
        *pg.transaction(3000, 8, [row(1)]),
        *pg.transaction(4000, 10, [row(3)]),
    ]
    assert state.messages == len(messages)


def test_28_a_streamed_transaction_that_the_log_has_is_skipped() -> None:
    state = core.CaptureState(
        timeline=1,
        logged_lsn=END,
        committed_lsn=END,
        previous_crc=0,
        confirmed=WalPosition(1, 100),
        now=0.0,
    )
    session = Session(state)
    session.receive(*block(7, *described(7), (7, row(0))), pg.stream_commit(7, COMMIT, END))
    assert session.log() == []
    assert not session.files
    # The server takes the table's schema for known now.
    session.receive(*pg.transaction(END, 8, [row(1)]))
    assert session.log() == pg.transaction(END, 8, [row(1)])


def test_a_streamed_transaction_that_does_not_follow_the_log_is_a_divergence() -> None:
    state = core.CaptureState(
        timeline=1,
        logged_lsn=END,
        committed_lsn=END,
        previous_crc=0,
        confirmed=WalPosition(1, 100),
        now=0.0,
    )
    with pytest.raises(DivergedError):
        Session(state).receive(
            *block(7, *described(7), (7, row(0))), pg.stream_commit(7, COMMIT, END + 1)
        )


def test_30_an_aborted_transaction_leaves_nothing() -> None:
    session = Session()
    for parallel in (True, False):
        session.receive(*block(7, *described(7), (7, row(0)), (8, row(1))))
        assert session.files
        session.receive(pg.stream_abort(7, 7, parallel=parallel))
        assert not session.files
        assert session.log() == []
        assert session.state.streams.spooled_bytes == len(session.state.streams) == 0


def test_30_an_aborted_subtransaction_leaves_nothing() -> None:
    session = Session()
    session.receive(*block(7, *described(7), (7, row(0)), (8, row(1)), (9, row(2)), (8, row(3))))
    session.receive(pg.stream_abort(7, 9), pg.stream_abort(7, 8))
    session.receive(*block(7, *described(7), (10, row(4)), first=False))
    session.receive(pg.stream_commit(7, COMMIT, END))
    assert session.log() == pg.transaction(COMMIT, 7, [row(0), row(4)])


def test_30_of_all_subtransactions_aborted_only_a_position_stays() -> None:
    session = Session()
    session.receive(*block(7, *described(8), (8, row(1))), pg.stream_abort(7, 8))
    session.receive(*block(7, first=False), pg.stream_commit(7, COMMIT, END))
    assert session.log() == []
    assert not session.files
    assert session.state.idle_lsn == END


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["change", "change", "open", "release", "undo"]), max_size=40))
def test_30_subtransactions_nest_in_every_way(steps: list[str]) -> None:
    """Against a model that knows the nesting, which the server does not send; xids pass 2^32."""
    first = 2**32 - 5
    spooled = spool.Spooled(first)
    next_xid = [first + 1]
    # Open subtransactions: xid or None, xids of those inside that have ended, changes before.
    stack: list[tuple[list[int | None], list[int], int]] = [([first], [], 0)]
    kept: list[int] = []
    at = 0
    for step in steps:
        if step == "change":
            for own, _, _ in stack:
                if own[0] is None:
                    own[0] = next_xid[0]
                    next_xid[0] += 1
            xid = stack[-1][0][0]
            assert xid is not None
            spooled.enter(xid % 2**32, spooled.length)
            kept.append(at)
            at += 1
            spooled.length = len(kept)
        elif step == "open":
            stack.append(([None], [], len(kept)))
        elif len(stack) > 1:
            own, inside, before = stack.pop()
            ended = [*inside, *(xid for xid in own if xid is not None)]
            if step == "release":
                stack[-1][1].extend(ended)
                continue
            del kept[before:]
            for xid in ended:
                spooled.leave(xid % 2**32)
            assert spooled.length == len(kept)
        assert list(spooled.ages) == sorted(set(spooled.ages))
        assert list(spooled.starts) == sorted(spooled.starts)


def test_a_million_subtransactions_take_little_memory() -> None:
    spooled = spool.Spooled(7)
    for xid in range(8, 100_008):
        spooled.enter(xid, xid)
    assert len(spooled.ages) * (spooled.ages.itemsize + spooled.starts.itemsize) == 1_200_000
    spooled.enter(7, 200_000)
    assert len(spooled.ages) == 0


def test_a_schema_that_changes_inside_is_visible_only_inside() -> None:
    session = Session()
    ordinary = pg.transaction(500, 9, [row(1)])
    session.receive(ordinary[0], *schema(T, 0), *ordinary[1:])
    session.receive(*block(7, *described(7), (7, row(2)), *described(7, T, 1), (7, row(3))))
    session.receive(*pg.transaction(600, 10, [row(4)]))
    session.receive(pg.stream_abort(7, 7), *pg.transaction(700, 11, [row(5)]))
    session.log()
    assert schemas_of(session) == {1: 0, 4: 0, 5: 0}
    session.receive(*block(8, *described(8), (8, row(6)), *described(8, T, 2), (8, row(7))))
    session.receive(*pg.transaction(800, 12, [row(8)]))
    session.receive(pg.stream_commit(8, COMMIT, END))
    # The server does not send it again after the commit.
    session.receive(*pg.transaction(2000, 13, [row(9)]))
    session.log()
    assert schemas_of(session) == {1: 0, 4: 0, 5: 0, 8: 0, 6: 0, 7: 2, 9: 2}


def test_a_schema_that_came_later_outlives_the_commit_of_an_older_one() -> None:
    """ALTER PUBLICATION waits for nobody: a table has other columns while a transaction is open."""
    session = Session()
    session.receive(*block(7, *described(7), (7, row(0))))
    ordinary = pg.transaction(500, 9, [row(1)])
    session.receive(ordinary[0], *schema(T, 3), *ordinary[1:])
    session.receive(pg.stream_commit(7, COMMIT, END), *pg.transaction(2000, 10, [row(2)]))
    session.log()
    assert schemas_of(session) == {1: 3, 0: 0, 2: 3}
    # It is also the last that the log was given of this table.
    types, relation = schema(T, 3)
    assert session.schemas[-1] == entry.schema_record(relation, [types])


def test_a_schema_of_an_aborted_part_is_not_taken_for_known() -> None:
    session = Session()
    ordinary = pg.transaction(500, 9, [row(1)])
    session.receive(ordinary[0], *schema(T, 0), *ordinary[1:])
    session.receive(*block(7, (7, row(9, U)), first=True)[:1])
    session.receive(*(pg.in_block(7, m) for m in schema(U, 0)), pg.in_block(7, row(9, U)))
    session.receive(*(pg.in_block(8, m) for m in schema(T, 5)), pg.in_block(8, row(2)))
    session.receive(pg.stream_stop(), pg.stream_abort(7, 8), pg.stream_commit(7, COMMIT, END))
    session.receive(*pg.transaction(2000, 10, [row(3)]))
    session.log()
    assert schemas_of(session) == {1: 0, 9: 0, 3: 0}


def test_rows_in_a_block_need_a_schema_of_that_transaction() -> None:
    session = Session()
    ordinary = pg.transaction(500, 9, [row(1)])
    session.receive(ordinary[0], *schema(T, 0), *ordinary[1:])
    with pytest.raises(MalformedMessageError, match="schema is unknown"):
        session.receive(*block(7, (7, row(2))), pg.stream_commit(7, COMMIT, END))


def schemas_of(session: Session) -> dict[int, int]:
    """The generation of the schema that each row has in the log."""
    found = {}
    for data in session.replica.entries:
        hashes = {c.relation_id: c.schema_hash for c in entry.read_header(data).relations}
        for message in messages_of(data):
            if message[:1] == b"I":
                oid, size = (
                    *struct.unpack_from(">I", message, 1),
                    *struct.unpack_from(">I", message, 9),
                )
                for generation in range(9):
                    types, relation = schema(oid, generation)
                    if hashes[oid] == entry.schema_hash(entry.schema_record(relation, [types])):
                        found[int(message[13 : 13 + size])] = generation
    return found


def test_30_memory_is_bounded_by_a_piece_and_disk_by_the_limit() -> None:
    session = Session()
    session.state.streams = spool.Streams(limit=2 << 20)
    largest = 0
    session.receive(pg.stream_start(7, first=True), *(pg.in_block(7, m) for m in schema(T, 0)))
    payloads = [xlog(pg.in_block(7, row(1, width=1000))) for _ in range(1000)]
    for _ in range(2):
        effects = core.step(session.state, events.CopyDataReceived(0.0, payloads))
        sizes = [len(e.data) for e in effects if isinstance(e, events.SpoolAppend)]
        largest = max(largest, *sizes)
        session.perform(effects)
    assert spool.PIECE_BYTES <= largest <= spool.PIECE_BYTES + 1100
    with pytest.raises(SpoolError, match="spool_limit is 2097152") as refused:
        core.step(session.state, events.CopyDataReceived(0.0, payloads))
    assert "spool_limit" in refused.value.repair


def test_while_a_replay_waits_for_the_replica_reports_go_on() -> None:
    session = Session()
    noise = random.Random(1)
    rows = [pg.insert(T, [b"1", noise.randbytes(1 << 20)]) for _ in range(12)]
    session.receive(*block(7, *described(7), *((7, r) for r in rows)))
    state = session.state
    core.step(state, events.CopyDataReceived(0.0, [xlog(pg.stream_commit(7, COMMIT, END))]))
    messages, _ = spool.split(session.files[7], len(session.files[7]))
    given = 0
    while state.replaying is not None:
        core.step(state, events.Replayed(0.0, messages[given : given + 1]))
        given += 1
    assert given < len(messages)
    assert state.in_flight_bytes < core.REPLAY_BYTES + (2 << 20)
    heard = [core.step(state, events.CaptureTick(float(s), MAX_LSN)) for s in range(1, 6)]
    assert all(any(isinstance(e, events.StandbyStatusUpdate) for e in effects) for effects in heard)
    assert not state.reading


def test_a_keepalive_in_a_block_is_answered_and_confirms_nothing() -> None:
    session = Session()
    start, *inside, stop = map(xlog, block(7, *described(7), (7, row(0))))
    before = session.reports
    session.take([start, keepalive(9000, reply=True), *inside, keepalive(9000), stop])
    assert session.reports > before
    assert session.state.idle_lsn == 0
    # Between blocks all that commits below it has come: the transaction itself ends above it.
    session.take([keepalive(9000)])
    assert session.state.idle_lsn == 9000


def test_messages_of_transactions_and_of_none() -> None:
    session = Session()
    inside = pg.message(450, "outbox", b"\xff", transactional=True)
    alone = pg.message(800, "note", b"hello")
    session.receive(pg.begin(500, 9), inside, pg.commit(500, 548), alone)
    session.receive(*block(7, (7, inside)))
    session.receive(pg.stream_commit(7, COMMIT, END))
    found = session.log()
    assert found[:3] == [pg.begin(500, 9), inside, pg.commit(500, 548)]
    assert [m[:1] for m in found[3:6]] == [b"B", b"M", b"C"]
    assert found[4] == alone
    assert found[6:] == pg.transaction(COMMIT, 7, [inside])
    ends = [entry.read_header(data).last_end_lsn for data in session.replica.entries]
    assert 800 in ends or ends == [END]
    # 28: sent again, it is skipped; its position is its end LSN.
    again = Session(session.replica.session(0.0), replica=session.replica)
    again.receive(pg.begin(500, 9), inside, pg.commit(500, 548), alone)
    assert again.log() == found


def test_a_large_message_of_no_transaction_is_in_one_entry() -> None:
    session = Session()
    noise = random.Random(2).randbytes(2 << 20)
    session.receive(*pg.transaction(100, 6, []), pg.message(800, "note", noise))
    session.log()
    (data,) = session.replica.entries
    header = entry.read_header(data)
    assert (header.message_count, header.max_xid, header.last_end_lsn) == (3, 0, 800)
    assert header.starts_transaction
    assert header.ends_transaction


def test_an_origin_in_a_block_has_no_xid() -> None:
    session = Session()
    start, *rest = block(7, *described(7), (7, row(0)))
    session.receive(start, pg.origin("elsewhere"), *rest, pg.stream_commit(7, COMMIT, END))
    assert session.log() == pg.transaction(COMMIT, 7, [pg.origin("elsewhere"), row(0)])


@pytest.mark.parametrize(
    "messages",
    [
        [pg.stream_stop()],
        [pg.stream_start(7, first=False)],
        [*block(7, (7, row(0))), pg.stream_start(7, first=True)],
        [pg.stream_start(7, first=True), pg.stream_start(8, first=True)],
        [pg.stream_start(7, first=True), pg.begin(1, 2)],
        [pg.stream_start(7, first=True), pg.stream_commit(7, 1, 2)],
        [pg.begin(1000, 7), pg.stream_start(8, first=True)],
        [pg.stream_commit(7, COMMIT, END)],
        [pg.stream_abort(7, 7)],
        [pg.stream_abort(7, 8)],
        [pg.stream_start(7, first=True)[:-1]],
        [*block(7), pg.stream_commit(7, COMMIT, END)[:-1]],
        [*block(7), pg.stream_abort(7, 7)[:-1]],
        [pg.stream_start(7, first=True), b"I\0\0\0"],
        [pg.stream_start(7, first=True), b"R\0\0\0\7"],
        [pg.stream_start(7, first=True), pg.in_block(7, pg.message(9, "p", b"x"))],
        [pg.message(9, "p", b"x", transactional=True)],
        [pg.message(9, "p", b"x")[:-1]],
        [b"M"],
        [b"M" + b"\0" * 30],
    ],
)
def test_what_is_not_the_protocol_is_refused_by_name(messages: list[bytes]) -> None:
    with pytest.raises(MalformedMessageError):
        Session().receive(*messages)


def test_a_spool_file_that_is_not_what_was_written_is_named() -> None:
    for data in (b"\0\0\0\0", b"\xff\xff\xff\x7fabc"):
        with pytest.raises(CorruptError):
            spool.split(data, 100)
    assert spool.split(b"\x05\0\0\0abc", 100) == ([], 0)
    assert spool.split(b"\x03\0\0\0abc\x01\0", 100) == ([b"abc"], 7)
