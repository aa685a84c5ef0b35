"""`tuskline log verify --offline`: each fault that is planted in a real store is named, with its place."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support import stored_log
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.stored_log import STREAM, Files
from walsender_bridge.change_log import entry
from walsender_bridge.change_log.protocol import REBUILD_GAP, START, CommitContext, IssuedCommit
from walsender_bridge.change_log.replica import fatal_segments
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.repository_messages import StreamDescription
from walsender_bridge.change_log.stored_replica import DataDirectoryLock
from walsender_bridge.change_log.verification import (
    EntryRow,
    ReplicaCheck,
    StatedReplica,
    Violated,
    against_repository,
    verify_global_ranges,
)
from walsender_bridge.cli import app as cli
from walsender_bridge.errors import Cause, ConfigError, RunningError, UnknownStreamError
from walsender_bridge.observability import log_verify
from walsender_bridge.observability.log_verify import VerifyReport
from walsender_bridge.runtime.output import Output


@pytest.fixture(autouse=True)
def no_child(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process that reads the segments first takes longer than most of these tests."""
    if "whole" not in request.node.name:
        monkeypatch.setattr(fatal_segments, "_read", lambda *_: (0, ""))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole data directory, to be copied: writing one takes as long as its commits."""
    return stored_log.make(tmp_path_factory.mktemp("template") / "data")


def verify(*data_dirs: Path) -> VerifyReport:
    return log_verify.verify_stopped(data_dirs, (), Output(as_json=True))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_whole_replicas_are_found_whole_and_left_as_they_are(tmp_path: Path) -> None:
    one = stored_log.make(tmp_path / "a", segment_bytes=1)
    two = stored_log.make(tmp_path / "b", trim=2)
    before = snapshot(tmp_path)
    assert len([name for name in before if name.endswith("data.mdb")]) > 5
    report = verify(one, two)
    assert report.violations == []
    assert [(r["first_offset"], r["last_offset"], r["entries"]) for r in report.rows] == [
        (1, 12, 12),
        (5, 12, 8),
    ]
    assert report.version == 6
    after = snapshot(tmp_path)
    # LMDB has no lock file for a reader here; the directory's own lock stays.
    assert {name: after[name] for name in before} == before
    assert {Path(name).name for name in set(after) - set(before)} <= {"lock"}


def test_an_uncommitted_tail_and_an_empty_replica_are_whole(tmp_path: Path) -> None:
    data_dir = stored_log.make(tmp_path / "a", commits=0)
    assert verify(data_dir).violations == []
    replica = HostedReplica(data_dir / "streams" / STREAM)
    replica.recover()
    session, _ = replica.open_writer(1)
    make = EntryMaker()
    tail = [make.whole(), make.start(), make.middle()]
    replica.append(session, tail, list(SCHEMAS.values()), None, 2**64 - 1)
    replica.close()
    report = verify(data_dir)
    assert report.violations == []
    assert report.rows[0]["entries"] == 3


def flipped(files: Files) -> None:
    data = bytearray(files.entry(5))
    data[-3] ^= 4
    files.put_entry(5, bytes(data))


def swapped(files: Files) -> None:
    five, six = files.entry(5), files.entry(6)
    files.put_entry(5, six)
    files.put_entry(6, five)


def inside_a_transaction(files: Files) -> None:
    """The entries of version 3 become one transaction, and its commit two."""
    make = EntryMaker()
    make.crc, make.lsn = entry.read_header(files.entry(4)).crc, 0x10000
    begins = make.start()
    middle, end = make.crc, make.end()
    files.put_entry(5, begins)
    files.put_entry(6, end)
    row = files.row(7)
    context = CommitContext(row.context.version, 5, row.context.global_offset, 1)
    position = replace(files.row(5).position, end_offset=6, crc=middle)
    files.put_row(6, IndexRow(context, len(begins), position, 0))


def older(files: Files) -> None:
    """Entry 5 is a transaction that the log has passed."""
    make = EntryMaker()
    make.crc = entry.read_header(files.entry(4)).crc
    files.put_entry(5, make.whole())


def another_at_the_end(files: Files) -> None:
    """The last entry continues the chain, and is another one than was committed."""
    make = EntryMaker(99)
    make.crc, make.lsn = entry.read_header(files.entry(11)).crc, 0x10000
    files.put_entry(12, make.whole(rows=2))


def half(files: Files) -> None:
    """Entry 5 continues a transaction that has not begun."""
    make = EntryMaker()
    make.crc = entry.read_header(files.entry(4)).crc
    files.put_entry(5, make.middle())


def position(files: Files, **changes: int) -> None:
    row = files.row(7)
    files.put_row(7, replace(row, position=replace(row.position, **changes)))


def longer(files: Files) -> None:
    """The last commit in the index ends beyond the commit context."""
    row = files.row(13)
    context, at = replace(row.context, length=3), replace(row.position, end_offset=14)
    files.put_row(13, None)
    files.put_row(14, replace(row, context=context, position=at))


FAULTS: dict[str, tuple[Callable[[Files], None], str, int | None, str]] = {
    "a flipped byte": (flipped, "I3", 5, "checksum mismatch"),
    "two entries that are swapped": (swapped, "I3", 5, "broken chain"),
    "an entry removed": (lambda f: f.put_entry(5, None), "I2", 5, "entry 5 is missing"),
    "the last entry removed": (lambda f: f.put_entry(12, None), "I2", 12, "entries 12 to 12"),
    "another last entry": (another_at_the_end, "I3", 12, "ends with another entry"),
    "an entry of the past": (older, "order", 5, "already passed"),
    "an index row removed": (lambda f: f.put_row(7, None), "I2", 5, "5 to 6 belong to no commit"),
    "the last index row removed": (lambda f: f.put_row(13, None), "I2", 11, "no commit"),
    "a global offset shifted": (
        lambda f: f.change_row(7, global_offset=99),
        *("I4", 7, "global offset 7, below 101"),
    ),
    "a global offset of before": (
        lambda f: f.change_row(7, global_offset=3),
        *("I4", 5, "global offset 3, below 5"),
    ),
    "a version that does not grow": (
        lambda f: f.change_row(7, version=2),
        *("I5", 5, "follows version 2"),
    ),
    "an offset in two commits": (
        lambda f: f.change_row(7, local_offset=4, length=3),
        *("I7", 5, "begins before 5"),
    ),
    "a commit inside a transaction": (inside_a_transaction, "I14", 5, "ends inside a transaction"),
    "the context ahead of the index": (
        lambda f: f.change_context(length=3),
        *("I2", 13, "entries 13 to 13"),
    ),
    "the context behind the index": (
        lambda f: f.change_context(local_offset=9, version=5),
        *("I1", 11, "version 6 at 13"),
    ),
    "the context of a version of before": (
        lambda f: f.change_context(version=4),
        *("I5", 13, "of version 4"),
    ),
    "the context at another global offset": (
        lambda f: f.change_context(global_offset=3),
        *("I1", 13, "not that of the index"),
    ),
    "a low watermark beyond the end": (
        lambda f: f.change_state(low_offset=40),
        *("I1", 40, "beyond the commit context's end"),
    ),
    "sealed, and behind": (
        lambda f: f.change_state(sealed_at=11),
        *("I8", 13, "sealed at 11"),
    ),
    "bytes that were not counted": (
        lambda f: position(f, bytes_total=1),
        *("I3", 6, "ends at byte 1"),
    ),
    "another position of a commit": (
        lambda f: position(f, end_lsn=1),
        *("I3", 6, "position of another transaction"),
    ),
    "another end of a commit": (
        lambda f: position(f, end_offset=9),
        *("I1", 5, "is at position 9"),
    ),
    "half a transaction": (half, "I14", 5, "starts no transaction"),
    "a commit beyond the context": (longer, "I1", 13, "and no commit does"),
    "an empty commit below the index": (
        lambda f: f.change_context(version=9, local_offset=13, global_offset=3, length=0),
        *("I4", 13, "version 9 does not follow version 6"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_rule_and_offset(
    tmp_path: Path, template: Path, fault: str
) -> None:
    event, invariant, offset, said = FAULTS[fault]
    data_dir = shutil.copytree(template, tmp_path / "a")
    whole = shutil.copytree(template, tmp_path / "b")
    stored_log.change(data_dir, event)
    report = verify(data_dir, whole)
    (violation,) = [each for each in report.violations if each.cause == Cause.CORRUPT]
    assert (violation.invariant, violation.offset) == (invariant, offset), violation
    assert said in violation.what
    assert (violation.stream, violation.replica) == (STREAM, str(data_dir))
    error = violation.error()
    assert error.cause == Cause.CORRUPT
    assert error.what.startswith(f"{invariant}: ")
    assert f"stream {STREAM}, replica {data_dir}" in error.where
    assert "docs/log.md" in error.repair
    assert not report.rows[0]["whole"]


def test_a_rejected_entry_in_a_sealed_replica_is_named(tmp_path: Path) -> None:
    data_dir = stored_log.make(tmp_path / "a")

    def reappears(files: Files) -> None:
        make = EntryMaker()
        make.crc, make.lsn = entry.read_header(files.entry(12)).crc, 0x10000
        files.put_entry(13, make.whole())
        files.change_state(sealed_at=13)

    stored_log.change(data_dir, reappears)
    (violation,) = verify(data_dir).violations
    assert (violation.invariant, violation.offset) == ("I9", 13)


def test_a_replica_with_another_entry_differs_at_its_offset(tmp_path: Path) -> None:
    """Both are consistent: only the comparison shows it."""
    make = EntryMaker()
    one = stored_log.make(tmp_path / "a", make=make)
    two = stored_log.make(tmp_path / "b", make=EntryMaker(2))
    assert verify(one).violations == verify(two).violations == []
    report = verify(one, two)
    (violation,) = report.violations
    assert (violation.invariant, violation.offset, violation.replica) == ("I3", 1, str(two))
    assert violation.cause == Cause.DIVERGED
    assert f"not that of replica {one}" in violation.what


def test_replicas_with_another_global_offset_differ(tmp_path: Path) -> None:
    one = stored_log.make(tmp_path / "a")
    two = stored_log.make(tmp_path / "b", first_global=5)
    (violation,) = verify(one, two).violations
    assert (violation.invariant, violation.offset) == ("I3", 1)
    assert "(1, 5), and (1, 1)" in violation.what


def test_what_a_rolled_segment_leaves_behind_is_not_taken_for_an_entry(tmp_path: Path) -> None:
    """The uncommitted tail was copied to the next segment, and lies in the older one as well."""
    data_dir = stored_log.make(tmp_path / "a", commits=0)
    replica = HostedReplica(data_dir / "streams" / STREAM, segment_bytes=100_000)
    replica.recover()
    session, _ = replica.open_writer(1)
    make = EntryMaker()
    entries = [make.whole(size=60_000), make.whole(size=60_000), make.whole()]
    replica.append(session, entries, list(SCHEMAS.values()), None, 2**64 - 1)
    for version in (1, 2, 3):
        replica.commit([IssuedCommit(CommitContext(version, version, version, 1))], version)
    replica.close()
    assert len(list((data_dir / "streams" / STREAM).glob("segment-*"))) > 1
    report = verify(data_dir)
    assert report.violations == []
    assert report.rows[0]["entries"] == 3


def test_uncommitted_entries_may_differ(tmp_path: Path) -> None:
    """A writer that was replaced may have reached one replica only."""
    for name, seed in (("a", 3), ("b", 4)):
        data_dir = stored_log.make(tmp_path / name)
        replica = HostedReplica(data_dir / "streams" / STREAM)
        replica.recover()
        session, status = replica.open_writer(1)
        make = EntryMaker(seed)
        make.follow(status)
        replica.append(session, [make.whole()], [], None, 2**64 - 1)
        replica.close()
    assert verify(tmp_path / "a", tmp_path / "b").violations == []


def test_what_recovery_refuses_is_named(tmp_path: Path) -> None:
    data_dir = stored_log.make(tmp_path / "a", segment_bytes=1)
    segments = sorted((data_dir / "streams" / STREAM).glob("segment-*"))
    shutil.rmtree(segments[2])
    report = verify(data_dir)
    (violation,) = report.violations
    assert (violation.invariant, violation.offset) == ("I2", 5)
    assert "the segment starting at 5 is missing" in report.notes[0]
    shutil.rmtree(segments[-1])
    violations = verify(data_dir).violations
    assert violations
    aside = stored_log.make(tmp_path / "b")
    folder = aside / "streams" / STREAM
    (folder / "wiping").touch()
    (violation,) = verify(aside).violations
    assert (violation.invariant, violation.offset) == ("I13", None)
    assert "being wiped" in violation.what


def test_a_segment_that_ends_its_reader_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = stored_log.make(tmp_path / "a")
    reason = "reading the segment kills the process with SIGBUS"
    monkeypatch.setattr(fatal_segments, "_read", lambda *_: (0, reason))
    (violation,) = verify(data_dir).violations
    assert violation.invariant == "I13"
    assert reason in violation.what
    assert "data.mdb" in violation.what


def test_a_state_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    data_dir = stored_log.make(tmp_path / "a")
    data = data_dir / "streams" / STREAM / "segment-00000000000000000001" / "data.mdb"
    content = data.read_bytes()
    data.write_bytes(content.replace(b'"term": 1', b'"term": 7'))
    (violation,) = verify(data_dir).violations
    assert violation.invariant == "I3"
    assert "record is damaged" in violation.what


def test_only_a_stopped_log_servers_directory_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the data directory"):
        verify(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []
    data_dir = stored_log.make(tmp_path / "a")
    with DataDirectoryLock(data_dir), pytest.raises(RunningError, match="log server runs"):
        verify(data_dir)
    with pytest.raises(UnknownStreamError, match="'other' is in none"):
        log_verify.verify_stopped([data_dir], ["other"], Output(as_json=True))


def test_a_long_stream_is_verified_in_little_memory(tmp_path: Path) -> None:
    """Of 64 MB, a part is in memory at a time."""
    data_dir = tmp_path / "a"
    stored_log.make(data_dir, commits=0)
    replica = HostedReplica(data_dir / "streams" / STREAM)
    replica.recover()
    session, _ = replica.open_writer(1)
    make = EntryMaker()
    for version in range(1, 65):
        replica.append(session, [make.whole(size=1 << 20)], [*SCHEMAS.values()], None, 2**64 - 1)
        replica.commit([IssuedCommit(CommitContext(version, version, version, 1))], version)
    replica.close()
    script = (
        "import resource, sys, pathlib\n"
        "from walsender_bridge.observability import log_verify\n"
        "from walsender_bridge.runtime.output import Output\n"
        "def memory():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return next(int(l.split()[1]) for l in lines if l.startswith('RssAnon'))\n"
        "before = memory()\n"
        "found = log_verify.verify_stopped([pathlib.Path(sys.argv[1])], (), Output(as_json=True))\n"
        "assert found.rows[0]['bytes'] > 64 << 20 and not found.violations\n"
        "print(memory() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(data_dir)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24 << 10


# -- the command ------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "walsender_bridge.cli.app", "log", "verify", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("TUSKLINE_")},
    )


def test_the_command_exits_with_the_cause_and_names_the_place(tmp_path: Path) -> None:
    one, two = stored_log.make(tmp_path / "a"), stored_log.make(tmp_path / "b", make=EntryMaker(2))
    done = command("--offline", "--data-dir", str(one), "--data-dir", str(two))
    assert done.returncode == Cause.DIVERGED
    assert f"stream {STREAM}, replica {two}, offset 1: I3: " in done.stderr
    assert "\nHINT:  " in done.stderr
    stored_log.change(one, flipped)
    shown = CliRunner().invoke(
        cli.app, ["log", "verify", "--offline", "--data-dir", str(one), "--json"]
    )
    assert shown.exit_code == Cause.CORRUPT
    (violation,) = json.loads(shown.stdout)["violations"]
    assert (violation["invariant"], violation["offset"], violation["stream"]) == ("I3", 5, STREAM)


# -- pure -------------------------------------------------------------------------------------------


def stated(
    stream: str = "a", *, state: str = "appendable", low: int = 1, version: int = 9
) -> StatedReplica:
    return StatedReplica(stream, "k", state, low, 9, 9, version, None, None)


def row(version: int, local: int, place: int, length: int) -> IndexRow:
    context = CommitContext(version, local, place, length)
    return IndexRow(context, 1, replace(START, end_offset=local + length), 0)


A = [row(1, 1, 1, 2), row(3, 3, 5, 1)]
B = [row(1, 1, 3, 1), row(2, 2, 4, 1), row(3, 3, 6, 2)]


def test_the_global_ranges_of_two_streams_follow_each_other() -> None:
    streams = {"a": (stated("a"), A), "b": (stated("b"), B)}
    assert verify_global_ranges(streams, complete=True) is None
    assert verify_global_ranges(streams, complete=False) is None


def test_a_gap_that_a_rebuild_has_left_is_no_violation() -> None:
    """It dropped the commit of version 2 of stream b, which no replica had."""
    later = 3 + REBUILD_GAP
    a = [row(1, 1, 1, 1), row(2, 2, 3, 1), row(3, 3, 9, 1), row(later, 4, REBUILD_GAP, 2)]
    b = [row(1, 1, 2, 1), row(later, 2, REBUILD_GAP + 2, 1)]
    streams = {"a": (stated("a", version=later), a), "b": (stated("b", version=later), b)}
    assert verify_global_ranges(streams, complete=True) is None
    # Behind that version, both have what they had: nothing explains a gap there.
    a = [*a[:2], row(3, 3, 9, 1)]
    b = [b[0], row(2, 2, 4, 1), row(4, 3, 10, 1)]
    streams = {"a": (stated("a", version=later), a), "b": (stated("b", version=later), b)}
    violation = verify_global_ranges(streams, complete=True)
    assert violation is not None
    assert (violation.stream, violation.offset) == ("a", 3)


@pytest.mark.parametrize(
    ("b", "named"),
    [
        ([row(1, 1, 3, 1), row(2, 2, 3, 1)], ("b", 2)),  # overlaps
        ([row(1, 1, 3, 1), row(2, 2, 5, 1)], ("b", 2)),  # a gap
        ([row(1, 1, 3, 1), row(3, 2, 6, 2)], ("a", 3)),  # a commit is missing
        ([row(1, 1, 2, 1), row(2, 2, 4, 1)], ("b", 1)),  # not in the order of names
    ],
)
def test_a_gap_or_an_overlap_between_streams_is_named(
    b: list[IndexRow], named: tuple[str, int]
) -> None:
    streams = {"a": (stated("a"), A), "b": (stated("b"), b)}
    violation = verify_global_ranges(streams, complete=True)
    assert violation is not None
    assert (violation.invariant, violation.stream, violation.offset) == ("I4", *named)


def test_what_was_trimmed_is_no_gap() -> None:
    trimmed = stated("b", low=3)
    # Versions 1 and 2 of b are gone: only above version 3 does every offset have to be there.
    streams = {"a": (stated("a"), A), "b": (trimmed, B[2:])}
    assert verify_global_ranges(streams, complete=True) is None
    streams = {"a": (stated("a"), A), "b": (trimmed, [B[2], row(4, 5, 9, 1)])}
    violation = verify_global_ranges(streams, complete=True)
    assert violation is not None
    assert violation.offset == 5
    # Another stream of the log is not here.
    assert verify_global_ranges(streams, complete=False) is None
    # All of b is gone, whose last commit was version 3.
    empty: dict[str, tuple[StatedReplica, list[IndexRow]]] = {
        "a": (stated("a"), [*A, row(4, 4, 8, 1), row(5, 5, 10, 1)]),
        "b": (stated("b", low=5), []),
    }
    assert verify_global_ranges(empty, complete=True) is None
    violation = verify_global_ranges(empty, complete=True, last_versions={"b": 3})
    assert violation is not None
    assert violation.offset == 4


class Given:
    """A replica that is what the test says."""

    def __init__(self, stated: StatedReplica, rows: list[IndexRow]) -> None:
        self.stream, self.name, self._stated, self._rows = stated.stream, "k", stated, rows

    def stated(self) -> StatedReplica:
        return self._stated

    def rows(self, _: StatedReplica) -> Iterator[IndexRow]:
        return iter(self._rows)

    def entries(self, _: StatedReplica) -> Iterator[EntryRow]:
        return iter(())


@pytest.mark.parametrize(("described_end", "violations"), [(7, 0), (9, 1)])
def test_what_was_committed_and_trimmed_meanwhile_is_no_gap(
    described_end: int, violations: int
) -> None:
    """The repository was asked before: only of a stream that ends there still is its last version known."""
    a = Given(stated("a"), [*A, row(4, 4, 8, 1), row(6, 5, 10, 1)])
    b = Given(stated("b", low=9), [])
    described = StreamDescription("b", 1, 3, described_end, 0, 0, 0, 9, 0, 9, 1, ())
    report = VerifyReport()
    log_verify._verify_ranges(
        {"a": [a], "b": [b]}, report, complete=True, described={"b": described}
    )
    assert len(report.violations) == violations


def test_versions_that_one_replica_does_not_know_yet_are_not_compared() -> None:
    streams = {"a": (stated("a", version=2), A[:1]), "b": (stated("b"), [*B, row(4, 5, 99, 1)])}
    assert verify_global_ranges(streams, complete=True) is None


def test_a_replica_that_lacks_what_was_committed_is_named() -> None:
    assert against_repository(stated(), 9, 9, in_sync=True) is None
    lacking = against_repository(stated(), 10, 9, in_sync=True)
    assert lacking is not None
    assert (lacking.invariant, lacking.offset, lacking.cause) == ("I6", 9, Cause.DIVERGED)
    # It is no longer of the set.
    assert against_repository(stated(state="sealed"), 10, 9, in_sync=True) is None
    # It was left out while it did not answer, and nobody has sealed it since.
    assert against_repository(stated(), 10, 9, in_sync=False) is None
    for in_sync in (True, False):
        ahead = against_repository(stated(), 9, 8, in_sync=in_sync)
        assert ahead is not None
        assert ahead.invariant == "I5"


def test_what_a_replica_states_and_serves_agrees_with_its_index() -> None:
    context = CommitContext(9, 1, 1, 8)
    made = replace(stated(), context=context)
    ReplicaCheck(made, iter(())).begin()
    for wrong, named in (
        (replace(made, context=replace(context, length=7)), "I1"),
        (replace(made, version=8), "I5"),
        (replace(made, context=None), "I5"),
    ):
        with pytest.raises(Violated) as caught:
            ReplicaCheck(wrong, iter(())).begin()
        assert caught.value.violation.invariant == named
    data = EntryMaker().whole()
    for served in ((4, 1), (3, 2)):
        check = ReplicaCheck(made, iter([row(3, 1, 1, 8)]))
        with pytest.raises(Violated) as caught:
            check.entry(EntryRow(1, *served, data))
        assert (caught.value.violation.invariant, caught.value.violation.offset) == ("I3", 1)
        assert "it is served with" in caught.value.violation.what
    ReplicaCheck(made, iter([row(3, 1, 1, 8)])).entry(EntryRow(1, 3, 1, data))


def test_a_sealed_replica_ends_with_its_last_commit() -> None:
    made = replace(stated(state="sealed", version=0), sealed_at=9)
    for wrong, named in (
        (replace(made, sealed_at=8), "I8"),
        (replace(made, end_offset=10), "I9"),
        (replace(made, low_offset=10), "I1"),
    ):
        with pytest.raises(Violated) as caught:
            ReplicaCheck(wrong, iter(())).begin()
        assert caught.value.violation.invariant == named
    ReplicaCheck(made, iter(())).begin()
