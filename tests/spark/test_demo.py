"""`tuskline demo`, the whole of it: what the README promises first."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from spark_consumers import read
from tests.support.engines import assert_engines_agree
from tests.support.iceberg_server import iceberg_server
from tests.support.rest_catalog import RestServer
from tests.support.s3 import gateway
from tests.support.servers import fresh_database
from walsender_bridge.demo import bucket
from walsender_bridge.demo.catalog import URI
from walsender_bridge.demo.local_server import by_major, free_port
from walsender_bridge.postgres.protocol.lsn import parse_lsn


def _demo(directory, *arguments, seconds):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "walsender_bridge.cli.app",
            "demo",
            "--json",
            "--dir",
            str(directory),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    print(done.stderr[-6000:])
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def _assert_whole(code, figures):
    assert figures["invariant_violations"] == 0
    assert figures["tables_compared"] == 12
    assert figures["tables_equal"] == 12
    assert figures["planted_error_found"] is True
    assert figures["transactions"] > 0
    assert figures["changes"] > figures["transactions"]
    assert figures["epochs"] == figures["epochs_checked"] > 1
    assert 0 < figures["freshness_seconds"]["p50"] <= figures["freshness_seconds"]["p99"]
    assert code == 0


# `make test` has it with kills, which checks all of this and more.
@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_ends_equal(tmp_path, spark):
    """And other engines read the same rows of its tables."""
    code, figures = _demo(tmp_path / "demo", "--seconds", "6", "--seed", "11", seconds=540)
    _assert_whole(code, figures)
    lake = Path(figures["lake"])
    shown = read(spark, lake)
    assert len(shown.tables) == 12
    assert_engines_agree(lake, shown)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_ends_equal_with_its_lake_in_a_bucket(tmp_path):
    if gateway() is None:
        pytest.skip("the demo's bucket needs versitygw, which needs Go to be built")
    options = ("--lake", "s3", "--seconds", "30", "--kill", "--seed", "13")
    code, figures = _demo(tmp_path / "demo", *options, seconds=840)
    _assert_whole(code, figures)
    assert figures["lake"] == "s3://demo/lake"
    assert not (tmp_path / "demo" / "lake").exists()
    assert figures["kills"]["driver"] >= 3


@contextmanager
def of_iceberg(folder, pg_server, port):
    """Iceberg's own server."""
    s3 = f"http://127.0.0.1:{port}"
    with (
        fresh_database(pg_server) as own,
        iceberg_server(
            folder, own.dsn, s3, warehouse="s3://demo/catalog", keys=bucket.KEYS
        ) as found,
    ):
        yield found.uri


@contextmanager
def of_tests(_folder, _pg_server, port):
    """The tests' own, whose commits of several tables are atomic."""
    with bucket.environment(port), RestServer().running() as server:
        server.keys = {}
        yield server.uri


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("catalog", [of_iceberg, of_tests])
def test_the_demo_ends_equal_in_a_rest_catalog_and_a_bucket(
    tmp_path, pg_server, monkeypatch, catalog
):
    if gateway() is None:
        pytest.skip("the demo's bucket needs versitygw, which needs Go to be built")
    port = free_port()
    with catalog(tmp_path, pg_server, port) as uri:
        monkeypatch.setenv(URI, uri)
        monkeypatch.setenv(bucket.PORT, str(port))
        options = ("--lake", "s3", "--catalog", "rest", "--seconds", "20", "--kill", "--seed", "15")
        code, figures = _demo(tmp_path / "demo", *options, seconds=1400)
    _assert_whole(code, figures)
    assert figures["lake"] == "s3://demo/lake"
    assert figures["kills"]["driver"] >= 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("load", ["30", pytest.param("120", marks=pytest.mark.long)])
def test_the_demo_ends_equal_when_everything_is_killed(tmp_path, load):
    """And what three safekeepers hold is the same, byte for byte."""
    page = tmp_path / "report.html"
    options = ("--seconds", load, "--kill", "--safekeepers", "3", "--seed", "12")
    code, figures = _demo(tmp_path / "demo", *options, "--report", str(page), seconds=840)
    _assert_whole(code, figures)
    report = page.read_text()
    assert report.count("killed: ") >= sum(figures["kills"].values())
    assert "down for " in report
    assert "of 12</b><small>tables equal at the end" in report
    assert set(figures["kills"]) == {
        *("bridge", "capture", "log-server", "driver", "postgres"),
        *("safekeeper", "wal_server", "proposer"),
    }
    assert all(times >= 3 for times in figures["kills"].values()), figures["kills"]
    assert figures["safekeepers"] == 3
    assert parse_lsn(figures["quorum_commit_lsn"]) > 0
    assert figures["segments_equal"] is True
    assert figures["segments_compared"] >= 1
    assert figures["wal_compared_bytes"] > 1 << 20


@pytest.mark.long
@pytest.mark.timeout(900)
def test_23_the_demo_ends_equal_when_log_servers_are_killed_and_one_is_wiped(tmp_path):
    """And what three log servers hold is the same, byte for byte."""
    options = ("--seconds", "45", "--kill", "--log-servers", "3", "--seed", "14")
    code, figures = _demo(tmp_path / "demo", *options, seconds=840)
    _assert_whole(code, figures)
    assert (figures["kills"]["replicas"], figures["kills"]["disk"]) == (3, 1)
    assert figures["log_servers"] == 3
    assert figures["replicas_equal"] is True
    assert figures["entries_compared"] > 50
    assert figures["entry_bytes_compared"] > 100_000
    assert figures["wiped_log_server"].startswith("127.0.0.1:")


@pytest.mark.long
@pytest.mark.skipif(max(by_major()) < 17, reason="no PostgreSQL whose standbys synchronize slots")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill", [(), ("--kill",)], ids=["", "kill"])
@pytest.mark.iceberg_only("the demo's lake has no Delta logs")
def test_5_17_the_demo_ends_equal_when_a_standby_takes_over_under_load(tmp_path, kill):
    options = ("--standby", "--seconds", "45" if kill else "20", "--seed", "13", *kill)
    code, figures = _demo(tmp_path / "demo", *options, seconds=840)
    _assert_whole(code, figures)
    assert figures["promoted"] is True
    assert figures["gate_decisions"] == ["timeline", "promoted"] * 2
