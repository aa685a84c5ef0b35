"""The file that records a quorum's id at the bridge: damage in it is never taken for another quorum."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from walsender_bridge.cli.children import _PROPOSER_FINAL
from walsender_bridge.errors import CorruptError, UnavailableError
from walsender_bridge.quorum.proposer.blocking_executor import BlockingExecutor
from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId
from walsender_bridge.quorum.proposer.quorum_id_record import (
    QuorumRecord,
    draw,
    load_file,
    save_file,
)
from walsender_bridge.runtime import checksummed_json
from walsender_bridge.runtime.waker import Waker

KNOWN = KnownQuorumId(0x883E028C9C7A72C4A5B05BC3B30B470F, formed=True)


def test_a_flipped_bit_never_names_another_quorum(tmp_path):
    file = tmp_path / "quorum-id.json"
    save_file(file, KNOWN)
    assert load_file(file) == KNOWN
    whole = file.read_bytes()
    refused = 0
    for bit in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        try:
            assert load_file(file) == KNOWN, bytes(flipped)
        except CorruptError:
            refused += 1
    # What is left is the name of the checksum, without which the file is one of an earlier release.
    assert refused >= (len(whole) - len("crc32c")) * 8


@pytest.mark.parametrize("content", [b"", bytes(60), b"[]", b'{"quorum": "8"', b"\xff"])
def test_what_is_no_record_is_refused_with_a_way_out(tmp_path, content):
    file = tmp_path / "quorum-id.json"
    file.write_bytes(content)
    with pytest.raises(CorruptError, match="tuskline down, tuskline up"):
        load_file(file)


def test_a_file_of_an_earlier_release_is_read(tmp_path):
    file = tmp_path / "quorum-id.json"
    file.write_text(json.dumps({"quorum": f"{KNOWN.quorum:032x}", "formed": True}))
    assert load_file(file) == KNOWN
    # Since it has a checksum, its bytes are the same.
    save_file(file, KNOWN)
    assert file.read_text() == (
        '{"quorum": "883e028c9c7a72c4a5b05bc3b30b470f", "formed": true, "crc32c": 131658297}'
    )


def test_a_file_that_cannot_be_read_for_now_is_no_damaged_one(tmp_path, monkeypatch):
    """It was kept aside, and the proposer ended for good once no other could be written: COMMIT hung."""
    file = tmp_path / "quorum-id.json"
    save_file(file, KNOWN)
    for number in (errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOSPC):

        def failing(*_: object, number: int = number, **__: object) -> NoReturn:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", failing)
            patch.setattr(checksummed_json, "replace_file", failing)
            for attempt in (
                lambda: load_file(file),
                lambda: save_file(file, KNOWN),
                lambda: draw(file),
                lambda: QuorumRecord(file, "", "", BlockingExecutor(Waker())).settled(KNOWN.quorum),
            ):
                with pytest.raises(UnavailableError, match="the operation is retried") as refused:
                    attempt()
                assert refused.value.cause not in _PROPOSER_FINAL
            # The server has it.
            executor: Any = SimpleNamespace(ask=lambda *_: None)
            QuorumRecord(file, "", "", executor, formed=True).settled(KNOWN.quorum)
        assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert load_file(file) == KNOWN
