"""A JSON file in which a process says how it is: replaced as a whole, so a reader sees one moment.

It is written from loops that must not stop: a disk that takes no file is no reason to. The log says so once, and the
reader sees by `updated_at` (seconds since the Unix epoch) that it is old. `pid` says who wrote it.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from walsender_bridge.runtime import logs, shared_files

_log = logs.logger(__name__)
#: Files that could not be written when it was last tried.
_untold: set[Path] = set()


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the file, with `pid` and `updated_at` added."""
    whole = {**record, "pid": os.getpid(), "updated_at": time.time()}
    try:
        replace(path, json.dumps(whole).encode())
    except OSError as error:
        if path not in _untold:
            _log.error("the status file cannot be written", where=str(path), reason=str(error))
            _untold.add(path)
    else:
        _untold.discard(path)


def replace(path: Path, content: bytes) -> None:
    """Give the file this content, for readers of now: whole, but not durable. Raises `OSError`; no draft is left then.

    A folder in memory that somebody has removed is made again.
    """
    try:
        _replace(path, content)
    except FileNotFoundError:
        if not shared_files.restore(path):
            raise
        _replace(path, content)


def _replace(path: Path, content: bytes) -> None:
    # Of this process alone, so that two that write at once leave one of both and no mixture.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def read(path: Path) -> dict[str, Any]:
    """What was last written, or {}: nobody ever wrote, or not such a file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
