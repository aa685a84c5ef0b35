"""Files that are replaced whole, and lines that are only added: what a crash leaves of either."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from walsender_bridge.runtime import json_lines
from walsender_bridge.runtime.durable import replace_file

#: Braces and quotes inside of strings, so that where a line ends cannot be seen by its last letter.
LINES: list[dict[str, Any]] = [
    {"why": 'a "brace" }', "n": 1},
    {"list": [1, {"of": "}"}], "back": "\\"},
    {"ü": None},
]


def test_a_file_is_replaced_whole_and_its_folder_is_made(tmp_path):
    path = tmp_path / "made" / "file"
    replace_file(path, b"one", mode=0o600)
    assert path.read_bytes() == b"one"
    assert path.stat().st_mode & 0o777 == 0o600
    replace_file(path, b"other", mode=0o600)
    assert path.read_bytes() == b"other"
    assert [each.name for each in path.parent.iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_file(path, b"one")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no room"):
        replace_file(path, b"two")
    assert path.read_bytes() == b"one"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_name_is_on_disk_when_the_call_returns(tmp_path, monkeypatch):
    """The content, then the name, then the folder."""
    done = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        fsync(descriptor)

    def replaced(draft: Path, path: Path) -> Path:
        done.append("name")
        return replace(draft, path)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    replace_file(tmp_path / "file", b"one")
    assert [done[0].endswith(".tmp"), *done[1:]] == [True, "name", str(tmp_path)]


def test_lines_are_read_back_in_order_and_a_file_that_is_not_there_has_none(tmp_path):
    path = tmp_path / "made" / "lines"
    assert list(json_lines.read(path)) == []
    for line in LINES:
        json_lines.append(path, line)
    assert list(json_lines.read(path)) == list(enumerate(LINES, 1))


@pytest.mark.parametrize("last", LINES)
def test_a_line_that_was_cut_off_anywhere_is_none_and_the_next_one_counts(tmp_path, last):
    path = tmp_path / "lines"
    json_lines.append(path, LINES[0])
    before = path.read_bytes()
    json_lines.append(path, last)
    added = path.read_bytes()[len(before) :]
    for length in range(len(added) - 1):
        path.write_bytes(before + added[:length])
        assert [record for _, record in json_lines.read(path)] == [LINES[0]], added[:length]
        json_lines.append(path, LINES[1])
        assert [record for _, record in json_lines.read(path)] == [LINES[0], LINES[1]]
    # All of it but the end of the line: it was whole.
    path.write_bytes(before + added[:-1])
    json_lines.append(path, LINES[1])
    assert [record for _, record in json_lines.read(path)] == [LINES[0], last, LINES[1]]


@pytest.mark.parametrize("damaged", [b"nonsense", b'"text"', b"[1]", b'{"a": 1,}', b'{"a" 1}'])
def test_a_line_that_was_damaged_is_told_by_its_number(tmp_path, damaged):
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n' + damaged + b'\n{"b": 2}\n')
    assert list(json_lines.read(path)) == [(1, {"a": 1}), (2, None), (3, {"b": 2})]
