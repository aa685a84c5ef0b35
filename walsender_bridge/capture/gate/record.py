"""The record of a source's gate decisions: a file of JSON lines, one per decision, never rewritten.

Keys: `at` (seconds since the Unix epoch), `decision`, `candidate`, `timeline`, `position` (an LSN), `why`. It is the
operator's record, and what the next session begins with: who was left out stays so until it streams again.

Invariant: `add` returns once the line is on disk (`json_lines`), and a line is whole: what belongs together is in one,
so a crash leaves either nothing of it or all. A line torn by a crash does not count: its decision never took effect, and is
made again. A line of a newer timeline ends the older one, whatever it decides.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from walsender_bridge.capture.gate.core import Decided, GateDecision, Standing
from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.runtime import disk_full, json_lines

_STANDINGS = {
    GateDecision.DEGRADED: Standing.DEGRADED,
    GateDecision.PROMOTED: Standing.PROMOTED,
    GateDecision.REJOINED: Standing.COUNTED,
}


class GateRecord:
    """The file at `path`, which need not exist. Raises `CorruptError` for a complete line that is not a decision."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.timeline = 0
        self.standings: dict[str, Standing] = {}
        #: The candidates that have rejoined on this timeline, and so are standbys of its server.
        self.streamed: set[str] = set()
        for line in decisions(path):
            self._take(GateDecision(line["decision"]), line["candidate"], line["timeline"])

    def add(self, decided: Decided) -> None:
        """Make a decision durable. Raises the errors of `disk_full`, in which case the decision is void."""
        line = {
            "at": time.time(),
            "decision": decided.decision,
            "candidate": decided.candidate,
            "timeline": decided.timeline,
            "position": format_lsn(decided.position),
            "why": decided.why,
        }
        with disk_full.named(self._path):
            json_lines.append(self._path, line)
        self._take(decided.decision, decided.candidate, decided.timeline)

    def _take(self, decision: GateDecision, candidate: str, timeline: int) -> None:
        if timeline > self.timeline:
            self.timeline = timeline
            self.streamed.clear()
            # On another timeline another candidate may be the server.
            for name, standing in self.standings.items():
                if standing is Standing.PROMOTED:
                    self.standings[name] = Standing.COUNTED
        if decision in _STANDINGS:
            self.standings[candidate] = _STANDINGS[decision]
        if decision is GateDecision.REJOINED:
            self.streamed.add(candidate)


def decisions(path: Path) -> Iterator[dict[str, Any]]:
    """The decisions, oldest first. Raises `CorruptError`."""
    for number, record in json_lines.read(path):
        if record is None or not _is_decision(record):
            raise CorruptError(
                f"line {number} is not a decision of the commit gate",
                where=str(path),
                repair="remove that line, or the file, after which every candidate counts again",
            )
        yield record


def _is_decision(record: dict[str, Any]) -> bool:
    return (
        record.get("decision") in {*GateDecision}
        and isinstance(record.get("candidate"), str)
        and isinstance(record.get("timeline"), int)
    )
