"""Damaged payloads of a walsender: capture's core takes them or refuses them by name, soon and in little memory."""

import contextlib
import random
import time
from collections.abc import Iterator
from itertools import islice

import pytest

from tests.support.capture_model import Replica, Server
from walsender_bridge.capture import core, events
from walsender_bridge.capture.spool import core as spool
from walsender_bridge.errors import CorruptError, DivergedError, MalformedMessageError, SpoolError
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import MAX_LSN
from walsender_bridge.postgres.protocol.replication import XLOG_HEADER_SIZE

EXPECTED = (MalformedMessageError, DivergedError, SpoolError, CorruptError)
#: Far more than an honest session of this size takes on a busy machine.
LIMIT_SECONDS = 5.0
PARSERS = (
    *(pgoutput.parse_begin, pgoutput.parse_commit, pgoutput.parse_message),
    *(pgoutput.parse_stream_start, pgoutput.parse_stream_commit, pgoutput.parse_stream_abort),
    *(pgoutput.parse_relation, pgoutput.parse_type),
)


def honest(rng: random.Random) -> list[bytes]:
    """A session with every kind of message in it."""
    server = Server(rng)
    server.streams = True
    for _ in range(60):
        rng.choice((server.commit, server.step, server.step))()
    for one in list(server.running):
        server.finish(one, committed=rng.random() < 0.7)
    return list(islice(server.stream(), 400))


def damage(payloads: list[bytes], rng: random.Random) -> Iterator[bytes]:
    """The same, with a few of them changed, cut, doubled, left out or exchanged."""
    hit = {rng.randrange(len(payloads)) for _ in range(rng.randrange(1, 4))}
    for number, data in enumerate(payloads):
        if number not in hit:
            yield data
            continue
        at = rng.randrange(len(data))
        match rng.randrange(7):
            case 0:
                yield data[:at]
            case 1:
                yield data
                yield data
            case 2:
                yield from rng.sample(payloads, 2)
            case 3:
                yield data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]
            case 4:
                # The kind and what follows it decide most.
                at = min(XLOG_HEADER_SIZE + rng.randrange(8), len(data) - 1)
                yield data[:at] + rng.choice((b"\0", b"\xff", rng.randbytes(1))) + data[at + 1 :]
            case 5:
                yield data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case _:
                pass


def run(payloads: list[bytes]) -> None:
    """A whole session over these payloads, with a replica that answers at once."""
    replica = Replica(gate=MAX_LSN)
    state = replica.session(0.0)
    state.streams = spool.Streams(limit=1 << 20)
    files: dict[int, bytes] = {}
    given = 0

    def perform(effects: list[events.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, events.SpoolAppend):
                files[effect.xid] = files.get(effect.xid, b"") + effect.data
            elif isinstance(effect, events.SpoolCut):
                files[effect.xid] = files[effect.xid][: effect.length]
            elif isinstance(effect, events.AppendToReplica):
                perform(core.step(state, events.Acknowledged(0.0, 0, 0, None)))

    for at in range(0, len(payloads), 50):
        perform(core.step(state, events.CopyDataReceived(0.0, payloads[at : at + 50])))
        while (xid := state.replaying) is not None:
            messages, used = spool.split(files[xid][given:], len(files[xid]))
            given = 0 if given + used == len(files[xid]) else given + used
            perform(core.step(state, events.Replayed(0.0, messages)))
        assert state.streams.spooled_bytes <= 1 << 20
        assert state.buffer_bytes <= 2 << 20


@pytest.mark.parametrize("rounds", [400, pytest.param(20_000, marks=pytest.mark.long)])
def test_a_damaged_session_ends_with_an_error_of_ours_or_well(seed: int, rounds: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    refused = 0
    payloads = honest(rng)
    run(payloads)
    for number in range(rounds):
        if number % 20 == 0:
            payloads = honest(rng)
        damaged = list(damage(payloads, rng))
        began = time.monotonic()
        try:
            run(damaged)
        except EXPECTED:
            refused += 1
        assert time.monotonic() - began < LIMIT_SECONDS
    assert refused > rounds // 4


def test_every_message_cut_at_every_byte_and_with_noise(seed: int) -> None:
    rng = random.Random(seed)
    sessions = [data for _ in range(20) for data in honest(rng) if data[:1] == b"w"]
    kinds = {data[XLOG_HEADER_SIZE]: data[XLOG_HEADER_SIZE:] for data in sessions}
    assert {*b"BCRYMSEcA"} <= kinds.keys()
    for message in kinds.values():
        for at in range(len(message)):
            for damaged in (message[:at], message[:at] + rng.randbytes(1) + message[at + 1 :]):
                for parse in PARSERS:
                    with contextlib.suppress(MalformedMessageError):
                        parse(damaged)
