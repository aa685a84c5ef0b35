"""Who may read WAL, what is refused and how, and clients that mean no good."""

import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import pq

from tests.support.other_account import NOBODY
from tests.support.tls import HOSTS, Authority, replace_files
from tests.support.waiting import wait_for
from tests.support.wal_server import (
    PASSWORD,
    USER,
    HeldWal,
    Receivers,
    WalServerProcess,
    current_lsn,
    run,
)
from tests.support.wire_client import RawClient, message, startup
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import ConfigError
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.protocol.wal_page import segment_name
from walsender_bridge.quorum.wal_server.slots import MOST_SLOTS
from walsender_bridge.quorum.wal_server.tls import TlsFiles, WalServerTls
from walsender_bridge.runtime import checksummed_json, tls_files


@pytest.fixture(scope="module")
def primary(pg_servers) -> LocalServer:
    return pg_servers.get()


@pytest.fixture
def held(primary: LocalServer, tmp_path: Path) -> Iterator[HeldWal]:
    """The newest segments of the shared server's WAL."""
    run(
        primary,
        "SELECT pg_switch_wal()",
        "CHECKPOINT",
        "SELECT pg_logical_emit_message(true,'a','b')",
    )
    wal = HeldWal(tmp_path, primary)
    newest = current_lsn(primary)
    wal.start = wal.end = newest - newest % wal.segment_bytes
    wal.take(primary)
    wal.publish()
    yield wal
    wal.close()


@pytest.fixture
def wal_server(held: HeldWal, tmp_path: Path) -> Iterator[WalServerProcess]:
    with WalServerProcess(tmp_path, held, timeout=3.0) as server:
        yield server


def command(server: WalServerProcess, text: str, **parameters: str) -> list[tuple[str | None, ...]]:
    """The rows of a walsender's command, through libpq."""
    conninfo = server.dsn(**parameters)
    connection = pq.PGconn.connect(conninfo.encode())
    try:
        if connection.status != pq.ConnStatus.OK:
            raise ConnectionError(connection.get_error_message())
        result = connection.exec_(text.encode())
        if result.status not in {pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK}:
            code = result.error_field(pq.DiagnosticField.SQLSTATE)
            raise ConnectionError(f"{(code or b'').decode()} {result.get_error_message()}")
        return [
            tuple(
                None if (v := result.get_value(r, c)) is None else v.decode()
                for c in range(result.nfields)
            )
            for r in range(result.ntuples)
        ]
    finally:
        connection.finish()


def stream(server: WalServerProcess, begin: int, end: int, **parameters: str) -> bytes:
    """The WAL from `begin` to `end`, through libpq."""
    connection = pq.PGconn.connect(server.dsn(**parameters).encode())
    try:
        result = connection.exec_(f"START_REPLICATION {format_lsn(begin)}".encode())
        assert result.status == pq.ExecStatus.COPY_BOTH, result.get_error_message()
        wal = b""
        while begin + len(wal) < end:
            size, data = connection.get_copy_data(0)
            assert size > 0
            if bytes(data[:1]) == b"w":
                assert int.from_bytes(data[1:9], "big") == begin + len(wal)
                wal += bytes(data[25:])
        return wal
    finally:
        connection.finish()


def works(server: WalServerProcess, held: HeldWal) -> None:
    """An honest client is served, and soon."""
    start = time.monotonic()
    row = command(server, "IDENTIFY_SYSTEM")[0]
    assert row == (str(held.system_id), "1", format_lsn(held.position), None)
    assert time.monotonic() - start < 5


def test_commands_answer_as_postgres_does(wal_server, held) -> None:
    works(wal_server, held)
    assert command(wal_server, "SHOW wal_segment_size") == [("16MB",)]
    assert command(wal_server, "SHOW data_directory_mode;") == [("0700",)]
    assert command(wal_server, "show SERVER_VERSION_NUM") == [(f"{held.major}0000",)]
    assert command(wal_server, 'READ_REPLICATION_SLOT "nobody"') == [(None, None, None)]
    created = command(wal_server, "CREATE_REPLICATION_SLOT one PHYSICAL (RESERVE_WAL)")
    assert created == [("one", "0/0", None, None)]
    read = command(wal_server, "READ_REPLICATION_SLOT one")
    assert read == [("physical", format_lsn(held.position), "1")]
    assert held.readers().pin_lsn == held.position
    command(wal_server, "CREATE_REPLICATION_SLOT passing TEMPORARY PHYSICAL RESERVE_WAL")
    wait_for(
        lambda: command(wal_server, "READ_REPLICATION_SLOT passing") == [(None, None, None)],
        10,
        "a temporary slot ends with its connection",
    )
    command(wal_server, "DROP_REPLICATION_SLOT one WAIT")
    assert held.readers().pin_lsn is None
    for text, code in [
        ("DROP_REPLICATION_SLOT one", "42704"),
        ("SHOW nothing_of_the_kind", "42704"),
        ("TIMELINE_HISTORY 7", "58P01"),
        ("START_REPLICATION SLOT nobody 0/0", "42704"),
        ("START_REPLICATION 0/1000000 TIMELINE 9", "XX000"),
        ("CREATE_REPLICATION_SLOT x LOGICAL pgoutput", "0A000"),
        ("BASE_BACKUP (LABEL 'x')", "0A000"),
        ("SELECT 1", "0A000"),
        ('CREATE_REPLICATION_SLOT "No" PHYSICAL', "42602"),
        ("START_REPLICATION now", "42601"),
    ]:
        with pytest.raises(ConnectionError, match=code):
            command(wal_server, text)


def test_wal_that_is_gone_or_not_there_yet_is_refused_in_postgres_words(wal_server, held) -> None:
    with RawClient(wal_server.port) as client:
        client.log_in()
        client.query(f"START_REPLICATION {format_lsn(held.position + 8)}")
        error = client.error()
        assert error["C"] == "XX000"
        assert "is ahead of the WAL flush position of this server" in error["M"]
        client.until("Z")
        # What a client had sent before it learned of the failure is not held against it.
        client.send(message(b"d", b"r" + bytes(33)) + message(b"c"))
        client.query(f"START_REPLICATION {format_lsn(held.start - held.segment_bytes)}")
        error = client.error()
        assert error["C"] == "58P01"
        assert "has already been removed" in error["M"]
        client.until("Z")
        client.query("IDENTIFY_SYSTEM")
        assert [kind for kind, _ in client.until("Z")] == ["T", "D", "C", "Z"]


def test_21_a_wrong_password_and_an_unknown_user_are_told_the_same(wal_server, held) -> None:
    secret = "planted-secret-91827"
    for user in (USER, "nobody", 'odd "name"'):
        with pytest.raises(
            ConnectionError, match=f'password authentication failed for user "{user}"'
        ):
            command(wal_server, "IDENTIFY_SYSTEM", user=user, password=secret)
    works(wal_server, held)
    # Nothing that is secret is in the log: no password, no verifier.
    log = wal_server.log
    assert "client refused" in log
    for part in (secret, PASSWORD, *wal_server.users.read_text().replace('"', "").split("$")[1:]):
        assert part.strip() not in log
    # Nor in what the kernel shows of the process.
    assert wal_server.process is not None
    shown = Path(f"/proc/{wal_server.process.pid}/cmdline").read_bytes()
    assert PASSWORD.encode() not in shown


def test_21_users_are_verifiers_from_a_real_server_and_take_effect_at_once(
    wal_server, held, primary
) -> None:
    run(primary, "CREATE ROLE wal_reader LOGIN PASSWORD 'from PostgreSQL itself'")
    try:
        text = run(primary, "SELECT rolpassword FROM pg_authid WHERE rolname = 'wal_reader'")[0][0]
    finally:
        run(primary, "DROP ROLE wal_reader")
    wal_server.users.write_text(f'; comment\n"wal_reader" "{text}"\n')
    wait_for(
        lambda: _accepted(wal_server, "wal_reader", "from PostgreSQL itself"), 10, "the new user"
    )
    assert not _accepted(wal_server, USER, PASSWORD)
    # A plain password is no verifier: the previous users remain in effect, and the log does not show it.
    wal_server.users.write_text('"wal_reader" "plain-as-day"\n')
    wait_for(
        lambda: "the previous users remain in effect" in wal_server.log, 10, "the fault is told"
    )
    assert _accepted(wal_server, "wal_reader", "from PostgreSQL itself")
    assert "plain-as-day" not in wal_server.log


def _accepted(server: WalServerProcess, user: str, password: str) -> bool:
    try:
        command(server, "IDENTIFY_SYSTEM", user=user, password=password)
    except ConnectionError:
        return False
    return True


def test_only_replication_connections_are_taken(wal_server) -> None:
    with pytest.raises(psycopg.OperationalError, match="replication connections only"):
        psycopg.connect(wal_server.dsn(replication="false", dbname="postgres"))
    with pytest.raises(ConnectionError, match="does not exist"):
        command(wal_server, "IDENTIFY_SYSTEM", replication="database", dbname="postgres")


# -- TLS --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """Authorities `ca` and `foreign`, and of them: server, client, expired (of ca), stranger (of foreign)."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "foreign"):
        openssl(
            *("req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.crt"),
            *("-subj", f"/CN={name}", "-days", "30"),
        )
    for name, authority, days in [
        ("server", "ca", 30),
        ("client", "ca", 30),
        ("expired", "ca", -1),
        ("stranger", "foreign", 30),
    ]:
        subject = "/CN=localhost" if name == "server" else f"/CN={USER}"
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.crt"),
            *("-CAkey", f"{authority}.key", "-CAcreateserial", "-out", f"{name}.crt"),
            *("-days", str(days), "-extfile", f"{name}.ext"),
        )
        (folder / f"{name}.key").chmod(0o600)
    return folder


def _tls(certificates: Path, client_ca: Path | None = None) -> TlsFiles:
    return TlsFiles(certificates / "server.crt", certificates / "server.key", client_ca)


def test_21_tls_with_channel_binding_and_no_plain_client_where_tls_is_required(
    held, tmp_path, certificates, primary
) -> None:
    tls = _tls(certificates)
    with WalServerProcess(tmp_path, held, tls=tls, tls_required=True) as server:
        verified = {"sslmode": "verify-full", "sslrootcert": f"{certificates}/ca.crt"}
        bound = verified | {"channel_binding": "require"}
        assert command(server, "IDENTIFY_SYSTEM", **bound)
        assert command(server, "IDENTIFY_SYSTEM", **verified, channel_binding="disable")
        with pytest.raises(ConnectionError, match="password authentication failed"):
            command(server, "IDENTIFY_SYSTEM", **bound, password="wrong")
        with pytest.raises(ConnectionError, match="without TLS are refused"):
            command(server, "IDENTIFY_SYSTEM", sslmode="disable")
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            command(
                server,
                "IDENTIFY_SYSTEM",
                **verified | {"sslrootcert": f"{certificates}/foreign.crt"},
            )
        run(primary, "SELECT pg_logical_emit_message(false, 'x', repeat('y', 3000000))")
        held.take(primary)
        held.publish()
        streamed = stream(server, held.start, held.position, **bound)
        size = held.segment_bytes
        for begin in range(held.start, held.position, size):
            part = streamed[begin - held.start : begin - held.start + size]
            assert held.bytes_of(segment_name(1, begin, size))[: len(part)] == part
        with RawClient(server.port) as client:
            # Bytes behind the request, in clear, would be read as if they had come encrypted.
            client.send(
                struct.pack(">II", 8, 80877103) + startup({"user": USER, "replication": "true"})
            )
            assert "unencrypted data" in client.error()["M"]


def test_21_an_expired_a_foreign_and_a_missing_client_certificate_are_refused(
    held, tmp_path, certificates
) -> None:
    tls = _tls(certificates, certificates / "ca.crt")
    with WalServerProcess(tmp_path, held, tls=tls) as server:

        def connect(name: str) -> list[tuple[str | None, ...]]:
            own = {"sslcert": f"{certificates}/{name}.crt", "sslkey": f"{certificates}/{name}.key"}
            return command(server, "IDENTIFY_SYSTEM", sslmode="require", **own)

        assert connect("client")
        for name in ("expired", "stranger"):
            with pytest.raises(ConnectionError):
                connect(name)
        with pytest.raises(ConnectionError):
            command(server, "IDENTIFY_SYSTEM", sslmode="require")
        wait_for(
            lambda: server.log.count("could not establish TLS") == 3,
            10,
            "all three refusals are told",
        )
        with pytest.raises(ConnectionError, match="password"):
            command(
                server,
                "IDENTIFY_SYSTEM",
                sslmode="require",
                sslcert=f"{certificates}/client.crt",
                sslkey=f"{certificates}/client.key",
                password="wrong",
            )
        assert connect("client")


def test_replaced_certificates_count_from_the_next_connection_on(held, tmp_path) -> None:
    """Also the authority of the readers' certificates; files that do not fit change nothing."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    used = first.issue("safekeeper", hosts=HOSTS)
    old, new = first.issue("reader"), second.issue("reader")

    def ask(server: WalServerProcess, own: tls_files.TlsFiles) -> object:
        return command(
            server,
            "IDENTIFY_SYSTEM",
            sslmode="verify-full",
            sslrootcert=str(own.ca),
            sslcert=str(own.certificate),
            sslkey=str(own.key),
            channel_binding="require",
        )

    with WalServerProcess(
        tmp_path, held, tls=TlsFiles(used.certificate, used.key, used.ca)
    ) as server:
        process = server.process
        assert ask(server, old)
        used.key.write_bytes(new.key.read_bytes())
        assert ask(server, old)
        assert "new certificate refused" in server.log
        replace_files(used, second.issue("safekeeper", hosts=HOSTS))
        assert ask(server, new)
        with pytest.raises(ConnectionError):
            ask(server, old)
        # Who trusts the server as it is, and has the former authority's certificate.
        mixed = tls_files.TlsFiles(new.ca, old.certificate, old.key)
        with pytest.raises(ConnectionError):
            ask(server, mixed)
        assert process is not None
        assert process.poll() is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_other_accounts_can_read_is_refused_by_name(tmp_path, mode) -> None:
    used = Authority(tmp_path).issue("safekeeper", hosts=HOSTS)
    used.key.chmod(mode)
    files = TlsFiles(used.certificate, used.key)
    if os.geteuid() == 0 and mode == 0o640:
        # Root's may be readable by a group, as PostgreSQL has it, and no other account's.
        assert WalServerTls(files).current().certificate
        os.chown(used.key, NOBODY, -1)
    with pytest.raises(ConfigError, match="accessible to other accounts") as caught:
        WalServerTls(files)
    assert caught.value.where == str(used.key)


def test_encryption_that_is_not_there_is_declined(wal_server) -> None:
    with RawClient(wal_server.port) as client:
        client.send(struct.pack(">II", 8, 80877104))
        assert client.exactly(1) == b"N"
        client.send(struct.pack(">II", 8, 80877103))
        assert client.exactly(1) == b"N"
        client.log_in()


# -- clients that mean no good ----------------------------------------------------------------------


def resident(server: WalServerProcess) -> int:
    """Bytes of memory that the server has."""
    assert server.process is not None
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_22_garbage_half_messages_and_two_gib_harm_nobody(
    wal_server, held, primary, tmp_path, seed, receive: Receivers
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    receiver = receive(primary, wal_server.dsn(), tmp_path / "received")
    wait_for(lambda: "streaming" in wal_server.log, 30, "an honest reader streams")
    works(wal_server, held)
    before = resident(wal_server)
    with RawClient(wal_server.port) as silent, RawClient(wal_server.port) as slow:
        silent.send(startup({"user": USER, "replication": "true"})[:9])
        for _ in range(60):
            with RawClient(wal_server.port) as client:
                client.send(rng.randbytes(rng.randrange(1, 4000)))
        with RawClient(wal_server.port) as client:
            client.send(struct.pack(">I", 2**31 - 1) + bytes(100_000))
            assert client.error()["C"] == "08P01"
        with RawClient(wal_server.port) as client:
            client.log_in()
            client.send(b"Q" + struct.pack(">I", 2**31 - 1) + bytes(1000))
            assert client.error()["C"] == "08P01"
        with RawClient(wal_server.port) as client:
            # Answers that nobody takes do not pile up.
            client.log_in()
            client.socket.settimeout(2)
            try:
                for _ in range(2000):
                    client.send(message(b"Q", b"IDENTIFY_SYSTEM\0") * 5000)
            except TimeoutError:
                pass
            else:
                pytest.fail("the server took 210 MB of commands whose answers were not read")
        # A byte now and then does not keep a login alive.
        packet = startup({"user": USER, "replication": "true"})
        dropped, begun = None, time.monotonic()
        for byte in packet:
            try:
                slow.send(bytes([byte]))
                slow.socket.settimeout(0.5)
                if not slow.socket.recv(1000):
                    raise ConnectionResetError
                dropped = time.monotonic() - begun
                break
            except TimeoutError:
                continue
            except ConnectionError:
                dropped = time.monotonic() - begun
                break
        assert dropped is not None
        assert dropped < 20
        # Its time was over, or it had to make room.
        assert silent.error()["C"] in {"08006", "53300"}
    works(wal_server, held)
    assert resident(wal_server) - before < 30 << 20
    held.publish()
    wait_for(lambda: receiver.has(held, held.position), 30, "the honest reader was not disturbed")
    print(receiver.stop())


def test_22_a_crowd_of_silent_logins_keeps_nobody_out(wal_server, held) -> None:
    crowd = [RawClient(wal_server.port) for _ in range(200)]
    try:
        works(wal_server, held)
        assert "closing the oldest" in wal_server.log
        for client in crowd[:100]:
            assert client.error()["C"] == "53300"
            assert client.socket.recv(1) == b""
    finally:
        for client in crowd:
            client.socket.close()


def test_22_a_reader_that_takes_nothing_is_dropped_and_costs_a_chunk(
    wal_server, held, primary, tmp_path, receive: Receivers
) -> None:
    run(primary, "CREATE TABLE IF NOT EXISTS bulk (t text)")
    run(
        primary, "INSERT INTO bulk SELECT repeat(md5(n::text), 60) FROM generate_series(1, 20000) n"
    )
    held.take(primary)
    held.publish()
    before = resident(wal_server)
    clients = [RawClient(wal_server.port, receive_buffer=4096) for _ in range(10)]
    try:
        for client in clients:
            client.log_in()
            client.query(f"START_REPLICATION {format_lsn(held.start)}")
        receiver = receive(primary, wal_server.dsn(), tmp_path / "received")
        wait_for(lambda: receiver.has(held, held.position), 30, "the others' WAL comes meanwhile")
        assert resident(wal_server) - before < 40 << 20
        wait_for(
            lambda: wal_server.log.count("due to replication timeout") == len(clients),
            20,
            "they are given up",
        )
        works(wal_server, held)
        print(receiver.stop())
    finally:
        for client in clients:
            client.socket.close()
        run(primary, "DROP TABLE bulk")


def test_a_recycled_segment_is_not_read_as_the_old_one(wal_server, held, primary) -> None:
    """The hot loop renames an old segment and writes new WAL over it while somebody reads it."""
    run(primary, "SELECT pg_logical_emit_message(false, 'x', repeat('y', 9000000))")
    held.take(primary)
    held.publish()
    with RawClient(wal_server.port, receive_buffer=1 << 16) as client:
        client.log_in()
        client.query(f"START_REPLICATION {format_lsn(held.start)}")
        client.until("W")
        client.receive()
        first = next(iter(sorted(held.folder.glob("0*"))))
        recycled = held.folder / "0000000100000FFF00000001.partial"
        first.rename(recycled)
        with recycled.open("r+b") as file:
            file.write(b"\xee" * held.segment_bytes)
        wal = b""
        try:
            while True:
                kind, body = client.receive()
                if kind == "d" and body[:1] == b"w":
                    wal += body[25:]
                    client.send(message(b"d", b"r" + bytes(33)))
                if kind == "E":
                    assert b"58P01" in body
                    break
        except EOFError:
            pass
        assert b"\xee" * 64 not in wal


def test_slots_are_refused_when_damaged_newer_or_too_many(wal_server, held, tmp_path) -> None:
    with RawClient(wal_server.port) as client:
        client.log_in()
        for number in range(MOST_SLOTS):
            client.query(f"CREATE_REPLICATION_SLOT s{number} PHYSICAL")
            assert [kind for kind, _ in client.until("Z")] == ["T", "D", "C", "Z"]
        client.query("CREATE_REPLICATION_SLOT one_more PHYSICAL")
        assert client.error()["C"] == "53400"
    assert wal_server.stop() == 0
    good = wal_server.slots.read_bytes()
    for damaged, said in [
        (good[:-30], "could not read the replication slots"),
        (good.replace(b'"name": "s1"', b'"name": "s7"', 1), "its checksum does not match"),
        (
            checksummed_json.sealed({"format": 9, "slots": []}),
            "unsupported format 9 of the replication slots",
        ),
        (b"", "could not read the replication slots"),
    ]:
        wal_server.slots.write_bytes(damaged)
        with pytest.raises(AssertionError):
            wal_server.start()
        assert said in wal_server.log
        assert wal_server.slots.read_bytes() == damaged
    wal_server.slots.write_bytes(good)
    wal_server.start()
    works(wal_server, held)


def test_9_a_slot_that_cannot_be_written_is_not_made(wal_server, held) -> None:
    """The draft's name is taken by a folder: as good as a disk that takes nothing, for root too."""
    draft = wal_server.slots.with_name(f"{wal_server.slots.name}.{wal_server.process.pid}.tmp")
    draft.mkdir()
    with pytest.raises(ConnectionError, match="58030"):
        command(wal_server, "CREATE_REPLICATION_SLOT one PHYSICAL")
    assert command(wal_server, "READ_REPLICATION_SLOT one") == [(None, None, None)]
    works(wal_server, held)
    draft.rmdir()
    command(wal_server, "CREATE_REPLICATION_SLOT one PHYSICAL")
