"""37: the output plugin that ends nothing at a client before the failover candidates have it."""

import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest

from tests.support import extension
from tests.support.extension import ONE
from tests.support.fake_standby import FakeStandby
from tests.support.slot_copies import PHYSICAL, PUBLICATION, Pair, inspect, rows, running_pair
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer

SLOT = "gated"
#: The walsender of SLOT while the plugin waits; nothing else of it waits in an extension.
WAITING = (
    "SELECT a.pid FROM pg_stat_activity AS a JOIN pg_replication_slots AS s ON s.active_pid = a.pid"
    f" WHERE s.slot_name = '{SLOT}' AND a.wait_event = 'Extension'"
)
CHANGES = (
    "SELECT lsn, xid, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, VARIADIC %s)"
)


@pytest.fixture(scope="module", params=ONE)
def servers(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The module's servers of one major."""
    major = request.param
    settings = extension.plugin_settings(major, extension.build(major, fail_points=False))
    if major >= 13:
        settings["logical_decoding_work_mem"] = "64kB"
    with running_pair(major, fail_points=False, max_prepared_transactions="2", **settings) as pair:
        yield pair


@pytest.fixture
def pair(servers: Pair) -> Iterator[Pair]:
    """The same with a fresh SLOT; afterwards the standby runs, and nothing waits."""
    servers.on_primary(f"SELECT pg_create_logical_replication_slot('{SLOT}', 'tuskline')")
    yield servers
    if not servers.primary.running:
        servers.primary.start()
    if not servers.standby.running:
        servers.standby.start()
    wait_for_slots(servers, "")
    drop = f"SELECT pg_drop_replication_slot('{SLOT}')"
    wait_for(lambda: not active(servers.primary), 30, "the slot is free")
    servers.on_primary(drop, "TRUNCATE shop")


def wait_for_slots(pair: Pair, names: str) -> None:
    """Set it; once a new session has it, walsenders have been told, and take it up before they decode what comes."""
    pair.on_primary(
        "LOAD 'tuskline'",
        f"ALTER SYSTEM SET tuskline.wait_for_slots = '{names}'",
        "SELECT pg_reload_conf()",
    )
    shown = "SHOW tuskline.wait_for_slots"
    wait_for(lambda: rows(pair.primary, shown) == [(names,)], 30, "it was read")


def active(server: LocalServer, slot: str = SLOT) -> bool:
    query = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
    return bool(rows(server, query, slot)[0][0])


def options(major: int) -> dict[str, str]:
    """All that pgoutput of this major can send."""
    found = {"publication_names": PUBLICATION, "proto_version": "1"}
    if major >= 14:
        found |= {"proto_version": "2", "messages": "on", "streaming": "on"}
    if major >= 15:
        found |= {"proto_version": "3", "two_phase": "on"}
    return found


class Client:
    """A plain pg_recvlogical, and what it has received."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path, log: Path) -> None:
        self.process = process
        self.output = output
        self.log = log

    def received(self) -> bytes:
        return self.output.read_bytes() if self.output.exists() else b""


@contextmanager
def client(pair: Pair, folder: Path) -> Iterator[Client]:
    output, log = folder / "received", folder / "stderr"
    # From 12 on a client may say when it is taken for dead; half of that is when it is asked.
    session = "-c wal_sender_timeout=4s" if pair.major >= 12 else ""
    dsn = pair.primary.dsn(options=session)
    command = [
        *(str(pair.primary.installation.tool("pg_recvlogical")), "-d", dsn),
        *("--slot", SLOT, "--start", "--no-loop", "-s", "1", "-F", "0", "-f", str(output)),
    ]
    for name, value in options(pair.major).items():
        command += ["-o", f"{name}={value}"]
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            wait_for(lambda: active(pair.primary), 30, "the client reads")
            yield Client(process, output, log)
        finally:
            process.kill()


def waits(pair: Pair) -> None:
    wait_for(lambda: rows(pair.primary, WAITING), 30, "the plugin waits")


def sent(pair: Pair) -> None:
    """Wait until the client has written all that the server has: a message comes in several pieces."""
    query = (
        "SELECT r.write_lsn >= pg_current_wal_lsn() FROM pg_stat_replication AS r"
        f" JOIN pg_replication_slots AS s ON s.active_pid = r.pid WHERE s.slot_name = '{SLOT}'"
    )
    wait_for(lambda: rows(pair.primary, query) == [(True,)], 30, "the client has it all")


def differs(reader: Client, before: bytes) -> bool:
    return reader.received() != before


def has_logged(pair: Pair, text: str) -> bool:
    return text in pair.primary.log_tail(15)


@pytest.fixture
def reader(pair: Pair, tmp_path: Path) -> Iterator[Client]:
    """A client of SLOT, which waits for the standby's slot."""
    wait_for_slots(pair, PHYSICAL)
    with client(pair, tmp_path) as found:
        yield found


def test_37_a_client_gets_a_transaction_when_the_candidate_has_it(
    pair: Pair, reader: Client
) -> None:
    pair.on_primary("INSERT INTO shop VALUES (1, 'row-1')")
    wait_for(lambda: b"row-1" in reader.received(), 30, "the standby streams")
    sent(pair)
    before = reader.received()
    pair.standby.stop()
    pair.on_primary("INSERT INTO shop VALUES (2, 'row-2')")
    waits(pair)
    if pair.major >= 12:
        begun = rows(pair.primary, "SELECT now()")[0][0]
        heard = "SELECT max(reply_time) FROM pg_stat_replication"
        wait_for(lambda: rows(pair.primary, heard)[0][0] > begun, 30, "the client was asked")
    time.sleep(0.5)
    assert reader.received() == before
    reason = "No standby streams from the slot."
    wait_for(lambda: reason in pair.primary.log_tail(100), 30, "the log says why")
    assert f'is waiting for replication slot "{PHYSICAL}"' in pair.primary.log_tail(100)
    pair.standby.start()
    wait_for(lambda: b"row-2" in reader.received(), 30, "the standby is back")
    assert reader.received()[len(before) :].startswith(b"B")
    assert reader.process.poll() is None


def test_37_nothing_else_ends_before_and_an_empty_setting_lets_it_pass(
    pair: Pair, reader: Client
) -> None:
    pair.standby.stop()
    steps: list[tuple[str, bytes]] = [("INSERT INTO shop VALUES (1, 'row-1')", b"B")]
    if pair.major >= 14:
        large = "INSERT INTO shop SELECT i, repeat('x', 90) FROM generate_series(10, 2000) AS i"
        steps += [("SELECT pg_logical_emit_message(false, 'p', 'told')", b"M"), (large, b"c")]
    if pair.major >= 15:
        for key, end, letter in ((3, "COMMIT", b"K"), (4, "ROLLBACK", b"r")):
            prepare = f"BEGIN; INSERT INTO shop VALUES ({key}, ''); PREPARE TRANSACTION 'both'"
            steps += [(prepare, b"b"), (f"{end} PREPARED 'both'", letter)]
    for statement, letter in steps:
        wait_for_slots(pair, PHYSICAL)
        before = reader.received()
        pair.on_primary(statement)
        waits(pair)
        time.sleep(0.1)
        held = reader.received()
        assert held == before or letter == b"c", statement
        wait_for_slots(pair, "")
        wait_for(partial(differs, reader, held), 30, "the setting is empty")
        assert reader.received()[len(held) :].startswith(letter), statement
        sent(pair)


def test_37_the_commit_records_end_counts_and_not_its_start(pair: Pair, tmp_path: Path) -> None:
    pair.on_primary(
        "SELECT pg_create_physical_replication_slot('exact', true)",
        "INSERT INTO shop VALUES (1, 'row-1')",
    )
    arguments = ["publication_names", PUBLICATION, "proto_version", "1"]
    commit = bytes(rows(pair.primary, CHANGES, SLOT, arguments)[-1][2])
    kind, start, end = struct.unpack_from(">cxQQ", commit)
    assert kind == b"C"
    assert start < end
    try:
        wait_for_slots(pair, "exact")
        silent = FakeStandby(pair.primary.dsn(), "exact", speaks=False)
        with silent as standby, client(pair, tmp_path) as found:
            for lsn in (start, end - 8):
                standby.flushed = lsn
                standby.speaks = True
                waits(pair)
                time.sleep(0.5)
                assert found.received() == b""
            standby.flushed = end
            wait_for(lambda: b"row-1" in found.received(), 30, "the end is there")
    finally:
        pair.on_primary("SELECT pg_drop_replication_slot('exact')")


def test_42_what_no_standby_that_streams_has_flushed_releases_nothing(pair: Pair) -> None:
    pair.on_primary(
        "SELECT pg_create_physical_replication_slot('exact', true)",
        "INSERT INTO shop VALUES (1, 'row-1')",
        # Nobody streams from it, and its position says that somebody has it all.
        "SELECT pg_replication_slot_advance('exact', pg_current_wal_lsn())",
    )
    dsn = pair.primary.dsn()
    arguments = ["publication_names", PUBLICATION, "proto_version", "1"]

    def is_held(reason: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("SET tuskline.wait_for_slots = 'exact'")
            connection.execute("SET statement_timeout = '2s'")
            with pytest.raises(psycopg.errors.QueryCanceled):
                connection.execute(CHANGES, [SLOT, arguments])
        assert reason in pair.primary.log_tail(15)

    try:
        is_held("No standby streams from the slot.")
        with FakeStandby(dsn, "exact", ahead=1 << 20):
            is_held("reports WAL as flushed that was not sent to it")
        wait_for(lambda: not active(pair.primary, "exact"), 30, "nobody streams")
        # The slot remembers that, and the standby has not spoken.
        with FakeStandby(dsn, "exact", speaks=False) as standby:
            is_held("has not reported a flush position yet")
            standby.speaks = True
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("SET tuskline.wait_for_slots = 'exact'")
                assert connection.execute(CHANGES, [SLOT, arguments]).fetchall()
        wait_for(lambda: not active(pair.primary, "exact"), 30, "nobody streams")
        with FakeStandby(dsn, "exact", replays=False):
            is_held("a client that does not replay WAL")
    finally:
        wait_for(lambda: not active(pair.primary, "exact"), 30, "nobody streams")
        pair.on_primary("SELECT pg_drop_replication_slot('exact')")


def test_37_what_is_sent_is_pgoutputs(pair: Pair) -> None:
    pair.make_slot("plain")
    try:
        pair.on_primary(
            f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())",
            "SELECT pg_replication_slot_advance('plain', pg_current_wal_lsn())",
            "INSERT INTO shop SELECT i, repeat('x', 90) FROM generate_series(1, 2000) AS i",
            "UPDATE shop SET note = 'new' WHERE id < 10",
            "BEGIN; DELETE FROM shop WHERE id < 5; SAVEPOINT a; UPDATE shop SET id = -id WHERE id = 9;"
            " ROLLBACK TO a; SELECT pg_logical_emit_message(true, 'p', 'in'); COMMIT",
            "SELECT pg_logical_emit_message(false, 'p', 'out')",
            "TRUNCATE shop",
            "CREATE TABLE unpublished (id int)",
            "BEGIN; INSERT INTO shop VALUES (1, 'prepared'); PREPARE TRANSACTION 'one'",
            "COMMIT PREPARED 'one'",
            "DROP TABLE unpublished",
        )
        wait_for_slots(pair, PHYSICAL)
        arguments = [text for each in options(pair.major).items() for text in each]
        expected = rows(pair.primary, CHANGES, "plain", arguments)
        assert len(expected) > 2000
        assert rows(pair.primary, CHANGES, SLOT, arguments) == expected
    finally:
        pair.on_primary("SELECT pg_drop_replication_slot('plain')")


def test_37_the_log_names_what_cannot_be_waited_for(pair: Pair, reader: Client) -> None:
    for names, name, reason in (
        (f"{PHYSICAL}, {SLOT}", SLOT, "The slot is a logical slot."),
        ("a b", "?", "is not a list of names."),
    ):
        wait_for_slots(pair, names)
        pair.on_primary("INSERT INTO shop VALUES (1, 'row-1')")
        said = f'is waiting for replication slot "{name}"'
        wait_for(partial(has_logged, pair, said), 30, said)
        assert reason in pair.primary.log_tail(15)
        assert b"row-1" not in reader.received()
        wait_for_slots(pair, "")
        wait_for(lambda: b"row-1" in reader.received(), 30, "the setting is empty")
        reader.output.open("wb").close()
        pair.on_primary("TRUNCATE shop")


def test_37_a_fast_shutdown_and_a_client_that_goes_end_the_wait(pair: Pair, tmp_path: Path) -> None:
    wait_for_slots(pair, PHYSICAL)
    pair.standby.stop()
    pair.on_primary("INSERT INTO shop VALUES (1, 'row-1')")
    if pair.major >= 14:
        with client(pair, tmp_path):
            waits(pair)
        wait_for(lambda: not active(pair.primary), 20, "the walsender has ended")
    with client(pair, tmp_path) as found:
        waits(pair)
        begun = time.monotonic()
        pair.primary.stop("fast", timeout=20)
        assert time.monotonic() - begun < 10
        assert found.process.wait(10) != 0
        assert b"server is shutting down while" in found.log.read_bytes()
        assert found.received() == b""
    pair.primary.start()
    pair.standby.start()
    with client(pair, tmp_path) as found:
        wait_for(lambda: b"row-1" in found.received(), 30, "it comes after the start")


def test_37_a_slot_of_the_plugin_can_be_copied(pair: Pair) -> None:
    pair.catch_up()
    found = pair.slot(SLOT)
    reserve = "SELECT tuskline_slots.reserve('_tuskline_tmp_copy', 'tuskline', %s, %s)"
    pair.on_standby(reserve, found.restart_lsn, found.confirmed_flush_lsn)
    pair.prove("_tuskline_tmp_copy", SLOT)
    pair.on_standby("SELECT tuskline_slots.rename('_tuskline_tmp_copy', %s)", SLOT)
    query = "SELECT plugin FROM pg_replication_slots WHERE slot_name = %s"
    assert pair.on_standby(query, SLOT) == [("tuskline",)]
    assert inspect(pair.standby, SLOT)["snapshot_present"]
    pair.on_standby("SELECT tuskline_slots.drop(%s)", SLOT)


def test_37_a_session_that_waits_can_be_cancelled(pair: Pair) -> None:
    pair.on_primary("INSERT INTO shop VALUES (1, 'row-1')")
    arguments = ["publication_names", PUBLICATION, "proto_version", "1"]
    with psycopg.connect(pair.primary.dsn(), autocommit=True) as connection:
        connection.execute("SET tuskline.wait_for_slots = 'no_such'")
        connection.execute("SET statement_timeout = '300ms'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            connection.execute(CHANGES, [SLOT, arguments])
        connection.execute("SET tuskline.wait_for_slots = ''")
        assert connection.execute(CHANGES, [SLOT, arguments]).fetchall()
