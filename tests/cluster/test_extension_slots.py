"""The extension's copies of slots on real pairs of servers: what is lost and kept, and what a promotion finds."""

from pathlib import Path

import psycopg
import pytest

from tests.support.extension import MAJORS
from tests.support.slot_copies import (
    MOVE,
    PHYSICAL,
    decoded,
    fields,
    inspect,
    received,
    rows,
    running_pair,
    slot_names,
)
from tests.support.waiting import wait_for

COPY = "_tuskline_tmp_kept"


@pytest.mark.parametrize("major", MAJORS)
def test_18_positions_alone_lose_rows_and_an_advanced_copy_does_not(major: int) -> None:
    """Fact 1: at the copied restart_lsn another transaction ran, and only the primary had a snapshot of it.

    The decoder that starts there without one waits until all that ran has ended, and the transaction in which
    rows 101 to 103 are had begun before that.
    """
    with running_pair(major) as pair:
        pair.make_slot("kept")
        pair.reserve(COPY, "kept")
        pair.prove(COPY, "kept")
        with (
            psycopg.connect(pair.primary.dsn()) as early,
            psycopg.connect(pair.primary.dsn()) as late,
        ):
            # The standby's decoder is left out of this: what it sees, it saves for every slot there.
            early.execute("INSERT INTO shop VALUES (1001, 'row-100')")
            pair.on_primary(*MOVE)
            for number in (101, 102, 103):
                late.execute("INSERT INTO shop VALUES (%s, %s)", [1000 + number, f"row-{number}"])
            early.commit()
            pair.on_primary(*MOVE, *MOVE)
            pair.reserve("_tuskline_tmp_positions", "kept")
            # What is proven gets its name; what is not stays without one.
            pair.on_standby("SELECT tuskline_slots.rename(%s, 'kept')", COPY)
            with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="no snapshot"):
                pair.on_standby("SELECT tuskline_slots.rename('_tuskline_tmp_positions', 'other')")
            assert not inspect(pair.standby, "_tuskline_tmp_positions")["snapshot_present"]
            late.commit()
        pair.on_primary("CHECKPOINT", "INSERT INTO shop VALUES (2000, 'row-104')")
        assert decoded(pair.primary, "kept") == [101, 102, 103, 104]
        pair.catch_up()
        pair.promote()
        assert decoded(pair.standby, "_tuskline_tmp_positions") == [104]
        # It stands where it was proven, before row 100 was committed.
        assert decoded(pair.standby, "kept") == [100, 101, 102, 103, 104]
        # Promoted, it takes new rows too, and a plain client reads them.
        rows(pair.standby, "INSERT INTO shop VALUES (2001, 'row-105') RETURNING id")
        assert received(pair.standby, "kept") == [100, 101, 102, 103, 104, 105]
        # 32: what was never proven can be dropped there, and nothing else.
        rows(pair.standby, "SELECT tuskline_slots.drop('_tuskline_tmp_positions')")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="on a primary"):
            rows(pair.standby, "SELECT tuskline_slots.drop('kept')")
        assert slot_names(pair.standby) == {"kept"}


@pytest.mark.parametrize("major", MAJORS)
def test_16_two_phase_and_its_position_are_kept(major: int) -> None:
    with running_pair(major) as pair:
        if major < 14:
            pair.make_slot("kept")
            found = pair.slot("kept")
            with pytest.raises(psycopg.errors.FeatureNotSupported):
                pair.on_standby(
                    "SELECT tuskline_slots.reserve(%s, 'pgoutput', %s, %s, true, %s)",
                    *(COPY, found.restart_lsn, found.confirmed_flush_lsn, found.restart_lsn),
                )
            return
        pair.on_primary(
            "SELECT pg_create_logical_replication_slot('kept', 'pgoutput', false, true)"
        )
        pair.catch_up()
        there = inspect(pair.primary, "kept")
        assert there["two_phase"]
        assert there["two_phase_at"] is not None
        pair.on_standby(
            "SELECT tuskline_slots.reserve(%s, 'pgoutput', %s, %s, true, %s)",
            *(COPY, there["restart_lsn"], there["confirmed_flush_lsn"], there["two_phase_at"]),
        )
        pair.prove(COPY, "kept")
        pair.on_standby("SELECT tuskline_slots.rename(%s, 'kept')", COPY)
        pair.standby.restart()
        here = inspect(pair.standby, "kept")
        assert here["two_phase"]
        assert here["two_phase_at"] == there["two_phase_at"]


@pytest.mark.parametrize("major", MAJORS)
def test_19_a_marker_lives_as_long_as_the_slot_and_a_crash_is_not_its_end(major: int) -> None:
    with running_pair(major) as pair:
        mark = f"SELECT tuskline_slots.mark('{PHYSICAL}', %s)"
        assert rows(pair.primary, mark, "first") == [("first",)]
        assert rows(pair.primary, mark, "second") == [("first",)]
        assert inspect(pair.primary, PHYSICAL)["marker"] == "first"
        pair.primary.kill()
        pair.primary.start()
        assert inspect(pair.primary, PHYSICAL)["marker"] == "first"
        pair.standby.stop()
        pair.on_primary(
            f"SELECT pg_drop_replication_slot('{PHYSICAL}')",
            f"SELECT pg_create_physical_replication_slot('{PHYSICAL}', true)",
        )
        assert inspect(pair.primary, PHYSICAL)["marker"] is None
        marker = pair.primary.data_dir / "pg_replslot" / PHYSICAL / "tuskline_marker"
        marker.write_text("no marker at all")
        assert inspect(pair.primary, PHYSICAL)["marker"] is None
        with pytest.raises(psycopg.errors.DataCorrupted, match="tuskline_marker"):
            rows(pair.primary, mark, "third")
        assert marker.read_text() == "no marker at all"
        pair.standby.start()


@pytest.mark.parametrize("major", MAJORS)
def test_19_memory_and_disk_differ_until_a_checkpoint(major: int) -> None:
    """Fact 3: what a crash would leave of the physical slot's catalog_xmin is what its file says."""
    with running_pair(major) as pair:
        pair.make_slot("kept")
        pair.reserve(COPY, "kept")
        wait_for(
            lambda: inspect(pair.primary, PHYSICAL)["catalog_xmin"], 30, "the standby has told"
        )
        found = inspect(pair.primary, PHYSICAL)
        assert found["dirty"]
        assert found["saved_catalog_xmin"] is None
        pair.on_primary("CHECKPOINT")
        assert inspect(pair.primary, PHYSICAL)["saved_catalog_xmin"] is not None
        here = inspect(pair.standby, COPY)
        assert here["saved_catalog_xmin"] == here["catalog_xmin"] == here["effective_catalog_xmin"]
        assert (here["persistency"], here["wal_present"]) == ("persistent", True)
        assert str(here["restart_lsn"]) == fields(pair.standby, COPY).restart_lsn


@pytest.mark.parametrize("major", MAJORS)
def test_6_the_three_fields_move_together_and_forward(major: int) -> None:
    with running_pair(major) as pair:
        pair.make_slot("kept")
        pair.reserve(COPY, "kept")
        pair.prove(COPY, "kept")
        first = fields(pair.standby, COPY)
        pair.on_standby(
            "SELECT tuskline_slots.reserve('_tuskline_tmp_ahead', 'pgoutput', %s, %s)", *first[:2]
        )
        pair.on_primary("INSERT INTO shop VALUES (3000, 'row-1')")
        pair.prove("_tuskline_tmp_ahead", "kept")
        ahead = fields(pair.standby, "_tuskline_tmp_ahead")
        assert ahead.restart_lsn != first.restart_lsn
        move = "SELECT tuskline_slots.set_fields(%s, %s, %s, %s::xid)"
        pair.on_standby(move, COPY, *ahead)
        assert fields(pair.standby, COPY) == ahead
        pair.standby.kill()
        pair.standby.start()
        assert fields(pair.standby, COPY) == ahead
        with pytest.raises(
            psycopg.errors.ObjectNotInPrerequisiteState, match="would move backwards"
        ):
            pair.on_standby(move, COPY, *first)
        pair.on_standby(move.replace("xid)", "xid, true)"), COPY, *first)
        assert fields(pair.standby, COPY) == first
        # Without a snapshot for the position nothing moves, forwards or backwards.
        bare = pair.slot("kept")._replace(restart_lsn=first.confirmed_flush_lsn)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="no snapshot"):
            pair.on_standby(move.replace("xid)", "xid, true)"), COPY, *bare)
        assert fields(pair.standby, COPY) == first


@pytest.mark.parametrize("major", MAJORS)
def test_an_advance_that_is_cancelled_leaves_no_file_open(major: int) -> None:
    with running_pair(major) as pair:
        pair.make_slot("kept")
        pair.reserve(COPY, "kept")
        pair.on_primary(
            "INSERT INTO shop SELECT n, repeat('x', 100) FROM generate_series(1, 200000) AS n"
        )
        pair.catch_up()
        end = rows(pair.standby, "SELECT pg_last_wal_replay_lsn()::text")[0][0]
        with psycopg.connect(pair.standby.dsn(), autocommit=True) as connection:
            files = Path(f"/proc/{connection.info.backend_pid}/fd")

            def open_segments() -> int:
                links = [str(each.readlink()) for each in files.iterdir()]
                return len([each for each in links if "/pg_wal/" in each])

            connection.execute("SET statement_timeout = '10ms'")
            for _ in range(10):
                with pytest.raises(psycopg.errors.QueryCanceled):
                    connection.execute("SELECT tuskline_slots.advance(%s, %s)", [COPY, end])
            assert open_segments() <= 1
