"""Whatever a client sends: the server's parsers answer with a named error, in bounded time and memory."""

import contextlib
import random
import struct
import time
import tracemalloc

import pytest

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol import replication_command
from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.frontend import (
    MESSAGE_LIMIT,
    STARTUP_LIMIT,
    FrontendParser,
    Message,
)
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.quorum.protocol.positions import Positions
from walsender_bridge.quorum.wal_server.login import LoginExchange, LoginStep
from walsender_bridge.quorum.wal_server.scram import ScramExchange, Verifier
from walsender_bridge.quorum.wal_server.stream import ReaderStream

ROUNDS = 6000
COMMANDS = [
    "IDENTIFY_SYSTEM",
    "SHOW wal_segment_size;",
    "TIMELINE_HISTORY 4294967295",
    "CREATE_REPLICATION_SLOT \"a\" TEMPORARY PHYSICAL (RESERVE_WAL true, B 'x')",
    "START_REPLICATION SLOT a PHYSICAL FFFFFFFF/FFFFFFFF TIMELINE 7",
    "DROP_REPLICATION_SLOT a WAIT",
    'READ_REPLICATION_SLOT "x""y"',
    "SELECT 'a', \"b\"",
]
NOBODY = Verifier(4096, bytes(16), bytes(32), bytes(32))


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes changed, cut out, put in, and repeated."""
    raw = bytearray(data)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(4):
            case 0:
                raw[at : at + 1] = rng.randbytes(1)
            case 1:
                del raw[at : at + rng.randrange(8)]
            case 2:
                raw[at:at] = rng.randbytes(rng.randrange(8))
            case 3:
                raw[at:at] = raw[:at][-rng.randrange(1, 40) :] * rng.randrange(1, 30)
    return bytes(raw)


def conversation(rng: random.Random) -> bytes:
    """What a client might send, in one piece."""
    body = b"user\0me\0replication\0true\0\0"
    data = struct.pack(">II", 8, 80877103) if rng.random() < 0.3 else b""
    data += struct.pack(">II", len(body) + 8, 3 << 16) + body
    for _ in range(rng.randrange(6)):
        text = rng.choice(COMMANDS).encode() + b"\0"
        kind = rng.choice(b"QdcfpX")
        data += bytes([kind]) + struct.pack(">I", len(text) + 4) + text
    return data


def test_22_packets_and_logins_under_damage(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    begun = time.process_time()
    reached = set()
    for _ in range(ROUNDS):
        parser = FrontendParser()
        login = LoginExchange(lambda _: NOBODY, None, tls_required=rng.random() < 0.2)
        data = damaged(conversation(rng), rng)
        try:
            while data:
                size = rng.randrange(1, 200)
                parser.feed(data[:size])
                data = data[size:]
                while (packet := parser.next()) is not None:
                    if login.step is not LoginStep.DONE:
                        login.take(packet, more=parser.buffered > 0)
                assert parser.buffered <= max(STARTUP_LIMIT, MESSAGE_LIMIT + 1)
            reached.add("waits")
        except (MalformedMessageError, SqlErrorReply) as error:
            reached.add(type(error).__name__)
    assert reached == {"waits", "MalformedMessageError", "SqlErrorReply"}
    assert time.process_time() - begun < 30


def test_22_commands_under_damage(seed: int) -> None:
    rng = random.Random(seed)
    begun = time.process_time()
    read = longest = 0
    for _ in range(ROUNDS):
        text = damaged(rng.choice(COMMANDS).encode(), rng).decode(errors="replace")
        try:
            read += replication_command.parse(text) is not None
        except SqlErrorReply as error:
            longest = max(longest, len(error.error.text))
    assert longest < 200
    assert read > ROUNDS // 20
    assert time.process_time() - begun < 30


def test_22_no_command_of_any_length_takes_long() -> None:
    """Texts that make a careless expression go back and forth, as long as a message may be."""
    size = MESSAGE_LIMIT - 100
    for piece in (
        "a",
        "'",
        '"',
        '""',
        "''",
        "(",
        "1",
        "1/",
        "/",
        " ",
        "\t\n",
        ";",
        "A1/",
        "é",
        "SHOW .",
    ):
        for head in ("", "SHOW ", "START_REPLICATION ", "CREATE_REPLICATION_SLOT a PHYSICAL ("):
            begun = time.process_time()
            with contextlib.suppress(SqlErrorReply):
                replication_command.parse(head + piece * (size // len(piece)))
            assert time.process_time() - begun < 0.5, (head, piece)


def prove(first: str, final: str) -> None:
    exchange = ScramExchange("me", NOBODY, None)
    exchange.first("SCRAM-SHA-256", first)
    exchange.final(final)


def test_22_scram_and_standby_messages_under_damage(seed: int) -> None:
    rng = random.Random(seed)
    first, final = "n,,n=,r=abcdefghijklmnop", "c=biws,r=abc,p=" + "A" * 43 + "="
    positions = Positions(7, 16, 1 << 20, ServerTimelines(1), 1000, 1000)
    status = b"r" + struct.pack(">QQQqB", 1, 2, 3, 4, 1)
    feedback = b"h" + struct.pack(">qIIII", 1, 2, 3, 4, 5)
    stream = ReaderStream(positions, 0, 0, now=0.0)
    for _ in range(ROUNDS // 3):
        texts = [damaged(text.encode(), rng).decode("latin-1") for text in (first, final)]
        with pytest.raises(SqlErrorReply) as caught:
            prove(*texts)
        assert caught.value.error.fatal
        with contextlib.suppress(MalformedMessageError):
            stream.received("d", damaged(rng.choice([status, feedback]), rng), 1.0)
        assert 0 <= stream.flush_lsn <= 1000


def test_22_a_flood_of_tiny_pieces_takes_no_memory() -> None:
    parser = FrontendParser()
    body = b"user\0me\0\0"
    parser.feed(struct.pack(">II", len(body) + 8, 3 << 16) + body)
    assert parser.next() is not None
    one = b"d" + struct.pack(">I", 38) + b"r" + bytes(33)
    tracemalloc.start()
    try:
        for _ in range(30_000):
            parser.feed(one[:20])
            assert parser.next() is None
            parser.feed(one[20:])
            assert parser.next() == Message("d", one[5:])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
