"""What becomes of tables: states, requests and schema changes, decided without disk or Spark."""

import json
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from spark_consumers.lake.epoch import rolled_back
from spark_consumers.lake.manifest import sealed_json
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion, open_chain
from spark_consumers.lake.manifest.table_version import REATTACHED
from spark_consumers.lake.policy import Policy
from spark_consumers.lake.reader import Snapshot
from spark_consumers.lake.status import CopyStatus, LakeStatus, table_rows
from spark_consumers.lake.tables import noticed, states
from spark_consumers.lake.tables.schema_change import (
    ColumnsAdded,
    FullResync,
    evaluate,
    first_layout,
    not_plain,
)
from spark_consumers.lake.tables.schema_match import Layout, SchemaMismatch
from spark_consumers.lake.tables.shape import Publication
from spark_consumers.lake.writer import requests
from spark_consumers.lake.writer.requests import Request
from spark_consumers.lake.writer.table_work import TableWork
from walsender_bridge.errors import (
    CorruptError,
    DeadlineError,
    DivergedError,
    LakeError,
    UnavailableError,
    UsageError,
)
from walsender_bridge.postgres.column_masks import DROP, ColumnMask
from walsender_bridge.postgres.table_layout import RowRules

A, B, NEW = "shop.public.a", "shop.public.b", "shop.public.new"
ID, TEXT, MORE = ("id", 23, -1), ("t", 25, -1), ("m", 23, -1)


def table(**changes):
    version = TableVersion("path", "iceberg", 1, "", ("id",), (), 5, 1, 10, 7, layout=(ID, TEXT))
    return replace(version, **changes)


def head(**changes):
    values = {
        "streams": {"shop": StreamPosition(1, 100, 7, 30)},
        "tables": {A: table(), B: table()},
        **changes,
    }
    return Manifest("lake", 9, 40, 39, 2, 0.0, **values)


def misfit(offset, *columns, number=0, reason="", key=("id",)):
    return SchemaMismatch(A, number, offset, columns, frozenset(key), reason)


# -- schema changes -------------------------------------------------------------------------------------


def test_columns_at_the_end_extend_the_table_from_where_they_came():
    known = first_layout(table())
    more, most = (ID, TEXT, MORE), (ID, TEXT, MORE, ("z", 16, -1))
    # The second range tells again what the first one told.
    told = [misfit(70, *more, number=1), misfit(50, *more), misfit(80, *most, number=1)]
    verdict = evaluate(table(), known, told)
    assert verdict == ColumnsAdded(
        (Layout(0, (ID, TEXT)), Layout(50, more), Layout(80, most)), (MORE, ("z", 16, -1))
    )


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ((misfit(5, ID),), "it lost t"),
        ((misfit(5, ID, ("u", 25, -1)),), "it lost t; got u"),
        ((misfit(5, ID, ("t", 1043, 24)),), "has another type for t"),
        ((misfit(5, TEXT, ID),), "another order"),
        ((misfit(5, MORE, ID, TEXT),), "got m"),
        ((misfit(5, ID, TEXT, MORE), misfit(6, ID, TEXT)), "lost m"),
        ((misfit(5, ID, TEXT, MORE), misfit(6, ID, TEXT, reason="renamed")), "renamed"),
        ((misfit(5, ID, TEXT, MORE, key=("id", "m")),), "was added to its key"),
    ],
)
def test_anything_else_is_a_table_of_its_own(told, reason):
    verdict = evaluate(table(), first_layout(table()), told)
    assert isinstance(verdict, FullResync)
    assert reason in verdict.reason


def test_a_table_of_format_1_is_copied_anew():
    verdict = evaluate(
        table(layout=()), first_layout(table(layout=())), [misfit(5, ID, TEXT, MORE)]
    )
    assert isinstance(verdict, FullResync)


def test_what_the_catalog_says_of_added_columns():
    plain = {"id": (23, -1, True), "m": (23, -1, False)}
    assert not_plain([MORE], plain) is None
    assert "default" in str(not_plain([MORE], {"m": (23, -1, True)}))
    assert "has been replaced since" in str(not_plain([MORE], {"m": (20, -1, False)}))
    assert "has been replaced since" in str(not_plain([MORE], {}))


# -- states ---------------------------------------------------------------------------------------------


def test_what_is_copied():
    state = {
        "live": table(),
        "left": table(state="left"),
        "paused": table(state="paused", resync="why"),
        "stale": table(state="stale", resync="why"),
        "failed": table(state="held", reason="why"),
        "held": table(state="held", resync="why"),
    }
    tables = {f"shop.public.{name}": version for name, version in state.items()}
    start = head(tables=tables, copies={"shop.public.held": table()})
    assert states.wanted_copies(start, {*tables, NEW}) == {
        *("shop.public.left", "shop.public.stale", NEW)
    }


@pytest.mark.parametrize(
    ("before", "holds", "after"),
    [
        ("live", True, "held"),
        ("live", False, "stale"),
        # What held nothing back before does not begin to.
        ("resuming", True, "stale"),
        ("stale", True, "stale"),
        ("left", True, "left"),
        ("held", True, "held"),
    ],
)
def test_a_table_that_cannot_follow(before, holds, after):
    start = head(tables={A: table(state=before)}, copies={A: table(), B: table()})
    made = states.stop(start, A, "why", holds=holds, full_resync=True)
    assert (made.tables[A].state, made.tables[A].resync) == (after, "why")
    assert list(made.copies) == [B]
    if before == "live":
        assert (made.tables[A].as_of, made.tables[A].offset) == (40, 30)


def test_tables_that_are_not_published_have_left():
    start = head(copies={NEW: table()}, not_copied={"shop.public.odd": "why"})
    made = states.without(start, {B}, "shop")
    assert [made.tables[n].state for n in (A, B)] == ["left", "live"]
    assert not made.copies
    assert not made.not_copied
    assert states.without(start, set(), "another") == start


def test_a_resume_goes_on_or_copies_anew():
    paused = states.pause(head(), A)
    assert (paused.tables[A].state, paused.tables[A].as_of) == ("paused", 40)
    assert states.resume(paused, A, 30).tables[A].state == "resuming"
    trimmed = states.resume(paused, A, 31).tables[A]
    assert trimmed.state == "stale"
    assert "trimmed up to offset 31" in trimmed.resync
    changed = states.pause(states.stop(head(), A, "lost t", holds=True, full_resync=True), A)
    assert states.resume(changed, A, 0).tables[A].state == "stale"
    failed = states.stop(head(), A, "corrupt", holds=True, full_resync=False)
    tried = states.resume(failed, A, 0).tables[A]
    assert (tried.state, tried.reason, tried.as_of) == ("live", "", 0)


def test_a_resync_leaves_a_live_table_live():
    made = states.resync(head(copies={A: table()}), A, "asked for")
    assert (made.tables[A].state, made.tables[A].resync) == ("live", "asked for")
    assert not made.copies
    assert states.wanted_copies(made, {A, B}) == {A}
    assert states.resync(states.pause(head(), A), A, "asked").tables[A].state == "stale"


def test_19_a_lake_whose_position_was_trimmed_names_its_tables():
    start = head(tables={A: table(), B: table(state="paused")})
    assert states.trimmed(start, {"shop": 30}) == {}
    assert list(states.trimmed(start, {"shop": 31})) == [A]


def test_34_published_tables_that_do_not_show_the_newest_epoch_are_named():
    tables = {
        name: table(state=state, reason=reason)
        for name, state, reason in (
            ("s.a.live", "live", ""),
            ("s.a.paused", "paused", "paused"),
            ("s.a.held", "held", "it lost f"),
            ("s.a.stale", "stale", "it lost g"),
            ("s.a.resuming", "resuming", ""),
            ("s.a.left", "left", ""),
        )
    }
    made = head(
        tables=tables,
        copies={"s.a.copied": table(), "s.a.left": table()},
        not_copied={"s.a.refused": "permission denied\nHINT:  ..."},
    )
    asked = [*tables, "s.a.copied", "s.a.refused", "s.a.new"]
    assert states.unreadable(made, asked) == {
        "s.a.held": "held: it lost f",
        "s.a.stale": "stale: it lost g",
        "s.a.resuming": "resuming",
        "s.a.left": "copied, but not published yet",
        "s.a.copied": "copied, but not published yet",
        "s.a.refused": "not copied: permission denied",
        "s.a.new": "not copied yet",
    }
    assert states.unreadable(made, ["s.a.live", "s.a.paused"]) == {}


def test_a_reader_gets_old_rows_only_of_tables_that_somebody_has_paused():
    start = replace(head(), epoch=90)
    for state, reason, behind in (
        ("live", "", False),
        ("left", "", False),
        ("paused", "paused", False),
        ("resuming", "", True),
        ("stale", "paused; the log was trimmed up to offset 9", True),
        ("stale", "paused", True),
        ("stale", "it lost f", True),
        ("resuming", "it lost f", True),
        ("held", "it lost f", True),
    ):
        found = replace(table(state=state, reason=reason), as_of=89)
        assert states.is_behind(start, found) == behind
        assert not states.is_behind(start, replace(found, as_of=90))


def test_a_table_that_was_paused_is_left_out_from_its_resume_on_until_it_follows():
    """Nobody asks for its old rows any more, and they lack parts of what other tables show."""
    paused = states.pause(head(), A)
    later = replace(paused, epoch=90)
    assert not states.is_behind(later, later.tables[A])
    dropped = replace(
        later, tables={**later.tables, A: replace(later.tables[A], resync="it lost t")}
    )
    for made, reason in (
        (states.resume(later, A, 30), "resuming"),
        (states.resume(later, A, 10**6), "the log is trimmed up to"),
        (states.resume(dropped, A, 30), "it lost t"),
        (states.resync(later, A, "asked for"), "asked for"),
        (states.resync(states.resume(later, A, 30), A, "asked for"), "asked for"),
    ):
        assert states.is_behind(made, made.tables[A])
        assert A not in Snapshot(Mock(), Path(), made).tables
        with pytest.raises(LakeError, match=f"those of epoch 40, not of epoch 90: .*{reason}"):
            Snapshot(Mock(), Path(), made)[A]
        assert reason in Snapshot(Mock(), Path(), made).stale[A]


def test_a_request_waits_for_a_look_that_began_after_it_came(tmp_path):
    """A source that is slow, or not there yet, has not said that it does not publish the table."""
    chain, began = open_chain(tmp_path), time.monotonic()
    looks, copies, status = Mock(), Mock(), Mock(streams={}, version=50)
    copies.finished.return_value = []
    work = TableWork(
        chain, "lake", {"shop": Mock()}, copies, Mock(), looks, Policy(), Mock(), pins=Mock()
    )
    work._clock = Mock(now=Mock(return_value=1.0))
    start = head(tables={B: table()})

    def round_of(*names, at):
        shapes = {name.removeprefix("shop."): Mock(oid=7) for name in names}
        look = [] if at is None else [("shop", at, Publication(shapes, frozenset()))]
        looks.answers.return_value = look
        return work.step(made, status, Mock(), {}).answered

    def leave(number, kind, name):
        dumped = {"id": number, "kind": kind, "tables": [name]}
        Path(requests.room(chain), f"{number}.json").write_bytes(sealed_json.dump(dumped))

    with patch.object(noticed, "outdated", return_value=None), patch.object(noticed, "followed_by", lambda t, *_: t):  # fmt: skip
        made = start
        leave("1", "add", NEW)
        leave("2", "pause", NEW)
        leave("3", "pause", B)
        # The first overtakes nobody who asks about the same table, and holds up nobody else.
        assert set(round_of(at=None)) == {"3"}
        assert set(round_of(B, at=began)) == {"3"}
        later = time.monotonic() + 1
        answered = round_of(B, NEW, at=later)
        assert answered["1"]["tables"] == {NEW: "is copied"}
        assert set(answered) == {"1", "2", "3"}
        assert round_of(B, at=later)["1"]["tables"][NEW].startswith("refused: no source")
        # Each is looked for at once, once.
        assert looks.soon.call_count == 1


def test_masks_are_compared_until_what_came_of_it_is_in_the_chain(tmp_path):
    """A round that fails before that must not let the table follow with its earlier masks."""
    looks, copies, status = Mock(), Mock(), Mock(streams={}, version=50)
    copies.finished.return_value = []
    looks.answers.return_value = []
    work = TableWork(
        *(open_chain(tmp_path), "lake", {"shop": Mock()}, copies, Mock(), looks, Policy(), Mock()),
        pins=Mock(),
        rules=lambda name: RowRules((ColumnMask("t", DROP),) if name == A else ()),
    )
    work._clock = Mock(now=Mock(return_value=1.0))
    for _ in range(2):
        # Nothing is published: the next round begins with the same head.
        found = work.step(head(), status, Mock(), {})
        assert found.tables[A].resync
        assert found.tables[A].state != "live"
        assert found.tables[B].state == "live"
    work.settled(found)
    assert work.step(found, status, Mock(), {}) == found


def test_14_a_copy_that_has_read_a_masked_table_under_another_name_is_not_taken(tmp_path):
    """Tables were renamed after the copy of B had begun: the table that has its name now was A."""
    copies, masked = Mock(), replace(table(), masks=(ColumnMask("t", DROP),))
    work = TableWork(
        *(open_chain(tmp_path), "lake", {"shop": Mock()}, copies, Mock(), Mock(), Policy(), Mock()),
        pins=Mock(),
    )
    copy = replace(table(state="copied"), path="new", relation_id=masked.relation_id)
    before = replace(table(), relation_id=99, resync="it lost t")
    start = head(tables={A: masked, B: before})
    assert not work._take(start, B, copy).copies
    copies.discard.assert_called_once_with(copy)
    other = replace(copy, relation_id=99)
    assert work._take(start, B, other).copies == {B: other}


def test_a_table_is_copied_when_it_could_not_be_brought_level_twice(tmp_path):
    """Failures of copies are none of these, and a round that takes a failure again counts none."""
    copies, status = Mock(), Mock(streams={}, version=50)
    work = TableWork(
        *(open_chain(tmp_path), "lake", {"shop": Mock()}, copies, Mock(), Mock(), Policy(), Mock()),
        pins=Mock(),
    )
    lost, copied = (replace(table(), resync=reason) for reason in (REATTACHED, "it lost t"))

    def ends(before, result):
        copies.finished.return_value = [(A, result)]
        work._with_arrived(head(tables={A: before}), status)
        copies.finished.return_value = []
        # Nothing is published: the next round begins with the same head.
        work._with_arrived(head(tables={A: before}), status)
        work._arrived.clear()
        return A in work._levels(head(tables={A: lost}), {A})

    error = UnavailableError("the source does not answer")
    with patch.object(TableVersion, "unfit", None):
        assert all(ends(copied, error) for _ in range(3))
        assert ends(lost, error)
        assert ends(lost, replace(table(state="copied"), path="new"))
        assert ends(lost, error)
        assert not ends(lost, error)


def test_a_pause_keeps_the_log_from_where_a_table_stopped(tmp_path):
    """A lease that moved to the newest epoch would lose what the table lacks, and a resume would copy it."""
    work = TableWork(
        *(open_chain(tmp_path), "lake", {"shop": Mock()}, Mock(), Mock(), Mock(), Policy(), Mock()),
        pins=Mock(),
    )
    work._clock = Mock(now=Mock(return_value=1.0))
    stale = replace(table(state="stale", reason="damage"), as_of=12)
    for before, version in (
        (table(), 40),
        (stale, 12),
        (replace(stale, state="resuming"), 12),
        # It is copied in any case.
        (replace(stale, resync="it lost t"), 40),
    ):
        client, status = Mock(), Mock(streams={}, version=50)
        request = Request("1", "pause", (A,))
        made = work._carry_out(head(tables={A: before}), request, status, client, {})
        assert made.tables[A].state == "paused"
        assert client.register_consumer.call_args.args[1] == version


def test_without_the_policy_nothing_is_held():
    stopped = states.stop(head(), A, "why", holds=True, full_resync=True)
    assert list(states.held(stopped)) == [A]
    assert states.held(Policy("go_on").released(stopped, "the log")) == {}


def test_epochs_wait_for_a_table_while_it_is_copied_again_and_not_when_that_has_failed():
    policy = Policy("wait_for_copy")
    stopped = states.stop(
        head(), A, "it lost f", holds=policy.holds(copied_again=True), full_resync=True
    )
    assert policy.released(stopped, "the log") == stopped
    assert list(states.held(stopped)) == [A]
    failed = policy.released(replace(stopped, not_copied={A: "permission denied"}), "the log")
    assert failed.tables[A].state == "stale"
    assert failed.tables[A].resync
    broken = states.damaged(
        head(), {head().tables[A].path: "damage"}, holds=policy.holds(copied_again=False)
    )
    assert broken.tables[A].state == "stale"
    assert Policy("hold").holds(copied_again=False)
    # What an earlier configuration held is released, but for a stream whose log was rolled back.
    held = states.stop(head(), A, "damage", holds=True, full_resync=False)
    assert states.held(policy.released(held, "the log")) == {}
    assert states.held(policy.released(held, "dam")) == states.held(held)


# -- requests -------------------------------------------------------------------------------------------


def ask(start, kind, *names, published=(A, B, NEW), low=1, apart=()):
    request, why = Request("1", kind, names), dict(apart)
    return requests.carry_out(start, request, published, {"shop": low}, 50.0, why)


@pytest.mark.parametrize(
    ("kind", "name", "word"),
    [
        ("pause", A, "is paused"),
        ("pause", NEW, "refused: it is not in the lake"),
        ("resume", A, "follows already"),
        ("resync", A, "is copied again"),
        ("resync", "shop.public.none", "refused: no source of this lake publishes it"),
        ("add", NEW, "is copied"),
        ("add", A, "is in the lake already"),
        ("add", "shop.public.none", "refused: no source of this lake publishes it"),
        ("drop", NEW, "refused: it is not in the lake"),
        # It would be copied again at once.
        ("drop", A, "refused: it is live; only a table that has left"),
    ],
)
def test_each_request_has_its_answer(kind, name, word):
    made = ask(head(), kind, name)
    assert made.answered["1"]["tables"][name].startswith(word)
    if word.startswith("refused"):
        assert made.tables == head().tables
        with pytest.raises(LakeError, match=name):
            requests.finished(made, Request("1", kind, (name,)))


@pytest.mark.parametrize(("kind", "name"), [("resume", A), ("add", NEW), ("retry", A)])
def test_what_needs_a_log_that_was_rolled_back_is_refused_at_once(kind, name):
    """It would be undone by the same look, and whoever waits for it would wait for ever."""
    apart = {"shop": f"{rolled_back.REASON}it is at version 5, and version 9 was read from it"}
    start = rolled_back.hold(head(), apart, holds=True)
    made = ask(start, kind, name, apart=apart)
    assert made.tables == start.tables
    with pytest.raises(DivergedError, match="the log was rolled back: it is at version 5") as told:
        requests.finished(made, Request("1", kind, (name,)))
    assert "tuskline table resync" in told.value.repair
    # The ways out, and what needs no log.
    assert ask(start, "resync", A, apart=apart).tables[A].resync
    assert ask(start, "pause", A, apart=apart).tables[A].state == "paused"
    if name == A:
        resynced = ask(ask(start, "pause", A), "resync", A)
        paused = replace(resynced.tables[A], state="paused")
        anew = ask(
            replace(resynced, tables={**resynced.tables, A: paused}), "resume", A, apart=apart
        )
        assert anew.tables[A].state == "stale"
    assert ask(start, kind, name).answered["1"]["tables"][name][:7] != "refused"


def test_a_request_is_finished_when_the_lake_shows_it():
    request = Request("1", "resync", (A,))
    assert requests.finished(head(), request) is None
    asked = ask(head(not_copied={A: "an old failure"}), "resync", A)
    assert requests.finished(asked, request) is None
    with pytest.raises(LakeError, match="permission denied"):
        requests.finished(replace(asked, not_copied={A: "permission denied"}), request)
    shown = replace(asked, tables={**asked.tables, A: table(path="new")})
    assert requests.finished(shown, request) == {A: "is copied again"}


@pytest.mark.parametrize("kind", ["retry", "resume", "resync", "add"])
def test_a_request_about_a_table_that_leaves_meanwhile_is_an_error_that_says_so(kind):
    unfit = table(state="paused", quarantined_rows=1, quarantine_files=("f",))
    request = Request("1", kind, (A,))
    start = head(tables={} if kind == "add" else {A: unfit, B: table()})
    made = ask(start, kind, A)
    assert requests.finished(made, request) is None
    gone = states.without(made, {B}, "shop")
    dropped = replace(gone, tables={B: table()})
    if kind in {"retry", "resume", "resync"}:
        with pytest.raises(LakeError, match="left") as told:
            requests.finished(gone, request)
        assert told.value.where == A
    if kind in {"retry", "resume"}:
        with pytest.raises(LakeError, match="left"):
            requests.finished(dropped, request)
    else:
        # It may be copied still: the answer's link had no version of it either.
        assert requests.finished(dropped, request) is None
        with pytest.raises(LakeError, match="permission denied"):
            requests.finished(replace(dropped, not_copied={A: "permission denied"}), request)
    if kind == "retry":
        assert requests.finished(dropped, Request("1", "skip", (A,))) is not None
        # A table that comes back is another one, without these rows.
        assert requests.finished(replace(gone, tables={A: table()}), request) is not None


@pytest.mark.parametrize("published", [(B, NEW), (A, B, NEW)], ids=["gone", "back"])
def test_a_table_that_has_left_is_dropped(published):
    """Also one that is published again: it comes back as a new table."""
    start = head(tables={A: table(state="left"), B: table()})
    made = ask(start, "drop", A, published=published)
    assert set(made.tables) == {B}
    assert requests.finished(made, Request("1", "drop", (A,))) == {A: "is dropped"}
    assert ask(made, "drop", A).answered["1"]["tables"][A].startswith("refused: it is not in")


def test_a_table_that_is_resumed_after_its_source_was_reattached_is_brought_level():
    paused = replace(
        table(state="paused", resync=REATTACHED), snapshot_id=7, layout=(("id", 23, -1),)
    )
    start = head(tables={A: paused, B: replace(paused, quarantined_rows=1)})
    made = requests.carry_out(start, Request("1", "resume", (A, B)), {A, B}, {"shop": 0}, 0.0, {})
    assert made.answered["1"]["tables"] == {
        A: f"is brought level or copied: {REATTACHED}",
        B: f"is copied again: {REATTACHED}",
    }


def test_old_answers_go():
    start = head(answered={"0": {"at": 0.0}, "9": {"at": 3000.0}})
    made = requests.carry_out(start, Request("1", "pause", (A,)), (), {}, 3700.0, {})
    assert set(made.answered) == {"1", "9"}


def test_requests_are_kept_in_order_until_they_are_forgotten(tmp_path):
    chain = open_chain(tmp_path)
    with pytest.raises(LakeError, match="no lake"):
        requests.ask(chain, "pause", [A])
    chain.initialise("log", "iceberg")
    with pytest.raises(UsageError):
        requests.ask(chain, "truncate", [A])
    made = [requests.ask(chain, kind, [A]) for kind in ("pause", "resume", "resync")]
    assert list(requests.waiting(chain)) == made
    requests.forget(chain, made[0])
    torn = tmp_path / "_tuskline" / "requests" / "0.json"
    torn.write_text("{")
    # A file that is none is put aside, and holds nobody up.
    assert list(requests.waiting(chain)) == made[1:]
    assert torn.with_suffix(".corrupt").exists()
    with pytest.raises(DeadlineError, match="not carried out yet; it stays"):
        requests.wait(chain, made[1], timeout=0.0)


DAMAGED = {
    "a kind that is none": {"kind": "resumf"},
    "the id of another": {"id": "2"},
    "a table that is no text": {"tables": [None]},
    "tables that are no list": {"tables": A},
    "a checksum of another content": {"crc": 1},
}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_a_request_that_is_damaged_is_put_aside_and_changes_nothing(tmp_path, change):
    chain = open_chain(tmp_path)
    chain.initialise("log", "iceberg")
    requests.make_room(chain)
    file = Path(requests.room(chain), "1.json")
    whole = {"id": "1", "kind": "resume", "tables": [A]}
    file.write_text(json.dumps(whole))
    # Earlier versions made them without a checksum.
    assert list(requests.waiting(chain)) == [Request("1", "resume", (A,))]
    file.write_text(json.dumps({**whole, **change}))
    assert list(requests.waiting(chain)) == []
    assert file.with_suffix(".corrupt").exists()
    with pytest.raises(CorruptError, match="renamed"):
        requests.wait(chain, Request("1", "resume", (A,)), timeout=0.0)


def test_a_request_that_cannot_be_read_holds_up_no_other(tmp_path):
    chain = open_chain(tmp_path)
    chain.initialise("log", "iceberg")
    made = requests.ask(chain, "pause", [A])
    (tmp_path / "_tuskline" / "requests" / "0.json").mkdir()
    assert list(requests.waiting(chain)) == [made]


def test_requests_that_cannot_be_removed_are_left_and_hold_up_no_epoch(tmp_path, monkeypatch):
    """As where root's command made their folder: each was carried out, and then no round succeeded."""
    chain = open_chain(tmp_path)
    chain.initialise("log", "iceberg")
    made, folder = requests.ask(chain, "pause", [A]), Path(requests.room(chain))
    (folder / "0.json").write_text("{")
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda path, _: path != folder)
        assert list(requests.waiting(chain)) == []
        with pytest.raises(DeadlineError, match="not carried out yet") as refused:
            requests.wait(chain, made, timeout=0.0)
        assert f"may write to {folder}" in str(refused.value)
    assert list(requests.waiting(chain)) == [made]


def test_whoever_may_not_leave_a_request_is_told(tmp_path, monkeypatch):
    chain = open_chain(tmp_path)
    chain.initialise("log", "iceberg")
    monkeypatch.setattr(chain.store, "create", Mock(side_effect=PermissionError(13, "no")))
    with pytest.raises(LakeError, match="could not write a request: no"):
        requests.ask(chain, "pause", [A])


def test_what_a_list_shows():
    start = head(
        tables={A: table(resync="asked for"), B: table(state="paused", as_of=12, reason="paused")},
        not_copied={"shop.public.odd": "no key"},
    )
    copies = {
        A: CopyStatus(99.0, 5, 50, 2, 1, 5.0, 50.0),
        NEW: CopyStatus(0.0, 0, 0, 0, 0, 0.0, 0.0),
    }
    status = LakeStatus(100.0, term=2, epoch=12, copying=copies)
    rows = {row["table"]: row for row in table_rows(start, status, 101.0)}
    assert {name: row["state"] for name, row in rows.items()} == {
        A: "live",
        B: "paused",
        NEW: "copying",
        "shop.public.odd": "failed",
    }
    assert (rows[A]["resync"], rows[A]["copy"]["rows"]) == ("copying", 5)
    assert (rows[B]["as_of"], rows[B]["reason"]) == (12, "paused")
    # Of a writer that is gone, or another: nothing is under way.
    assert NEW not in {row["table"] for row in table_rows(start, status, 200.0)}
    assert NEW not in {row["table"] for row in table_rows(start, replace(status, term=1), 101.0)}


def test_a_list_shows_where_each_history_begins_and_the_names_in_the_lake():
    tables = {
        A: table(mode="history", start_lsn=0x1A0, history_from=1_700_000_000_000_000),
        # Of a copy of an earlier version, which has not recorded the time.
        B: table(mode="history", start_lsn=0x1B0, lake_name="shop.sales.b"),
        NEW: table(mode="soft_delete"),
    }
    rows = {row["table"]: row for row in table_rows(head(tables=tables), LakeStatus(), 1.0)}
    assert {name: row["history"] for name, row in rows.items()} == {
        A: {"begins_at_lsn": "0/1A0", "begins_at": "2023-11-14T22:13:20.000Z"},
        B: {"begins_at_lsn": "0/1B0", "begins_at": None},
        NEW: None,
    }
    assert {name: row["lake_name"] for name, row in rows.items()} == {
        A: A,
        B: "shop.sales.b",
        NEW: NEW,
    }
