"""The commit gate's rule: what may be shown, why not, and who leaves the gate and comes back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import statuses
from walsender_bridge.capture.gate.core import (
    REJOIN_BYTES,
    Decided,
    Effect,
    GateDecision,
    GateState,
    ObservedServer,
    Pass,
    Rule,
    Standing,
    step,
)
from walsender_bridge.capture.gate.invariants import check_invariants, checked
from walsender_bridge.capture.gate.record import GateRecord, decisions
from walsender_bridge.capture.gate.slots import GateSlot, Sender
from walsender_bridge.doctor import gate as doctor_gate
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.errors import CorruptError
from walsender_bridge.observability import gate_view

END = 1 << 40  # of the server's WAL


def follows(
    lsn: int | None, *, physical: bool = True, lost: bool = False, **sender: Any
) -> GateSlot:
    """A slot that a standby streams from, which has caught up."""
    facts = {"state": "streaming", "sent_lsn": 2 * END, "flush_lsn": lsn, "replays": True}
    return GateSlot(lsn, Sender(**{**facts, **sender}), physical, lost)


def look(
    state: GateState, slots: Mapping[str, GateSlot], now: float = 0.0, **facts: Any
) -> list[Effect]:
    return step(
        state,
        ObservedServer(**{"now": now, "timeline": 1, "flush_lsn": END, "slots": slots, **facts}),
    )


def gate(*candidates: str, **rule: Any) -> GateState:
    return GateState(Rule(candidates, **rule), timeline=1)


def decided(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(each.decision, each.candidate) for each in effects if isinstance(each, Decided)]


def test_36_a_transaction_passes_with_the_end_of_its_commit_record_not_with_its_start() -> None:
    state, start, end = gate("a"), 1000, 1034
    look(state, {"a": follows(start)})
    assert state.position < end
    assert "slot a: its standby has 0/3E8" in state.holding(end)[0]
    look(state, {"a": follows(end - 1)})
    assert state.position < end
    assert look(state, {"a": follows(end)}) == [Pass(end)]
    assert state.holding(end) == []


def test_36_the_safekeepers_quorum_counts_in_the_same_way() -> None:
    state = gate("a", safekeepers=True)
    look(state, {"a": follows(1034)})
    assert state.position == 0
    look(state, {"a": follows(1034)}, quorum=1000)
    assert state.position == 1000
    assert state.holding(1034) == ["a quorum of safekeepers has 0/3E8"]
    look(state, {"a": follows(1034)}, quorum=1034)
    assert state.position == 1034
    # A proposer that is away says nothing: what a quorum had it still has, and nothing new passes.
    look(state, {"a": follows(2000)}, quorum_why="no proposer")
    assert state.position == 1034
    assert state.holding(2000) == ["no proposer"]


@pytest.mark.parametrize(("quorum", "position"), [(0, 100), (1, 300), (2, 200), (3, 100)], ids=str)
def test_every_candidate_or_as_many_as_are_stated(quorum: int, position: int) -> None:
    state = gate("a", "b", "c", quorum=quorum)
    look(state, {"a": follows(200), "b": follows(100), "c": follows(300)})
    assert state.position == position


def test_nothing_passes_that_the_server_itself_could_lose() -> None:
    state = gate("a")
    look(state, {"a": follows(END + 1)})
    assert state.position == END


@pytest.mark.parametrize(
    ("slot", "word"),
    [
        (None, "does not exist on the server"),
        (GateSlot(500), "is not in use"),
        (GateSlot(None), "has never been used"),
        (follows(None), "has not reported a position"),
        (follows(500, replays=False), "does not replay WAL"),
        (follows(500, lost=True), "has lost its WAL"),
        (follows(500, physical=False), "is a logical slot"),
        (follows(500, state=None, flush_lsn=None), "cannot see its walsender"),
        (follows(500, flush_lsn=None), "has not reported a position"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_15_a_slot_that_no_standby_follows_blocks_by_name(slot: GateSlot | None, word: str) -> None:
    state = gate("a", "b")
    slots = {"a": follows(900), **({} if slot is None else {"b": slot})}
    look(state, slots)
    assert state.position == 0
    (reason,) = state.holding(1)
    assert "slot b" in reason
    assert word in reason


def test_5_a_candidate_that_goes_away_holds_what_comes_then_and_lets_it_pass_when_it_is_back() -> (
    None
):
    state = gate("a")
    look(state, {"a": follows(100)})
    # Also what the slot says while nobody streams from it: somebody advanced it by hand.
    look(state, {"a": GateSlot(900)})
    assert state.position == 100
    look(state, {})
    assert state.position == 100
    look(state, {"a": follows(250)})
    assert state.position == 250
    # Dropped, and made anew for a standby of an older backup: what was shown stays shown, the rest waits.
    assert look(state, {"a": follows(50)}) == []
    assert state.position == 250
    assert state.holding(251) == ["slot a: its standby has 0/32"]


def test_42_what_a_standby_was_not_sent_counts_for_nothing() -> None:
    state = gate("a")
    look(state, {"a": follows(100)})
    for sent in (150, 199):
        look(state, {"a": follows(200, sent_lsn=sent)})
        (reason,) = state.holding(101)
        assert "has WAL up to 0/C8 that was not sent to it" in reason
    # The slot remembers that report of another session.
    look(state, {"a": follows(200, flush_lsn=None)})
    assert state.position == 100
    look(state, {"a": follows(200, flush_lsn=120)})
    assert state.position == 120
    look(state, {"a": follows(200, sent_lsn=200)})
    assert state.position == 200


def test_42_a_standby_that_catches_up_is_not_counted_further_and_is_not_away() -> None:
    state = gate("a", on_missing="degrade", degrade_after=1.0)
    look(state, {"a": follows(100)})
    for now in (0.0, 100.0):
        assert look(state, {"a": follows(150, state="catchup")}, now) == []
    assert state.holding(101) == ["slot a: its standby has 0/64, and is catching up"]
    assert look(state, {"a": follows(150)}, 101.0) == [Pass(150)]


def test_42_an_unrewound_candidate_that_comes_and_goes_is_away_all_the_while() -> None:
    state = gate("a", on_missing="degrade", degrade_after=10.0)
    flaps = [
        GateSlot(900),
        follows(900, flush_lsn=None),
        follows(900, sent_lsn=500, state="catchup"),
    ]
    for now in range(10):
        assert look(state, {"a": flaps[now % 3]}, float(now)) == []
    assert decided(look(state, {"a": flaps[1]}, 10.0)) == [("degraded", "a")]
    assert state.candidates["a"].standing is Standing.DEGRADED
    look(state, {"a": flaps[2]}, 11.0)
    assert state.candidates["a"].standing is Standing.DEGRADED


def test_block_waits_for_as_long_as_it_takes() -> None:
    state = gate("a", degrade_after=1.0)
    for now in (0.0, 1e6):
        assert look(state, {}, now) == []


def test_degrade_is_decided_before_anything_passes_and_taken_back_when_it_streams() -> None:
    state = gate("a", "b", on_missing="degrade", degrade_after=10.0)
    look(state, {"a": follows(100), "b": follows(100)})
    away = {"a": follows(500), "b": GateSlot(100)}
    assert look(state, away, 5.0) == []
    assert look(state, away, 14.9) == []
    effects = look(state, away, 15.0)
    assert decided(effects) == [("degraded", "b")]
    assert effects[-1] == Pass(500)
    assert isinstance(effects[0], Decided)
    assert "for 10 s: slot b is not in use" in effects[0].why
    # Far behind what was shown, it would hold everything until it has it all.
    state.shown = state.position = 500 + REJOIN_BYTES
    assert look(state, {"a": follows(state.shown), "b": follows(499)}, 20.0) == []
    effects = look(state, {"a": follows(state.shown + 9), "b": follows(510)}, 21.0)
    assert decided(effects) == [("rejoined", "b")]
    assert state.position == 500 + REJOIN_BYTES
    assert state.holding(state.position + 1) == ["slot b: its standby has 0/1FE"]


@pytest.mark.parametrize("on_missing", ["block", "degrade"])
def test_who_was_left_out_before_stays_so_as_long_as_that_is_allowed(on_missing: Any) -> None:
    rule = Rule(("a",), on_missing=on_missing)
    state = GateState(rule, timeline=1, shown=50, standings={"a": Standing.DEGRADED})
    effects = look(state, {})
    assert effects == ([] if on_missing == "block" else [Pass(END)])


def test_a_slow_candidate_is_not_away() -> None:
    state = gate("a", on_missing="degrade", degrade_after=1.0)
    look(state, {"a": follows(100)})
    assert look(state, {"a": follows(100)}, 1e6) == []


def test_whom_the_quorum_does_not_need_is_not_left_out() -> None:
    state = gate("a", "b", "c", quorum=2, on_missing="degrade", degrade_after=1.0)
    there = {"a": follows(100), "b": follows(90)}
    assert decided(look(state, there)) == decided(look(state, there, 9.0)) == []
    assert state.position == 90
    # Without b it needs both of them, and c has been away for long.
    assert decided(look(state, {"a": follows(200)}, 10.0)) == [("degraded", "c")]
    assert decided(look(state, {"a": follows(200)}, 11.0)) == [("degraded", "b")]
    assert state.position == 200


def test_a_promotion_takes_that_candidate_out_and_the_others_still_count() -> None:
    state = gate("a", "b")
    look(state, {"a": follows(100), "b": follows(100)})
    # `a` was promoted: its own slot is not on itself, and b's is not there yet.
    effects = look(state, {}, timeline=2, was="a")
    assert decided(effects) == [("promoted", "a")]
    assert state.position == 100
    assert "slot b does not exist on the server" in state.holding(101)[0]
    look(state, {"b": follows(150)}, timeline=2, was="a")
    assert state.position == 150
    # The old primary comes back under the name that is free, and counts.
    effects = look(state, {"b": follows(170), "a": follows(160)}, timeline=2, was="a")
    assert decided(effects) == [("rejoined", "a")]
    assert state.position == 160
    # And back again.
    effects = look(state, {"a": follows(200)}, timeline=3, was="b")
    assert decided(effects) == [("promoted", "b")]
    assert state.position == 200


def test_a_slot_name_that_a_primary_keeps_from_its_past_does_not_excuse_it() -> None:
    state = gate("a")
    look(state, {"a": follows(100)}, was="a")
    assert state.position == 100
    assert look(state, {}, was="a") == []
    assert state.holding(101)


def test_who_is_promoted_but_finds_a_slot_of_that_name_waits_for_it() -> None:
    state = gate("a")
    effects = look(state, {"a": GateSlot(5)}, timeline=2, was="a")
    assert decided(effects) == [("timeline", "")]
    assert state.position == 0


def members(*names: str, **rule: Any) -> GateState:
    """The gate of a server that is one of these."""
    return gate(*names, members=True, **rule)


def test_42_the_member_that_all_others_stream_from_is_not_waited_for() -> None:
    state = members("a", "b", "c")
    slots = {"b": follows(100), "c": GateSlot(90)}
    assert look(state, slots) == []
    assert "one of the members is the server itself" in state.holding(101)[-1]
    # c has only begun.
    assert look(state, {**slots, "c": follows(95, state="catchup")}) == []
    effects = look(state, {**slots, "c": follows(95)})
    assert decided(effects) == [("promoted", "a")]
    assert effects[-1] == Pass(95)
    # It stays so, and the others are waited for by name.
    assert look(state, slots) == []
    assert state.holding(100) == [state.candidates["c"].away]


@pytest.mark.parametrize("slot", [None, GateSlot(5), GateSlot(None)])
def test_42_a_member_is_the_server_that_has_its_slot_as_primary_slot_name(slot: Any) -> None:
    own = {} if slot is None else {"a": slot}
    state = members("a", "b")
    assert decided(look(state, own, was="a")) == [("promoted", "a")]
    assert state.counted == [state.candidates["b"]]
    # Not if somebody streams from it: names that were copied with a backup prove nothing.
    state = members("a", "b")
    assert look(state, {"a": follows(100)}, was="a") != []
    assert state.candidates["b"].standing is Standing.PROMOTED
    look(state, {"a": GateSlot(100)}, was="a")
    assert [each.slot for each in state.counted] == ["a"]


def test_42_a_server_that_is_no_member_leaves_nobody_out() -> None:
    state = members("a", "b")
    look(state, {"a": follows(100), "b": follows(100)})
    assert look(state, {"a": follows(200), "b": GateSlot(100)}) == []
    again = GateState(state.rule, timeline=1, streamed={"b"})
    assert look(again, {"a": follows(200), "b": GateSlot(100)}) == []
    assert again.open is False


def test_42_names_by_member_fit_after_failovers_forth_and_back() -> None:
    state = members("a", "b")
    for timeline in range(1, 8):
        itself, other = "ab" if timeline % 2 else "ba"
        # Also where the new primary does not keep the slot's name in its settings.
        was = itself if timeline % 3 else ""
        end = 100 * timeline
        effects = look(state, {other: GateSlot(None)}, timeline=timeline, was=was)
        assert state.position < end
        assert not state.open
        effects += look(state, {other: follows(end)}, timeline=timeline, was=was)
        assert ("promoted", itself) in decided(effects)
        assert state.position == end
        assert decided(look(state, {other: follows(end)}, timeline=timeline, was=was)) == []


def test_42_an_open_gate_is_said() -> None:
    state = gate("a")
    look(state, {"a": follows(100)})
    look(state, {}, timeline=2, was="a")
    assert state.open
    (word,) = gate_view.problems("shop", statuses.gate(open=True), 0.0)
    assert "the commit gate of shop is open" in word
    both = members("a", "b", on_missing="degrade", degrade_after=1.0)
    look(both, {"b": GateSlot(100)}, was="a")
    assert decided(look(both, {"b": GateSlot(100)}, 2.0, was="a")) == [("degraded", "b")]
    assert both.open
    assert not gate().open


def test_a_server_that_was_left_behind_shows_nothing() -> None:
    state = GateState(Rule(("a",)), timeline=2)
    assert look(state, {"a": follows(100)}) == []
    assert "timeline 1" in state.holding(1)[0]


SENDERS = st.builds(
    Sender,
    st.none() | st.sampled_from(["startup", "catchup", "streaming"]),
    st.none() | st.integers(0, 99),
    st.none() | st.integers(0, 99),
    st.booleans(),
)


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abc"),
            st.builds(GateSlot, st.none() | st.integers(0, 99), st.none() | SENDERS),
        ),
        max_size=20,
    ),
    st.integers(0, 3),
)
def test_what_passes_is_on_enough_candidates_and_never_goes_back(
    history: list[dict[str, GateSlot]], quorum: int
) -> None:
    state, best, before = gate("a", "b", "c", quorum=quorum), dict.fromkeys("abc", 0), 0
    for number, slots in enumerate(history):
        for name, slot in slots.items():
            if slot.sender and slot.sender.replays and slot.sender.state == "streaming":
                sent, flush = slot.sender.sent_lsn or 0, slot.sender.flush_lsn or 0
                best[name] = max(best[name], flush if flush <= sent else 0)
        look(state, slots, float(number))
        assert state.position >= before
        assert sum(held >= state.position for held in best.values()) >= (quorum or 3)
        before = state.position


def _decision(decision: GateDecision, candidate: str, timeline: int = 1) -> Decided:
    return Decided(decision, candidate, timeline, 100, "because")


def test_the_record_is_what_the_next_session_begins_with(tmp_path: Path) -> None:
    path = tmp_path / "gate" / "shop.jsonl"
    record = GateRecord(path)
    assert (record.timeline, record.standings) == (0, {})
    for decision in (
        _decision(GateDecision.TIMELINE, ""),
        _decision(GateDecision.DEGRADED, "a"),
        _decision(GateDecision.DEGRADED, "b"),
        _decision(GateDecision.REJOINED, "a"),
        _decision(GateDecision.PROMOTED, "d", 2),
        _decision(GateDecision.PROMOTED, "c", 3),
    ):
        record.add(decision)
    again = GateRecord(path)
    assert again.timeline == record.timeline == 3
    assert again.standings == record.standings
    assert again.standings == {
        "a": Standing.COUNTED,
        "b": Standing.DEGRADED,
        "c": Standing.PROMOTED,
        "d": Standing.COUNTED,
    }
    assert [line["position"] for line in decisions(path)] == ["0/64"] * 6
    again.add(_decision(GateDecision.TIMELINE, "", 4))
    assert GateRecord(path).standings["c"] is Standing.COUNTED


def test_42_a_list_of_members_that_lacked_the_server_is_corrected(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"

    def session(rule: Rule, slots: Mapping[str, GateSlot], **facts: Any) -> list[tuple[str, str]]:
        record = GateRecord(path)
        state = GateState(rule, record.timeline, 100, record.standings, record.streamed)
        effects = []
        for now in (0.0, 1.0, 2.0):
            seen = ObservedServer(now, slots=slots, flush_lsn=END, **facts)
            before = checked(state)
            effects += step(state, seen)
            check_invariants(state, before, seen)
        for each in effects:
            if isinstance(each, Decided):
                record.add(each)
        passed.append(state.position)
        return decided(effects)

    passed: list[int] = []
    both, without_c = ({"b": follows(900), "c": c} for c in (follows(800), GateSlot(500)))
    two, b = Rule(("a", "b")), {"b": follows(900)}
    assert session(two, {**b, "a": follows(900)}, timeline=1) == [("timeline", "")]
    assert session(two, b, timeline=2, was="a") == [("promoted", "a")]
    # It lacks a, which is the server; so c, which is down, seems to be it.
    assert session(Rule(("b", "c"), members=True), without_c, timeline=2) == [("promoted", "c")]
    members = Rule(("a", "b", "c"), members=True)
    assert session(members, without_c, timeline=2) == []
    assert passed == [900, 900, 900, 0], "c may be promoted, and lacks what would pass"
    assert session(members, both, timeline=2) == [("rejoined", "c"), ("promoted", "a")]
    assert passed[-1] == 800
    assert session(members, without_c, timeline=2) == []
    assert passed[-1] == 0


def test_42_a_kill_between_any_two_lines_of_the_record_decides_the_same_afterwards(
    tmp_path: Path,
) -> None:
    rule = Rule(("a", "b"), on_missing="degrade", degrade_after=5.0)
    both = {"a": follows(100), "b": follows(100)}
    looks = [  # each with the timeline, and the slot that the server had as a standby
        (both, 1, ""),
        ({"b": follows(110)}, 2, "a"),
        ({}, 2, "a"),
        ({"b": follows(120), "a": follows(120)}, 2, "a"),
        ({}, 3, "b"),
        ({"a": follows(130)}, 3, "b"),
        ({}, 4, ""),
    ]

    def session(path: Path, upto: int, lines: int) -> GateState:
        """All looks; as many lines as that are written, then it is killed, and another session looks again."""
        record = GateRecord(path)
        state = GateState(rule, record.timeline, standings=dict(record.standings))
        for number, (slots, timeline, was) in enumerate(looks[: upto + 1]):
            if timeline < record.timeline:
                continue  # that server is not there any more
            for now in (10.0 * number, 10.0 * number + 9):
                for effect in look(state, slots, now, timeline=timeline, was=was):
                    if not isinstance(effect, Decided):
                        continue
                    if not lines:
                        return session(path, upto, -1)
                    record.add(effect)
                    lines -= 1
        return state

    for upto in range(len(looks)):
        whole = session(tmp_path / f"whole-{upto}", upto, -1)
        standings = [each.standing for each in whole.candidates.values()]
        for lines in range(len([*decisions(tmp_path / f"whole-{upto}")])):
            killed = session(tmp_path / f"killed-{upto}-{lines}", upto, lines)
            found = [each.standing for each in killed.candidates.values()]
            assert (found, killed.timeline) == (standings, whole.timeline), (upto, lines)


def test_a_line_that_a_crash_cut_off_is_none_and_another_ones_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shop.jsonl"
    record = GateRecord(path)
    record.add(_decision(GateDecision.DEGRADED, "a"))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole + whole[:length])
        cut = GateRecord(path)
        assert cut.standings == {"a": Standing.DEGRADED}
        cut.add(_decision(GateDecision.REJOINED, "a"))
        assert GateRecord(path).standings == {"a": Standing.COUNTED}
    path.write_bytes(whole + b'{"decision": "opened"}\n')
    with pytest.raises(CorruptError, match="line 2"):
        GateRecord(path)


def test_a_gate_that_is_closed_for_long_is_said_with_its_reasons_and_a_candidate_that_is_left_out() -> (
    None
):
    assert list(gate_view.problems("shop", None, 0.0)) == []
    assert list(gate_view.problems("shop", statuses.gate(), 1000.0)) == []
    closed = statuses.gate(holding=("slot a is not in use",), stuck_since=990.0)
    assert list(gate_view.problems("shop", closed, 991.0)) == []
    (word,) = gate_view.problems("shop", closed, 1000.0)
    assert "closed for 10 s" in word
    assert "slot a is not in use" in word
    (word,) = gate_view.problems(
        "shop", statuses.gate(candidate={"standing": "degraded", "away": "gone"}), 0.0
    )
    assert "no longer waits for candidate a" in word
    assert "gone" in word


def test_the_rows_of_status_say_who_has_what() -> None:
    assert gate_view.rows("shop", None, 0) == []
    first, second = gate_view.rows("shop", statuses.gate(quorum_lsn=140), 150)
    assert (first["candidate"], first["lag_bytes"]) == ("safekeepers", 10)
    assert (second["candidate"], second["lsn"], second["lag_bytes"]) == ("a", "0/64", 50)


SENDER = {"state": "streaming", "sent_lsn": 5, "flush_lsn": 5, "replays": True}


@pytest.mark.parametrize("on_missing", ["block", "degrade"])
def test_doctor_says_who_cannot_be_waited_for(on_missing: Any) -> None:
    slot = {"restart_lsn": 5, "physical": True, "wal_status": None, "sender": SENDER}
    facts = {"may_see": True, "was": None, "slots": {"a": slot}}
    rule = Rule(("a", "b"), on_missing=on_missing)
    good, bad = doctor_gate.evaluate(facts, rule, "shop")
    assert good.severity is Severity.OK
    assert "pg_create_physical_replication_slot('b')" in bad.repair
    assert bad.severity is (Severity.ERROR if on_missing == "block" else Severity.WARNING)
    assert not bad.prevents
    of_members = Rule(("a", "b"), members=True, on_missing=on_missing)
    good, itself = doctor_gate.evaluate(facts, of_members, "shop")
    assert good.severity is itself.severity is Severity.OK
    assert "b is the current primary" in itself.what
    both = {**facts, "slots": {"a": slot, "b": slot}}
    *_, none = doctor_gate.evaluate(both, of_members, "shop")
    assert "so the server itself is not among them" in none.what
    *_, blind = doctor_gate.evaluate({**facts, "may_see": False}, rule, "shop")
    assert "pg_read_all_stats" in blind.repair
