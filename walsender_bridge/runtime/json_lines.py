"""A file of decisions: a JSON object on each line, only ever added to.

Invariant: `append` returns once its line is on disk. What a crash leaves of a line that was being written is told from
one that was damaged: it is the beginning of an object that does not end, and nobody was told of it.
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
    """Add a line, durably; the folder and the file are made if they are not there. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        line = json.dumps(record).encode() + b"\n"
        # Behind a line that was cut off, which so stays one line.
        file.write(line if _ends_whole(path) else b"\n" + line)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def read(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Number, from 1, and record of each line, oldest first; None: it is damaged. Those that were cut off are left out.

    Without a file there are no lines. Raises `OSError`.
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
    """It is the beginning of an object, without its end: inside of a string, or of a brace that is open."""
    bare = _STRING.sub(b"", line)
    return line.startswith(b"{") and (b'"' in bare or bare.count(b"{") > bare.count(b"}"))


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
