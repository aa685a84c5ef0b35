"""The report of a benchmark: rounds as measured, medians, and ratios if the results are equal."""

import json
import os
import platform
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of one side. `wall` and `cpu` in seconds, `load` the machine's before it (1 minute).

    `result` is what must be the same on both sides (None: it is compared elsewhere); `more` holds further
    figures.
    """

    side: str
    work: str
    rows: int
    wall: float
    cpu: float
    result: Any
    load: float
    more: dict[str, float] = field(default_factory=dict)


@dataclass
class Report:
    """Collects the rounds of one benchmark. `peers`: name and version."""

    name: str
    peers: list[dict[str, str]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    absolute: dict[str, float] = field(default_factory=dict)
    #: Why the results of two sides differ.
    unequal: list[str] = field(default_factory=list)
    _digests: dict[str, str] = field(default_factory=dict)

    def add(self, turn: Round) -> None:
        """Keep a round; its result must be that of every other round of the same work."""
        first = next((r for r in self.rounds if r.work == turn.work and r.result is not None), turn)
        if turn.result is not None and first.result != turn.result:
            self.unequal.append(
                f"{turn.work}: {first.side} has {_short(first.result)}, "
                f"{turn.side} has {_short(turn.result)}"
            )
        self.rounds.append(turn)

    def same_bytes(self, work: str, digest: str) -> None:
        """All rounds of our own side must have produced the same bytes."""
        if self._digests.setdefault(work, digest) != digest:
            self.unequal.append(f"{work}: two rounds of our own differ")

    def values(self, side: str, work: str, name: str) -> list[float]:
        """One figure of each round of a side: `wall`, `cpu`, `rows`, `rows_s`, `rows_cpu_s`, or more."""
        found = []
        for turn in self.rounds:
            if (turn.side, turn.work) == (side, work):
                own = {"wall": turn.wall, "cpu": turn.cpu, "rows": float(turn.rows)} | turn.more
                own["rows_s"] = turn.rows / turn.wall if turn.wall else 0.0
                own.setdefault("rows_cpu_s", turn.rows / turn.cpu if turn.cpu else 0.0)
                if name in own:
                    found.append(own[name])
        return found

    def median(self, side: str, work: str, name: str) -> float:
        """The median of a figure, also kept in `absolute`; 0 if that side did not run."""
        values = self.values(side, work, name)
        found = statistics.median(values) if values else 0.0
        if values:
            self.absolute[f"{side}_{name}_{work}"] = round(found, 4)
        return found

    def ratio(self, key: str, own: float, peer: float) -> None:
        """Own by peer, if both ran."""
        if own and peer:
            self.ratios[key] = round(own / peer, 3)

    def record(self) -> dict[str, Any]:
        """The JSON object. Ratios are left out if the results differ."""
        sides = Counter((turn.side, turn.work) for turn in self.rounds)
        return {
            "name": self.name,
            "rounds": min(sides.values(), default=0),
            "results_equal": not self.unequal,
            "unequal": self.unequal,
            "peers": self.peers,
            "ratios": {} if self.unequal else self.ratios,
            "absolute": self.absolute,
            "machine": machine(),
            "raw": [asdict(turn) | {"result": _short(turn.result)} for turn in self.rounds],
        }


def _short(result: Any) -> str:
    text = result if isinstance(result, str) else json.dumps(result, default=str)
    return text if len(text) <= 200 else text[:200] + "..."


def machine() -> dict[str, Any]:
    """The machine, and its load."""
    info = Path("/proc/cpuinfo")
    models = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else ())
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": [round(each, 2) for each in os.getloadavg()],
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def load() -> float:
    """The machine's load over the last minute."""
    return round(os.getloadavg()[0], 2)


def keep(record: dict[str, Any]) -> Path:
    """Write the whole record to a file. Returns its path."""
    folder = Path(".cache/benchmarks")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['name']}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(record, indent=1))
    return path
