"""Synchronizations by a holder of a log server's certificate that are none: nothing durable changes, and no report is hidden."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from tests.support.log_server_process import LogServer
from tests.support.tls import HOSTS
from walsender_bridge.change_log import actions, protocol
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.connection import connect
from walsender_bridge.change_log.protocol import MAX_COUNT, START, CommitContext
from walsender_bridge.change_log.replica.disk import BeforeRestart, Durable
from walsender_bridge.change_log.replica.synchronizer import KIND_STATE, OfferMessage
from walsender_bridge.change_log.storage.records import pack_state, unpack_state
from walsender_bridge.errors import CorruptError, MalformedMessageError, TusklineError
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.runtime.tls_files import TlsFiles

STREAM = "bank"
EMPTY = Durable(STREAM, "a log", term=3)


class Attacker:
    """A log server that offers the replica of `bank`, which is to be synchronized, whatever it likes."""

    def __init__(self, log_server: LogServer, tls: TlsFiles) -> None:
        self.log_server, self.tls = log_server, tls
        with log_server.client(log_server.repository) as client:
            client._call(m.LEARN, m.CreateRequest(STREAM, "a log"))

    def reports(self) -> dict[str, int]:
        """The terms that the log server reports, by stream; it may be asked for whatever was sent to it."""
        with self.log_server.client(self.log_server.repository) as client:
            found = client._call(m.REPORT, actions.Empty()).reports
        return {each.stream: each.term for each in found}

    def described(self) -> Any:
        with self.log_server.client(self.log_server.repository) as client:
            [its] = [
                r for r in client._call(m.REPLICAS, actions.Empty()).replicas if r.stream == STREAM
            ]
        return its

    def synchronize(self, durable: bytes, *batches: pa.RecordBatch) -> TusklineError | None:
        """Returns what the log server says; None: it has taken everything."""
        offer = OfferMessage("stranger", "a log", START, durable.hex())
        path = flight.FlightDescriptor.for_path("sync", STREAM)
        options = flight.FlightCallOptions(timeout=20)
        try:
            with actions.at("there"), connect(self.log_server.address, self.tls) as client:
                writer, reader = client.do_put(path, protocol.APPEND_SCHEMA, options)
                try:
                    writer.write_with_metadata(rows(), actions.encode(offer))
                    reader.read()
                    for batch in batches:
                        writer.write_batch(batch)
                        reader.read()
                    writer.done_writing()
                finally:
                    writer.close()
        except TusklineError as error:
            return error
        finally:
            assert self.log_server.process.poll() is None
        return None


def rows(*found: tuple[int | None, bytes | None]) -> pa.RecordBatch:
    kinds = pa.array([kind for kind, _ in found], pa.uint8())
    return pa.record_batch(
        [kinds, pa.array([data for _, data in found], pa.large_binary())],
        schema=protocol.APPEND_SCHEMA,
    )


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacker]:
    with LogServer.running(tmp_path_factory.mktemp("hostile")) as found:
        yield Attacker(found, found.authority.issue("log-server", hosts=HOSTS))


def _changed(**changes: Any) -> Durable:
    return replace(EMPTY, **changes)


NO_RECORDS: Sequence[Durable] = [
    _changed(term=1 << 70),
    _changed(term=MAX_COUNT + 1),
    _changed(term=-1),
    _changed(term=1.0),
    _changed(term="3"),
    _changed(gate_lsn=1 << 64),
    _changed(system_id=1 << 64),
    _changed(taken_at=1 << 63),
    _changed(sealed_at=1 << 65),
    _changed(confirmed_to=WalPosition(1 << 32, 0)),
    _changed(confirmed_to=WalPosition(1, -1)),
    _changed(before_restart=BeforeRestart(None, 1 << 65)),
    _changed(syncing_from=["a"]),
    _changed(was_sealed=1),
    _changed(context=CommitContext(1 << 70, 1, 1, 0)),
    _changed(context=CommitContext(1, 1, 1 << 70, 0)),
    _changed(position=replace(START, commit_time=1 << 63)),
    _changed(position=replace(START, bytes_total=1 << 66)),
]


@pytest.mark.parametrize("durable", NO_RECORDS, ids=range(len(NO_RECORDS)))
@pytest.mark.parametrize("at_end", [False, True])
def test_38_numbers_beyond_their_range_hide_no_report(
    attacker: Attacker, durable: Durable, at_end: bool
) -> None:
    """A number beyond 64 bits cannot be sent: once taken, no report of this log server could be read again."""
    begin = pack_state(EMPTY if at_end else durable)
    refused = attacker.synchronize(begin, rows((KIND_STATE, pack_state(durable))))
    assert isinstance(refused, CorruptError), refused
    assert "is damaged" in refused.what
    assert attacker.reports() == {"shop": attacker.log_server.status().term}
    assert attacker.described().status.term in {0, EMPTY.term}


STATE = (KIND_STATE, pack_state(EMPTY))


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (rows(STATE, STATE), "has 2 state records"),
        (rows((None, b"x")), "must not have null values"),
        (rows((KIND_STATE, None)), "must not have null values"),
        (rows((9, b"x")), "is malformed"),
        (rows((protocol.KIND_ENTRY, b"x")), "too short"),
        (rows((protocol.KIND_SCHEMA, b"x")), "truncated message"),
        (rows((KIND_STATE, b"x")), "is damaged"),
        (rows((2, b"x")), "does not match its checksum"),
    ],
    ids=range(8),
)
def test_38_a_batch_that_is_no_part_of_a_synchronization_changes_nothing(
    attacker: Attacker, batch: pa.RecordBatch, what: str
) -> None:
    refused = attacker.synchronize(pack_state(EMPTY), batch)
    assert isinstance(refused, MalformedMessageError | CorruptError), refused
    assert what in refused.what
    assert attacker.described().status.state == "learning"
    attacker.log_server.append(attacker.log_server.maker.whole())


@pytest.mark.parametrize("offsets", [(0, 1 << 30, 64), (64, 0, 64), (0, -(1 << 40), 64)])
def test_38_offsets_beyond_the_data_of_a_synchronization_do_not_end_the_process(
    attacker: Attacker, offsets: tuple[int, ...]
) -> None:
    buffers = [None, pa.py_buffer(np.array(offsets, np.int64)), pa.py_buffer(bytes(64))]
    data = pa.Array.from_buffers(pa.large_binary(), 2, buffers)
    kinds = pa.array([KIND_STATE] * 2, pa.uint8())
    batch = pa.record_batch([kinds, data], schema=protocol.APPEND_SCHEMA)
    refused = attacker.synchronize(pack_state(EMPTY), batch)
    assert isinstance(refused, MalformedMessageError), type(refused)
    assert attacker.described().status.state == "learning"


@pytest.mark.parametrize("stream", ["bank", "shop"])
def test_38_a_lesser_role_synchronizes_nothing(attacker: Attacker, stream: str) -> None:
    writer = Attacker.__new__(Attacker)
    writer.log_server, writer.tls = attacker.log_server, attacker.log_server.writer
    before = attacker.described()
    refused = writer.synchronize(pack_state(replace(EMPTY, stream=stream)))
    assert refused is not None
    assert "does not allow 'sync'" in refused.what
    assert attacker.described() == before


class PlainServer(flight.FlightServerBase):  # type: ignore[misc]  # Flight carries no types
    """It has no certificate, and counts the calls that reach it."""

    def __init__(self) -> None:
        self.calls = 0
        super().__init__("grpc://127.0.0.1:0")

    def do_put(self, *_: Any) -> None:
        self.calls += 1


def test_37_a_log_server_sends_nothing_without_tls(attacker: Attacker) -> None:
    """The role `repository` may not read: even an address that its holder invents never leads to a server without a certificate."""
    log_server = attacker.log_server
    with PlainServer() as plain, log_server.client(log_server.repository) as client:
        request = m.SynchronizeRequest("shop", f"grpc://127.0.0.1:{plain.port}", False)
        with pytest.raises(TusklineError):
            client._call(m.SYNCHRONIZE, request)
        assert plain.calls == 0


def test_a_synchronization_that_is_one_ends_well_after_a_refused_one(tmp_path: Path) -> None:
    with LogServer.running(tmp_path) as found:
        _ends_well(Attacker(found, found.authority.issue("log-server", hosts=HOSTS)))


def _ends_well(attacker: Attacker) -> None:
    assert attacker.synchronize(pack_state(EMPTY), rows(STATE, STATE)) is not None
    assert attacker.synchronize(pack_state(EMPTY), rows(STATE)) is None
    assert attacker.described().status.state == "sealed"
    assert attacker.reports()[STREAM] == EMPTY.term


def test_a_record_is_checked_where_it_is_read(tmp_path: Path) -> None:
    """Also from a disk, whose checksum a wrong program may have made."""
    assert unpack_state(pack_state(EMPTY), tmp_path) == EMPTY
    for durable in NO_RECORDS:
        with pytest.raises(CorruptError, match="is damaged"):
            unpack_state(pack_state(durable), tmp_path)
