"""A file of decisions: one JSON object per line, append-only.

Invariant: `append` returns once its line is on disk. A line torn by a crash can be distinguished from a damaged one: it is
the beginning of an object without its end, and its decision has not taken effect.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from walsender_bridge.runtime.durable import sync_folder

_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append a line durably; the folder and the file are created if necessary. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        line = json.dumps(record).encode() + b"\n"
        # Start a new line after a torn one.
        file.write(line if _ends_whole(path) else b"\n" + line)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def read(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Read number (from 1) and record of each line, oldest first; None if it is damaged. Torn lines are skipped.

    A missing file has no lines. Raises `OSError`.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError:
            if not _was_cut_off(line):
                yield number, None
        else:
            yield number, record if isinstance(record, dict) else None


def _was_cut_off(line: bytes) -> bool:
    """Whether the line is the beginning of an object without its end: inside a string or an open brace."""
    bare = _STRING.sub(b"", line)
    return line.startswith(b"{") and (b'"' in bare or bare.count(b"{") > bare.count(b"}"))


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
