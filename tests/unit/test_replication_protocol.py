"""The replication protocol's text and bytes: what is sent is quoted, what arrives is checked."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walsender_bridge.errors import (
    AuthenticationError,
    ConfigError,
    ConnectionFailedError,
    MalformedMessageError,
    PrivilegeError,
    PublicationError,
    ServerSettingError,
    SlotError,
    SlotInUseError,
    TusklineError,
    UsageError,
)
from walsender_bridge.postgres.client.hosts import primary_dsn
from walsender_bridge.postgres.client.replication_connection import (
    PINNED_OPTIONS,
    describe,
    pinned_conninfo,
)
from walsender_bridge.postgres.protocol import replication
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition
from walsender_bridge.postgres.protocol.pgoutput import POSTGRES_EPOCH
from walsender_bridge.postgres.protocol.refusals import connection_error, server_error
from walsender_bridge.postgres.protocol.replication import ServerTimelines


def test_commands_are_what_every_server_reads() -> None:
    assert (
        replication.create_logical_slot("own_slot")
        == 'CREATE_REPLICATION_SLOT "own_slot" LOGICAL pgoutput NOEXPORT_SNAPSHOT'
    )
    assert (
        replication.create_logical_slot("copy", temporary=True, export_snapshot=True)
        == 'CREATE_REPLICATION_SLOT "copy" TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT'
    )
    assert replication.start_logical("s", ["p"], start_lsn=0x16B374D848) == (
        'START_REPLICATION SLOT "s" LOGICAL 16/B374D848 '
        "(proto_version '1', publication_names '\"p\"')"
    )
    assert replication.timeline_history(3) == "TIMELINE_HISTORY 3"


def test_names_with_quotes_stay_one_name() -> None:
    text = replication.start_logical("s", ["it's", 'a "b", c'])
    assert text.endswith('publication_names \'"it\'\'s","a ""b"", c"\')')


@pytest.mark.parametrize("slot", ["", "Upper", "a-b", 'a"; DROP', "x" * 64, "a\0"])
def test_slot_names_that_no_server_accepts_are_refused(slot: str) -> None:
    with pytest.raises(UsageError):
        replication.quote_slot(slot)


@pytest.mark.parametrize("name", ["", "a\0b", "\u00e9" * 32])
def test_names_that_no_server_accepts_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        replication.quote_name(name)


@given(st.integers(0, MAX_LSN), st.integers(0, MAX_LSN), st.integers(0, 2**60), st.booleans())
def test_messages_of_the_walsender(start: int, end: int, time: int, reply: bool) -> None:
    data = struct.pack(">cQQq", b"w", start, end, time) + b"Bxyz"
    head = replication.parse_xlog_header(data)
    assert (head.start_lsn, head.wal_end, head.sent_at) == (start, end, time + POSTGRES_EPOCH)
    assert data[replication.XLOG_HEADER_SIZE :] == b"Bxyz"
    alive = replication.parse_keepalive(struct.pack(">cQqB", b"k", end, time, reply))
    assert (alive.wal_end, alive.sent_at, alive.reply_requested) == (
        end,
        time + POSTGRES_EPOCH,
        reply,
    )


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_by_name(data: bytes) -> None:
    for parse in (replication.parse_xlog_header, replication.parse_keepalive):
        try:
            parse(data)
        except MalformedMessageError:
            continue
        assert data[0] in (replication.XLOG_DATA, replication.KEEPALIVE)


def test_status_update_is_the_servers_layout() -> None:
    data = replication.status_update(write=3, flush=2, apply=1, now_us=POSTGRES_EPOCH + 5)
    assert data == b"r" + struct.pack(">QQQqB", 3, 2, 1, 5, 0)


HISTORY = "1\t0/3000000\tno recovery target specified\n\n2\t0/5000060\tbefore 2024\n"


def test_a_history_says_which_wal_is_the_servers() -> None:
    history = replication.parse_history(3, HISTORY)
    assert history == ServerTimelines(3, (WalPosition(1, 0x3000000), WalPosition(2, 0x5000060)))
    assert history.contains(1, 0x3000000)
    assert not history.contains(1, 0x3000001)
    assert history.contains(2, 0x5000060)
    assert not history.contains(2, 0x5000061)
    assert history.contains(3, MAX_LSN)
    assert not history.contains(4, 0)


@pytest.mark.parametrize("text", ["x", "1 0/1\n1 0/2", "4\t0/1\tlater", "2 0/1 a\n1 0/2 b", "1"])
def test_a_history_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(MalformedMessageError):
        replication.parse_history(3, text)


@given(st.text(max_size=200))
def test_any_text_is_a_history_or_refused(text: str) -> None:
    try:
        replication.parse_history(7, text)
    except MalformedMessageError:
        return


def test_identity() -> None:
    row = ("7710445527775402275", "2", "16/B374D848", "shop")
    identity = replication.parse_identity([row])
    assert (identity.timeline, identity.flush_lsn, identity.database) == (2, 0x16B374D848, "shop")
    for rows in ([], [("a", "1", "0/0", None)], [("1", "1", None, None)], [row, row]):
        with pytest.raises(MalformedMessageError):
            replication.parse_identity(rows)


def test_a_dsn_keeps_its_own_settings_beside_the_pinned_ones() -> None:
    text = pinned_conninfo(
        "postgresql://u:secret@h/db?options=-cwork_mem%3D1MB", replication="database"
    )
    assert "-cwork_mem=1MB" in text
    assert PINNED_OPTIONS in text
    assert "connect_timeout" in text
    assert "secret" not in describe("postgresql://u:secret@h/db")


@pytest.mark.parametrize(
    "userinfo",
    ["u:p@S3cret", "u:p/S3cret", "u:5432/S3cret", "u:p@S3cret:x", "u:S3cret/x", "u:p@S3cret@x"],
)
@pytest.mark.parametrize("host", ["h", "127.0.0.1:1", "a:1,b:2"])
def test_a_password_that_is_not_escaped_is_shown_nowhere(userinfo: str, host: str) -> None:
    dsn = f"postgresql://{userinfo}@{host}/db"
    assert "S3cret" not in describe(dsn)
    with pytest.raises(ConfigError, match="part of its password") as caught:
        pinned_conninfo(primary_dsn(dsn))
    assert "S3cret" not in str(caught.value) + caught.value.repair


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:a%40b%2Fc@h:1,k/db",
        "host=@socket dbname=a@b",
        "postgresql://%40socket/db?port=1",
    ],
)
def test_an_escaped_password_and_a_name_with_an_at_sign_are_read(dsn: str) -> None:
    pinned_conninfo(primary_dsn(dsn))


def test_a_service_has_no_port_that_is_known() -> None:
    assert describe("service=shop") == "service shop"
    assert describe("service=shop host=h port=6543 dbname=d") == "h:6543/d"


def test_a_wrong_dsn_shows_nothing_of_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        pinned_conninfo("host=h password=top secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('FATAL:  password authentication failed for user "u"', AuthenticationError),
        ("fe_sendauth: no password supplied", AuthenticationError),
        (
            'FATAL:  no pg_hba.conf entry for replication connection from host "h"',
            AuthenticationError,
        ),
        ('FATAL:  role "x" does not exist', AuthenticationError),
        ('FATAL:  database "x" does not exist', ConfigError),
        ("FATAL:  permission denied to start WAL sender", PrivilegeError),
        ("FATAL:  must be superuser or replication role to start walsender", PrivilegeError),
        (
            "FATAL:  number of requested standby connections exceeds max_wal_senders",
            ServerSettingError,
        ),
        ("FATAL:  the database system is starting up", ConnectionFailedError),
        ('FATAL:  too many connections for role "lake"', ConnectionFailedError),
        ("FATAL:  sorry, too many clients already", ConnectionFailedError),
        ("FATAL:  canceling authentication due to timeout", ConnectionFailedError),
        ("connection refused", ConnectionFailedError),
        ("FATAL:  etwas anderes", ConnectionFailedError),
    ],
)
def test_a_refused_connection_has_its_cause(text: str, kind: type[TusklineError]) -> None:
    error = connection_error(text, "h:5432/db")
    assert type(error) is kind
    assert error.where == "h:5432/db"


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        ("42501", "must be superuser", PrivilegeError),
        ("55006", 'replication slot "s" is active for PID 7', SlotInUseError),
        ("42704", 'replication slot "s" does not exist', SlotError),
        ("42704", 'publication "p" does not exist', PublicationError),
        ("55000", 'logical decoding requires "wal_level" >= "logical"', ServerSettingError),
        ("55000", 'can no longer get changes from replication slot "s"', SlotError),
        ("53400", "all replication slots are in use", ServerSettingError),
        ("58P01", "requested WAL segment has already been removed", SlotError),
        ("57P01", "terminating connection due to administrator command", ConnectionFailedError),
    ],
)
def test_a_refused_command_has_its_cause(code: str, text: str, kind: type[TusklineError]) -> None:
    assert type(server_error(code, text, "h")) is kind


def test_a_publication_that_was_made_again_decodes_nothing_from_before() -> None:
    """Up to 17 pgoutput looks it up as of each change, so to make it again is not enough."""
    error = server_error("42704", 'publication "p" does not exist', "h")
    assert "tuskline reattach" in error.repair
