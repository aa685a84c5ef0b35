"""A stream that cannot go on: capture, `doctor` and `init` each say why, and make nothing that would hide it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support import old_files
from tests.support.attached import Attached, difference, server_state
from tests.support.capture_stack import (
    PUBLICATION,
    SLOT,
    CaptureProcess,
    ChangeLog,
    check_equal,
    content,
    make_tables,
)
from tests.support.servers import DEFAULT, Database, MakeServer, drop_slot, majors
from tests.support.waiting import wait_for
from walsender_bridge.cli.doctor import of_source
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import LocalServer, by_major
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.provisioning.configured import capture_source, known_of
from walsender_bridge.provisioning.init import init

LSN = re.compile(r"[0-9A-F]+/[0-9A-F]+")
TABLES = ("public.orders", "public.audit")
REATTACH = "tuskline reattach shop"

#: The last major that refuses to decode without its publication, as here, and the first that leaves changes out.
before_and_after_18 = pytest.mark.parametrize(
    "pg_server",
    [major for major in (15, 18) if major in majors()],
    indirect=True,
    ids="pg{}".format,
)


class Place:
    """A configuration, its log, and a capture of it."""

    def __init__(self, folder: Path, log: ChangeLog, dsn: str) -> None:
        folder.mkdir()
        self.log = log
        self.tuskline = Attached(folder, {"shop": {"dsn": dsn, "tables": TABLES}})
        config = self.tuskline.config
        text = config.read_text().replace(self.tuskline.log_listen, log.listen)
        repository = log.folder / "repository"
        config.write_text(text.replace('data_dir = "log"', f'data_dir = "{repository}"'))
        status_file = repository / "run" / "capture-shop.status.json"
        status_file.parent.mkdir(exist_ok=True)
        self.capture = CaptureProcess(folder, log, dsn, *TABLES, status_file=status_file)

    def capture_some(self, dsn: str, *statements: str) -> None:
        """Capture until the log has what these commit; then stop."""
        self.capture.start()
        wait_for(self.capture.streams, 60, "capture streams")
        with psycopg.connect(dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())
        check_equal(self.log, dsn)
        assert self.capture.stop() == 0

    def refused(self, cause: Cause) -> dict[str, Any]:
        """The error with which capture ends, when it is started; nothing is appended to the log."""
        before = self.log.replica_status()
        self.capture.start()
        assert self.capture.wait(60) == cause
        after = self.log.replica_status()
        assert (after.end_offset, after.confirmed_to) == (before.end_offset, before.confirmed_to)
        error: dict[str, Any] = self.capture.status()["error"]
        return error

    def well(self) -> dict[str, Any]:
        """What `doctor` says of it, without an error but that the log is another process's, namely this one's."""
        report: dict[str, Any] = self.tuskline.json("doctor", code=Cause.CONFIG)
        errors = [each for each in report["findings"] if each["severity"] == "error"]
        assert [each["check"] for each in errors] == ["address of the bridge"], errors
        return report

    def doctor(self, cause: Cause) -> dict[str, Any]:
        """The first error that `doctor` finds; it is the same while the log does not run."""
        report = self.tuskline.json("doctor", code=cause)
        errors = [each for each in report["findings"] if each["severity"] == "error"]
        first: dict[str, Any] = errors[0]
        self.log.stop_repository()
        settings = load_config(self.tuskline.config)
        (section,) = settings.source
        found = of_source(section, None, partial(known_of, settings, section))
        again = next(each for each in found if each.severity is Severity.ERROR)
        # The end of the server's WAL goes forward.
        assert LSN.sub("N", str(again.to_json())) == LSN.sub("N", str(first))
        self.log.start_repository()
        return first

    def init_refused(self, dsn: str, cause: Cause) -> dict[str, Any]:
        """The error of `init`, which makes nothing; it is the same while the log does not run."""
        before = server_state(dsn)
        error: dict[str, Any] = self.tuskline.error("init", code=cause)
        self.log.stop_repository()
        settings = load_config(self.tuskline.config)
        (section,) = settings.source
        known = known_of(settings, section)
        with pytest.raises(TusklineError) as caught:
            init(capture_source(section), None, known and known.log)
        assert (caught.value.what, caught.value.cause) == (error["what"], cause)
        self.log.start_repository()
        assert difference(before, server_state(dsn)) == []
        return error


@pytest.fixture
def place(tmp_path: Path, log: ChangeLog, shop: Database) -> Place:
    """A source whose stream has a history, and whose capture is down."""
    place = Place(tmp_path / "place", log, shop.dsn)
    place.tuskline.json("init")
    place.capture_some(shop.dsn, "INSERT INTO orders VALUES (1, 'logged')")
    return place


# -- the publication ------------------------------------------------------------------------------------

MAKE = f"CREATE PUBLICATION {PUBLICATION} FOR TABLE orders, audit, tuskline.flush"


@before_and_after_18
@pytest.mark.parametrize(
    ("statements", "fate"),
    [
        pytest.param(
            [f"DROP PUBLICATION {PUBLICATION}"], "dropped", id="dropped", marks=pytest.mark.long
        ),
        pytest.param(
            [f"DROP PUBLICATION {PUBLICATION}", MAKE], "dropped and recreated", id="made again"
        ),
        pytest.param(
            [f"ALTER PUBLICATION {PUBLICATION} RENAME TO other"],
            "renamed to 'other'",
            id="renamed",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_publication_that_went_while_capture_was_down(
    place: Place, shop: Database, statements: list[str], fate: str
) -> None:
    shop.execute(*statements[:1], "INSERT INTO orders VALUES (2, 'without')", *statements[1:])
    wanted = f"publication '{PUBLICATION}' was {fate}: changes committed in between are missing"
    error = place.refused(Cause.PUBLICATION)
    assert (error["what"], error["repair"]) == (wanted, REATTACH)
    found = place.doctor(Cause.PUBLICATION)
    assert (found["what"], found["repair"], found["fix_sql"]) == (wanted, REATTACH, "")
    error = place.init_refused(shop.dsn, Cause.PUBLICATION)
    assert (error["what"], error["repair"]) == (wanted, REATTACH)


@before_and_after_18
@pytest.mark.parametrize(
    "again",
    [
        pytest.param([], id="dropped", marks=pytest.mark.long),
        pytest.param([MAKE], id="made again"),
    ],
)
def test_a_publication_that_goes_while_capture_streams(
    place: Place, shop: Database, again: list[str]
) -> None:
    place.capture.start()
    wait_for(place.capture.streams, 60, "capture streams")
    shop.execute(
        f"DROP PUBLICATION {PUBLICATION}", "INSERT INTO orders VALUES (2, 'without')", *again
    )
    assert place.capture.wait(60) == Cause.PUBLICATION
    error = place.capture.status()["error"]
    assert PUBLICATION in error["what"]
    assert error["repair"] == REATTACH
    wanted = "dropped and recreated" if again else "dropped"
    assert f"was {wanted}:" in place.refused(Cause.PUBLICATION)["what"]
    assert f"was {wanted}:" in place.doctor(Cause.PUBLICATION)["what"]


def test_a_publication_that_an_older_version_began_with_is_recorded_by_the_next_session(
    place: Place, shop: Database
) -> None:
    own = f"FROM tuskline.provisioned WHERE slot = '{SLOT}' AND kind = 'publication oid'"
    shop.execute(f"DELETE {own}")
    place.capture_some(shop.dsn, "INSERT INTO orders VALUES (2, 'goes on')")
    with shop.connect() as connection:
        query = (
            f"SELECT grantee = (SELECT oid::text FROM pg_publication WHERE pubname = name) {own}"
        )
        assert connection.execute(query.encode()).fetchall() == [(True,)]
    # Without the row: what made the publication is in the record, and that there is a history in the log.
    for rows in ("kind = 'publication oid'", "true"):
        shop.execute(
            f"DELETE FROM tuskline.provisioned WHERE {rows}",
            f"DROP PUBLICATION IF EXISTS {PUBLICATION}",
        )
        assert "was dropped:" in place.refused(Cause.PUBLICATION)["what"]


def test_a_role_that_an_administrator_made_sees_that_its_publication_is_another_one(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    role = f"lost_{shop.name}"
    dsn = shop.server.dsn(shop.name, user=role, password="planted-secret-31aa")
    place = Place(tmp_path / "place", log, dsn)
    admin = ("--admin", "user=postgres")
    env = {"PGPASSWORD": str(psycopg.conninfo.conninfo_to_dict(shop.dsn)["password"])}
    try:
        place.tuskline.json("init", *admin, env=env)
        place.capture_some(shop.dsn, "INSERT INTO orders VALUES (1, 'logged')")
        place.well()
        shop.execute(f"DROP PUBLICATION {PUBLICATION}", MAKE)
        assert "recreated" in place.refused(Cause.PUBLICATION)["what"]
        assert "recreated" in place.doctor(Cause.PUBLICATION)["what"]
        # With no right to read the record it is no worse than it was, and `doctor` names the right.
        shop.execute(f"REVOKE SELECT ON tuskline.provisioned FROM {role}")
        report = place.well()
        assert any(
            "may not read tuskline.provisioned" in each["what"] for each in report["findings"]
        )
    finally:
        place.tuskline.run("detach", *admin, env=env)
    with shop.connect() as connection:
        query = "SELECT FROM pg_roles WHERE rolname = %s"
        assert connection.execute(query.encode(), [role]).fetchone() is None, "detach takes it back"


# -- the slot -------------------------------------------------------------------------------------------


def test_a_slot_that_was_dropped_and_one_that_was_made_again_by_hand(
    place: Place, shop: Database
) -> None:
    drop_slot(shop, SLOT)
    error = place.refused(Cause.DIVERGED)
    assert "stream shop has diverged: the slot is gone; the log was confirmed to " in error["what"]
    found = place.doctor(Cause.DIVERGED)
    assert "stream shop has diverged: the slot is gone; the log was confirmed to " in found["what"]
    assert found["repair"] == REATTACH
    error = place.init_refused(shop.dsn, Cause.SLOT)
    assert "the slot is gone; the log was confirmed to " in error["what"]
    assert error["repair"] == REATTACH
    shop.execute(
        "INSERT INTO orders VALUES (2, 'skipped')",
        f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
    )
    assert "the slot was recreated or moved" in place.refused(Cause.DIVERGED)["what"]
    found = place.doctor(Cause.DIVERGED)
    assert "the slot was recreated or moved" in found["what"]
    assert found["repair"] == REATTACH


def test_a_slot_that_the_server_has_invalidated(
    tmp_path: Path, log: ChangeLog, make_server: MakeServer
) -> None:
    server = make_server(fsync="off", max_slot_wal_keep_size="1MB", max_wal_size="32MB")
    place = started(tmp_path, log, server)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for _ in range(4):
            connection.execute("SELECT pg_logical_emit_message(false, '', repeat('x', 1000000))")
            connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")
    error = place.refused(Cause.SLOT)
    assert error["what"] == "the slot is lost: the server has removed WAL that the slot needs"
    assert error["repair"] == REATTACH
    found = place.doctor(Cause.SLOT)
    assert found["what"] == f"{SLOT} is lost: the server has removed WAL that the slot needs"
    assert found["repair"] == REATTACH
    error = place.init_refused(server.dsn(), Cause.SLOT)
    assert "the server has removed WAL that the slot needs" in error["what"]
    assert error["repair"] == REATTACH


def test_init_names_the_slot_that_it_makes(tmp_path: Path, log: ChangeLog, shop: Database) -> None:
    place = Place(tmp_path / "place", log, shop.dsn)
    place.tuskline.json("init")
    # Nothing was captured, so nothing is skipped.
    drop_slot(shop, SLOT)
    assert place.tuskline.json("init")["created"] == [{"source": "shop", "created": f"slot {SLOT}"}]
    assert place.tuskline.json("init")["created"] == []


def test_init_after_detach_does_not_begin_a_history_again(place: Place, shop: Database) -> None:
    place.tuskline.json("detach")
    assert "the slot is gone" in place.refused(Cause.DIVERGED)["what"]
    with shop.connect() as connection:
        query = b"SELECT FROM pg_publication"
        assert connection.execute(query).fetchall() == [], "capture makes nothing either"
    error = place.init_refused(shop.dsn, Cause.SLOT)
    assert "the slot is gone" in error["what"]
    assert error["repair"] == REATTACH
    assert "the slot is gone" in place.doctor(Cause.DIVERGED)["what"]
    # Where nobody knows of the history, the slot is made, and capture refuses it.
    place.log.stop_repository()
    place.capture.status_file.unlink()
    assert f"slot {SLOT}" in {row["created"] for row in place.tuskline.json("init")["created"]}
    place.log.start_repository()
    assert "the slot was recreated or moved" in place.refused(Cause.DIVERGED)["what"]
    assert "the slot was recreated or moved" in place.doctor(Cause.DIVERGED)["what"]


@before_and_after_18
def test_a_publication_that_was_renamed_and_renamed_back_between_two_looks(
    place: Place, shop: Database
) -> None:
    """No look sees it: before 18 the server refuses to decode what was committed meanwhile, since then it leaves that out and only warns."""
    shop.execute(
        f"ALTER PUBLICATION {PUBLICATION} RENAME TO other",
        "INSERT INTO orders VALUES (2, 'without')",
        f"ALTER PUBLICATION other RENAME TO {PUBLICATION}",
        "INSERT INTO orders VALUES (3, 'with')",
    )
    for _ in range(2):
        error = place.refused(Cause.PUBLICATION)
        assert "changes that were committed while publication" in error["what"]
        assert error["repair"] == REATTACH
    (row,) = place.tuskline.json("reattach")["reattached"]
    assert row == {"source": "shop", "reason": error["what"]}
    # What was committed before is in the new copy of the tables.
    place.capture.start()
    wait_for(place.capture.streams, 60, "capture streams")
    shop.execute("INSERT INTO orders VALUES (4, 'again')")
    wait_for(lambda: 4 in content(place.log).keys["orders"], 60, "the log goes on")
    assert place.capture.stop() == 0


# -- the server -----------------------------------------------------------------------------------------


def started(tmp_path: Path, log: ChangeLog, server: LocalServer) -> Place:
    """The place of a stream with a history, whose capture is down, on a server of the test's own."""
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    place = Place(tmp_path / "place", log, server.dsn())
    place.tuskline.json("init")
    place.capture_some(server.dsn(), "INSERT INTO orders VALUES (1, 'logged')")
    return place


def test_another_cluster_is_named_before_all_that_it_lacks(
    place: Place, tmp_path: Path, log: ChangeLog, shop: Database, make_server: MakeServer
) -> None:
    beside = make_server(fsync="off").folder.resolve()
    # Not a copy of the clusters that tests share, which all have one identifier; and it has no tables yet.
    other = LocalServer.create(
        by_major()[DEFAULT],
        beside.with_name("another"),
        settings={"fsync": "off"},
        template_cache=beside.with_name("another-template"),
    )
    with other:
        other.start()
        refused_there(place, tmp_path, log, shop.dsn, other.dsn())


def refused_there(place: Place, tmp_path: Path, log: ChangeLog, own: str, dsn: str) -> None:
    there = Place(tmp_path / "there", log, dsn)
    before = server_state(dsn)
    found = there.doctor(Cause.DIVERGED)
    error = there.init_refused(dsn, Cause.DIVERGED)
    refused = there.refused(Cause.DIVERGED)
    for told in (found, error, refused):
        assert "stream shop has diverged: the log was written from the cluster" in told["what"]
        for identifier in (system_id(own), system_id(dsn)):
            assert identifier in told["what"]
        assert told["repair"].endswith(REATTACH)
    assert difference(before, server_state(dsn)) == []
    checks = {each["check"] for each in there.tuskline.json("doctor", code=10)["findings"]}
    assert not checks & {"publication", "privileges", "tables", "slot"}, checks


def system_id(dsn: str) -> str:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT system_identifier::text FROM pg_control_system()")
        return str(row.fetchall()[0][0])


def test_a_server_that_was_restored_to_an_older_state(
    tmp_path: Path, log: ChangeLog, make_server: MakeServer
) -> None:
    server = make_server(fsync="off")
    place = started(tmp_path, log, server)
    server.stop()
    old = old_files.keep(server)
    server.start()
    # Much more than a server writes of its own when it starts and is asked: its end of WAL is what tells.
    newer = "INSERT INTO orders SELECT g, repeat('newer', 100) FROM generate_series(2, 1000) g"
    place.capture_some(server.dsn(), newer)
    server.stop()
    old_files.bring_back(server, old)
    server.start()
    assert "it was restored or replaced" in place.refused(Cause.DIVERGED)["what"]
    found = place.doctor(Cause.DIVERGED)
    assert "it was restored or replaced" in found["what"]
    assert found["repair"] == REATTACH
