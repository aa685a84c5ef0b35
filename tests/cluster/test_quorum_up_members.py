"""Members come and go by `tuskline safekeeper add|remove|replace`, under `tuskline up`; and `up` archives, and shows it all."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from textual.widgets import Static

from tests.support.attached import Attached
from tests.support.child import start_child
from tests.support.quorum_stack import insert, load_server
from tests.support.quorum_up import follows, hosting, pids, quorum, up
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.cli.top import Top
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import LocalServer, free_port
from walsender_bridge.errors import Cause
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings


@pytest.fixture
def server(make_server: MakeServer) -> LocalServer:
    return load_server(make_server, fsync="off")


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    return getattr(request, "param", 3)


@pytest.fixture
def tuskline(tmp_path: Path, server: LocalServer, count: int) -> Iterator[Attached]:
    with hosting(tmp_path, server, count, archive="archive") as attached:
        yield attached


@pytest.fixture
def one_more(tmp_path: Path) -> Iterator[str]:
    """A safekeeper that the configuration does not know; its address."""
    port = free_port()
    process = start_child(
        "walsender_bridge.quorum.safekeeper",
        SafekeeperSettings(tmp_path / "more", "127.0.0.1", port, tmp_path / "more-positions"),
        log=tmp_path / "more.log",
    )
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_12_members_are_added_removed_and_replaced_by_commands(
    tuskline, server, one_more, tmp_path
):
    up(tuskline)
    insert(server, 1)
    first, second, third = [each["address"] for each in quorum(tuskline)["safekeepers"]]

    def changed(*arguments: str) -> tuple[int, set[str]]:
        made = tuskline.json("safekeeper", *arguments)
        # It is done when it says so: the members have it on their disks.
        assert quorum(tuskline)["proposer"]["membership"]["settled"] is True
        return made["generation"], set(made["members"])

    # It begins with the WAL that is retained for laggards, and says what it does not serve.
    def begins() -> list[str]:
        return [each["begin_lsn"] for each in quorum(tuskline)["safekeepers"]]

    # A commit needs two of the three.
    wait_for(lambda: "0/0" not in begins(), 20, "all three have begun")
    begin = begins()[0]
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_switch_wal()")
    insert(server, 10)
    wait_for(
        lambda: (
            parse_lsn(quorum(tuskline)["proposer"]["restart_lsn"]) >> 24 > parse_lsn(begin) >> 24
        ),
        20,
        "all have it",
    )
    assert changed("add", one_more) == (3, {first, second, third, one_more})
    (lacking,) = tuskline.json("safekeeper", "add", one_more)["not_served"]
    assert (lacking["address"], lacking["from"]) == (one_more, begin)
    assert parse_lsn(lacking["to"]) > parse_lsn(begin)
    again = tuskline.run("safekeeper", "add", one_more)
    assert f"{one_more} does not serve WAL from {begin} to {lacking['to']}" in again.stderr
    word = f"safekeeper {one_more} has no WAL before {lacking['to']}"
    assert [each.startswith(word) for each in quorum(tuskline)["notes"]] == [True]
    assert word in tuskline.run("doctor").stdout
    assert changed("remove", first) == (5, {second, third, one_more})
    assert changed("remove", first) == (5, {second, third, one_more})
    insert(server, 2)
    # Who has left and still runs is no fault; what to write into the configuration is said.
    assert quorum(tuskline)["problems"] == []
    done = tuskline.run("safekeeper", "replace", second, first)
    assert done.returncode == 0, done.stderr
    assert "set in" in done.stderr
    assert f"addresses = {sorted([first, third, one_more])}" in done.stderr
    found = quorum(tuskline)["safekeepers"]
    assert {s["address"] for s in found if s["member"]} == {first, third, one_more}
    # The next proposer finds them, though the configuration does not name one of them.
    os.kill(pids(tuskline, "bridge")["proposer"], signal.SIGKILL)
    wait_for(lambda: follows(tuskline), 40, "they follow again")
    os.kill(pids(tuskline, "log-server")["safekeeper-3"], signal.SIGSTOP)
    insert(server, 3)  # a majority is the one that came back, and the one that joined
    os.kill(pids(tuskline, "log-server")["safekeeper-3"], signal.SIGCONT)
    error = tuskline.error("safekeeper", "remove", "0000", code=Cause.USAGE)
    assert "matches no member, or several" in error["what"]
    error = tuskline.error("safekeeper", "add", "127.0.0.1:1", code=Cause.UNAVAILABLE)
    assert error["where"] == "127.0.0.1:1"


@pytest.mark.parametrize("count", [5, pytest.param(1, marks=pytest.mark.long)], indirect=True)
def test_10_up_archives_each_complete_segment_once_and_top_shows_each_safekeeper_s_lag(
    tuskline, server, count, tmp_path
):
    up(tuskline)
    rows = asyncio.run(_top(tuskline))
    assert [row[0] for row in rows] == ["quorum", *(f"safekeeper-{n + 1}" for n in range(count))]
    assert [row[1] for row in rows] == ["follows", *["streaming"] * count]
    assert {row[2] for row in rows} == {"0 B"}
    for number in range(3):
        insert(server, number)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("SELECT pg_switch_wal()")
    insert(server, 3)
    archive, wal = tmp_path / "archive", server.data_dir / "pg_wal"
    archiver = pids(tuskline, "log-server")["archiver-1"]
    os.kill(archiver, signal.SIGKILL)

    def complete() -> set[str]:
        return {path.name for path in archive.glob("0*") if len(path.name) == 24}

    wait_for(lambda: len(complete()) >= 3, 40, "three segments are archived")
    for name in complete():
        assert (archive / name).read_bytes() == (wal / name).read_bytes()
    wait_for(
        lambda: pids(tuskline, "log-server")["archiver-1"] not in {archiver, None}, 20, "it is back"
    )


async def _top(tuskline: Attached) -> list[list[str]]:
    """The rows of the safekeepers once nobody is behind."""
    app = Top(load_config(tuskline.config), every=0.2)
    async with app.run_test(size=(140, 60)) as pilot:
        rows: list[list[str]] = []
        for _ in range(150):
            await pilot.pause(0.1)
            lines = str(app.query_one("#seen", Static).content).splitlines()
            rows = [
                re.split(" {2,}", line)
                for line in lines
                if line.startswith(("quorum ", "safekeeper-"))
            ]
            if rows and all(row[2] == "0 B" for row in rows):
                break
        await pilot.press("q")
    return rows
