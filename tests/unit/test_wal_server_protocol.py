"""The WAL server's protocol without I/O: packets, commands, login, and what may be sent when."""

import os
import struct

import pytest

from tests.support.wal_server import verifier
from walsender_bridge.errors import ConfigError, MalformedMessageError
from walsender_bridge.postgres.protocol import backend, replication_command
from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.frontend import (
    MESSAGE_LIMIT,
    EncryptionRequest,
    FrontendParser,
    Message,
    Startup,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.postgres.protocol.replication_command import (
    CreateSlot,
    DropSlot,
    IdentifySystem,
    ReadSlot,
    Show,
    StartReplication,
    TimelineHistory,
    Unsupported,
)
from walsender_bridge.quorum.protocol.positions import Positions
from walsender_bridge.quorum.wal_server.login import LoginExchange, Then
from walsender_bridge.quorum.wal_server.scram import SCRAM, Verifier, parse_verifier
from walsender_bridge.quorum.wal_server.stream import (
    Finish,
    ReaderStream,
    SendRange,
    WaitForPositions,
    Write,
)
from walsender_bridge.quorum.wal_server.users import Users

MIB = 1 << 20


# -- packets ----------------------------------------------------------------------------------------


def packets(parser: FrontendParser, data: bytes) -> list[object]:
    parser.feed(data)
    found: list[object] = []
    while (packet := parser.next()) is not None:
        found.append(packet)
    return found


def startup(body: bytes, version: int = 3 << 16) -> bytes:
    return struct.pack(">II", len(body) + 8, version) + body


def test_packets_are_the_same_in_whatever_pieces_they_come() -> None:
    ssl = struct.pack(">II", 8, 80877103)
    data = ssl + startup(b"user\0me\0replication\0true\0\0") + b"Q\0\0\0\x09SHOW\0" + b"X\0\0\0\4"
    expected = [
        EncryptionRequest(gss=False),
        Startup(3, 0, {"user": "me", "replication": "true"}),
        Message("Q", b"SHOW\0"),
        Message("X", b""),
    ]
    assert packets(FrontendParser(), data) == expected
    parser = FrontendParser()
    assert [p for i in range(len(data)) for p in packets(parser, data[i : i + 1])] == expected
    assert parser.buffered == 0


@pytest.mark.parametrize(
    "data",
    [
        b"\x7f\xff\xff\xff",
        b"\0\0\0\4",
        startup(b"user\0me"),
        startup(b"user\0\0\0\0"),
        startup(b"\0\0\0"),
        startup(b"user\0\xff\0\0"),
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
def test_22_a_packet_that_is_none_is_refused_at_once(data: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        packets(FrontendParser(), data)


@pytest.mark.parametrize(
    "data",
    [
        b"Q\x7f\xff\xff\xff",
        b"Q\0\0\0\3",
        b"d" + struct.pack(">I", MESSAGE_LIMIT + 1),
        b"\0\0\0\0\4",
    ],
)
def test_22_a_message_that_is_none_is_refused_before_its_bytes_are_waited_for(data: bytes) -> None:
    parser = FrontendParser()
    packets(parser, startup(b"user\0me\0\0"))
    with pytest.raises(MalformedMessageError):
        packets(parser, data)


# -- commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("IDENTIFY_SYSTEM", IdentifySystem()),
        ("identify_system ;", IdentifySystem()),
        ("SHOW wal_segment_size", Show("wal_segment_size")),
        ("SHOW a.b", Show("a.b")),
        ("TIMELINE_HISTORY 2", TimelineHistory(2)),
        ('CREATE_REPLICATION_SLOT "s" PHYSICAL RESERVE_WAL', CreateSlot("s", reserve_wal=True)),
        ("CREATE_REPLICATION_SLOT s PHYSICAL (RESERVE_WAL)", CreateSlot("s", reserve_wal=True)),
        ("CREATE_REPLICATION_SLOT s PHYSICAL (RESERVE_WAL 'off')", CreateSlot("s")),
        ('CREATE_REPLICATION_SLOT "s" TEMPORARY PHYSICAL', CreateSlot("s", temporary=True)),
        ("READ_REPLICATION_SLOT s", ReadSlot("s")),
        ("DROP_REPLICATION_SLOT S WAIT", DropSlot("s", wait=True)),
        # A walreceiver leaves the word PHYSICAL out.
        ("START_REPLICATION 16/B374D848 TIMELINE 3", StartReplication(None, 0x16B374D848, 3)),
        ('START_REPLICATION SLOT "a" PHYSICAL 0/0', StartReplication("a", 0)),
        ("SELECT pg_catalog.set_config('search_path', '', false)", Unsupported("SQL")),
        ("BASE_BACKUP (LABEL 'x')", Unsupported("BASE_BACKUP")),
        (" ; ", None),
    ],
)
def test_commands_of_every_client_are_read(text: str, command: object) -> None:
    assert replication_command.parse(text) == command


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("IDENTIFY_SYSTEM now", "42601"),
        ("START_REPLICATION", "42601"),
        ("START_REPLICATION 0/0 TIMELINE 0", "42601"),
        ("START_REPLICATION 0/0 TIMELINE 99999999999", "42601"),
        ("TIMELINE_HISTORY -1", "42601"),
        ("CREATE_REPLICATION_SLOT s PHYSICAL (TWO_PHASE)", "42601"),
        ("CREATE_REPLICATION_SLOT s", "42601"),
        ('READ_REPLICATION_SLOT "Up"', "42602"),
        ('READ_REPLICATION_SLOT "' + "x" * 64 + '"', "42602"),
        ('READ_REPLICATION_SLOT "open', "42601"),
        ("CREATE_REPLICATION_SLOT s LOGICAL pgoutput", "0A000"),
    ],
)
def test_what_is_no_command_has_postgres_sqlstate(text: str, code: str) -> None:
    with pytest.raises(SqlErrorReply) as caught:
        replication_command.parse(text)
    assert caught.value.error.code == code


# -- login ------------------------------------------------------------------------------------------


NOBODY = Verifier(4096, bytes(16), bytes(32), bytes(32))


def login(*, certificate: str | None = None, required: bool = False) -> LoginExchange:
    return LoginExchange(lambda _: NOBODY, certificate, tls_required=required)


def test_21_the_offer_depends_on_tls_and_nothing_is_told_before_the_proof() -> None:
    reply = login().take(Startup(3, 0, {"user": "x", "replication": "true"}), more=False)
    assert reply.data == backend.sasl([SCRAM])
    started = login(certificate="PEM")
    assert started.take(EncryptionRequest(gss=True), more=False).data == b"N"
    assert started.take(EncryptionRequest(gss=False), more=False).then is Then.START_TLS
    reply = started.take(Startup(3, 0, {"user": "x", "replication": "true"}), more=False)
    assert b"SCRAM-SHA-256-PLUS" in reply.data


def test_21_bytes_in_clear_behind_a_request_for_tls_are_refused() -> None:
    with pytest.raises(SqlErrorReply, match="unencrypted data"):
        login(certificate="PEM").take(EncryptionRequest(gss=False), more=True)
    with pytest.raises(SqlErrorReply, match="without TLS are refused"):
        login(certificate="PEM", required=True).take(
            Startup(3, 0, {"user": "x", "replication": "true"}), more=False
        )


def test_whoever_wants_a_database_learns_what_is_here_before_anything_else() -> None:
    """By it `slots` and `doctor` know a candidate that streams from a safekeeper."""
    with pytest.raises(SqlErrorReply, match=backend.REPLICATION_ONLY):
        login(certificate="PEM", required=True).take(Startup(3, 0, {"user": "x"}), more=False)


@pytest.mark.parametrize(
    ("packet", "code"),
    [
        (Startup(2, 0, {"user": "x"}), "0A000"),
        (Startup(3, 0, {"replication": "true"}), "28000"),
        (Startup(3, 0, {"user": "x"}), "0A000"),
        (Startup(3, 0, {"user": "x", "replication": "database"}), "3D000"),
        (Message("Q", b"SHOW x\0"), "08P01"),
    ],
)
def test_21_a_login_that_is_none_is_refused(packet, code: str) -> None:
    with pytest.raises(SqlErrorReply) as caught:
        login().take(packet, more=False)
    assert caught.value.error.code == code
    assert caught.value.error.fatal


def test_a_newer_protocol_is_negotiated_down() -> None:
    reply = login().take(
        Startup(3, 2, {"user": "x", "replication": "1", "_pq_.new": "1"}), more=False
    )
    assert reply.data.startswith(backend.negotiate_protocol(["_pq_.new"]))


def test_21_only_verifiers_are_read_and_an_error_does_not_show_them(tmp_path) -> None:
    assert parse_verifier(verifier("secret")).iterations == 4096
    for text in ("md5" + "0" * 32, "plain password", "SCRAM-SHA-256$1:YQ==$YQ==:YQ=="):
        with pytest.raises(ConfigError) as caught:
            parse_verifier(text)
        assert text not in str(caught.value)
    path = tmp_path / "users"
    path.write_text(f'"a ""b""" "{verifier("x")}"\n')
    with pytest.raises(ConfigError, match="readable by others"):
        Users(path)
    path.chmod(0o600)
    users = Users(path)
    assert users.verifier('a "b"') is users.verifier('a "b"')
    # One that is not there has a salt that stays, as if it were.
    assert users.verifier("nobody").salt == users.verifier("nobody").salt
    assert users.verifier("nobody").stored_key != users.verifier("nobody").stored_key


def test_21_two_safekeepers_do_not_tell_by_their_salts_who_exists(tmp_path) -> None:
    """Both have the same file. A salt that differs between them, or after a restart, would reveal an unknown user."""
    path = tmp_path / "users"
    path.touch(mode=0o600)
    path.write_text(f'"first" "{verifier("x")}"\n')
    here, there = Users(path), Users(path)
    path.write_text(f'{path.read_text()}"second" "{verifier("y")}"\n')
    here.refresh()
    shown = [(u.verifier("nobody").salt, u.verifier("nobody").iterations) for u in (here, there)]
    assert shown[0] == shown[1]
    assert len(shown[0][0]) == len(here.verifier("second").salt)
    assert here.verifier("nobody").salt != here.verifier("anybody").salt


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another account")
def test_21_a_file_of_users_of_another_account_is_refused(tmp_path) -> None:
    path = tmp_path / "users"
    path.touch(mode=0o600)
    os.chown(path, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to another account"):
        Users(path)


# -- the stream -------------------------------------------------------------------------------------


def at(lsn: int, *, commit: int | None = None, history: ServerTimelines | None = None) -> Positions:
    return Positions(
        7, 16, MIB, history or ServerTimelines(1), lsn, lsn if commit is None else commit
    )


def test_13_nothing_is_sent_past_flush_or_commit() -> None:
    stream = ReaderStream(at(1000), 100, 0, now=0.0)
    assert stream.next(at(1000, commit=700), 0.0, 0) == SendRange(100, 700)
    assert stream.next(at(600, commit=700), 0.0, 0) == SendRange(100, 600)
    stream.sent(600)
    # Positions that have gone back take nothing back and send nothing.
    assert stream.next(at(500), 0.0, 0) == WaitForPositions(30.0)
    assert stream.next(at(600), 0.0, 0) == WaitForPositions(30.0)
    assert stream.next(at(601), 0.0, 0) == SendRange(600, 601)


def test_13_a_timeline_that_was_left_ends_with_the_next_one() -> None:
    after = at(900, history=ServerTimelines(2, (WalPosition(1, 500),)))
    stream = ReaderStream(at(400), 100, 1, now=0.0)
    stream.sent(400)
    assert stream.next(after, 0.0, 0) == SendRange(400, 500)
    stream.sent(500)
    assert stream.next(after, 0.0, 0) == Write(backend.COPY_DONE)
    assert isinstance(stream.next(after, 0.0, 0), WaitForPositions)
    stream.received("c", b"", 1.0)
    done = stream.next(after, 1.0, 0)
    assert isinstance(done, Finish)
    assert b"next_tli" in done.data
    assert b"0/1F4" in done.data


def test_a_reader_may_end_the_stream_itself() -> None:
    stream = ReaderStream(at(400), 100, 0, now=0.0)
    stream.received("c", b"", 1.0)
    assert stream.next(at(400), 1.0, 0) == Write(backend.COPY_DONE)
    done = stream.next(at(400), 1.0, 0)
    assert isinstance(done, Finish)
    # No timeline follows; a walreceiver reads two completions.
    assert b"next_tli" not in done.data
    assert done.data.count(b"START_") == 2
    with pytest.raises(MalformedMessageError):
        stream.received("d", status(1), 2.0)


def test_13_a_start_exactly_where_the_timeline_was_left_has_no_stream() -> None:
    history = ServerTimelines(3, (WalPosition(1, 500), WalPosition(2, 800)))
    assert not ReaderStream(at(900, history=history), 500, 1, now=0.0).opens
    assert ReaderStream(at(900, history=history), 499, 1, now=0.0).opens
    for lsn, timeline, said in [(501, 1, "forked"), (0, 4, "not in this server's history")]:
        with pytest.raises(SqlErrorReply) as caught:
            ReaderStream(at(900, history=history), lsn, timeline, now=0.0)
        assert said in caught.value.error.text + caught.value.error.detail
    with pytest.raises(SqlErrorReply, match="ahead of the WAL flush position"):
        ReaderStream(at(900), 901, 1, now=0.0).check_start(at(900))


def test_a_fork_below_what_was_sent_ends_the_stream_too() -> None:
    stream = ReaderStream(at(400), 100, 0, now=0.0)
    stream.sent(400)
    after = at(400, history=ServerTimelines(2, (WalPosition(1, 390),)))
    assert stream.next(after, 0.0, 0) == Write(backend.COPY_DONE)


def status(flush: int, *, reply: bool = False) -> bytes:
    return b"r" + struct.pack(">QQQqB", flush, flush, 0, 0, reply)


def test_a_silent_reader_is_asked_and_then_given_up() -> None:
    stream = ReaderStream(at(100), 100, 0, now=0.0, timeout=60.0)
    assert stream.next(at(100), 29.9, 0) == WaitForPositions(30.0)
    asked = stream.next(at(100), 30.0, 0)
    assert asked == Write(backend.keepalive(100, 0, reply=True))
    assert stream.next(at(100), 30.0, 0) == WaitForPositions(60.0)
    stream.received("d", status(50), 59.0)
    assert stream.flush_lsn == 50
    assert stream.next(at(100), 60.0, 0) == WaitForPositions(89.0)
    with pytest.raises(SqlErrorReply, match="timeout"):
        stream.next(at(100), 119.0, 0)


def test_a_reader_that_asks_is_answered_and_one_that_claims_too_much_is_not_believed() -> None:
    stream = ReaderStream(at(100), 100, 0, now=0.0)
    stream.received("d", status(10**15, reply=True), 1.0)
    assert stream.flush_lsn == 100
    assert stream.next(at(100), 1.0, 0) == Write(backend.keepalive(100, 0, reply=False))
    for kind, body in [("d", b"r"), ("d", b""), ("d", b"?" * 34), ("Q", b"x\0")]:
        with pytest.raises(MalformedMessageError):
            stream.received(kind, body, 1.0)
