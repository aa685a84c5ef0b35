"""What doctor says of a server whose commits are to wait for safekeepers, and of the safekeepers."""

import contextlib
import socket
import threading
import time
from dataclasses import replace

import pytest

from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.doctor import quorum, safekeepers
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.doctor.safekeepers import SafekeeperAnswer
from walsender_bridge.errors import Cause, ServerSettingError
from walsender_bridge.provisioning.quorum import ConfiguredQuorum, check
from walsender_bridge.quorum.proposer.effects import Lineage, Primary
from walsender_bridge.quorum.proposer.status import without_session
from walsender_bridge.quorum.proposer.status_record import ENDED
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.runtime.error_record import ErrorRecord

NAME, SLOT = "tuskline_quorum", "tuskline_safekeepers"
QUORUM = ConfiguredQuorum(CaptureSource("shop", "host=db dbname=x", "s", "p"), NAME, SLOT)
SERVER = m.ServerInfo(7, 16, 16 << 20)
PRIMARY = Primary(Lineage(1), 0x5000000)
MB = 1 << 20


def facts(**other):
    good = {
        "version": 160_004,
        "version_text": "16.4",
        "in_recovery": False,
        "names": f"ANY 1 ({NAME})",
        "names_source": "configuration file",
        "names_after_reload": None,
        "commit": "on",
        "commit_elsewhere": [],
        "settings": {
            "max_replication_slots": "10",
            "max_wal_senders": "10",
            "max_slot_wal_keep_size": "-1",
        },
        "slots_used": 2,
        "senders_used": 2,
        "slot": {"slot_type": "physical", "active": False, "wal_status": "reserved"},
        "senders": 1,
        "crowded": [],
        "waiting": 0,
        "role": {"name": "tuskline", "superuser": False, "replication": True},
        "may_see": True,
        "may_advance": True,
    }
    return {**good, **other}


def found(severity=None, **other):
    """What is said, by check, of findings that are not OK (or of this severity)."""
    judged = quorum.evaluate(facts(**other), QUORUM, "db", 1 << 30)
    return {
        each.check: each
        for each in judged
        if (each.severity is severity if severity else each.severity is not Severity.OK)
    }


def test_a_good_server_is_good():
    assert found() == {}


@pytest.mark.parametrize(
    ("version", "bad"),
    [
        (110_013, True),
        (110_014, False),
        (120_008, True),
        (120_009, False),
        (130_004, True),
        (130_005, False),
        (140_000, True),
        (140_001, False),
        (150_000, False),
    ],
)
def test_minors_that_rewrite_a_part_of_a_record_are_refused(version, bad):
    problems = found(version=version)
    assert set(problems) == ({"minor version"} if bad else set())
    assert all(each.prevents and each.severity is Severity.ERROR for each in problems.values())


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        (f"FIRST 1 ({NAME}, s1)", f"FIRST 2 ({NAME}, s1)"),
        (f"ANY 1 ({NAME}, s1)", f"FIRST 2 ({NAME}, s1)"),
        ("*", f"ANY 1 ({NAME})"),
        ("FIRST 1 (s1, s2)", f"FIRST 3 ({NAME}, s1, s2)"),
        # Two walsenders of s1 answer, though each name has to.
        (f"ANY 2 (s1, {NAME})", f"FIRST 2 ({NAME}, s1)"),
        (f"FIRST 2 (s1, {NAME})", f"FIRST 2 ({NAME}, s1)"),
    ],
)
def test_28_names_that_can_outvote_the_proposer_are_refused(names, fix):
    problem = found(names=names)["synchronous_standby_names"]
    assert problem.severity is Severity.ERROR
    assert f"'{fix}'" in problem.fix


def test_35_a_list_that_waits_for_an_older_walsender_is_named() -> None:
    problem = found(names=f"FIRST 1 ({NAME})")["synchronous_standby_names"]
    assert problem.severity is Severity.WARNING
    assert "the walsender of the previous one" in problem.what
    assert f"'ANY 1 ({NAME})'" in problem.fix


def test_2_a_standby_beside_the_quorum_is_named_and_several_of_its_name_are_refused() -> None:
    problems = found(names=f"FIRST 2 ({NAME}, s1)")
    assert problems["synchronous_standby_names"].severity is Severity.WARNING
    assert "while it is not" in problems["synchronous_standby_names"].what
    problems = found(names=f"FIRST 2 ({NAME}, s1)", crowded=[{"name": "s1", "walsenders": 2}])
    assert problems["standbys"].severity is Severity.ERROR
    assert "2 walsenders are named 's1'" in problems["standbys"].what


def test_commits_that_do_not_wait_are_worth_a_word():
    problem = found(names="FIRST 1 (s1)")["synchronous_standby_names"]
    assert problem.severity is Severity.WARNING
    assert f"'FIRST 2 ({NAME}, s1)'" in problem.fix
    # With nobody to answer, the script must not make commits hang.
    assert not found(names="", senders=0)["synchronous_standby_names"].fix


def test_28_a_name_that_several_use_is_refused():
    assert found(senders=2)["proposer"].severity is Severity.ERROR


def test_a_server_that_waits_for_nobody_is_told_and_up_may_start():
    problem = found(senders=0)["proposer"]
    assert (problem.severity, problem.prevents) == (Severity.ERROR, False)


@pytest.mark.parametrize(
    ("place", "words", "fix"),
    [
        ({"commit": "remote_apply"}, "is remote_apply", "ALTER SYSTEM SET"),
        (
            {"commit_elsewhere": [{"role": "app", "database": None, "value": "remote_apply"}]},
            "of role app",
            "ALTER ROLE",
        ),
        (
            {"commit_elsewhere": [{"role": None, "database": "x", "value": "remote_apply"}]},
            "in x",
            "ALTER DATABASE",
        ),
        (
            {"commit_elsewhere": [{"role": "app", "database": "x", "value": "remote_apply"}]},
            "of role app in x",
            "IN DATABASE",
        ),
    ],
)
def test_28_remote_apply_is_refused_wherever_it_is_set(place, words, fix):
    problem = found(**place)["synchronous_commit"]
    assert problem.severity is Severity.ERROR
    assert words in problem.what
    assert "hang" in problem.what
    assert fix in problem.fix
    with pytest.raises(ServerSettingError, match="remote_apply"):
        check(facts(**place), QUORUM)


def test_commits_that_wait_for_nothing_are_told():
    assert found(commit="off")["synchronous_commit"].severity is Severity.ERROR
    elsewhere = [{"role": "batch", "database": None, "value": "local"}]
    assert found(commit_elsewhere=elsewhere)["synchronous_commit"].severity is Severity.WARNING
    with pytest.raises(ServerSettingError, match="wait for no standby"):
        check(facts(commit="local"), QUORUM)


def test_room_for_the_proposer_and_its_slot():
    settings = {
        "max_replication_slots": "2",
        "max_wal_senders": "3",
        "max_slot_wal_keep_size": "64",
    }
    problems = found(settings=settings, slot=None, senders=0, names="")
    assert "raise max_wal_senders to 4" in problems["max_wal_senders"].repair
    assert "raise max_replication_slots to 3" in problems["max_replication_slots"].repair
    assert "1024 MB" in problems["max_slot_wal_keep_size"].what


@pytest.mark.parametrize(
    "slot",
    [
        {"slot_type": "logical", "active": False},
        {"slot_type": "physical", "active": True},
        {"slot_type": "physical", "active": False, "wal_status": "lost"},
    ],
)
def test_a_slot_that_keeps_nothing(slot):
    assert found(slot=slot)["safekeepers' slot"].cause is Cause.SLOT


def test_nobody_is_told_to_drop_the_slot_that_keeps_wal():
    lost = {"slot_type": "physical", "active": False, "wal_status": "lost"}
    behind = found(slot=lost, flush_lsn=500, quorum_lsn=400)["safekeepers' slot"].repair
    whole = found(slot=lost, flush_lsn=500, quorum_lsn=500)["safekeepers' slot"].repair
    assert "drop" not in behind + whole
    assert "has all WAL" in whole
    assert "start the safekeepers" in behind


def test_what_the_role_lacks():
    assert found(may_see=False)["quorum privileges"].severity is Severity.WARNING
    assert "GRANT EXECUTE" in found(may_advance=False)["quorum privileges"].fix


# -- safekeepers ----------------------------------------------------------------------------------------


def greeting(number, server=SERVER, commit_lsn=0x4000000):
    node = m.NodeId(1, 1)
    return m.SafekeeperGreeting(number, server, node, Configuration(), commit_lsn, commit_lsn, 1)


def answers(*messages):
    return [SafekeeperAnswer(f"host:{n}", message, "refused") for n, message in enumerate(messages)]


def problems(*messages):
    judged = safekeepers.evaluate(answers(*messages), SERVER, PRIMARY, "db")
    return [each for each in judged if each.severity is not Severity.OK]


def test_safekeepers_that_answer_are_fit():
    assert problems(greeting(1), greeting(2), greeting(3, m.ServerInfo())) == []


def test_one_that_is_away_is_a_word_two_are_no_quorum():
    (one,) = problems(greeting(1), None, greeting(3))
    assert one.severity is Severity.WARNING
    *_, none = problems(greeting(1), None, None)
    assert none.severity is Severity.ERROR
    assert "no quorum" in none.what


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (m.Refusal.OTHER_SYSTEM, "system identifier"),
        (m.Refusal.OTHER_MAJOR, "major version"),
        (m.Refusal.OTHER_SEGMENT_SIZE, "WAL segment size"),
    ],
)
def test_19_another_server_s_safekeeper_is_named(reason, word):
    refused = m.Refused(reason, m.NodeId(), "7, but its WAL here is of 8")
    (problem,) = problems(greeting(1), greeting(2), refused)
    assert word in problem.what
    assert problem.cause is Cause.DIVERGED


def test_19_a_safekeeper_that_tells_of_another_server():
    (problem,) = problems(greeting(1), greeting(2), greeting(3, m.ServerInfo(8, 16, 16 << 20)))
    assert problem.cause is Cause.DIVERGED


def test_safekeepers_ahead_of_the_server_are_told():
    found = problems(greeting(1), greeting(2), greeting(3, commit_lsn=0x6000000))
    assert "restored from an older state" in found[0].what


def test_a_safekeeper_whose_vote_no_election_reaches_is_named():
    gone = replace(greeting(3), node_id=m.NodeId((1 << 64) - 1, 9))
    (problem, *others) = problems(greeting(1), greeting(2), gone)
    assert "no election of the others reaches" in problem.what
    assert "tuskline safekeeper replace" in problem.repair
    assert problem.severity is Severity.ERROR
    assert not others, "the others are a quorum"


def test_an_address_twice_is_no_second_safekeeper():
    found = problems(greeting(1), greeting(1), greeting(1))
    assert "count twice" in found[0].what
    assert "1 of 3" in found[1].what


def test_17_the_proposer_s_own_words():
    error = ErrorRecord("DIVERGED", "a copy", "db", "another server")
    told = without_session(ENDED, error)
    (problem,) = safekeepers.proposer(told, "db")
    assert (problem.what, problem.cause) == ("a copy", Cause.DIVERGED)
    assert not list(safekeepers.proposer(replace(told, phase="leading"), "db"))
    assert not list(safekeepers.proposer(None, "db"))


def test_safekeepers_that_hang_cost_one_time_out_together(monkeypatch):
    """Nobody accepts on five of six addresses; the sixth says nonsense, which is its own trouble only."""
    monkeypatch.setattr(safekeepers, "_ANSWER_SECONDS", 1.0)
    with contextlib.ExitStack() as stack:
        hung = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in hung]
        threading.Thread(target=_say_nonsense, args=(hung[2],), daemon=True).start()
        began = time.monotonic()
        found = safekeepers.reach(addresses, SERVER)
        took = time.monotonic() - began
    assert [each.address for each in found] == addresses
    assert {each.message for each in found} == {None}
    assert [each.silence for each in found].count("no answer in 1 s") == 5
    assert found[2].silence not in {"", "no answer in 1 s"}
    assert 0.9 < took < 3


def _say_nonsense(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" * 100)
        connection.recv(1 << 16)
