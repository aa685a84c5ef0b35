"""What is said of a quorum: the worst first, nothing that is old, and nothing through a folder of somebody else."""

import os
import shutil
import time
from dataclasses import replace

import pytest

from tests.support import statuses
from walsender_bridge.capture.status_record import CaptureStatus
from walsender_bridge.cli.members import unserved_wal
from walsender_bridge.observability.quorum_view import STARTING, QuorumView, SafekeeperView
from walsender_bridge.quorum.proposer.core import Phase
from walsender_bridge.quorum.proposer.status import without_session
from walsender_bridge.quorum.proposer.status_record import ENDED
from walsender_bridge.quorum.safekeeper.status import WriteTimes
from walsender_bridge.quorum.safekeeper.status_record import (
    WRITE_SECONDS,
    ArchiveRecord,
    CatchUpRecord,
)
from walsender_bridge.quorum.wal_server.status_record import SlotRecord, WalServerStatus
from walsender_bridge.runtime import shared_files, status_file
from walsender_bridge.runtime.commit_page import CommitPage, CommitPageWriter
from walsender_bridge.runtime.error_record import ErrorRecord

MEMBERS = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")


OWN = statuses.safekeeper()
CAPTURE = statuses.capture()


def safekeeper(number, shown="streaming", *, own=OWN, hosted=True, **told):
    """`own`: what it reports itself, of now; None: nothing."""
    own = own and replace(own, updated_at=own.updated_at and time.time())
    address = f"127.0.0.1:{number + 1}"
    reported = statuses.reported(address=address, shown=shown, **told)
    return SafekeeperView(f"safekeeper-{number + 1}", address, reported, own, hosted=hosted)


def view(*safekeepers, **proposer):
    told = statuses.session(**proposer)
    return QuorumView(told, proposer_here=True, safekeepers=safekeepers, required=True)


def test_all_is_well():
    seen = view(*(safekeeper(n) for n in range(3)))
    assert (seen.problems, seen.quorum, seen.lag_bytes) == ([], True, 0x100)


def test_a_lost_quorum_is_said_first():
    seen = view(safekeeper(0), safekeeper(1, "silent"), safekeeper(2, "away"), quorum=False)
    assert seen.problems == [
        "the quorum is lost, commits hang: 1 of 3 safekeepers follow the proposer",
        "safekeeper 127.0.0.1:2 is silent",
        "safekeeper 127.0.0.1:3 is away",
    ]
    assert seen.lag_bytes is None


@pytest.mark.parametrize(
    ("required", "commits"),
    [(True, ", commits hang"), (None, ", commits that wait for it hang"), (False, "")],
)
def test_commits_are_said_to_hang_only_where_they_wait_for_the_quorum(required, commits):
    seen = replace(view(quorum=False), required=required)
    said = "no quorum follows the proposer" if required is False else "the quorum is lost"
    assert seen.problems == [f"{said}{commits}: 0 of 0 safekeepers follow the proposer"]
    assert not seen.starts
    begins = replace(view(quorum=False, phase="greeting"), required=required)
    assert begins.starts
    assert begins.problems == [
        f"no quorum follows the proposer yet{commits}: it waits for a majority of the safekeepers to answer"
    ]


def test_each_phase_before_a_proposer_leads_is_described():
    assert {*STARTING} == {*Phase} - {Phase.LEADING, Phase.STOPPED}


def test_40_a_disk_without_room_is_said_before_it_refuses_wal():
    own = replace(OWN, free_bytes=0, free_limit=1 << 26)
    seen = view(safekeeper(0, own=own), safekeeper(1), safekeeper(2))
    assert seen.problems == [
        "safekeeper 127.0.0.1:1 will soon accept no more WAL: 0 bytes are free, less than free_bytes = 67108864"
    ]
    assert seen.quorum
    assert not view(safekeeper(0, own=replace(own, free_bytes=1 << 26))).problems


def test_a_safekeeper_that_no_proposer_asks_is_missed_where_the_bridge_is():
    own = replace(OWN, state="waiting", updated_at=time.time())
    alone = SafekeeperView("safekeeper-1", "127.0.0.1:1", None, own, hosted=True)
    assert QuorumView(None, False, (alone,)).problems == ["safekeeper 127.0.0.1:1 is waiting"]
    assert QuorumView(None, False, (alone,), bridge_here=False).problems == []
    damaged = replace(alone, own=replace(own, damaged=("0001",)))
    assert "damaged" in QuorumView(None, False, (damaged,), bridge_here=False).problems[0]


def test_why_a_safekeeper_ended_is_said_after_it():
    error = ErrorRecord("CORRUPT", "it is damaged", "/a/control", "replace it")
    ended = replace(safekeeper(0, "away", own=None), ended=error)
    seen = view(ended, safekeeper(1), safekeeper(2))
    assert seen.problems == [
        "safekeeper 127.0.0.1:1 is away: /a/control: it is damaged; replace it"
    ]


def test_what_is_let_go_of_for_want_of_room_is_said():
    archive = ArchiveRecord("0/900", unreserved=True, missing=(("0/500", "0/700"),))
    lost = SlotRecord("a", "0/300", active=False, temporary=False, wal_status="lost")
    other = replace(lost, slot="b", restart_lsn="0/800", wal_status="unreserved")
    server = WalServerStatus(damaged=(), logins=0, readers=(), slots=(lost, other))
    one = replace(safekeeper(0, own=replace(OWN, archive=archive)), server=server)
    words = [word.removeprefix("safekeeper 127.0.0.1:1: ") for word in view(one).problems]
    assert [word.partition(" (")[0] for word in words] == [
        "replication slot a is lost: WAL from 0/300 on has been removed",
        "WAL from 0/500 to 0/700 was removed before it was archived here, and may be missing in the archive",
        "the archive has no WAL from 0/900 on, and WAL is no longer kept for it",
    ]


def test_39_a_member_that_lacks_wal_which_others_retain_is_named():
    def begins(number, lsn, **more):
        return safekeeper(
            number, own=None, hosted=False, begin_lsn=lsn, flush_lsn="0/90000", **more
        )

    def shorter(*safekeepers, keep_bytes=0x80000):
        return replace(view(*safekeepers), keep_bytes=keep_bytes).notes

    (word,) = shorter(begins(0, "0/10000"), begins(1, "0/40000"), begins(2, "0/8000"))
    assert (
        "127.0.0.1:2 has no WAL before 0/40000, but safekeeper 127.0.0.1:3 has it from 0/8000 on"
        in word
    )
    # By now the others may have removed all that is below: only what they have to retain counts.
    assert not shorter(begins(0, "0/10000"), begins(1, "0/40000"), keep_bytes=0x50000)
    assert not shorter(begins(0, "0/40000"), begins(1, "0/40000"))
    assert not shorter(begins(0, "0/10000"), begins(1, "0/40000", member=False))
    assert not shorter(begins(0, "0/10000"), begins(1, None))
    assert not shorter(begins(0, "0/0"), begins(1, "0/40000")), "a new one has none yet"
    assert not view(begins(0, "0/10000"), begins(1, "0/40000")).problems
    # What it says of itself is of now.
    own = replace(OWN, flush_lsn="0/90000", begin_lsn="0/40000")
    (word,) = shorter(begins(0, "0/10000"), safekeeper(1, own=own, begin_lsn="0/0"))
    assert "127.0.0.1:2 has no WAL before 0/40000" in word


def test_older_wal_that_nobody_could_bring_is_a_fault_until_it_is_brought():
    told = {"catch_up_target_lsn": "0/10000", "stuck": True}
    begun = replace(OWN, begin_lsn="0/40000")
    seen = view(safekeeper(0), safekeeper(1, own=begun, **told), safekeeper(2))
    (word,) = seen.problems
    assert word == (
        "safekeeper 127.0.0.1:2 lacks WAL from 0/10000 to 0/40000, and could not get it from another: "
        "their WAL is damaged, or cannot be read"
    )
    own = replace(begun, catch_up=CatchUpRecord("0/10000", "it does not follow"))
    (word,) = view(safekeeper(1, own=own, **told)).problems
    assert word.endswith("could not get it from another: it does not follow")
    for fine in ({"stuck": False}, {"catch_up_target_lsn": None}):
        assert not view(safekeeper(1, **(told | fine))).problems


def test_a_segment_that_is_not_lent_is_named():
    own = replace(OWN, damaged=("000000010000000000000003",))
    (word,) = view(safekeeper(0, own=own), safekeeper(1)).problems
    assert word.endswith("damaged WAL, which it does not serve: 000000010000000000000003")


def test_39_a_member_that_is_brought_older_wal_says_how_much_is_left():
    first = safekeeper(0, own=None, hosted=False, begin_lsn="0/10000", flush_lsn="0/90000")
    told = {"begin_lsn": "0/40000", "flush_lsn": "0/90000", "catch_up_target_lsn": "0/10000"}
    second = safekeeper(1, own=None, hosted=False, **told)
    (word,) = replace(view(first, second), keep_bytes=0x80000).notes
    assert word.endswith("have to use that one until it has caught up, down to 0/10000")
    assert second.catch_up_bytes == 0x30000
    assert (
        safekeeper(
            1, own=None, hosted=False, **(told | {"catch_up_target_lsn": None})
        ).catch_up_bytes
        == 0
    )
    assert replace(first, reported=None).catch_up_bytes is None
    older = CatchUpRecord("0/10000", "received WAL was rejected: it is damaged")
    own = replace(OWN, flush_lsn="0/90000", begin_lsn="0/40000", catch_up=older)
    (word,) = replace(view(first, safekeeper(1, own=own)), keep_bytes=0x80000).notes
    assert word.endswith("have to use that one; received WAL was rejected: it is damaged")


def test_39_what_one_that_joined_cannot_serve_is_told():
    before = view(
        safekeeper(0, own=None, begin_lsn="0/20000", member=True),
        safekeeper(1, own=None, begin_lsn="0/10000", member=True),
        safekeeper(2, own=None, begin_lsn="0/0", member=False),
        safekeeper(3, own=None, begin_lsn="0/0", member=True),  # it has no WAL yet
        safekeeper(4, own=None, begin_lsn="0/5000", member=False),  # it has left
    )
    members = [statuses.reported(address=each, begin_lsn="0/30000") for each in MEMBERS]
    assert unserved_wal(members, before, [MEMBERS[2]]) == [
        {"address": MEMBERS[2], "from": "0/10000", "to": "0/30000"}
    ]
    assert unserved_wal(members, before, []) == []
    members = [statuses.reported(address=MEMBERS[2], begin_lsn=lsn) for lsn in (None, "0/10000")]
    assert [each["to"] for each in unserved_wal(members, before, [MEMBERS[2]])] == [None]


def test_why_a_proposer_does_not_go_on_is_told_with_its_repair():
    error = ErrorRecord("FENCED", "the proposer stopped, displaced", "", "stop this one")
    seen = replace(view(safekeeper(0)), proposer=without_session(ENDED, error))
    assert seen.problems[0].endswith("hang: the proposer stopped, displaced; stop this one")


@pytest.mark.parametrize("old", [{"updated_at": time.time() - 60}, {"pid": 0}])
def test_what_is_old_says_nothing_of_now(old):
    seen = view(safekeeper(0), **old)
    assert not seen.quorum
    assert seen.problems == [
        "the quorum is lost, commits hang: the proposer does not report: it is not running, or it hangs"
    ]
    hosted = replace(safekeeper(0), own=statuses.safekeeper(**old))
    assert hosted.state == "away"
    assert hosted.flush_lsn == "0/2000"


def test_a_full_disk_and_a_refusal_are_told_with_their_reasons():
    full = safekeeper(0, own=replace(OWN, state="full", why="no room"))
    refused = safekeeper(1, "joining", fault="the logs part at 0/1000")
    assert view(full, refused).problems == [
        "safekeeper 127.0.0.1:1 has no space for WAL: no room",
        "safekeeper 127.0.0.1:2 is joining: the logs part at 0/1000",
    ]


def test_one_that_has_left_is_missed_by_nobody_but_only_when_all_members_are_there():
    names = ("a", "b")
    members = [safekeeper(n, safekeeper=names[n], member=True) for n in range(2)]
    left = safekeeper(2, "away", own=None, hosted=False, safekeeper=None, member=False)
    membership = statuses.membership(members=names)
    assert view(*members, left, membership=membership).problems == []
    # That one may be the third member: nobody knows who is away.
    membership = statuses.membership(members=(*names, "c"))
    assert view(*members, left, membership=membership).problems == [
        "safekeeper 127.0.0.1:3 is away"
    ]
    membership = statuses.membership(members=names, new_members=(*names, "c"))
    assert view(*members, left, membership=membership).problems == [
        "safekeeper 127.0.0.1:3 is away"
    ]


def test_the_histogram_counts_what_took_at_most_so_long():
    times = WriteTimes()
    for seconds in (0.00005, WRITE_SECONDS[1], 0.02, 99.0):
        times.add(seconds)
    record = times.record()
    assert record.count == 4
    assert record.buckets == (1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3)
    assert record.seconds == pytest.approx(99.0203)


def test_a_status_file_is_replaced_whole_and_a_full_disk_stops_nobody(tmp_path):
    path = tmp_path / "status.json"
    assert status_file.read(path, CaptureStatus) is None
    status_file.write(path, CAPTURE)
    assert status_file.read(path, CaptureStatus) is not None
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]
    path.write_text('{"state": ')
    assert status_file.read(path, CaptureStatus) is None
    status_file.write(tmp_path / "gone" / "status.json", CAPTURE)


def test_a_folder_that_others_took_or_may_write_holds_up_no_start(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    run_dir = tmp_path / "run"
    assert shared_files.prepare(run_dir) == shared_files.folder(run_dir)
    made = shared_files.folder(run_dir).resolve()
    assert made.parent == tmp_path / "shm"
    assert (made.stat().st_mode & 0o777, made.stat().st_uid) == (0o700, os.getuid())
    (made / "a").touch()
    shared_files.clear(run_dir, "a", "b")
    assert not list((tmp_path / "shm").iterdir())
    # Whoever starts next finds its folder again.
    assert shared_files.prepare(run_dir).resolve() == made
    for taken in ("writable", "link", "file"):
        made = shared_files.folder(run_dir).resolve()
        made.rmdir()
        if taken == "writable":
            made.mkdir()
            made.chmod(0o777)
        elif taken == "link":
            made.symlink_to(tmp_path)
        else:
            made.touch()
        prepared = shared_files.prepare(run_dir)
        assert prepared.resolve() not in {made, tmp_path}, taken
        assert list(prepared.iterdir()) == []
    # What only another account could remove is left behind, and in nobody's way.
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert shared_files.prepare(run_dir).resolve().parent == run_dir, "nothing in memory is its own"


def test_an_installation_where_another_was_removed_does_not_read_what_that_one_said(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(shared_files, "_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    run_dir = tmp_path / "run"
    status_file.write(shared_files.prepare(run_dir) / "proposer.json", CAPTURE)
    shutil.rmtree(run_dir)
    assert not (shared_files.folder(run_dir) / "proposer.json").exists()
    assert list(shared_files.prepare(run_dir).iterdir()) == []


def test_a_copy_of_an_installation_and_the_original_do_not_share_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    run_dir, copy = tmp_path / "run", tmp_path / "copy"
    status_file.write(shared_files.prepare(run_dir) / "proposer.json", CAPTURE)
    shutil.copytree(run_dir, copy, symlinks=True)
    assert not (shared_files.folder(copy) / "proposer.json").exists()
    assert list(shared_files.prepare(copy).iterdir()) == []
    shared_files.clear(copy, "proposer.json")
    assert status_file.read(shared_files.folder(run_dir) / "proposer.json", CaptureStatus)


def test_without_memory_the_run_folder_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "_MEMORY", tmp_path / "shm")
    made = shared_files.prepare(tmp_path / "run")
    assert made.resolve() == shared_files.folder(tmp_path / "run")
    assert made.parent == tmp_path / "run"
    (made / "a").touch()
    shared_files.clear(tmp_path / "run", "a")
    assert list((tmp_path / "run").iterdir()) == []


def test_who_writes_into_a_folder_that_was_removed_makes_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_files, "_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    run_dir = tmp_path / "run"
    page, status = (shared_files.prepare(run_dir) / name for name in ("commit.page", "it.json"))
    made = shared_files.folder(run_dir).resolve()
    # A log server that ends, before the proposer of a bridge that begins has written there.
    shared_files.clear(run_dir, "positions-1")
    assert not made.exists()
    writer = CommitPageWriter(page)
    writer.write(CommitPage(1, 1, 5))
    assert (writer.fault, page.exists()) == ("", True)
    assert (made.stat().st_mode & 0o777, made.stat().st_uid) == (0o700, os.getuid())
    shutil.rmtree(made)
    # Another account has taken the name meanwhile.
    made.mkdir(mode=0o777)
    made.chmod(0o777)
    made_again = shared_files.prepare(run_dir).resolve()
    shutil.rmtree(made_again)
    status_file.write(status, CAPTURE)
    assert status_file.read(status, CaptureStatus) is not None
    assert list(made.iterdir()) == []
    # With the installation it goes for good.
    shutil.rmtree(shared_files.folder(run_dir).resolve())
    shutil.rmtree(run_dir)
    status_file.write(status, CAPTURE)
    assert not run_dir.exists()


def test_a_page_of_the_gates_that_cannot_be_written_is_red():
    seen = view(*(safekeeper(n) for n in range(3)), commit_page_fault="/x cannot be written: why")
    assert len(seen.problems) == 1
    assert seen.problems[0].startswith(
        "commit gates that wait for the quorum stay closed: /x cannot"
    )
