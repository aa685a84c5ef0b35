"""A candidate that streams from a safekeeper: refused by its name, by whoever is asked, until it streams from the primary."""

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.support.attached import Attached
from tests.support.capture_stack import CaptureProcess, ChangeLog
from tests.support.extension import ONE
from tests.support.quorum_stack import QuorumStack
from tests.support.slot_copies import PHYSICAL, rows, slot_names
from tests.support.slot_sync import STANDBY, SlotStack, attached, slot_stack
from tests.support.waiting import wait_for
from tests.support.wal_server import PASSWORD, USER, WalServerProcess
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.postgres.protocol.lsn import parse_lsn


def stream_from(synced_pair: SlotStack, conninfo: str, port: int) -> None:
    """Give the standby another upstream, and wait until it streams from there. Before 13 that would need a restart."""
    standby = synced_pair.pair.standby
    quoted = conninfo.replace("'", "''")
    rows(standby, f"ALTER SYSTEM SET primary_conninfo = '{quoted}'")
    rows(standby, "SELECT pg_reload_conf()")
    there = "SELECT 1 FROM pg_stat_wal_receiver WHERE sender_port = %s AND status = 'streaming'"
    wait_for(lambda: rows(standby, there, port), 30, "it streams from there")


def make_slot_at(server: WalServerProcess) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE_REPLICATION_SLOT {PHYSICAL} PHYSICAL RESERVE_WAL".encode())


def findings(tuskline: Attached, check: str, where: str) -> list[dict[str, Any]]:
    report = json.loads(tuskline.run("doctor", "--json").stdout.splitlines()[-1])
    return [
        each for each in report["findings"] if each["check"] == check and where in each["where"]
    ]


@pytest.mark.long
@pytest.mark.parametrize("major", ONE)
def test_35_a_candidate_behind_a_safekeeper_is_refused_by_name(
    major: int, tmp_path: Path, log: ChangeLog
) -> None:
    place = tmp_path / "quorum"
    place.mkdir()
    with (
        slot_stack(major, tmp_path) as synced_pair,
        QuorumStack(place, synced_pair.pair.primary) as q,
    ):
        pair = synced_pair.pair
        q.start()
        wait_for(lambda: q.status_file.exists() and q.status()["quorum"], 30, "there is a quorum")
        pair.on_primary("SELECT pg_switch_wal()")
        pair.make_slot("kept")
        with synced_pair.controller() as controller:
            synced_pair.until(controller, "READY", "kept")
        end = parse_lsn(rows(pair.primary, "SELECT pg_current_wal_flush_lsn()::text")[0][0])
        wait_for(lambda: parse_lsn(q.status()["commit_lsn"]) >= end, 30, "the quorum has it")
        with q.wal_server(0) as server, attached(synced_pair, tmp_path) as tuskline:
            address = f"127.0.0.1:{server.port}"
            # A slot of the same name, as a standby there has one.
            make_slot_at(server)
            direct = rows(pair.standby, "SHOW primary_conninfo")[0][0]
            there = make_conninfo(
                "", host="127.0.0.1", port=server.port, user=USER, password=PASSWORD
            )
            stream_from(synced_pair, there, server.port)
            synced_pair.load.write()
            pair.catch_up()  # it follows, by way of the quorum
            for command, code in (
                (("slots", "status"), 1),
                (("slots", "ready", "--standby", STANDBY), 1),
                (("slots", "sync", "--once"), 1),
            ):
                told = tuskline.json(*command, code=code)
                (row,) = told["slots"]
                assert (row["standby"], row["state"], row["reason"], row["safe"]) == (
                    STANDBY, "BLOCKED", "behind_safekeeper", False,
                )  # fmt: skip
                assert f"a safekeeper, {address}" in row["why"]
                assert "primary_conninfo" in row["repair"]
                (problem,) = told["problems"]
                assert problem.startswith(
                    f"{STANDBY}: slot kept: the standby streams from a safekeeper"
                )
            assert f"a safekeeper, {address}" in tuskline.run("slots", "status").stderr
            (found,) = findings(tuskline, "upstream", f"candidate {STANDBY}")
            assert (found["severity"], found["what"].startswith("it streams from a safekeeper")) == (
                "error", True,
            )  # fmt: skip
            assert address in found["what"]
            assert PHYSICAL in found["repair"]
            # Asked once and not at each poll: a safekeeper's log is not ours to fill.
            with synced_pair.controller() as controller:
                asked = server.log.count("replication connections only")
                for _ in range(5):
                    assert controller.once(10)[STANDBY].ready is False
                assert server.log.count("replication connections only") <= asked + 1
            gate_refuses(tuskline, synced_pair, log, tmp_path)
            # The copy that was proven is still there; back at the primary it is proven again.
            stream_from(synced_pair, direct, pair.primary.port)
            with synced_pair.controller() as controller:
                synced_pair.until(controller, "READY", "kept")
            assert findings(tuskline, "upstream", f"candidate {STANDBY}")[0]["severity"] == "ok"
        assert slot_names(pair.standby) == {"kept"}


def gate_refuses(tuskline: Attached, synced_pair: SlotStack, log: ChangeLog, folder: Path) -> None:
    """The commit gate shows nothing, and it and doctor say for whom it waits, with or without a slot of the name."""
    pair = synced_pair.pair
    with tuskline.config.open("a") as config:
        config.write(f'[gate]\ncandidates = ["{PHYSICAL}"]\n')
    rows(pair.primary, "CREATE TABLE orders (id bigint PRIMARY KEY, pad text)")
    dsn = pair.primary.dsn()
    with CaptureProcess(folder, log, dsn, "public.orders", gate=Rule((PHYSICAL,))) as capture:
        wait_for(capture.streams, 60, "capture streams")
        rows(pair.primary, "INSERT INTO orders VALUES (1, 'x')")

        def holding() -> str:
            return "; ".join((capture.status().get("gate") or {}).get("holding", []))

        words = f"slot {PHYSICAL} is not in use"
        wait_for(lambda: words in holding(), 30, "the gate says for whom it waits")
        assert "from a safekeeper" in holding()
        (found,) = findings(tuskline, "commit gate", "shop")
        assert (found["severity"], words in found["what"]) == ("error", True)
        assert f"primary_slot_name = '{PHYSICAL}'" in found["repair"]
        assert log.committed_lsn() == 0
        # Nor without its slot, which a standby that never streamed from the primary has not.
        rows(pair.primary, f"SELECT pg_drop_replication_slot('{PHYSICAL}')")
        wait_for(
            lambda: f"slot {PHYSICAL} does not exist on the server" in holding(), 30, "it says so"
        )
        assert "from a safekeeper" in holding()
        assert log.committed_lsn() == 0
        rows(pair.primary, f"SELECT pg_create_physical_replication_slot('{PHYSICAL}', true)")
    wait_for(
        lambda: (
            not rows(
                pair.primary,
                "SELECT 1 FROM pg_replication_slots WHERE slot_name = 'tuskline_shop' AND active",
            )
        ),
        30,
        "capture has gone",
    )
    rows(pair.primary, "SELECT pg_drop_replication_slot('tuskline_shop')")
