"""A safekeeper's process with certificates: who gets nowhere, what each role may send, and that others are served meanwhile."""

import contextlib
import random
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.child import run_child
from tests.support.tls import HOSTS, Authority, replace_files
from tests.support.tls_safekeeper import GREETING, OURS, Conversation, TlsSafekeeper
from tests.support.waiting import wait_for
from tests.support.wal import SMALL, Wal
from walsender_bridge.errors import (
    AuthenticationError,
    Cause,
    ConnectionFailedError,
    MalformedMessageError,
    TusklineError,
)
from walsender_bridge.quorum.proposer.handshake import ask
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.safekeeper.connection import GREETING_SECONDS, MOST_CONNECTIONS
from walsender_bridge.runtime.tls_files import TlsFiles

SEGMENT = SMALL.segment_bytes
HALF = SEGMENT // 2
#: An idle crowd, many times more than there is room for.
CROWD = 300
TERM_2 = m.Vote(m.NodeId(2, 2), m.Purpose.ATTACH, 1, Configuration(1, frozenset({1})))


@pytest.fixture(scope="module")
def safekeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSafekeeper]:
    folder = tmp_path_factory.mktemp("safekeeper")
    one = TlsSafekeeper(folder, Authority(folder))
    one.start()
    try:
        one.vote()
        yield one
    finally:
        one.stop()


@contextlib.contextmanager
def unharmed(safekeeper: TlsSafekeeper) -> Iterator[None]:
    """Nothing that it promised or holds changes in the block, and it serves its proposer in it."""
    before = safekeeper.promised(), safekeeper.wal()
    yield
    assert safekeeper.greets().node_id == m.NodeId(1, 1)
    assert (safekeeper.promised(), safekeeper.wal()) == before
    assert safekeeper.process is not None
    assert safekeeper.process.poll() is None


# -- strangers --------------------------------------------------------------------------------------


def unverified(authority: Authority, folder: Path, kind: str) -> TlsFiles:
    """Files of a stranger who trusts the safekeeper."""
    if kind == "expired":
        return authority.expired("proposer")
    folder.mkdir()
    own = Authority(folder).issue("proposer")
    own.ca.unlink()
    # Of both authorities: its own, so that the files fit, and the safekeeper's.
    both = (folder / "authority/ca.pem").read_bytes()
    own.ca.write_bytes(both + (authority.folder / "authority/ca.pem").read_bytes())
    return own


def test_37_a_certificate_of_another_authority_gets_nowhere(safekeeper, tmp_path):
    stranger = unverified(safekeeper.authority, tmp_path / "other", "other")
    with unharmed(safekeeper), pytest.raises(AuthenticationError, match="refused this certificate"):
        safekeeper.ask(GREETING, TERM_2, tls=stranger)


def test_37_an_expired_certificate_is_refused_before_it_is_shown(safekeeper, tmp_path):
    """`TlsFiles` refuses it; a peer without such scruples is refused by the handshake."""
    expired = unverified(safekeeper.authority, tmp_path, "expired")
    with unharmed(safekeeper), pytest.raises(TusklineError, match="expired"):
        safekeeper.ask(GREETING, tls=expired)
    _refused(safekeeper, _context(expired.ca, expired), r"(?i)expired")


def test_37_without_a_certificate_nothing_is_read(safekeeper):
    _refused(safekeeper, _context(safekeeper.files.ca), r"(?i)certificate required")


def test_37_an_older_tls_is_refused(safekeeper):
    context = _context(safekeeper.files.ca, safekeeper.proposer)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        unharmed(safekeeper),
        _connected(safekeeper) as plain,
        pytest.raises(OSError, match=r"(?i)protocol.version"),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def _context(ca: Path, own: TlsFiles | None = None) -> ssl.SSLContext:
    """That of a peer with this certificate; None: with none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(ca)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def _refused(safekeeper: TlsSafekeeper, context: ssl.SSLContext, reason: str) -> None:
    """After a handshake that the peer takes for a whole one."""
    with (
        unharmed(safekeeper),
        _connected(safekeeper) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as shaken,
        pytest.raises(OSError, match=reason),
    ):
        shaken.recv(1)


@contextlib.contextmanager
def _connected(safekeeper: TlsSafekeeper) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", safekeeper.port), timeout=20) as plain:
        yield plain


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        b"\xff" * 70_000,
        struct.pack(">BBHIQQQQ", ord("G"), 2, 0, 20, 0, 0, 0, 0) + bytes(20),  # without TLS
        b"\x16\x03\x01\xff\xff" + b"\x01" * 70_000,  # a record longer than TLS has
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",  # a first message of 16 MiB
    ],
    ids=["http", "junk", "plain", "record", "message"],
)
def test_37_junk_ends_its_connection_alone(safekeeper, sent):
    with unharmed(safekeeper), _connected(safekeeper) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(sent)
        safekeeper.greets()
        _is_closed(stranger)


def _is_closed(stranger: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while stranger.recv(4096):
            pass


# -- the holder of a certificate --------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        struct.pack(">BBHIQQQQ", ord("A"), 2, 0, 1 << 30, 1, 0, 0, 0),  # 1 GiB of WAL
        struct.pack(">BBHIQQQQ", ord("V"), 2, 0, 1 << 30, 1, 0, 0, 0),
        struct.pack(">BBHIQQQQ", ord("G"), 1, 0, 20, 0, 0, 0, 0) + bytes(20),  # version 1
        struct.pack(">BBHIQQQQ", ord("A"), 2, 0, 1 << 20, 1, 0, 0, 0),  # WAL before a greeting
    ],
    ids=["1 GiB of WAL", "1 GiB of vote", "version 1", "no greeting"],
)
def test_37_a_proposers_broken_frames_end_its_connection_alone(safekeeper, header):
    talk = safekeeper.talk()
    with unharmed(safekeeper), contextlib.closing(talk):
        talk.end.send_frame(header + b"x" * 100_000)
        with pytest.raises(ConnectionFailedError):
            # Before its time for a greeting is over.
            talk.hear(GREETING_SECONDS / 2)


@pytest.mark.parametrize("role", ["monitor", "safekeeper", "reader", "writer", "log-server"])
def test_37_a_lesser_role_changes_nothing(safekeeper, role):
    hosts = HOSTS if role in {"safekeeper", "log-server"} else ()
    tls = safekeeper.authority.issue(role, hosts=hosts)
    refused: list[tuple[m.ToSafekeeper, ...]] = [
        (GREETING, TERM_2),
        (GREETING, m.Resume(m.NodeId(1, 1))),
        (GREETING, m.Append(1, 1 << 20, 0, 0, 0)),
        (GREETING, m.Configure(1, Configuration(9, frozenset({9})))),
    ]
    if role not in {"monitor", "safekeeper"}:
        refused = [(GREETING,)]
    with unharmed(safekeeper):
        for messages in refused:
            answer = safekeeper.ask(*messages, tls=tls)
            assert isinstance(answer, m.Refused)
            assert answer.reason == m.Refusal.NOT_ALLOWED
            assert type(messages[-1]).__name__ in answer.detail


def test_37_a_certificate_without_roles_changes_nothing(safekeeper):
    tls = safekeeper.authority.issue_uri("https://example.org/")
    with unharmed(safekeeper):
        answer = safekeeper.ask(GREETING, tls=tls)
    assert isinstance(answer, m.Refused)
    assert "names no roles" in answer.detail


def test_37_only_a_proposer_reads_wal_behind_a_vote(tmp_path, seed):
    """A monitor and another safekeeper know the term and the positions from the greeting, and get no byte."""
    one = TlsSafekeeper(tmp_path, Authority(tmp_path))
    one.start()
    greeting = m.ProposerGreeting(m.ServerInfo(SMALL.system_id, SMALL.major, SEGMENT), 1)
    made = Wal()
    made.fill(SEGMENT + HALF, random.Random(seed))
    try:
        with contextlib.closing(one.talk()) as leader:
            greeted = leader.ask(greeting)
            assert isinstance(greeted, m.SafekeeperGreeting)
            members = Configuration(1, frozenset({greeted.safekeeper}))
            assert isinstance(
                leader.ask(m.Vote(m.NodeId(1, 1), m.Purpose.ATTACH, 1, members)), m.VoteReply
            )
            history = History((HistoryEntry(1, SEGMENT, 1),))
            leader.ask(m.Elected(1, SEGMENT, SEGMENT, True, history, members.stamped(1)))
            leader.say(m.Append(1, SEGMENT, SEGMENT, SEGMENT, HALF), wal=bytes(made.data[:HALF]))
            assert leader.hear() == m.AppendAck(1, SEGMENT + HALF, SEGMENT)
            read = m.Fetch(1, SEGMENT, SEGMENT + HALF)
            before = one.promised(), one.wal()
            for role in ("monitor", "safekeeper"):
                tls = one.authority.issue(role, hosts=HOSTS if role == "safekeeper" else ())
                for messages in ((greeting, read), (greeting, m.Fetch(1, 0, 0))):
                    answer = one.ask(*messages, tls=tls)
                    assert isinstance(answer, m.Refused)
                    assert answer.reason == m.Refusal.NOT_ALLOWED
                    assert "Fetch" in answer.detail
            assert (one.promised(), one.wal()) == before
            assert leader.ask(read) == m.Fetched(1, SEGMENT, HALF)
    finally:
        one.stop()


def test_37_a_monitor_and_an_operator_are_answered(safekeeper):
    for role in ("monitor", "operator"):
        tls = safekeeper.authority.issue(role)
        assert ask("localhost", safekeeper.port, OURS, tls=tls) == safekeeper.greets()


# -- crowds -----------------------------------------------------------------------------------------


def half_a_handshake(safekeeper: TlsSafekeeper) -> socket.socket:
    stranger = socket.create_connection(("127.0.0.1", safekeeper.port), timeout=20)
    stranger.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
    return stranger


def descriptors(safekeeper: TlsSafekeeper) -> int:
    assert safekeeper.process is not None
    return len(list(Path(f"/proc/{safekeeper.process.pid}/fd").iterdir()))


@pytest.mark.parametrize(
    "connect",
    [
        half_a_handshake,
        lambda one: socket.create_connection(("127.0.0.1", one.port), timeout=20),
    ],
    ids=["half a handshake", "idle"],
)
def test_37_a_crowd_makes_room_from_its_oldest_on(
    safekeeper: TlsSafekeeper, connect: Callable[[TlsSafekeeper], socket.socket]
) -> None:
    leader = safekeeper.talk()
    before = descriptors(safekeeper)
    with unharmed(safekeeper), contextlib.ExitStack() as crowd:
        crowd.callback(leader.close)
        assert isinstance(leader.ask(GREETING), m.SafekeeperGreeting)
        assert isinstance(leader.ask(m.Resume(m.NodeId(1, 1))), m.VoteReply)
        strangers = []
        for number in range(CROWD):
            strangers.append(crowd.enter_context(connect(safekeeper)))
            if number % 50 == 0:
                safekeeper.greets()
        safekeeper.greets()
        for gone in strangers[: CROWD - MOST_CONNECTIONS]:
            _is_closed(gone)
        for newest in strangers[-MOST_CONNECTIONS // 2 :]:
            newest.setblocking(False)
            with pytest.raises(BlockingIOError):
                newest.recv(1)
        assert descriptors(safekeeper) <= before + MOST_CONNECTIONS
        # The leader's connection is still its own.
        assert not leader.end.receive()


# -- the safekeeper's own certificate ---------------------------------------------------------------


def test_36_a_proposer_proves_the_safekeepers_name(safekeeper):
    with contextlib.closing(safekeeper.talk(host="db-7.example")) as talk:
        talk.say(GREETING)
        with pytest.raises(AuthenticationError, match="Hostname mismatch"):
            talk.hear()


def test_36_a_proposer_proves_the_safekeepers_authority(safekeeper, tmp_path):
    stranger = Authority(tmp_path).issue("proposer")
    with pytest.raises(AuthenticationError, match=r"self-signed|unable to get"):
        safekeeper.ask(GREETING, tls=stranger)


def test_36_it_does_not_listen_for_other_machines_without_certificates(tmp_path, safekeeper):
    settings = replace(safekeeper.settings, data_dir=tmp_path / "data", host="192.0.2.1", tls=None)
    done = run_child("walsender_bridge.quorum.safekeeper", settings, seconds=30)
    assert done.returncode == Cause.CONFIG
    assert "other machines could reach this address" in done.stderr
    assert "HINT" in done.stderr
    assert "tuskline certs" in done.stderr


def test_36_it_does_not_start_with_a_clients_certificate(tmp_path, safekeeper):
    settings = replace(safekeeper.settings, data_dir=tmp_path / "data", tls=safekeeper.proposer)
    done = run_child("walsender_bridge.quorum.safekeeper", settings, seconds=30)
    assert done.returncode == Cause.CONFIG
    assert "certificate, key and authority do not fit" in done.stderr


def test_38_certificates_are_replaced_while_it_runs(tmp_path):
    """Also the authority: the next connection is proved with the new files, and unfit ones change nothing."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = Authority(tmp_path / "first"), Authority(tmp_path / "second")
    one = TlsSafekeeper(tmp_path, first)
    one.start()
    try:
        old, new = one.proposer, second.issue("proposer")
        with contextlib.closing(one.talk()) as earlier:
            assert isinstance(earlier.ask(GREETING), m.SafekeeperGreeting)
            one.files.key.write_bytes(new.key.read_bytes())
            assert isinstance(one.ask(GREETING, tls=old), m.SafekeeperGreeting)
            wait_for(lambda: "new certificate refused" in one.log.read_text(), 10, "it says so")
            replace_files(one.files, first.issue("safekeeper", hosts=HOSTS))
            assert isinstance(one.ask(GREETING, tls=old), m.SafekeeperGreeting)
            assert isinstance(earlier.ask(GREETING), m.SafekeeperGreeting)
            replace_files(one.files, second.issue("safekeeper", hosts=HOSTS))
            # It may be a stolen certificate's, which nothing else would end.
            with pytest.raises(ConnectionFailedError):
                wait_for(lambda: earlier.ask(GREETING) is None, 20, "the connection ends")
            assert isinstance(one.ask(GREETING, tls=new), m.SafekeeperGreeting)
            with pytest.raises(AuthenticationError):
                one.ask(GREETING, tls=old)
    finally:
        one.stop()


def test_plain_and_tls_do_not_meet(safekeeper):
    """A proposer without a certificate is refused as what it is, and at once."""
    with unharmed(safekeeper), contextlib.closing(Conversation(safekeeper.port, None)) as talk:
        talk.say(GREETING)
        with pytest.raises((ConnectionFailedError, MalformedMessageError)):
            talk.hear()
