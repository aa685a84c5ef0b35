"""`tuskline log status|verify|trim|tail` on the stream of a real server, while it is written and after it."""

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from tests.support.attached import CLI, Attached
from tests.support.servers import Database
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.cli import app as cli


def run(tuskline: Attached, *arguments: str, code: int = 0) -> str:
    """`tuskline log ARGUMENTS` in this process, which is as good as one of its own and starts sooner; its output."""
    done = CliRunner().invoke(cli.app, ["log", *arguments, "--config", str(tuskline.config)])
    assert done.exit_code == code, (done.output, done.exception)
    return done.stdout


def lines(tuskline: Attached, *arguments: str) -> list[dict[str, Any]]:
    shown = run(tuskline, "tail", "shop", "--json", *arguments)
    return [json.loads(line) for line in shown.splitlines()]


@contextlib.contextmanager
def following(tuskline: Attached, version: int) -> Iterator["subprocess.Popen[str]"]:
    """`tuskline log tail --follow` from this version on."""
    command = [*CLI, "log", "tail", "shop", "--json", "--follow", "--from-version", str(version)]
    process = subprocess.Popen(
        [*command, "--config", str(tuskline.config)], stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def committed(log: LogClient, shop: Database, *statements: str) -> int:
    """Run these, wait until the log has them, and return a version that has."""
    shop.execute(*statements)
    with shop.connect() as connection:
        row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        shop.execute("INSERT INTO audit VALUES (0, 'mark')")
    wait_for(lambda: log.status().streams["shop"].last_end_lsn >= int(row[0]), 30, "it is logged")
    return log.status().version


def test_an_attached_stream_is_shown_verified_tailed_and_trimmed(
    tmp_path: Path, shop: Database
) -> None:
    section = {"dsn": shop.dsn, "tables": ["public.orders", "public.audit"]}
    with Attached(tmp_path, {"shop": section}) as tuskline, contextlib.ExitStack() as stack:
        tuskline.json("init")
        tuskline.up()
        with LogClient(f"grpc://{tuskline.log_listen}") as log:
            wait_for(lambda: _streams(log), 30, "the stream is there")
            log.register_consumer("lake", None, 600)
            first = committed(
                log,
                shop,
                "INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 500) AS n",
                "UPDATE orders SET pad = E'\\x1b[31mred' WHERE id = 7",
                "TRUNCATE audit",
            )
            follows = stack.enter_context(following(tuskline, first))
            shown = tuskline.json("log", "status")
            (stream,) = shown["streams"]
            (replica,) = stream["replicas"]
            assert (replica["state"], replica["lag_bytes"], shown["faults"]) == (
                "appendable",
                0,
                [],
            )
            assert [row["holder"] for row in shown["holding"]] == ["consumer lake"]
            assert shown["holding"][0]["bytes"] == replica["bytes"] > 0

            transactions = lines(tuskline)
            counts = [each["counts"] for each in transactions]
            assert {"public.orders": {"insert": 500}} in counts
            assert {"public.audit": {"truncate": 1}} in counts
            assert [each["kind"] for each in transactions] == ["transaction"] * len(transactions)
            only = ("--relations", "public.orders", "--rows")
            rows = [each for each in lines(tuskline, *only) if each["kind"] == "row"]
            assert len(rows) == 501
            assert rows[500]["new"] == {"id": "7", "pad": "\x1b[31mred"}
            text = run(tuskline, "tail", "shop", *only)
            assert "\x1b" not in text
            assert r"pad='\x1b[31mred'" in text

            wait_for(lambda: follows.poll() is None, 5, "it follows")
            second = committed(log, shop, "DELETE FROM orders WHERE id = 8")
            # It goes on until it is interrupted.
            assert follows.stdout is not None
            while json.loads(follows.stdout.readline())["counts"] != {
                "public.orders": {"delete": 1}
            }:
                pass
            follows.send_signal(signal.SIGINT)
            assert follows.wait(10) == 0
            report = tuskline.json("log", "verify")
            assert report["violations"] == []
            assert report["replicas"][0]["entries"] == log.status().streams["shop"].end_offset - 1

            error = tuskline.error("log", "trim", "shop", "--to-version", str(first), code=2)
            assert "consumer 'lake' has published nothing yet" in error["what"]
            log.register_consumer("lake", second, 600)
            (freed,) = tuskline.json("log", "trim", "shop", "--to-version", str(first))["replicas"]
            assert freed["entries"] > 0
            assert freed["bytes"] > 0
            assert lines(tuskline)[0]["version"] > first
        assert tuskline.stop_up() == 0
        report = json.loads(run(tuskline, "verify", "--offline", "--json"))
        assert report["violations"] == []
        assert report["replicas"][0]["first_offset"] == freed["low_offset"]
        tuskline.json("detach")


def _streams(log: LogClient) -> bool:
    try:
        return "shop" in log.status().streams
    except Exception:
        time.sleep(0.1)
        return False
