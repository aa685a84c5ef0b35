"""The benchmarks at a tiny scale: what they print, and that unequal results print no ratio."""

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

from benchmarks import recvlogical
from benchmarks.decode import differs
from benchmarks.report import Report, Round

KEYS = {"name", "rounds", "results_equal", "peers", "ratios", "absolute", "machine"}


def run(name: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, "--json", "--rounds", "1", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert record.keys() >= KEYS
    assert record["results_equal"] is True
    assert record["rounds"] == 1
    assert record["name"] == name
    return record


@pytest.mark.long
def test_capture_prints_its_ratios():
    record = run("capture", "--scale", "0.001", "--no-debezium")
    assert [peer["name"] for peer in record["peers"]] == ["pg_recvlogical"]
    keys = {f"wall_rate_vs_pg_recvlogical_{work}" for work in ("tpcb", "wide")}
    assert record["ratios"].keys() == keys
    # Not CPU seconds: at this size they may be less than the kernel's tick of 10 ms, so 0.
    assert record["absolute"]["own_rows_s_wide"] > 0
    processes = {f"own_{name}_cpu_wide" for name in ("replicas", "repository", "capture_bench")}
    assert record["absolute"].keys() > processes | {"own_walsender_cpu_wide"}


@pytest.mark.long
def test_decode_prints_its_ratios():
    ratios = run("decode", "--scale", "0.005")["ratios"]
    assert ratios.keys() == {
        *("tpcb_rows_per_cpu_s", "wide_rows_per_cpu_s", "vs_plain_tpcb", "vs_plain_wide")
    }


@pytest.mark.long
def test_comparison_prints_its_figures():
    figures = run("comparison", "--scale", "0.05")["absolute"]
    sides = {(side, case) for side in ("source", "lake") for case in ("ranges", "hash")}
    assert figures.keys() >= {f"{side}_rows_s_{case}" for side, case in sides}


@pytest.mark.long
def test_views_prints_its_ratios():
    ratios = run("views", "--scale", "0.01")["ratios"]
    pairs = ("epoch_large_vs_small", "epoch_with_views_vs_without", "views_vs_job")
    assert ratios.keys() == {f"{pair}{suffix}" for pair in pairs for suffix in ("", "_cpu")}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("mvn") is None, reason="the driver and Debezium come from Maven")
def test_snapshot_and_debezium_print_their_ratios():
    ratios = run("snapshot", "--scale", "0.01")["ratios"]
    sides = {f"rows_s_vs_jdbc_{case}" for case in ("keyed", "plain", "wide")}
    sides |= {f"lake_{side}" for side in sides} | {"wide_rows_cpu_s", "lake_wide_rows_cpu_s"}
    assert sides <= ratios.keys()
    assert "rows_per_cpu_vs_debezium_tpcb" in run("capture", "--scale", "0.01")["ratios"]


def test_unequal_results_print_no_ratio():
    report = Report("capture")
    for side, result in (("own", {"rows": 3}), ("debezium", {"rows": 2})):
        report.add(Round(side, "tpcb", 3, 1.0, 1.0, result, 0.0))
    report.ratio("rows_per_cpu_vs_debezium_tpcb", 10.0, 1.0)
    record = report.record()
    assert record["results_equal"] is False
    assert record["ratios"] == {}
    assert "own has" in record["unequal"][0]


def test_a_table_that_one_decoder_lacks_is_a_difference():
    assert differs([], []) is None


def test_a_byte_that_differs_from_pg_recvlogical_is_found(tmp_path):
    def payload(*messages: bytes) -> bytes:
        return b"".join(len(m).to_bytes(4, "little") + m for m in messages)

    relation = b"R" + bytes(4) + b"public\0t\0d" + b"\0\1" + b"\1id\0" + bytes(8)
    written = tmp_path / "written"
    written.write_bytes(b"Bone\n" + relation + b"\n" + b"I\n\n\n" + b"Cend\n")
    assert recvlogical.differs(written, [payload(b"Bone", b"I\n\n"), payload(b"Cend")]) is None
    assert "message 1" in str(recvlogical.differs(written, [payload(b"Bone", b"I\nx", b"Cend")]))
    assert "more than" in str(recvlogical.differs(written, [payload(b"Bone", b"I\n\n")]))


@pytest.mark.long
def test_wal_prints_its_ratios():
    found = run("wal", "--scale", "0.01", "--seconds", "1", "--bulk-rows", "3000000")
    assert found["ratios"].keys() >= {
        *("p50_c1_vs_receivers", "p50_c8_vs_receivers", "tps_c8_vs_receivers"),
        *("tps_c32_vs_receivers", "tps_c32_vs_standbys", "bulk_mb_s_vs_receivers"),
    }
    assert len(found["peers"]) == 2


@pytest.mark.long
def test_wal_catchup_prints_its_ratios():
    found = run("wal-catchup", "--scale", "0.03")
    assert found["ratios"].keys() >= {"mb_s_vs_receiver", "proposer_rss_mb"}


@pytest.mark.long
def test_tables_prints_its_ratios():
    ratios = run("tables", "--scale", "0.04", "--epochs", "130", "--retained", "120")["ratios"]
    keys = {"epoch_20_of_1000_vs_20_of_20", "epoch_10000_vs_100", "epoch_1000_of_1000_seconds"}
    assert ratios.keys() >= keys


@pytest.mark.long
def test_apply_prints_its_ratios():
    ratios = run("apply", "--scale", "0.002")["ratios"]
    assert ratios.keys() >= {
        "rows_s_vs_plain_merge",
        "rows_s",
        "rows_cpu_s",
        "read_vs_plain",
        "read_vs_merge",
    }
