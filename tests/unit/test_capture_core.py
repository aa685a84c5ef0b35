"""Capture's core, one rule a test; whole histories with crashes are in tests/simulation."""

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import pgoutput_messages as pg
from tests.support.capture_model import MOOD, Replica, keepalive, messages_of, schema, xlog
from walsender_bridge.capture import core, entries, events
from walsender_bridge.capture.core import CaptureState, step
from walsender_bridge.capture.events import (
    Acknowledged,
    AppendToReplica,
    CaptureTick,
    CopyDataReceived,
    StandbyStatusUpdate,
)
from walsender_bridge.capture.overlap import Overlap
from walsender_bridge.change_log import entry
from walsender_bridge.errors import DivergedError, MalformedMessageError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition

T = 16385


def new_state(**changes: object) -> CaptureState:
    values: dict[str, object] = {
        "timeline": 1,
        "logged_lsn": 0,
        "committed_lsn": 0,
        "previous_crc": 0,
        "confirmed": WalPosition(1, 100),
        "now": 0.0,
    }
    state = CaptureState(**{**values, **changes})  # type: ignore[arg-type]
    step(state, CaptureTick(0.0, MAX_LSN))
    return state


def payloads(*messages: bytes) -> list[bytes]:
    return [xlog(message) for message in messages]


def appends(effects: list[events.Effect]) -> list[AppendToReplica]:
    return [effect for effect in effects if isinstance(effect, AppendToReplica)]


def reports(effects: list[events.Effect]) -> list[StandbyStatusUpdate]:
    return [effect for effect in effects if isinstance(effect, StandbyStatusUpdate)]


def cut(effects: list[events.Effect]) -> list[bytes]:
    return [data for append in appends(effects) for data in append.entries]


def all_entries(state: CaptureState, *messages: bytes) -> tuple[list[bytes], list[bytes]]:
    """The entries and schema records of these messages, with a replica that answers at once."""
    found: list[bytes] = []
    records: list[bytes] = []
    waiting = step(state, CopyDataReceived(0.0, payloads(*messages)))
    waiting += step(state, CaptureTick(0.03, MAX_LSN))
    while waiting:
        effect = waiting.pop(0)
        if isinstance(effect, AppendToReplica):
            found += effect.entries
            records += effect.schemas
            waiting += step(state, Acknowledged(0.06, 0, 0, None))
    return found, records


def rows(count: int, width: int = 20) -> list[bytes]:
    return [pg.insert(T, [b"%d" % i, b"x" * width]) for i in range(count)]


def one(start_lsn: int, count: int = 2, width: int = 20) -> list[bytes]:
    begin, *rest = pg.transaction(start_lsn, start_lsn, rows(count, width))
    return payloads(begin, *schema(T, 0), *rest)


def test_small_transactions_share_an_entry_that_is_cut_after_20_ms() -> None:
    state = new_state()
    assert not cut(step(state, CopyDataReceived(0.001, one(1000))))
    assert state.deadline == pytest.approx(0.021)
    assert not cut(step(state, CopyDataReceived(0.010, one(2000))))
    found = cut(step(state, CaptureTick(0.0211, MAX_LSN)))
    assert len(found) == 1
    header = entry.read_header(found[0])
    assert header.starts_transaction
    assert header.ends_transaction
    assert (header.first_end_lsn, header.last_end_lsn) == (1000 + 0x30, 2000 + 0x30)
    assert messages_of(found[0])[0] == pg.begin(1000, 1000)


def test_while_the_replica_is_busy_small_transactions_gather() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)))
    assert len(cut(step(state, CaptureTick(0.021, MAX_LSN)))) == 1
    assert not cut(step(state, CopyDataReceived(0.03, one(2000))))
    assert not cut(step(state, CopyDataReceived(0.06, one(3000))))
    assert state.deadline > 0.06
    found = cut(step(state, Acknowledged(0.07, 1048, 0, None)))
    assert [entry.read_header(data).last_end_lsn for data in found] == [3000 + 0x30]


def test_a_transaction_of_several_entries_is_cut_by_size_and_none_is_larger() -> None:
    state = new_state()
    begin, *rest = pg.transaction(1000, 7, rows(5000, 1000))
    found, _ = all_entries(state, begin, *schema(T, 0), *rest)
    headers = [entry.read_header(data) for data in found]
    assert len(found) == 5
    assert max(h.raw_length for h in headers) <= entries.ENTRY_BYTES
    assert [h.starts_transaction for h in headers] == [True, False, False, False, False]
    assert [h.ends_transaction for h in headers] == [False, False, False, False, True]
    assert [h.last_end_lsn for h in headers] == [0, 0, 0, 0, 1000 + 0x30]


def test_an_unfinished_transaction_is_not_cut_by_time() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)[:-1]))
    assert not cut(step(state, CaptureTick(5.0, MAX_LSN)))


def test_under_load_every_entry_ends_a_transaction() -> None:
    state = new_state()
    found: list[bytes] = []
    for number in range(300):
        found += cut(step(state, CopyDataReceived(0.0, one(1000 + number * 1000, width=9000))))
        found += cut(step(state, Acknowledged(0.0, 0, 0, None))) if state.in_flight else []
    assert len(found) >= 4
    assert all(entry.read_header(data).ends_transaction for data in found)


def acknowledged(state: CaptureState, now: float, took: float) -> list[bytes]:
    return cut(step(state, Acknowledged(now, state.logged_lsn, 0, None, took)))


def test_appends_take_a_tenth_of_the_time() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)))
    assert cut(step(state, CaptureTick(0.021, MAX_LSN)))
    assert not acknowledged(state, 0.025, took=0.004)
    assert not cut(step(state, CopyDataReceived(0.026, one(2000))))
    assert state.deadline == pytest.approx(0.061)
    assert not cut(step(state, CaptureTick(0.060, MAX_LSN)))
    assert len(cut(step(state, CaptureTick(0.0611, MAX_LSN)))) == 1


def test_a_slow_replica_delays_the_next_append_by_no_more_than_100_ms() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)))
    assert cut(step(state, CaptureTick(0.021, MAX_LSN)))
    step(state, CopyDataReceived(0.05, one(2000)))
    assert not acknowledged(state, 0.08, took=0.059)
    assert state.deadline == pytest.approx(0.121)
    # An append that took longer delays nothing any more.
    assert cut(step(state, CaptureTick(0.1211, MAX_LSN)))
    step(state, CopyDataReceived(0.13, one(3000)))
    assert acknowledged(state, 5.0, took=4.8)


def test_a_pause_holds_up_no_more_than_it_gathers() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)))
    assert cut(step(state, CaptureTick(0.021, MAX_LSN)))
    sizes: list[int] = []
    choose = random.Random(1)
    for number in range(2, 800):
        begin, *rest = pg.transaction(
            number * 1000, number, [pg.insert(T, [b"1", choose.randbytes(9000)])]
        )
        found = cut(step(state, CopyDataReceived(0.022, payloads(begin, *schema(T, 0), *rest))))
        sizes += [sum(map(len, found))] if found else []
    assert len(sizes) == 3
    assert all(core.GATHERED_BYTES <= size < 2 * core.GATHERED_BYTES for size in sizes)


def test_small_entries_that_a_pause_holds_up_are_few() -> None:
    """As many schemas as entries, each of which is cut by its own."""
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)))
    assert cut(step(state, CaptureTick(0.021, MAX_LSN)))
    found: list[bytes] = []
    for number in range(2, 3 + core.GATHERED_ENTRIES):
        begin, *rest = pg.transaction(number * 1000, number, rows(1))
        told = payloads(begin, *schema(T, number % 2), *rest)
        found += cut(step(state, CopyDataReceived(0.022, told)))
    assert len(found) == core.GATHERED_ENTRIES


def test_a_message_larger_than_an_entry_stands_alone() -> None:
    state = new_state()
    big = pg.insert(T, [b"1", b"x" * (entries.ENTRY_BYTES + 5)])
    begin, *rest = pg.transaction(2000, 8, [*rows(1), big, *rows(1)])
    found, _ = all_entries(state, begin, *schema(T, 0), *rest)
    alone = [messages_of(data) for data in found if len(messages_of(data)) == 1]
    assert alone == [[big]]


def test_entries_are_chained_and_name_the_timeline() -> None:
    state = new_state(previous_crc=77, timeline=5)
    found = cut(step(state, CopyDataReceived(0.0, one(1000, 3000, 1000))))
    crc = 77
    for data in found:
        entry.verify(data, crc)
        header = entry.read_header(data)
        assert header.timeline == 5
        crc = header.crc


def test_a_changed_schema_starts_a_new_entry_and_is_registered_before_it() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, payloads(pg.begin(1000, 7), *schema(T, 0), *rows(1))))
    found, records = all_entries(state, *schema(T, 1), *rows(1), pg.commit(1000, 1048))
    hashes = [entry.read_header(data).relations[0].schema_hash for data in found]
    assert hashes == [entry.schema_hash(record) for record in records]
    types, relation = schema(T, 1)[0], schema(T, 1)[1]
    assert entry.split_schema_record(records[1]) == [relation, types]


def test_a_schema_that_is_sent_again_is_registered_once() -> None:
    state = new_state()
    effects = step(state, CopyDataReceived(0.0, [*one(1000), *one(2000)]))
    effects += step(state, CaptureTick(0.03, MAX_LSN))
    assert [len(append.schemas) for append in appends(effects)] == [1]
    assert MOOD in state.types


def test_a_schema_that_comes_back_is_the_newest_again() -> None:
    state = new_state()
    sent: list[bytes] = []
    for number, generation in enumerate((0, 1, 0, 0)):
        begin, *rest = pg.transaction(1000 * (number + 1), number, rows(1))
        sent += [begin, *schema(T, generation), *rest]
    found, records = all_entries(state, *sent)
    first, second = (
        entry.schema_hash(entry.schema_record(s[1], [s[0]])) for s in map(_schemas, (0, 1))
    )
    assert [entry.schema_hash(record) for record in records] == [first, second, first]
    assert [entry.read_header(d).relations[0].schema_hash for d in found] == [first, second, first]


def _schemas(generation: int) -> list[bytes]:
    return schema(T, generation)


ROOT, LEAF = 16900, 16901


def partition_rows(state: CaptureState, *messages: bytes) -> list[tuple[int, bytes]]:
    """The OIDs of the partitions that the entries name, and the messages that are said to be theirs."""
    found, _ = all_entries(state, *messages)
    named = []
    for data in found:
        header = entry.read_header(data)
        hashes = {one.relation_id: one.schema_hash for one in header.relations}
        for one in header.partitions:
            assert one.schema_hash == hashes[ROOT]
            named.append((one.relation_id, messages_of(data)[one.number]))
    return named


def root_rows(count: int, width: int = 20) -> list[bytes]:
    return [pg.insert(ROOT, [b"%d" % i, b"x" * width]) for i in range(count)]


def test_a_partition_that_is_described_behind_its_root_is_named_with_its_row() -> None:
    row, other = root_rows(2)
    sent = [
        *schema(ROOT, 0),
        row,
        *schema(T, 0),
        *rows(1),
        *schema(ROOT, 0),
        *schema(LEAF, 0),
        other,
    ]
    assert partition_rows(new_state(), *pg.transaction(1000, 7, sent)) == [(LEAF, other)]
    # Before the first row, and again when it is described again.
    sent = [*schema(ROOT, 0), *schema(LEAF, 0), row]
    state = new_state()
    for number in (1000, 2000):
        assert partition_rows(state, *pg.transaction(number, 7, sent)) == [(LEAF, row)]
    assert partition_rows(state, *pg.transaction(3000, 7, [row])) == []


@pytest.mark.parametrize("width", [20, entries.ENTRY_BYTES - 300, entries.ENTRY_BYTES + 5])
def test_a_partition_is_named_in_the_entry_that_has_its_row(width: int) -> None:
    """Wherever that is cut: in the transaction that was open, or behind it."""
    row = root_rows(1, width)[0]
    sent = [*schema(ROOT, 0), *schema(LEAF, 0), row]
    for before in ([], rows(1), rows(3, 400_000)):
        whole = pg.transaction(1000, 7, [*schema(T, 0), *before])
        second = pg.transaction(2000, 8, [*before, *sent, *rows(1)])
        assert partition_rows(new_state(), *whole, *second) == [(LEAF, row)]


def test_a_partition_that_is_described_without_the_key_of_its_root_is_told() -> None:
    """An UPDATE of the root's key has no old key then, and nothing later says that it lacked one."""
    (row,) = root_rows(1)
    leaf = bytearray(schema(LEAF, 0)[-1])
    at = leaf.index(b"\1id\0")
    for flags, told in (((1, 0), 1), ((1, 1), 1), ((0, 1), 2), ((0, 0), 1)):
        leaf[at], leaf[leaf.index(b"mood\0") - 1] = flags
        sent = [*schema(ROOT, 0), *schema(LEAF, 0)[:-1], bytes(leaf), row]
        named = partition_rows(new_state(), *pg.transaction(1000, 7, sent))
        assert named == [(LEAF, row), (entry.NAMED_OTHERWISE, row)][:told], flags


def test_tables_that_are_truncated_together_are_no_partitions() -> None:
    described = [*schema(ROOT, 0), *schema(LEAF, 0)]
    sent = [*described, pg.truncate(ROOT, LEAF), *root_rows(1), pg.insert(LEAF, [b"1", b"x"])]
    assert partition_rows(new_state(), *pg.transaction(1000, 7, sent)) == []
    sent = [*described, pg.insert(LEAF, [b"1", b"x"]), *root_rows(1)]
    assert partition_rows(new_state(), *pg.transaction(1000, 7, sent)) == []


def test_28_what_the_log_has_is_skipped_and_its_schemas_are_followed() -> None:
    state = new_state(logged_lsn=1048, committed_lsn=1048, confirmed=WalPosition(1, 1000))
    effects = step(
        state, CopyDataReceived(0.0, [*one(1000), *payloads(*pg.transaction(1048, 8, rows(1)))])
    )
    effects += step(state, CaptureTick(0.03, MAX_LSN))
    assert [messages_of(data)[0] for data in cut(effects)] == [pg.begin(1048, 8)]


def test_28_tables_of_a_transaction_that_is_skipped_are_no_partitions() -> None:
    """Their rows are not taken, so nothing of the log stands between their descriptions."""
    first, second = root_rows(2)
    again = [*schema(ROOT, 0), first, *schema(LEAF, 0), pg.insert(LEAF, [b"1", b"x"])]
    sent = [*pg.transaction(1000, 7, again), *pg.transaction(1048, 8, [second])]
    state = new_state(logged_lsn=1048, committed_lsn=1048)
    assert partition_rows(state, *sent) == []
    # Nor is the partition of a row that is skipped that of the next one.
    again = [*schema(ROOT, 0), *schema(LEAF, 0), first]
    sent = [*pg.transaction(1000, 7, again), *pg.transaction(1048, 8, [second])]
    state = new_state(logged_lsn=1048, committed_lsn=1048)
    assert partition_rows(state, *sent) == []


def test_32_the_last_transaction_is_not_doubled() -> None:
    # The log's position is the end of the commit record; the Begin names its start, which is below.
    state = new_state(logged_lsn=1048, committed_lsn=1048)
    effects = step(state, CopyDataReceived(0.0, one(1000)))
    effects += step(state, CaptureTick(0.03, MAX_LSN))
    assert cut(effects) == []
    assert state.transactions == 0


def test_a_transaction_without_a_published_change_is_only_a_position() -> None:
    state = new_state()
    effects = step(state, CopyDataReceived(0.0, payloads(*pg.transaction(1000, 7, []))))
    effects += step(state, CaptureTick(1.5, MAX_LSN))
    assert cut(effects) == []
    assert appends(effects)[-1].confirm_to == (1, 1048)


def test_the_server_hears_of_a_position_only_when_the_replica_has_recorded_it() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)))
    effects = step(state, CaptureTick(0.03, MAX_LSN))
    assert appends(effects)[0].confirm_to is None
    # Durable, not committed: nothing to confirm, and the next question is due soon.
    effects = step(state, Acknowledged(0.04, 1048, 0, WalPosition(1, 100)))
    assert not effects
    assert state.deadline == pytest.approx(0.13)
    effects = step(state, CaptureTick(0.14, MAX_LSN))
    assert appends(effects) == [AppendToReplica((), (), None, MAX_LSN)]
    # Committed: it is written down, and only then reported.
    effects = step(state, Acknowledged(0.15, 1048, 1048, WalPosition(1, 100)))
    effects += step(state, CaptureTick(0.25, MAX_LSN))
    assert appends(effects)[0].confirm_to == (1, 1048)
    assert all(report.flush == 100 for report in reports(effects))
    effects = step(state, Acknowledged(0.26, 1048, 1048, WalPosition(1, 1048)))
    assert effects == [StandbyStatusUpdate(1048, 1048)]


def test_the_gate_holds_from_a_sessions_first_append_on() -> None:
    # Before any tick: what was cut in the session's first moment must not pass it either.
    state = CaptureState(
        timeline=1,
        logged_lsn=0,
        committed_lsn=0,
        previous_crc=0,
        confirmed=WalPosition(1, 100),
        now=0.0,
        gate=1500,
    )
    found = appends(step(state, CopyDataReceived(0.03, [*one(1000), *one(2000)])))
    found += appends(step(state, CopyDataReceived(0.06, [keepalive(9000)])))
    assert [append.gate_lsn for append in found] == [1500]
    step(state, Acknowledged(0.07, 2048, 2048, WalPosition(1, 100)))
    idle = appends(step(state, CopyDataReceived(0.5, [keepalive(9000)])))
    assert idle[0].gate_lsn == 1500
    assert idle[0].confirm_to == (1, 2048)


def test_a_gate_that_opens_is_passed_on_at_once_and_only_for_what_waits() -> None:
    state = new_state(gate=0)
    step(state, CopyDataReceived(0.0, one(1000)))
    assert [each.gate_lsn for each in appends(step(state, CaptureTick(0.021, 0)))] == [0]
    assert not appends(step(state, CaptureTick(0.022, 500)))  # an answer is due
    assert [each.gate_lsn for each in appends(step(state, _durable(0.03, 1048)))] == [500]
    step(state, _durable(0.031, 1048))
    assert not appends(step(state, CaptureTick(0.032, 500)))
    assert [each.gate_lsn for each in appends(step(state, CaptureTick(0.033, 1048)))] == [1048]
    step(state, _durable(0.034, 1048))
    # Nothing waits that it does not let pass: the next heartbeat will do.
    assert not appends(step(state, CaptureTick(0.035, 9000)))


def _durable(now: float, lsn: int, committed: int = 0) -> Acknowledged:
    return Acknowledged(now, lsn, committed, WalPosition(1, 100))


def test_a_closed_gate_stops_the_reading_at_the_limit_and_reports_go_on() -> None:
    state = new_state(gate=0, max_uncommitted_bytes=2000)
    step(state, CopyDataReceived(0.0, one(1000)))
    step(state, CaptureTick(0.03, 0))
    reading = [state.reading]
    step(state, _durable(0.04, 1048))
    step(state, CopyDataReceived(0.05, one(3000)))
    step(state, CaptureTick(0.08, 0))
    step(state, _durable(0.09, 3048))
    reading.append(state.reading)
    # The server hears of us all the same, or it would give the connection up.
    now, told = 1.0, 0
    while now < 4.0:
        effects = step(state, CaptureTick(now, 0))
        told += len(reports(effects))
        if appends(effects):
            step(state, _durable(now, 3048))
        now += 0.11
    assert told >= 3
    # It opens, and what the log has committed makes room.
    assert appends(step(state, CaptureTick(5.0, 3048)))
    step(state, _durable(5.1, 3048, 1048))
    reading.append(state.reading)
    step(state, _durable(5.2, 3048, 3048))
    reading.append(state.reading)
    assert reading == [True, False, False, True]


def test_33_what_is_durable_but_not_committed_is_never_confirmed() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)))
    now = 0.0
    for _ in range(50):
        now += 0.11
        for append in appends(step(state, CaptureTick(now, MAX_LSN))):
            assert append.confirm_to is None
            step(state, Acknowledged(now, 1048, 0, WalPosition(1, 100)))
    assert state.confirmed == (1, 100)


def test_an_idle_stream_is_confirmed_to_the_lesser_of_keepalive_and_gate() -> None:
    for gate, expected in ((MAX_LSN, 5000), (3000, 3000)):
        state = new_state()
        step(state, CaptureTick(0.0, gate))
        step(state, CopyDataReceived(0.1, [keepalive(5000)]))
        effects = step(state, CaptureTick(1.2, gate))
        assert appends(effects)[0].confirm_to == (1, expected)


@pytest.mark.parametrize("waiting", ["buffer", "open", "uncommitted"])
def test_a_keepalive_counts_only_when_nothing_waits(waiting: str) -> None:
    state = new_state(logged_lsn=1048 if waiting == "uncommitted" else 0)
    messages = {"buffer": one(2000), "open": one(2000)[:-1], "uncommitted": []}[waiting]
    step(state, CopyDataReceived(0.0, messages))
    step(state, CopyDataReceived(0.001, [keepalive(5000)]))
    for now in (0.01, 1.2, 2.4):
        for append in appends(step(state, CaptureTick(now, MAX_LSN))):
            assert append.confirm_to is None
            step(state, Acknowledged(now, state.logged_lsn, 0, WalPosition(1, 100)))


def test_a_keepalive_inside_a_transaction_does_not_confirm_it() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, [*one(2000)[:-1], keepalive(9000), one(2000)[-1]]))
    assert state.idle_lsn == 0


def test_keepalives_are_answered_at_once_and_each_second_without_one() -> None:
    state = new_state()
    effects = step(state, CopyDataReceived(0.2, [keepalive(100, reply=True)]))
    assert reports(effects) == [StandbyStatusUpdate(100, 100)]
    assert not reports(step(state, CaptureTick(1.1, MAX_LSN)))
    assert reports(step(state, CaptureTick(1.3, MAX_LSN)))


def test_reports_go_on_while_the_replica_does_not_answer_and_reading_stops() -> None:
    state = new_state()
    lsn, now = 1000, 0.0
    noise = random.Random(1)
    while state.reading:
        big = pg.insert(T, [b"1", noise.randbytes(1 << 20)])
        begin, *rest = pg.transaction(lsn, 7, [big])
        step(state, CopyDataReceived(now, payloads(begin, *schema(T, 0), *rest)))
        lsn += 1000
        now += 0.001
    assert state.in_flight_bytes < core.IN_FLIGHT_BYTES + (2 << 20)
    heard = sum(len(reports(step(state, CaptureTick(now + s, MAX_LSN)))) for s in range(1, 11))
    assert heard == 10
    for _ in range(10):
        step(state, Acknowledged(now + 11, lsn, 0, None))
    assert state.reading


def test_behind_a_silent_replica_an_append_follows_every_two_seconds() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, [keepalive(5000)]))
    found = [s for s in range(1, 12) if appends(step(state, CaptureTick(float(s), MAX_LSN)))]
    assert found == [1, 3, 5, 7, 9, 11]


def test_behind_a_silent_replica_small_entries_are_appended_though_they_are_few() -> None:
    state = new_state()
    step(state, CopyDataReceived(0.0, one(1000)))
    assert cut(step(state, CaptureTick(1.0, MAX_LSN)))
    big = [*one(3000, 2000, 600), *one(2_000_000)]
    assert not cut(step(state, CopyDataReceived(1.1, big))) or state.new_entries == []
    assert state.deadline <= 3.0
    assert appends(step(state, CaptureTick(3.0, MAX_LSN)))


def overlapping(slot_lsn: int, *, confirmed_to: int = 1048) -> CaptureState:
    """A session whose log ends with the transaction 1000 to 1048, with a slot at `slot_lsn`."""
    overlap = Overlap.of(1048, pg.START_TIME, confirmed_to, slot_lsn)
    return new_state(
        logged_lsn=1048, committed_lsn=1048, confirmed=WalPosition(1, confirmed_to), overlap=overlap
    )


def test_29_a_transaction_of_another_time_at_the_logs_end_is_a_divergence() -> None:
    begin, *rest = pg.transaction(1000, 7, rows(1), pg.START_TIME + 1)
    with pytest.raises(DivergedError, match="a different one ends there"):
        _take(overlapping(900), [begin, *schema(T, 0), *rest])


def test_29_the_logs_last_transaction_must_be_sent_again_before_anything_new() -> None:
    state = overlapping(900)
    with pytest.raises(DivergedError, match="without sending it"):
        step(state, CopyDataReceived(0.0, [*one(900), *one(2000)]))
    state = overlapping(900)
    with pytest.raises(DivergedError, match="without sending it"):
        step(state, CopyDataReceived(0.0, [keepalive(5000)]))
    # A keepalive before it says nothing yet.
    state = overlapping(900)
    step(
        state,
        CopyDataReceived(0.0, [keepalive(1000), *one(1000)[:-1], keepalive(5000), one(1000)[-1]]),
    )
    assert cut(
        step(state, CopyDataReceived(0.1, [*one(2000)])) + step(state, CaptureTick(0.13, MAX_LSN))
    )


def test_29_what_the_log_passed_as_idle_holds_no_transaction() -> None:
    state = overlapping(1048, confirmed_to=4000)
    # One that changes no published table is nothing.
    step(state, CopyDataReceived(0.0, payloads(*pg.transaction(2000, 8, []))))
    with pytest.raises(DivergedError, match="is missing from the log"):
        step(state, CopyDataReceived(0.0, one(3000)))


def test_the_slot_is_confirmed_to_where_it_is_until_the_overlap_is_seen() -> None:
    state = overlapping(900, confirmed_to=4000)
    assert reports(step(state, CaptureTick(1.5, MAX_LSN)))[0].flush == 900
    assert reports(step(state, CopyDataReceived(1.6, [*one(1000), keepalive(3000, reply=True)])))[
        0
    ] == StandbyStatusUpdate(900, 900)
    assert (
        reports(step(state, CopyDataReceived(1.7, [keepalive(4000, reply=True)])))[0].flush == 4000
    )


@pytest.mark.parametrize(
    "messages",
    [
        [pg.insert(T, [b"1"])],
        [pg.commit(1, 2)],
        [pg.begin(1000, 7), pg.begin(2000, 8)],
        [pg.begin(1000, 7)[:-1]],
        [pg.begin(1000, 7), *rows(1), pg.commit(1000, 1048)[:-1]],
        [b"Zxx"],
        [b""],
        [pg.begin(1000, 7), *rows(1), pg.commit(1000, 1048)],
    ],
    ids=["row outside", "commit outside", "nested", "short B", "short C", "kind", "empty", "no R"],
)
def test_what_is_not_the_protocol_is_refused_by_name(messages: list[bytes]) -> None:
    with pytest.raises(MalformedMessageError):
        _take(new_state(), messages)


@pytest.mark.parametrize(
    ("logged", "begin_lsn", "commit_lsn", "end_lsn"),
    [
        # A commit record that would overlap the log's last one; one that is not the Begin's.
        (1048, 1020, 1020, 1068),
        (1048, 2000, 1999, 2048),
        (3000, 2000, 2000, 3001),
    ],
)
def test_a_transaction_that_cannot_follow_the_log_is_a_divergence(
    logged: int, begin_lsn: int, commit_lsn: int, end_lsn: int
) -> None:
    state = new_state(logged_lsn=logged, committed_lsn=logged)
    messages = [pg.begin(begin_lsn, 7), *schema(T, 0), *rows(1), pg.commit(commit_lsn, end_lsn)]
    with pytest.raises(DivergedError):
        _take(state, messages)


def _take(state: CaptureState, messages: list[bytes]) -> None:
    step(state, CopyDataReceived(0.0, payloads(*messages)))
    step(state, CaptureTick(0.03, MAX_LSN))


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=80), max_size=8))
def test_any_bytes_are_taken_or_refused_by_name(noise: list[bytes]) -> None:
    state = new_state()
    try:
        step(state, CopyDataReceived(0.0, [*one(1000), *noise, *map(xlog, noise)]))
        step(state, CaptureTick(0.03, MAX_LSN))
    except (MalformedMessageError, DivergedError):
        return


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 600)), min_size=1, max_size=12),
    st.lists(st.integers(1, 9), min_size=1, max_size=9),
    st.data(),
)
def test_28_a_resend_from_any_point_leaves_each_transaction_once(
    shapes: list[tuple[int, int]], chunks: list[int], data: st.DataObject
) -> None:
    original, entries.ENTRY_BYTES = entries.ENTRY_BYTES, 800  # type: ignore[misc]
    try:
        transactions = [
            pg.transaction(1000 * (i + 1), i, rows(count, width))
            for i, (count, width) in enumerate(shapes)
        ]
        replica = Replica(confirmed_to=WalPosition(1, 100), gate=MAX_LSN)
        for _ in range(3):
            # The connection breaks after any number of messages, and everything is sent again.
            replica.open_writer(seal=False)
            state = replica.session(0.0)
            stream = payloads(*schema(T, 0)) + [m for t in transactions for m in payloads(*t)]
            stop = data.draw(st.integers(0, len(stream)))
            _run(state, stream[:stop], chunks, replica)
        replica.open_writer(seal=False)
        _run(replica.session(0.0), stream, chunks, replica)
        wanted = [m for t in transactions if len(t) > 2 for m in t]
        assert replica.messages() == wanted
    finally:
        entries.ENTRY_BYTES = original  # type: ignore[misc]


def _run(state: CaptureState, stream: list[bytes], chunks: list[int], replica: Replica) -> None:
    at, turn, now = 0, 0, 0.0
    while at <= len(stream):
        size = chunks[turn % len(chunks)]
        now += 0.007
        for append in appends(step(state, CopyDataReceived(now, stream[at : at + size]))):
            replica.append(append)
            replica.tick()
            step(state, replica.acknowledge(now))
        at, turn = at + size, turn + 1
    for append in appends(step(state, CaptureTick(now + 1, MAX_LSN))):
        replica.append(append)


def test_the_layout_of_the_model_is_the_servers() -> None:
    assert xlog(b"B", 7) == b"w" + struct.pack(">QQq", 7, 7, 0) + b"B"
