"""What was decided about a source's gate: a file of JSON lines, one for each decision, never rewritten.

Keys: `at` (seconds since the Unix epoch), `decision`, `candidate`, `timeline`, `position` (an LSN), `why`. It is the
operator's record, and what the next session begins with: who was left out stays so until it streams again.

Invariant: `add` returns once the line is on disk. A line that a crash cut off is none: what it decided was never told.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from walsender_bridge.capture.gate import Decided, Decision, Standing
from walsender_bridge.durable import sync_folder
from walsender_bridge.errors import CorruptError
from walsender_bridge.wire.lsn import format_lsn

_STANDINGS = {
    Decision.DEGRADED: Standing.DEGRADED,
    Decision.PROMOTED: Standing.PROMOTED,
    Decision.REJOINED: Standing.COUNTED,
}


class GateRecord:
    """The file at `path`, which need not be there. Raises `CorruptError` for a whole line that is none of ours."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.timeline = 0
        self.standings: dict[str, Standing] = {}
        for line in decisions(path):
            self._take(Decision(line["decision"]), line["candidate"], line["timeline"])

    def add(self, decided: Decided) -> None:
        """Make a decision durable."""
        line = {
            "at": time.time(),
            "decision": decided.decision,
            "candidate": decided.candidate,
            "timeline": decided.timeline,
            "position": format_lsn(decided.position),
            "why": decided.why,
        }
        new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:
            # Behind a line that a crash cut off, so that it stays one bad line.
            file.write(b"" if _ends_whole(self._path) else b"\n")
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            sync_folder(self._path.parent)
        self._take(decided.decision, decided.candidate, decided.timeline)

    def _take(self, decision: Decision, candidate: str, timeline: int) -> None:
        if decision is not Decision.TIMELINE:
            self.standings[candidate] = _STANDINGS[decision]
            return
        self.timeline = timeline
        # On another timeline somebody else may be the server.
        for name, standing in self.standings.items():
            if standing is Standing.PROMOTED:
                self.standings[name] = Standing.COUNTED


def decisions(path: Path) -> Iterator[dict[str, Any]]:
    """The decisions, oldest first. Raises `CorruptError`."""
    text = b""
    with contextlib.suppress(FileNotFoundError):
        text = path.read_bytes()
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            record: dict[str, Any] = json.loads(line)
            Decision(record["decision"])
            if not isinstance(record["candidate"], str) or not isinstance(record["timeline"], int):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            if _cut_off(line):
                continue
            raise CorruptError(
                f"line {number} is no decision of the commit gate",
                where=str(path),
                repair="remove that line, or the file: every candidate then counts again",
            ) from None
        yield record


def _cut_off(line: bytes) -> bool:
    """Whether a crash may have left this: the beginning of a line of ours, without its end."""
    return line.startswith(b'{"at"'[: len(line)]) and not line.endswith(b"}")


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return True
        file.seek(size - 1)
        return file.read(1) == b"\n"
