"""Status files: a JSON file with the state of a process, replaced atomically, so a reader sees a consistent state.

Each kind of file has a model, a subclass of `Status` beside its writer, which readers get, too (`json_model`). A file
that is missing, damaged, or of another version that wrote other fields, has no status: a reader never fails because of it.

It is written from loops that must not stop if the disk is full. The failure is logged once, and the reader detects
from `updated_at` that the file is old.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from dataclasses import replace as changed
from pathlib import Path
from typing import TypeVar

from walsender_bridge.runtime import json_model, logs, processes, shared_files

_log = logs.logger()
#: Files that could not be written at the last attempt.
_unwritten: set[Path] = set()
_M = TypeVar("_M")
_N = TypeVar("_N")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What every status has. `pid`: of the writer; `updated_at`: seconds since the Unix epoch. `write` fills both."""

    pid: int = 0
    updated_at: float = 0.0

    def fresh(self, seconds: float) -> bool:
        """Whether the writer lives, and wrote it within these seconds."""
        return time.time() - self.updated_at < seconds and processes.alive(self.pid)


def write(path: Path, status: Status) -> None:
    """Replace the file, with this process's `pid` and the time now."""
    whole = changed(status, pid=os.getpid(), updated_at=time.time())
    try:
        replace(path, json_model.encode(whole))
    except OSError as error:
        if path not in _unwritten:
            _log.error("could not write status file", where=str(path), reason=str(error))
            _unwritten.add(path)
    else:
        _unwritten.discard(path)


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


def read(path: Path, kind: type[_M], *others: type[_N]) -> _M | _N | None:
    """The status last written, as the first of these models that the file has all fields of; None if it has no other."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    kinds: tuple[type[_M | _N], ...] = (kind, *others)
    for each in kinds:
        with contextlib.suppress(ValueError):
            return json_model.decode(each, content)
    return None
