"""The small durable files: one of an earlier release is read, and written byte for byte; a value of another type is damage."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import control_state
from walsender_bridge.errors import CorruptError
from walsender_bridge.quorum.proposer import quorum_id_record
from walsender_bridge.quorum.proposer.member_changes import MemberRequest
from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.quorum.safekeeper import control_file
from walsender_bridge.quorum.safekeeper.archive import archived_file
from walsender_bridge.quorum.safekeeper.storage import position_file
from walsender_bridge.quorum.wal_server.slot_file import SlotFile
from walsender_bridge.quorum.wal_server.slots import WalServerSlot
from walsender_bridge.runtime import checksummed_json, commit_page, record_file
from walsender_bridge.runtime.folder import FolderDisk


@dataclass(frozen=True)
class File:
    """A file `name` of this content, which holds `value`. `load` raises `CorruptError`, whatever its reader does instead.

    `opened` and `sealed`: between its bytes and its record.
    """

    name: str
    content: bytes
    value: Any
    save: Callable[[Path], None]
    load: Callable[[Path], Any]
    opened: Callable[[bytes], dict[str, Any]] = checksummed_json.opened
    sealed: Callable[[dict[str, Any]], bytes] = checksummed_json.sealed


def framed(magic: bytes, version: int) -> dict[str, Any]:
    return {
        "opened": lambda content: record_file.unpack(content, magic, version)[1],
        "sealed": partial(record_file.pack, magic, version),
    }


SLOTS = [
    WalServerSlot("a", 0x1000000, HotStandbyFeedback(7, 1, 5, 1)),
    WalServerSlot("b", None, lost=True),
]
REQUEST = MemberRequest(3, frozenset({1, 2**100}), (("h", 5455),), 1_700_000_000.25, 7)
QUORUM = KnownQuorumId(0xAB, formed=True)
POSITION = position_file.StoragePosition(0x1000000, 0x1234567, cutting=True)
URL = "file:///archive"
ARCHIVED = archived_file.Archived(0x3000000, ((0x1000000, 0x2000000),), "ab12")
PAGE = commit_page.CommitPage(7, 1, 0x1000000, "why")


def _archived(folder: Path) -> archived_file.Archived:
    found = archived_file.load(FolderDisk(folder), URL, mine=True)
    if found == archived_file.Archived() and (folder / "archived.corrupt-1").exists():
        raise CorruptError("nothing counts as archived")
    return found


def _save_page(folder: Path) -> None:
    writer = commit_page.CommitPageWriter(folder / "page")
    writer._writer = "ab12"
    writer.write(PAGE)


def _page(folder: Path) -> str:
    _, why = commit_page.CommitPageReader(folder / "page").committed(7, 1)
    if "is damaged" in why:
        raise CorruptError(why)
    return why


FILES = [
    File(
        "slots",
        b'{"format": 2, "slots": [{"name": "a", "restart_lsn": 16777216, "feedback": {"xmin": 7, "xmin_epoch": 1,'
        b' "catalog_xmin": 5, "catalog_xmin_epoch": 1}, "lost": false}, {"name": "b", "restart_lsn": null, "feedback":'
        b' {"xmin": 0, "xmin_epoch": 0, "catalog_xmin": 0, "catalog_xmin_epoch": 0}, "lost": true}], "crc32c":'
        b" 636635980}",
        SLOTS,
        lambda folder: SlotFile(folder / "slots").save({each.name: each for each in SLOTS}),
        lambda folder: SlotFile(folder / "slots").load(),
    ),
    File(
        "members.json",
        b'{"generation": 3, "members": ["00000000000000000000000000000001", "00000010000000000000000000000000"],'
        b' "addresses": ["h:5455"], "asked_at": 1700000000.25, "quorum": "00000000000000000000000000000007", "crc32c":'
        b" 3979552600}",
        REQUEST,
        lambda folder: REQUEST.save(folder / "members.json"),
        lambda folder: MemberRequest.load(folder / "members.json"),
    ),
    File(
        "quorum-id.json",
        b'{"quorum": "000000000000000000000000000000ab", "formed": true, "crc32c": 3621371688}',
        QUORUM,
        lambda folder: quorum_id_record.save_file(folder / "quorum-id.json", QUORUM),
        lambda folder: quorum_id_record.load_file(folder / "quorum-id.json"),
    ),
    File(
        control_file.NAME,
        b'TUSKCTRL\x02\x00\x00\x00i\x02\x00\x00{"safekeeper": "ffffffffffffffffffffffffffffffff", "server":'
        b' {"system_id": 7000000000000000001, "major": 16, "segment_size": 16777216}, "node_id": [9,'
        b' "80000000000000000000000000000005"], "history": [[2, 256, 1], [9, 9223372036854775808, 2]], "configuration":'
        b' {"generation": 3, "members": ["00000000000000000000000000000001", "00000010000000000000000000000000"],'
        b' "new_members": ["00000000000000000000000000000005"], "term": 9, "distrusted":'
        b' ["00000000000000000000000000000001"], "quorum": "80000000000000000000000000000001"}, "fence": {"term": 8,'
        b' "timeline": 1}, "commit_lsn": 9223372036854775809, "restart_lsn": 512}\x99\x9f\x00\x90',
        control_state.STATE,
        lambda folder: control_file.save(FolderDisk(folder), control_state.STATE),
        lambda folder: control_file.load(FolderDisk(folder)),
        **framed(control_file.MAGIC, control_file.FORMAT),
    ),
    File(
        position_file.NAME,
        b'TUSKWALP\x01\x00\x00\x00Q\x00\x00\x00{"begin_lsn": 16777216, "durable_lsn": 19088743, "cutting": true,'
        b' "exact": false}\x8a,\x16p',
        POSITION,
        lambda folder: position_file.save(FolderDisk(folder), POSITION),
        lambda folder: position_file.load(FolderDisk(folder)),
        **framed(position_file.MAGIC, position_file.FORMAT),
    ),
    File(
        archived_file.NAME,
        b'TUSKARCH\x01\x00\x00\x00^\x00\x00\x00{"url": "file:///archive", "lsn": 50331648, "missing": [[16777216,'
        b' 33554432]], "mark": "ab12"}\xbe\xa6f\xe1',
        ARCHIVED,
        lambda folder: archived_file.save(FolderDisk(folder), URL, ARCHIVED),
        _archived,
        **framed(archived_file.MAGIC, archived_file.FORMAT),
    ),
    File(
        "page",
        b'tsklgate\x01\x00\x00\x00f\x00\x00\x00{"system_id": 7, "timeline": 1, "commit_lsn": 16777216, "why": "why",'
        b' "writer": "ab12", "sequence": 1}\x8c\x02\x86\xe5',
        "the safekeepers' proposer has not renewed its page yet",
        _save_page,
        _page,
        **framed(commit_page._MAGIC, commit_page._VERSION),
    ),
]


@pytest.fixture(params=FILES, ids=lambda file: file.name)
def file(request: pytest.FixtureRequest) -> File:
    found: File = request.param
    return found


def mistyped(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The record with one value, at the place that is named, of another type; each of its values in turn."""
    if place:
        yield place, {} if isinstance(value, list) else []
    if not isinstance(value, dict | list):
        return
    for name in value if isinstance(value, dict) else range(len(value)):
        for where, other in mistyped(value[name], f"{place}.{name}"):
            changed = value.copy()
            changed[name] = other
            yield where, changed


def test_one_of_an_earlier_release_is_read_and_written_byte_for_byte(
    tmp_path: Path, file: File
) -> None:
    (tmp_path / file.name).write_bytes(file.content)
    assert file.load(tmp_path) == file.value
    (tmp_path / file.name).unlink()
    file.save(tmp_path)
    assert (tmp_path / file.name).read_bytes() == file.content


def test_a_value_of_another_type_is_damage_though_the_checksum_is_right(
    tmp_path: Path, file: File
) -> None:
    record = file.opened(file.content)
    cases = [(place, other) for place, other in mistyped(record) if place != ".format"]
    assert len(cases) >= len(record) - 1
    for number, (place, other) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / file.name).write_bytes(file.sealed(other))
        with pytest.raises(CorruptError):
            pytest.fail(f"{place}: {file.load(folder)}")
