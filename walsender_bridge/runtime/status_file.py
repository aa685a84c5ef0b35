"""Status files: a JSON file with the state of a process, replaced atomically, so a reader sees a consistent state.

It is written from loops that must not stop if the disk is full. The failure is logged once, and the
reader detects from `updated_at` (seconds since the Unix epoch) that the file is old. `pid` is that of the writer.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from walsender_bridge.runtime import logs

_log = logs.logger(__name__)
#: Files that could not be written at the last attempt.
_unwritten: set[Path] = set()


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the file, with `pid` and `updated_at` added."""
    whole = {**record, "pid": os.getpid(), "updated_at": time.time()}
    try:
        replace(path, json.dumps(whole).encode())
    except OSError as error:
        if path not in _unwritten:
            _log.error("could not write status file", where=str(path), reason=str(error))
            _unwritten.add(path)
    else:
        _unwritten.discard(path)


def replace(path: Path, content: bytes) -> None:
    """Replace the file's content atomically, but not durably. Raises `OSError`, after removing the temporary file."""
    # The name is unique to this process, so that concurrent writers cannot mix their contents.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read(path: Path) -> dict[str, Any]:
    """The record last written, or {} if there is no valid file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
