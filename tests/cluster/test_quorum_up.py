"""`tuskline up` with safekeepers, on a real server: hosted, watched, verified, and ended with everything else."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import make_conninfo

from tests.support import statuses
from tests.support.attached import Attached
from tests.support.child import run_child, start_child
from tests.support.quorum_stack import NAME, Load, insert, load_server, numbers
from tests.support.quorum_up import follows, hosting, pids, quorum, up
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import PASSWORD, USER, current_lsn, verifier
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause
from walsender_bridge.observability import quorum_view
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.proposer.member_changes import parse_address
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.safekeeper import data_dir
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.quorum.wal_server.status_record import WalServerStatus
from walsender_bridge.runtime import processes, shared_files, status_file
from walsender_bridge.runtime.supervisor import read_states

COUNT = 3


@pytest.fixture
def server(make_server: MakeServer) -> LocalServer:
    return load_server(make_server, fsync="off")


@pytest.fixture
def tuskline(tmp_path: Path, server: LocalServer) -> Iterator[Attached]:
    with hosting(tmp_path, server, COUNT) as attached:
        yield attached


def fetch(tuskline: Attached, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{tuskline.metrics_listen}{path}", timeout=15) as got:
            return got.status, got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _capture(tuskline: Attached) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tuskline.run_dir / "capture-shop.status.json").read_text())
    return record


def _shown(tuskline: Attached) -> int:
    """The end LSN of what consumers may read."""
    with LogClient(f"grpc://{tuskline.log_listen}") as log:
        return log.status().streams["shop"].last_end_lsn


def test_5_up_hosts_the_safekeepers_and_says_when_a_quorum_is_lost(
    tuskline, server, receive, tmp_path
):
    up(tuskline)
    insert(server, 1)
    _check_reader(tuskline, server, receive, tmp_path)
    found = quorum(tuskline)
    assert [each["state"] for each in found["safekeepers"]] == ["streaming"] * COUNT
    assert parse_lsn(found["proposer"]["commit_lsn"]) > 0
    _check_metrics(tuskline)
    lag = tuskline.json("lag")["safekeepers"]
    assert [row["safekeeper"] for row in lag] == [
        "quorum",
        *(f"safekeeper-{n + 1}" for n in range(3)),
    ]
    # Online: they write meanwhile.
    assert tuskline.json("safekeeper", "verify")["equal"] is True
    stopped = [pids(tuskline, "log-server")[f"safekeeper-{n}"] for n in (1, 2)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    waiting = threading.Thread(target=insert, args=(server, 2), daemon=True)
    waiting.start()
    try:
        wait_for(lambda: _lost(tuskline), 30, "it says so")
        lost = quorum(tuskline)
        assert waiting.is_alive()
        assert lost["problems"][0].startswith("the quorum is lost, commits that wait for it hang")
        # First of all, for people too.
        said = tuskline.run("status")
        assert said.returncode == Cause.UNAVAILABLE
        assert said.stderr.startswith("the quorum is lost, commits hang")
        code, text = fetch(tuskline, "/readyz")
        assert code == 503
        assert "the quorum is lost" in json.loads(text)["reasons"][0]
        # Nor do consumers get what a failover could lose: the log has it, and its gate is closed.
        wait_for(lambda: _capture(tuskline)["gate"]["holding"], 10, "the gate is closed")
        told = _capture(tuskline)
        assert told["logged_lsn"] > told["committed_lsn"] == _shown(tuskline)
        assert told["gate"]["position_lsn"] < told["logged_lsn"]
        (row,) = tuskline.json("status", code=Cause.UNAVAILABLE)["gate"]
        assert (row["candidate"], row["lag_bytes"] > 0) == ("safekeepers", True)
        # Commits that no longer wait for the quorum do not hang.
        tuskline.json("quorum", "release", "--yes", "--yes-i-may-lose-data")
        released = tuskline.json("status", code=Cause.UNAVAILABLE)["problems"]
        assert released[0].startswith("no quorum follows the proposer: 1 of 3 safekeepers")
        assert not any("commits hang" in each for each in released)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    waiting.join(20)
    assert not waiting.is_alive()
    wait_for(lambda: follows(tuskline), 30, "they follow again")
    wait_for(lambda: _shown(tuskline) >= told["logged_lsn"], 30, "the gate is open")


def _reader_dsn(tuskline: Attached) -> str:
    """Of the first WAL server, for a user who may read there from now on."""
    users = tuskline.directory / "log-server" / "safekeeper" / data_dir.USERS
    users.write_text(f'"{USER}" "{verifier(PASSWORD)}"\n')
    address = load_config(tuskline.config).safekeepers.wal_addresses[0]
    host, _, port = address.rpartition(":")
    return make_conninfo("", host=host, port=port, user=USER, password=PASSWORD)


def _check_reader(tuskline, server, receive, tmp_path) -> None:
    """A user who is added while it runs reads from a hosted WAL server, and is seen."""
    dsn = _reader_dsn(tuskline)
    folder = tmp_path / "received"

    def let_in() -> bool:
        """The users are read again a few times a second."""
        made = receive(server, dsn, folder, "--slot=shelf", "--create-slot", "--if-not-exists")
        return made.process.wait(20) == 0

    wait_for(let_in, 20, "the new user may come in")
    receive(server, dsn, folder, "--slot=shelf", "--no-loop")
    wait_for(lambda: quorum(tuskline)["safekeepers"][0]["readers"], 20, "the reader is seen")
    (reader,) = quorum(tuskline)["safekeepers"][0]["readers"]
    assert (reader["user"], reader["application_name"]) == (USER, "pg_receivewal")
    wait_for(lambda: quorum(tuskline)["safekeepers"][0]["slots"][0]["active"], 20, "its slot too")
    (slot,) = quorum(tuskline)["safekeepers"][0]["slots"]
    assert slot["slot"] == "shelf"


def _lost(tuskline: Attached) -> bool:
    seen = quorum_view.observe(load_config(tuskline.config))
    return seen is not None and not seen.quorum


def _check_metrics(tuskline: Attached) -> None:
    families = {f.name: f for f in text_string_to_metric_families(fetch(tuskline, "/metrics")[1])}
    value = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    first = quorum(tuskline)["safekeepers"][0]
    at = first["address"]
    assert value["tuskline_quorum_up",] == 1
    assert value["tuskline_quorum_term",] == value["tuskline_safekeeper_term", at] >= 1
    assert value["tuskline_safekeeper_state", at, "streaming"] == 1
    assert value["tuskline_safekeeper_lsn_bytes", at, "flush"] <= parse_lsn(first["flush_lsn"])
    assert value["tuskline_safekeeper_write_seconds_count", at] > 0
    assert value["tuskline_safekeeper_write_seconds_bucket", "+Inf", at] > 0
    assert value["tuskline_safekeeper_removed_segments_total", at] == 0
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert set(
        re.findall(r"^\| `(tuskline_quorum\w+|tuskline_safekeeper\w+)`", page, re.MULTILINE)
    ) == {
        f"{name}_total" if family.type == "counter" else name
        for name, family in families.items()
        if name.startswith(("tuskline_quorum", "tuskline_safekeeper"))
    }


def _commits_told(tuskline: Attached) -> int:
    """Up to where every safekeeper knows that WAL is committed."""
    seen = quorum_view.observe(load_config(tuskline.config))
    assert seen is not None
    return min(parse_lsn(each.own.commit_lsn) if each.own else 0 for each in seen.safekeepers)


def test_1_a_part_that_is_killed_comes_back_and_everything_ends_with_up(tuskline, server):
    up(tuskline)
    for supervisor, name in (
        ("log-server", "safekeeper-2"),
        ("log-server", "wal-server-2"),
        ("bridge", "proposer"),
    ):
        before = pids(tuskline, supervisor)[name]
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: pids(tuskline, supervisor)[name] not in {before, None}, 20, name)  # noqa: B023
    wait_for(lambda: follows(tuskline), 30, "they follow again")
    insert(server, 1)
    # The supervisor itself: what runs under it goes with it, and a new one finds its directories free.
    log_server = pids(tuskline, "up")["log-server"]
    os.kill(log_server, signal.SIGKILL)
    wait_for(
        lambda: pids(tuskline, "up")["log-server"] not in {log_server, None},
        20,
        "another log server",
    )
    wait_for(lambda: follows(tuskline), 40, "they follow again")
    insert(server, 2)
    committed = current_lsn(server)
    wait_for(lambda: _commits_told(tuskline) >= committed, 30, "all safekeepers know of the commit")
    assert tuskline.process is not None
    up_pid, count = tuskline.process.pid, 1 + 3 + 2 + 1 + 2 * COUNT
    # A majority is enough for a commit; the others come a moment later.
    wait_for(lambda: len(processes.family(up_pid)) >= count, 30, "all of them run")
    family = processes.family(up_pid)
    assert tuskline.json("down")["ended"] == tuskline.process.pid
    wait_for(lambda: not any(map(processes.alive, family)), 10, "all of them have ended")
    report = tuskline.json("safekeeper", "verify")
    assert report["equal"] is True
    assert report["compared_bytes"] > 0
    # The server may write WAL of its own (a running-xacts record) just before the end: it has reached
    # the safekeepers then, and its commit has not been told.
    (end,) = {parse_lsn(row["end_lsn"]) for row in report["safekeepers"]}
    for row in report["safekeepers"]:
        assert committed <= parse_lsn(row["commit_lsn"]) <= end
    # What is damaged is named, by the exit code too.
    wal = tuskline.directory / "log-server" / "safekeeper-3" / "wal"
    segment = next(wal.glob("0*"))
    content = bytearray(segment.read_bytes())
    content[8192 * 3 + 1] ^= 0xFF
    segment.write_bytes(content)
    done = tuskline.run("safekeeper", "verify")
    assert done.returncode == Cause.CORRUPT
    assert segment.name in done.stderr
    assert "safekeeper-3" in done.stdout


@pytest.mark.long
def test_1_commits_go_on_while_the_folder_in_memory_is_removed_and_it_comes_back(
    tuskline, server, receive, tmp_path
):
    """As systemd-logind does (RemoveIPC=yes) when the user who started `up` logs out."""
    up(tuskline)
    folder = shared_files.folder(tuskline.run_dir)
    before = {part: pids(tuskline, part) for part in ("log-server", "bridge")}
    load = Load(server)
    try:
        wait_for(lambda: load.acknowledged, 30, "a commit returns")
        started = [receive(server, (dsn := _reader_dsn(tuskline)), tmp_path / "received")]

        def reads() -> Any:
            # It is refused, and ends, until the WAL server has read its users again.
            if started[-1].process.poll() is not None:
                started.append(receive(server, dsn, tmp_path / "received"))
            return _reader(tuskline)

        reader = wait_for(reads, 60, "it reads")
        _remove(folder.resolve())
        _heals(tuskline, load)
        assert before == {part: pids(tuskline, part) for part in before}, tuskline.logs()
        assert folder.resolve().stat().st_mode & 0o777 == 0o700
        # One end of a page ends with the folder, and begins with another page than the other end has.
        for name in ("safekeeper-1", "wal-server-2", "proposer"):
            pid = {**before["log-server"], **before["bridge"]}[name]
            _remove(folder.resolve())
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: pid not in _running(tuskline), 20, "it is started again")  # noqa: B023
            _heals(tuskline, load)
            # Its WAL server was not among them: it reads on, without having to connect again.
            lsn = current_lsn(server)
            wait_for(lambda: (_reader(tuskline) or reader)[1] > lsn, 30, "it reads what is new")  # noqa: B023
            assert _reader(tuskline)[0] == reader[0]
    finally:
        acknowledged = load.stop()
    assert numbers(server) >= {*acknowledged}
    lsn = current_lsn(server)
    insert(server, -1)
    wait_for(lambda: _shown(tuskline) > lsn, 30, "the gate is open")
    assert tuskline.json("safekeeper", "verify")["equal"] is True


def _remove(folder: Path) -> None:
    """Remove it whole, although those who share it write new files meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def _reader(tuskline: Attached) -> Any:
    """The one reader of the first WAL server: its address, and up to where it was sent WAL; None: it is not there yet."""
    path = shared_files.folder(tuskline.run_dir) / "wal-server-1.json"
    own = status_file.read(path, WalServerStatus)
    readers = own.readers if own is not None else ()
    return (readers[0].address, parse_lsn(readers[0].sent_lsn)) if readers else None


def _running(tuskline: Attached) -> set[int]:
    return {pid for part in ("log-server", "bridge") for pid in pids(tuskline, part).values()}


def _heals(tuskline: Attached, load: Load) -> None:
    """Everything is well, both ends of each page have the one that stands, and commits return."""
    wait_for(lambda: follows(tuskline), 60, "they follow again")
    wait_for(lambda: not _on_removed_pages(tuskline), 30, "they share the new pages")
    count = len(load.acknowledged)
    wait_for(lambda: len(load.acknowledged) > count, 30, "commits return")


def _on_removed_pages(tuskline: Attached) -> list[str]:
    """The processes that do not have the page that stands: none yet, or one that was removed."""
    children = pids(tuskline, "log-server")
    del children["replicas"]
    return [name for name, pid in children.items() if not _has_its_page(pid)]


def _has_its_page(pid: int | None) -> bool:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return False
    pages = [line for line in maps if "positions-" in line]
    return bool(pages) and not any(line.endswith("(deleted)") for line in pages)


def test_4_a_proposer_that_is_displaced_says_so_and_does_not_come_back(tuskline, server, tmp_path):
    up(tuskline)
    section = quorum(tuskline)["safekeepers"]
    addresses = tuple(parse_address(each["address"]) for each in section)
    settings = ProposerSettings(server.dsn(), addresses, NAME, "tuskline_safekeepers")
    rival = start_child("walsender_bridge.quorum.proposer", settings, log=tmp_path / "rival.log")
    try:
        wait_for(lambda: _ended(tuskline), 30, "the proposer of up has ended")
        found = quorum(tuskline)
        assert found["proposer"]["phase"] == "ended"
        assert "displaced" in found["problems"][0]
        assert "only one proposer may run" in found["problems"][0]
        insert(server, 1)  # the rival's quorum has it
        assert rival.poll() is None
        assert _ended(tuskline)
    finally:
        rival.terminate()
        assert rival.wait(20) == 0


def _ended(tuskline: Attached) -> bool:
    child = read_states(tuskline.run_dir, "bridge").children["proposer"]
    return child.state == "ended" and child.exit_code == Cause.FENCED


def test_38_a_bridge_is_no_quorum_with_the_one_safekeeper_it_hosts(tmp_path, server):
    with hosting(tmp_path, server, 1, addresses=[]) as alone:
        for command in (["bridge", "run"], ["up"]):
            error = alone.error_plain(*command, code=Cause.CONFIG)
            assert "would use as the whole quorum" in error
            assert "name them alone in [machine] parts" in error


def test_38_a_membership_that_is_not_the_configured_one_is_red(tuskline):
    settings = load_config(tuskline.config)
    shared_files.prepare(settings.run_dir)
    told = statuses.session(membership=statuses.membership(unlike="1 of 3"))
    status_file.write(settings.proposer_status, told)
    seen = quorum_view.observe(settings)
    assert seen is not None
    problem = seen.problems[0]
    assert problem.startswith("the membership differs from the configured one: 1 of 3; correct")


def test_25_a_directory_of_somebody_else_is_left_alone_and_stops_no_other(tuskline):
    foreign = tuskline.directory / "log-server" / "safekeeper-2"
    foreign.mkdir(parents=True)
    (foreign / "PG_VERSION").write_text("16")
    log_server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "walsender_bridge.cli.app",
            "log-server",
            "run",
            "-c",
            str(tuskline.config),
        ]
    )
    try:
        wait_for(
            lambda: len(_following(tuskline)) == COUNT - 1 and _ended_safekeeper(tuskline), 60, "so"
        )
        second = _hosted(tuskline)[1]
        assert (second.state, "PG_VERSION" in second.fault) == ("away", True)
        assert str(foreign) in second.fault
        assert "wal-server-2" not in pids(tuskline, "log-server")
    finally:
        log_server.terminate()
        assert log_server.wait(40) == 0
    assert {path.name for path in foreign.iterdir()} == {"PG_VERSION"}


def _hosted(tuskline: Attached) -> tuple[quorum_view.SafekeeperView, ...]:
    seen = quorum_view.observe(load_config(tuskline.config))
    assert seen is not None
    return seen.safekeepers


def _following(tuskline: Attached) -> list[str]:
    return [each.name for each in _hosted(tuskline) if each.state != "away"]


def _ended_safekeeper(tuskline: Attached) -> bool:
    child = read_states(tuskline.run_dir, "log-server").children.get("safekeeper-2")
    return child is not None and child.state == "ended"


def test_one_damaged_safekeeper_and_an_unusable_lake_make_no_commit_wait(tmp_path, server):
    lake = tmp_path / "lake"
    lake.mkdir()
    (lake / "report.csv").write_text("precious")
    with hosting(tmp_path, server, COUNT, lake=True) as tuskline:
        up(tuskline)
        insert(server, 1)
        wait_for(lambda: _said(tuskline, "lake: is not empty"), 30, "the lake's fault is told")
        control = tmp_path / "log-server" / "safekeeper-2" / "control" / "control"
        content = bytearray(control.read_bytes())
        content[len(content) // 2] ^= 1
        log_server = pids(tuskline, "up")["log-server"]
        family = processes.family(log_server)
        # Nobody starts another one before the file is damaged.
        assert tuskline.process is not None
        tuskline.process.send_signal(signal.SIGSTOP)
        os.kill(log_server, signal.SIGKILL)
        wait_for(lambda: not any(map(processes.alive, family)), 20, "they have ended")
        control.write_bytes(content)
        tuskline.process.send_signal(signal.SIGCONT)
        wait_for(lambda: not _lost(tuskline) and _ended_safekeeper(tuskline), 60, "a quorum")
        insert(server, 2)
        address = quorum(tuskline)["safekeepers"][1]["address"]
        (told,) = _said(tuskline, f"safekeeper {address} is away: {control}: ")
        assert "damaged" in told
        assert "tuskline safekeeper replace" in told
        found = json.loads(tuskline.run("doctor", "--json").stdout)["findings"]
        assert [each["where"] for each in found if each["check"] == "data directory"] == [
            str(control)
        ]
        # The way out, and a start with the damage there: both, one after the other.
        assert tuskline.stop_up() == 0
        tuskline.up()
        wait_for(lambda: not _lost(tuskline), 60, "a quorum")
        assert tuskline.stop_up() == 0
        control.parents[1].rename(tmp_path / "damaged")
        tuskline.up()
        wait_for(lambda: not _lost(tuskline), 60, "a quorum")
        done = tuskline.run("safekeeper", "replace", address, address)
        assert done.returncode == 0, done.stderr
        wait_for(lambda: follows(tuskline), 60, "all of them follow")
        insert(server, 3)
        assert tuskline.stop_up() == 0
        assert tuskline.json("safekeeper", "verify")["equal"] is True
    assert [path.name for path in lake.iterdir()] == ["report.csv"]


@pytest.mark.long
def test_a_damaged_log_makes_no_commit_wait_and_goes_on_once_it_is_mended(tuskline, server):
    up(tuskline)
    insert(server, 1)
    assert tuskline.stop_up() == 0
    file = tuskline.directory / "log" / "repository.sqlite"
    content = file.read_bytes()
    file.write_bytes(b"no database" + content[11:])
    tuskline.up()
    wait_for(lambda: not _lost(tuskline), 60, "a quorum")
    insert(server, 2)
    (told,) = wait_for(
        lambda: _said(tuskline, "log: could not read the repository"), 30, "the log's fault is told"
    )
    assert str(file) in told
    # It is put back while everything runs.
    file.write_bytes(content)
    wait_for(lambda: tuskline.run("status").returncode == 0, 60, "all is well")


def _said(tuskline: Attached, beginning: str) -> list[str]:
    done = tuskline.run("status", "--json")
    ill = json.loads(done.stdout)["problems"]
    assert done.returncode == (Cause.UNAVAILABLE if ill else 0), done.stderr
    return [word for word in ill if word.startswith(beginning)]


def test_25_two_safekeepers_never_use_one_directory(tmp_path):
    with data_dir.held(tmp_path / "data"):
        settings = SafekeeperSettings(tmp_path / "data", "127.0.0.1", 0, tmp_path / "positions")
        done = run_child("walsender_bridge.quorum.safekeeper", settings)
    assert done.returncode == Cause.RUNNING
    assert "another safekeeper uses this data directory" in done.stderr
