"""The replica's core: recovery, appends, commits, reports, sealing, and the invariants of the design."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.log_entries import ACCOUNTS, AUDIT, HASHES, SCHEMAS, EntryMaker
from walsender_bridge.change_log.protocol import MAX_COUNT, REBUILD_GAP, START, CommitContext
from walsender_bridge.change_log.replica.core import TRANSITIONS, Event, Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import (
    DropFrom,
    Durable,
    Effect,
    PutDurable,
    PutEntry,
    PutIndex,
    PutSchema,
    RecoveryOutcome,
    StoredReplica,
    evaluate,
)
from walsender_bridge.errors import (
    CorruptError,
    DivergedError,
    FencedError,
    InvalidReplicaError,
    MalformedMessageError,
    StreamSealedError,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition


def new_replica(term: int = 1) -> Replica:
    replica = Replica(StoredReplica(Durable("s", "log"), None, None, None), (), ())
    replica.open_writer(term)
    return replica


def append(replica: Replica, *entries: bytes, gate: int = 2**64 - 1) -> list[Effect]:
    return replica.append(entries, list(SCHEMAS.values()), None, gate)


def commit_all(replica: Replica, version: int, start: int = 1) -> CommitContext:
    """Commit what the replica reports."""
    report = replica.report("k")
    assert report is not None
    known = replica.current.context.global_end if replica.current.context else start
    context = CommitContext(version, report.local_offset, known, report.length)
    replica.commit(context)
    return context


# -- recovery ---------------------------------------------------------------------------------------

# One character an offset, from 1.  x trimmed   C committed   U uncommitted   . lost
# ] the end of the commit context (none: there is no context)   ) the end of the index, where it differs
RECOVERY = [
    ("", RecoveryOutcome.NEW),
    ("UU", RecoveryOutcome.VALID),
    ("CCC]", RecoveryOutcome.VALID),
    ("CCC]UU", RecoveryOutcome.VALID),
    ("xxCC]", RecoveryOutcome.VALID),
    ("xxCC]U", RecoveryOutcome.VALID),
    ("xxxx]", RecoveryOutcome.ALL_TRIMMED),
    ("xxxx]UU", RecoveryOutcome.VALID),
    ("....]", RecoveryOutcome.INVALID),  # total loss is no trim
    ("x...]", RecoveryOutcome.INVALID),
    ("..CC]", RecoveryOutcome.INVALID),  # a prefix is lost, not trimmed
    ("x.CC]", RecoveryOutcome.INVALID),
    ("CC..]", RecoveryOutcome.INVALID),  # the context is ahead
    ("CC]CC)", RecoveryOutcome.INVALID),  # the context is behind the index
    ("CC)CC]", RecoveryOutcome.INVALID),  # the index is behind the context
    ("CC)", RecoveryOutcome.INVALID),  # commits without a context
]


def found_in(picture: str) -> StoredReplica:
    cells = [c for c in picture if c not in "])"]
    context_end = next((i + 1 for i, c in enumerate(picture.replace(")", "")) if c == "]"), None)
    index_end = next((i + 1 for i, c in enumerate(picture.replace("]", "")) if c == ")"), None)
    low = 1 + cells.count("x")
    there = [i + 1 for i, c in enumerate(cells) if c in "CU"]
    if index_end is None and "C" in cells:
        index_end = context_end
    context = None if context_end is None else CommitContext(9, low, low, context_end - low)
    position = replace(START, end_offset=context_end or 1)
    durable = Durable("s", "log", low_offset=low, context=context, position=position)
    first, last = (there[0], there[-1]) if there else (None, None)
    return StoredReplica(durable, first, last, index_end)


@pytest.mark.parametrize(("picture", "expected"), RECOVERY)
def test_recovery_judges_what_it_finds(picture: str, expected: RecoveryOutcome) -> None:
    outcome, reason = evaluate(found_in(picture))
    assert outcome == expected
    assert bool(reason) == (expected == RecoveryOutcome.INVALID)


@pytest.mark.parametrize(
    ("picture", "expected"), [("CC]U", RecoveryOutcome.INVALID), ("xx]UU", RecoveryOutcome.VALID)]
)
def test_22_commits_without_an_index_are_lost_unless_they_were_trimmed(
    picture: str, expected: RecoveryOutcome
) -> None:
    outcome, reason = evaluate(replace(found_in(picture), indexed_end=None))
    assert outcome == expected
    assert reason == ("the index of the commits up to 3 is lost" if "C" in picture else "")


def test_what_the_store_found_damaged_is_invalid_whatever_the_rest_says() -> None:
    found = replace(found_in("CCC]"), damage="segment-7 was damaged")
    assert evaluate(found) == (RecoveryOutcome.INVALID, "segment-7 was damaged")


def test_an_invalid_replica_is_silent_and_refuses_everything() -> None:
    replica = Replica(found_in("CC..]"), (), ())
    assert replica.state == ReplicaState.LEARNING
    assert replica.report("k") is None
    refused = [
        lambda: replica.commit(CommitContext(10, 5, 5, 1)),
        lambda: replica.commit(CommitContext(10, 5, 5, 0)),
        lambda: replica.open_writer(9),
        lambda: replica.append([EntryMaker().whole()]),
        lambda: replica.trim(3, MAX_COUNT),
        replica.check_readable,
        lambda: replica.seal(5, 9, MAX_COUNT),
    ]
    for event in refused:
        with pytest.raises(InvalidReplicaError, match="learning"):
            event()
    assert replica.persist() == []


def test_a_crash_keeps_the_tail_and_it_is_reported_again() -> None:
    make, replica = EntryMaker(), new_replica()
    tail = [make.whole(), make.start(), make.end(), make.start()]
    append(replica, *tail)
    again = Replica(StoredReplica(replica.durable, 1, 4, None), tail, HASHES.values())
    report = again.report("k")
    assert report is not None
    assert (report.local_offset, report.length) == (1, 3)
    assert again.status() == replica.status()


# -- appends ----------------------------------------------------------------------------------------


def test_an_append_is_its_schemas_its_entries_and_what_the_writer_knows() -> None:
    make, replica = EntryMaker(), new_replica()
    entries = [make.whole(), make.whole()]
    effects = replica.append(entries, [SCHEMAS[ACCOUNTS]], WalPosition(1, 77))
    kinds = [type(effect) for effect in effects]
    assert kinds == [PutSchema, PutEntry, PutEntry, PutDurable]
    assert [e.offset for e in effects if isinstance(e, PutEntry)] == [1, 2]
    assert replica.durable.confirmed_to == (1, 77)
    assert replica.ack().durable_last_end_lsn == make.end_lsn


def test_a_heartbeat_that_says_nothing_new_writes_nothing() -> None:
    replica = new_replica()
    assert replica.append([], [], WalPosition(1, 50), 5) != []
    assert replica.append([], [], WalPosition(1, 50), 5) == []
    assert replica.append([], [], WalPosition(1, 50), 6) == []
    assert replica.append([], [], WalPosition(1, 40), 5) == []  # confirmed_to never goes back
    assert replica.status().confirmed_to == (1, 50)


def test_a_gate_that_was_lowered_stays_so_over_a_crash() -> None:
    """Else what capture is about to cut off would be offered again."""
    make, replica = EntryMaker(), new_replica()
    tail = [make.whole(), make.whole()]
    replica.append(tail, list(SCHEMAS.values()), gate_lsn=make.end_lsn)
    replica.append([], [], gate_lsn=0)
    again = Replica(StoredReplica(replica.durable, 1, 2, None), tail, HASHES.values())
    report = again.report("k")
    assert report is not None
    assert report.length == 0
    # One that is raised is sent again by the next heartbeat.
    assert replica.append([], [], gate_lsn=make.end_lsn) == []


def test_the_first_cluster_that_a_writer_names_stays() -> None:
    replica = new_replica()
    assert replica.status().system_id is None
    # What was there already does not make it a heartbeat without news.
    replica.append([], [], WalPosition(1, 50))
    assert replica.append([], [], WalPosition(1, 50), system_id=7) == [PutDurable(replica.durable)]
    assert replica.append([], [], WalPosition(1, 50)) == []
    assert replica.status().system_id == 7
    before = replica.durable
    with pytest.raises(DivergedError, match="system identifier 7, not 8"):
        replica.append([], [], WalPosition(1, 60), system_id=8)
    assert replica.durable == before


def test_an_entry_that_does_not_continue_the_log_changes_nothing() -> None:
    make, replica = EntryMaker(), new_replica()
    first = make.whole()
    append(replica, first)
    before = replica.status()
    stranger = EntryMaker(seed=9)
    stranger.crc, stranger.lsn = make.crc, make.lsn - 0x100
    resent = EntryMaker(seed=9)
    resent.crc, resent.lsn = make.crc, make.lsn
    middle, second = resent.middle(), make.whole()
    wrong: list[tuple[bytes, type[Exception], str]] = [
        (first, CorruptError, "follows"),
        (stranger.whole(), MalformedMessageError, "already passed"),
        (middle, MalformedMessageError, "does not start a transaction"),
        (second[:-1] + bytes([second[-1] ^ 1]), CorruptError, "CRC32C"),
    ]
    for data, error, message in wrong:
        with pytest.raises(error, match=message):
            append(replica, data)
        assert replica.status() == before
    append(replica, second)
    append(replica, make.start())
    with pytest.raises(MalformedMessageError, match="inside a transaction"):
        append(replica, make.whole())


def test_rows_without_their_schema_are_refused() -> None:
    make, replica = EntryMaker(), new_replica()
    with pytest.raises(MalformedMessageError, match=f"relation {AUDIT}"):
        replica.append([make.whole(table=AUDIT)], [SCHEMAS[ACCOUNTS]])


def test_a_newer_term_fences_the_older_and_cuts_off_the_unfinished() -> None:
    make, replica = EntryMaker(), new_replica(term=3)
    append(replica, make.whole())
    crc = make.crc
    append(replica, make.start(), make.middle())
    effects = replica.open_writer(4)
    assert effects == [DropFrom(2), PutDurable(replica.durable)]
    status = replica.status()
    assert (status.term, status.end_offset, status.last_crc) == (4, 2, crc)
    with pytest.raises(FencedError, match="term 3"):
        replica.open_writer(3)
    make.follow(status)
    append(replica, make.start(), make.end())
    assert replica.open_writer(5) == [PutDurable(replica.durable)]


# -- reports and commits ----------------------------------------------------------------------------


def test_only_whole_transactions_that_the_gate_has_passed_are_reported() -> None:
    make, replica = EntryMaker(), new_replica()
    append(replica, make.whole())
    first = make.end_lsn
    append(replica, make.start(), make.end())
    second = make.end_lsn
    append(replica, make.start())
    for gate, length in [(first - 1, 0), (first, 1), (second - 1, 1), (second, 3), (2**64 - 1, 3)]:
        append(replica, gate=gate)
        report = replica.report("k")
        assert report is not None
        assert (report.local_offset, report.length, report.version) == (1, length, 0)


def test_an_empty_commit_is_written_with_the_next_thing_and_reported_only_then() -> None:
    make, replica = EntryMaker(), new_replica()
    append(replica, make.whole())
    commit_all(replica, 1)
    assert replica.commit(CommitContext(2, 2, 5, 0)) == []
    report = replica.report("k")
    assert report is not None
    assert report.version == 1
    assert replica.status().version == 2
    assert replica.persist() == [PutDurable(replica.durable)]
    report = replica.report("k")
    assert report is not None
    assert report.version == 2
    assert replica.persist() == []


def test_commits_that_do_not_follow_are_refused_and_old_ones_ignored() -> None:
    make, replica = EntryMaker(), new_replica()
    append(replica, make.whole(), make.start(), make.end())
    assert replica.commit(CommitContext(1, 1, 1, 1))
    before = replica.status()
    assert replica.commit(CommitContext(1, 1, 1, 1)) == []  # a duplicate
    assert replica.commit(CommitContext(0, 1, 1, 0)) == []  # stale
    wrong = {
        "is at 2": [CommitContext(2, 1, 2, 2), CommitContext(2, 3, 2, 1)],
        "global 2": [CommitContext(2, 2, 1, 2)],
        "no transaction ends at 3": [CommitContext(2, 2, 2, 1)],
        "no transaction ends at 9": [CommitContext(2, 2, 2, 7)],
    }
    for message, contexts in wrong.items():
        for context in contexts:
            with pytest.raises(InvalidReplicaError, match=message):
                replica.commit(context)
            assert replica.status() == before
    effects = replica.commit(CommitContext(7, 2, 40, 2))  # versions and global offsets may skip
    row = next(e.row for e in effects if isinstance(e, PutIndex))
    assert row.position.end_lsn == make.end_lsn
    assert row.size == row.position.bytes_total - before.bytes_total


def test_21_a_commit_of_other_entries_is_refused() -> None:
    make, replica = EntryMaker(), new_replica()
    append(replica, make.whole(), make.whole(), make.whole())
    crc = replica.uncommitted_ends[1].crc
    with pytest.raises(InvalidReplicaError, match="the entry in front of 3 is another one"):
        replica.commit(CommitContext(1, 1, 1, 2), crc=crc ^ 1)
    assert replica.status().committed_end == 1
    replica.commit(CommitContext(1, 1, 1, 2), crc=crc)
    assert replica.status().committed_end == 3
    # An empty one is of no entries.
    replica.commit(CommitContext(2, 3, 3, 0), crc=crc ^ 1)


def test_trimming_is_durable_and_only_of_what_is_committed() -> None:
    make, replica = EntryMaker(), new_replica()
    append(replica, make.whole(), make.whole())
    commit_all(replica, 1)
    append(replica, make.whole())
    with pytest.raises(InvalidReplicaError, match="only 3 is committed"):
        replica.trim(4, MAX_COUNT)
    assert replica.trim(3, MAX_COUNT) == [PutDurable(replica.durable)]
    assert replica.trim(2, MAX_COUNT) == []
    assert replica.durable.low_offset == 3


# -- sealing ----------------------------------------------------------------------------------------


def test_a_new_replica_is_sealed_at_once_and_again_with_the_same_answer() -> None:
    replica = new_replica()
    replica.seal(1, 9, MAX_COUNT)
    assert replica.state == ReplicaState.SEALED
    before = replica.durable
    assert replica.seal(1, 9, MAX_COUNT) == []
    assert replica.durable == before


# C committed, U uncommitted; seal at this end -> state, offsets that are left
SEALS = [
    ("CC", 3, ReplicaState.SEALED, 3),
    ("CCUU", 3, ReplicaState.SEALED, 3),  # the tail is rejected
    ("CCUU", 4, ReplicaState.SEALING, 5),  # a commit is missing: it is awaited
    ("CCUU", 5, ReplicaState.SEALING, 5),
    ("UU", 1, ReplicaState.SEALED, 1),
]


@pytest.mark.parametrize(("picture", "end", "state", "left"), SEALS)
@pytest.mark.parametrize("restarted", [False, True])
def test_sealing(picture: str, end: int, state: ReplicaState, left: int, restarted: bool) -> None:
    make, replica = EntryMaker(), new_replica()
    entries = [make.whole() for _ in picture]
    committed = picture.count("C")
    if committed:
        append(replica, *entries[:committed])
        commit_all(replica, 1)
    append(replica, *entries[committed:])
    effects = replica.seal(end, 9, MAX_COUNT)
    if restarted:
        kept = entries[: replica.tail.end_offset - 1]
        first, last = (1, len(kept)) if kept else (None, None)
        found = StoredReplica(replica.durable, first, last, committed + 1 if committed else None)
        replica = Replica(found, kept[committed:], HASHES.values())
    assert replica.state == state
    assert replica.tail.end_offset == left
    assert (DropFrom(left) in effects) == (left < len(picture) + 1)
    with pytest.raises(InvalidReplicaError, match="cannot append"):
        append(replica, make.whole())
    if state == ReplicaState.SEALING:
        length = end - committed - 1
        dropped = replica.commit(CommitContext(2, committed + 1, committed + 1, length))
        assert replica.state == ReplicaState.SEALED
        assert replica.tail.end_offset == end
        assert (DropFrom(end) in dropped) == (end < len(picture) + 1)
    replica.commit(CommitContext(3, end, end, 0))  # a sealed stream learns versions
    assert replica.persist()
    report = replica.report("k")
    assert report is not None
    assert (report.version, report.length) == (3, 0)
    with pytest.raises(StreamSealedError):
        replica.open_writer(8)
    with pytest.raises(InvalidReplicaError, match="cannot open a writer"):
        replica.open_writer(10)
    replica.open_writer(9)
    assert replica.state == ReplicaState.APPENDABLE
    with pytest.raises(FencedError, match="not newer"):
        replica.seal(end, 9, MAX_COUNT)  # a request that is late
    make.follow(replica.status())
    append(replica, make.whole())


@pytest.mark.parametrize("low", [1, 2, 3, 4])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("end", [1, 3, 4, 5, 6, 9])
def test_2_sealing_after_a_restart(low: int, empty: bool, tail: int, end: int) -> None:
    """Low watermark (nothing, some, all trimmed) x context (of the commit, or a newer empty one) x last commit.

    Three entries are committed, in the versions 1 to 3; `end`: that of the last commit, as the repository knows it.
    """
    make, replica = EntryMaker(), new_replica()
    for version in (1, 2, 3):
        append(replica, make.whole())
        commit_all(replica, version)
    if empty:
        replica.commit(CommitContext(7, 4, 9, 0))
        replica.persist()
    replica.trim(low, MAX_COUNT)
    uncommitted = [make.whole() for _ in range(tail)]
    append(replica, *uncommitted)
    first = low if low < 4 + tail else None
    found = StoredReplica(replica.durable, first, first and 3 + tail, 4 if low < 4 else None)
    again = Replica(found, uncommitted, HASHES.values())
    before = again.status()
    if end < 4:
        with pytest.raises(InvalidReplicaError, match="committed up to 4"):
            again.seal(end, 9, MAX_COUNT)
        assert again.status() == before
        return
    effects = again.seal(end, 9, MAX_COUNT)
    report = again.report("k")
    assert report is not None
    # I8: sealed only at the last commit. Nothing is offered, and the context stays as it is.
    assert again.state == (ReplicaState.SEALED if end == 4 else ReplicaState.SEALING)
    assert (report.version, report.local_offset, report.length) == (7 if empty else 3, 4, 0)
    assert (DropFrom(4) in effects) == (end == 4 and tail > 0)
    assert again.tail.end_offset == (4 if end == 4 else 4 + tail)
    assert again.durable == replace(replica.durable, term=9, sealed_at=end, was_sealed=True)
    # Another restart changes neither.
    kept = uncommitted if end > 4 else []
    last = 3 + len(kept)
    first = low if low <= last else None
    stored = StoredReplica(again.durable, first, first and last, 4 if low < 4 else None)
    twice = Replica(stored, kept, HASHES.values())
    assert (twice.state, twice.status()) == (again.state, again.status())
    assert again.seal(end, 9, MAX_COUNT) == []


@pytest.mark.parametrize("again", [False, True])
def test_38_no_writer_raises_the_term_of_a_replica_that_was_sealed(again: bool) -> None:
    """It would fence the true writer, and every seal up to its own term."""
    replica = new_replica()
    replica.open_writer(1 << 40)  # never sealed: nothing else gives a term
    replica.seal(1, (1 << 40) + 1, MAX_COUNT)
    if again:
        replica = Replica(StoredReplica(replica.durable, None, None, None), (), ())
    replica.open_writer((1 << 40) + 1)
    before = replica.status()
    with pytest.raises(InvalidReplicaError, match="is not that of the last seal"):
        replica.open_writer((1 << 40) + 2)
    assert (replica.status(), replica.state) == (before, ReplicaState.APPENDABLE)
    replica.seal(1, (1 << 40) + 2, MAX_COUNT)


@pytest.mark.parametrize("term", [9, 1 << 60])
def test_31_a_replica_behind_the_fence_refuses_seals_and_trims_of_the_old_repository(
    term: int,
) -> None:
    """Whatever its term: it would remove entries that the new repository has recorded, and not published yet."""
    make, replica = EntryMaker(), new_replica()
    append(replica, make.whole())
    commit_all(replica, 7)
    replica.seal(2, 5, 7 + REBUILD_GAP)
    replica.commit(CommitContext(7 + REBUILD_GAP, 2, 2 + REBUILD_GAP, 0))
    replica.seal(2, 5, 7 + REBUILD_GAP)
    replica.open_writer(5)
    append(replica, make.whole())
    before = replica.status()
    with pytest.raises(FencedError, match="the repository has been rebuilt since"):
        replica.seal(2, term, 1000)
    with pytest.raises(FencedError, match="the repository has been rebuilt since"):
        replica.trim(2, 1000)
    assert (replica.status(), replica.state) == (before, ReplicaState.APPENDABLE)
    # A version that was issued while the call was on its way says nothing.
    replica.seal(2, term, 5 + REBUILD_GAP)


@pytest.mark.parametrize("term", [1, 9])
def test_a_replica_that_is_not_valid_is_no_newer_one(term: int) -> None:
    """It is to be synchronized, whatever its term is; a newer term would stand for another writer."""
    replica = new_replica(5)
    replica.damage("a flipped bit")
    with pytest.raises(InvalidReplicaError, match="a flipped bit"):
        replica.seal(1, term, MAX_COUNT)


def test_a_replica_with_more_commits_than_the_seal_is_not_cut() -> None:
    make, replica = EntryMaker(), new_replica()
    append(replica, make.whole())
    commit_all(replica, 1)
    with pytest.raises(InvalidReplicaError, match="committed up to 2"):
        replica.seal(1, 9, MAX_COUNT)


@pytest.mark.parametrize("picture", ["", "UU", "CC", "CCUU"])
def test_what_is_not_committed_is_cut_off_at_once_and_its_place_is_taken(picture: str) -> None:
    make, replica = EntryMaker(), new_replica(term=4)
    entries = [make.whole() for _ in picture]
    committed = picture.count("C")
    if committed:
        append(replica, *entries[:committed])
        commit_all(replica, 1)
    append(replica, *entries[committed:])
    end = committed + 1
    with pytest.raises(FencedError):
        replica.cut_tail(3, end)
    with pytest.raises(InvalidReplicaError, match="committed up to"):
        replica.cut_tail(4, end + 1)
    effects = replica.cut_tail(4, end)
    assert (DropFrom(end) in effects) == ("U" in picture)
    assert replica.tail.end_offset == end
    assert replica.state == ReplicaState.APPENDABLE
    report = replica.report("k")
    assert report is not None
    assert report.length == 0
    make.follow(replica.status())
    append(replica, make.whole())
    report = replica.report("k")
    assert report is not None
    assert (report.local_offset, report.length) == (end, 1)


def test_every_transition_leads_to_a_state_and_closed_is_the_end() -> None:
    assert set(TRANSITIONS) == set(ReplicaState)
    assert TRANSITIONS[ReplicaState.CLOSED] == {}
    for state, events in TRANSITIONS.items():
        if state != ReplicaState.CLOSED:
            assert events[Event.CLOSE] == ReplicaState.CLOSED
    for silent in (ReplicaState.LEARNING, ReplicaState.CLOSED):
        assert Event.REPORT not in TRANSITIONS[silent]
        assert Event.COMMIT not in TRANSITIONS[silent]


# -- invariants -------------------------------------------------------------------------------------


class ReplicaMachine(RuleBasedStateMachine):
    """Any order of events, restarts between effects included; the disk is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.make = EntryMaker()
        self.entries: dict[int, bytes] = {}
        self.rows: list[CommitContext] = []
        self.durable = Durable("s", "log")
        self.acknowledged: dict[int, bytes] = {}
        self.committed: dict[int, bytes] = {}
        self.version = 0
        self.reported: set[int] = set()
        self.open = False
        self.replica = self._recovered()

    def _recovered(self) -> Replica:
        offsets = sorted(self.entries)
        first, last = (offsets[0], offsets[-1]) if offsets else (None, None)
        indexed = self.rows[-1].end if self.rows else None
        found = StoredReplica(self.durable, first, last, indexed)
        tail = [self.entries[o] for o in offsets if o >= self.durable.committed_end]
        replica = Replica(found, tail, HASHES.values())
        assert replica.outcome != RecoveryOutcome.INVALID, replica.reason
        return replica

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case DropFrom(offset):
                    gone = [o for o in self.entries if o >= offset]
                    assert offset >= self.durable.committed_end, "a committed entry was removed"
                    for o in gone:
                        del self.entries[o]
                        self.acknowledged.pop(o, None)
                case PutEntry(offset, data):
                    assert offset not in self.entries, "an entry was overwritten"
                    self.entries[offset] = data
                case PutIndex(row):
                    self.rows.append(row.context)
                case PutDurable(durable):
                    assert durable.version >= self.durable.version, "I5"
                    assert durable.low_offset >= self.durable.low_offset
                    self.durable = durable

    @rule()
    def take_over(self) -> None:
        self._do(self.replica.open_writer(self.durable.term + 1))
        self.make.follow(self.replica.status())
        self.open = True

    @precondition(lambda self: self.open)
    @rule(kinds=st.lists(st.sampled_from(["whole", "long"]), min_size=1, max_size=3))
    def write(self, kinds: list[str]) -> None:
        entries: list[bytes] = []
        for kind in kinds:
            if self.replica.tail.unfinished and not entries:
                entries += [self.make.middle(), self.make.end()]
            entries += [self.make.whole()] if kind == "whole" else [self.make.start()]
            if kind == "long":
                break
        self._do(append(self.replica, *entries))
        start = self.replica.tail.end_offset - len(entries)
        self.acknowledged |= {start + i: data for i, data in enumerate(entries)}

    @rule(empty=st.booleans(), lazy=st.booleans())
    def commit(self, empty: bool, lazy: bool) -> None:
        report = self.replica.report("k")
        assert report is not None
        self.version += 1
        known = self.replica.current.context.global_end if self.replica.current.context else 1
        length = 0 if empty else report.length
        start = report.local_offset
        assert not set(range(start, start + length)) & self.reported, "I7"
        self._do(self.replica.commit(CommitContext(self.version, start, known, length)))
        for offset in range(start, start + length):
            self.committed[offset] = self.entries[offset]
            self.reported.add(offset)
        if not lazy:
            self._do(self.replica.persist())

    @rule(part=st.floats(0, 1))
    def trim(self, part: float) -> None:
        ends = [row.end for row in self.rows if row.end > self.durable.low_offset]
        if ends:
            low = ends[int(part * (len(ends) - 1))]
            self._do(self.replica.trim(low, MAX_COUNT))
            self.entries = {o: d for o, d in self.entries.items() if o >= low}
            self.rows = [row for row in self.rows if row.end > low]

    @rule()
    def restart(self) -> None:
        self.replica = self._recovered()
        self.version = max(self.version, self.durable.version)
        self.open = False

    @invariant()
    def holds(self) -> None:
        status = self.replica.status()
        context = self.replica.current.context
        assert status.committed_end == (context.end if context else 1), "I1"
        expected = set(range(status.low_offset, status.end_offset))
        assert set(self.entries) == expected, "I2"
        for offset, data in self.committed.items():
            assert offset < status.low_offset or self.entries[offset] == data, "I9"
        for offset, data in self.acknowledged.items():
            assert offset < status.low_offset or self.entries[offset] == data, "acked entry lost"
        report = self.replica.report("k")
        assert report is not None
        assert report.local_offset == status.committed_end, "I7"
        assert report.version <= self.durable.version, "only durable versions are reported"
        for end in (status.committed_end, report.local_offset + report.length):
            if status.low_offset < end:
                assert self.entries[end - 1][-26:-25] == b"C", "I14"


ReplicaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestReplicaMachine = ReplicaMachine.TestCase
