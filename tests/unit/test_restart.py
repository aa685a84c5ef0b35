"""The RESTART entry: a stream goes on with another history, under offsets that were never used."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.log_entries import SCHEMAS, EntryMaker
from walsender_bridge.change_log.entry import Codec, EntryKind, read_header, read_payload
from walsender_bridge.change_log.protocol import (
    START,
    CommitContext,
    IssuedCommit,
    Position,
    ReplicaReport,
)
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.restart import build_restart
from walsender_bridge.change_log.storage import records as segment_records
from walsender_bridge.errors import (
    CorruptError,
    DivergedError,
    InvalidReplicaError,
    MalformedMessageError,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.runtime import json_model

CLUSTER, OTHER = 7_001, 7_002
CONFIRMED = WalPosition(1, 0x100)


class Stream:
    """A hosted replica, its writer, and a repository that commits all it reports."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.make, self.version = folder / "s", EntryMaker(), 0
        self.host = HostedReplica(self.folder)
        self.host.create("s", "log")
        self.open()

    def open(self) -> None:
        self.session, status = self.host.open_writer(self.host.status().term + 1)
        self.make.crc = status.last_crc

    def again(self) -> None:
        self.host.close()
        self.host = HostedReplica(self.folder)
        self.host.recover()
        self.open()

    def append(
        self,
        *entries: bytes,
        confirm_to: WalPosition | None = None,
        gate: int = 2**64 - 1,
        system_id: int | None = None,
    ) -> None:
        schemas = list(SCHEMAS.values())
        self.host.append(self.session, entries, schemas, confirm_to, gate, system_id)

    def restart(self, confirm_to: WalPosition = CONFIRMED, system_id: int = OTHER) -> None:
        self.append(
            build_restart(self.make.crc), confirm_to=confirm_to, gate=0, system_id=system_id
        )
        self.make.crc = self.host.status().last_crc

    def commit(self) -> ReplicaReport:
        report = self.host.report("k")
        assert report is not None
        self.version += 1
        at = CommitContext(self.version, report.local_offset, report.local_offset, report.length)
        self.host.commit([IssuedCommit(at)], at.version)
        return report


@pytest.fixture
def stream(tmp_path: Path):
    made = Stream(tmp_path)
    made.append(
        made.make.whole(),
        made.make.whole(),
        confirm_to=WalPosition(3, 0x900),
        system_id=CLUSTER,
        gate=2**63,
    )
    made.commit()
    yield made
    made.host.close()


def test_an_entry_of_no_messages_that_verifies_in_its_place() -> None:
    data = build_restart(77)
    header = read_header(data)
    assert (header.kind, header.codec, header.previous_crc) == (EntryKind.RESTART, Codec.NONE, 77)
    assert header.starts_transaction
    assert header.ends_transaction
    assert read_payload(data, header) == b""


def test_offsets_go_on_and_lsns_begin_again_on_another_cluster(stream: Stream) -> None:
    before = stream.host.status()
    stream.restart()
    report = stream.commit()
    # The closed gate does not hold it: it shows nothing.
    assert report.position == replace(
        START, end_offset=4, latest_time=report.position.latest_time, history_start=4,
        bytes_total=report.position.bytes_total, crc=report.position.crc,
    )  # fmt: skip
    assert report.position.latest_time > 0
    after = stream.host.status()
    assert (after.confirmed_to, after.system_id) == ((1, 0x100), OTHER)
    assert (after.last_end_lsn, after.committed_end_lsn, after.last_timeline) == (0, 0, 0)
    # Transactions of lower LSNs, on a lower timeline.
    stream.make.lsn = 0x200
    stream.append(stream.make.whole())
    assert stream.commit().position.history_start == 4
    ended = stream.host.status()
    assert before.last_end_lsn > ended.last_end_lsn > 0
    assert ended.committed_end == 5
    # Only those of the present history are listed.
    listed = stream.host.transactions_after(0, 0, 10)
    assert [end for end, _, _ in listed] == [ended.last_end_lsn]
    assert stream.host.transactions_after(0, ended.last_end_lsn, 10) == []


def test_what_it_says_survives_a_crash_before_and_after_its_commit(stream: Stream) -> None:
    stream.restart()
    stream.again()
    status = stream.host.status()
    assert (status.confirmed_to, status.system_id, status.last_end_lsn) == ((1, 0x100), OTHER, 0)
    assert stream.commit().position.history_start == 4
    stream.again()
    report = stream.host.report("k")
    assert report is not None
    assert report.position.history_start == 4
    assert json_model.decode(ReplicaReport, json_model.encode(report)) == report
    # As another one behind it.
    stream.restart(confirm_to=WalPosition(1, 0x50), system_id=CLUSTER)
    assert stream.commit().position.history_start == 5


def test_it_is_a_commit_of_its_own_whatever_was_written_behind_it(stream: Stream) -> None:
    stream.restart()
    stream.make.lsn = 0x200
    stream.append(stream.make.whole(), stream.make.whole())
    lengths = [stream.commit().length for _ in range(2)]
    assert lengths == [1, 2]
    ends = [cut.end_offset for cut in stream.host.plan(1, 99, None, None)]
    assert ends == [3, 4, 6]


def test_it_is_not_cut_off_with_an_uncommitted_tail(stream: Stream) -> None:
    stream.restart()
    stream.make.lsn = 0x200
    stream.append(stream.make.whole())
    term = stream.host.status().term
    with pytest.raises(InvalidReplicaError, match="RESTART entry before 4 is not committed"):
        stream.host.cut_tail(term, 3)
    stream.commit()
    stream.host.cut_tail(term, 4)
    assert stream.host.status().end_offset == 4


def test_a_wrong_one_changes_nothing(stream: Stream) -> None:
    before = stream.host.status()
    entry = build_restart(stream.make.crc)
    for words in ({}, {"system_id": OTHER}, {"confirm_to": (1, 1)}):
        with pytest.raises(MalformedMessageError, match="RESTART entry comes alone"):
            stream.append(entry, **words)
    following = replace_crc(stream.make, read_header(entry).crc)
    with pytest.raises(MalformedMessageError, match="comes alone"):
        stream.append(entry, following.whole(), confirm_to=WalPosition(1, 1), system_id=OTHER)
    with pytest.raises(CorruptError):
        stream.append(build_restart(1), confirm_to=WalPosition(1, 1), system_id=OTHER)
    assert stream.host.status() == before
    # What nobody has seen would have no continuation.
    stream.append(stream.make.whole())
    with pytest.raises(MalformedMessageError, match="only 3 is committed"):
        stream.restart()
    # Without it, the first cluster stays.
    with pytest.raises(DivergedError):
        stream.append(system_id=OTHER)


def replace_crc(make: EntryMaker, crc: int) -> EntryMaker:
    following = EntryMaker()
    following.crc, following.lsn = crc, make.lsn
    return following


def test_rows_of_an_older_store_are_one_history() -> None:
    position = Position(4, 0x900, 1, 1, 3, 99, 5)
    row = IndexRow(CommitContext(7, 3, 3, 1), 20, position, 11)
    packed = segment_records.pack_row(row)
    older = packed[: 13 * 8 - 8]
    assert len(older) == 96
    assert segment_records.unpack_row(older, "here") == row
    assert segment_records.unpack_row(packed, "here") == row
    later = replace(row, position=replace(position, history_start=4))
    assert segment_records.unpack_row(segment_records.pack_row(later), "here") == later
    for size in range(97, len(packed)):
        with pytest.raises(CorruptError):
            segment_records.unpack_row(packed[:size], "here")
