"""An observation as the lines that `top` shows on a screen. Pure.

Problems come first, each with its cause; then sources, safekeepers, slots, tables and processes. A part that is not
configured has no line, and lines that do not fit are counted.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from walsender_bridge.observability import lag
from walsender_bridge.observability.lag import Lag
from walsender_bridge.observability.observation import Observation, SourceView
from walsender_bridge.runtime.printable import printable
from walsender_bridge.runtime.table_text import columns_text

_UNKNOWN: Final = "-"
#: The fewest lines of a section: its title, a row, and the number of further rows.
_LEAST: Final = 3
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")


class Line(NamedTuple):
    """A line and its style, as Rich names it."""

    text: str
    style: str = ""


class _ViewSection(NamedTuple):
    name: str
    titles: tuple[str, ...]
    rows: list[tuple[object, ...]]


def screen(seen: Observation, width: int, height: int) -> list[Line]:
    """At most `height` lines of at most `width` cells."""
    head = [Line(_crop(_head(seen), width), "bold")]
    head += _problems([*seen.problems, *seen.degraded], width, max(2, height // 2 - 1))
    sections = [section for section in _sections(seen) if section.rows]
    lines, hidden = _fill(sections, width, height - len(head))
    if hidden:
        lines, hidden = _fill(sections, width, height - len(head) - 1)
        lines.append(Line(_crop(_more(hidden), width)))
    return (head + lines)[:height]


def _head(seen: Observation) -> str:
    text = f"version {seen.log.version if seen.log is not None else _UNKNOWN}"
    if seen.lake is not None:
        ago = seen.at - seen.lake.published_at
        return f"{text}, epoch {seen.lake.epoch}, published {ago:.0f} s ago, term {seen.lake.term}"
    return f"{text}, no epoch yet" if seen.lake_configured else text


def _problems(problems: Sequence[str], width: int, most: int) -> list[Line]:
    """The problems, wrapped: as many complete ones as fit into `most` lines, and of the first as much as fits."""
    wrapped = [
        textwrap.wrap(printable(problem), width, initial_indent="! ", subsequent_indent="  ")
        for problem in problems
    ]
    if sum(map(len, wrapped)) <= most:
        return [Line(line, "red") for each in wrapped for line in each]
    first, *others = wrapped
    lines = first[: most - 1]
    while others and len(lines) + len(others[0]) < most:
        lines += others.pop(0)
    lines.append(_more({"problems": len(others)}) if others else "... see tuskline status")
    return [Line(line, "red") for line in lines]


def _fill(
    sections: Sequence[_ViewSection], width: int, height: int
) -> tuple[list[Line], dict[str, int]]:
    """The sections in `height` lines, and how many rows are in none of them, by section.

    Tables get the remaining lines, so each section before them takes a third at most.
    """
    lines: list[Line] = []
    hidden: dict[str, int] = {}
    for section in sections:
        room = height - len(lines)
        if section.name != "tables":
            room = min(room, max(_LEAST, height // 3))
        title, *rows = columns_text(section.titles, section.rows, width)
        if len(rows) >= room:
            kept = room - 2
            if kept < 1:
                hidden[section.name] = len(rows)
                continue
            rows = [*rows[:kept], _more({section.name: len(rows) - kept})]
        lines.append(Line(title, "bold"))
        lines += [Line(_crop(row, width)) for row in rows]
    return lines, hidden


def _more(counts: Mapping[str, int]) -> str:
    return "... and " + ", ".join(f"{count} more {name}" for name, count in counts.items())


def _crop(text: str, width: int) -> str:
    return columns_text([text], [], width)[0]


def _sections(seen: Observation) -> list[_ViewSection]:
    stages = [stage for stage in lag.STAGES if stage != "merge" or seen.lake_configured]
    found = lag.of_sources(seen)
    sources = [
        _source(source, [x for x in found if x.source == source.name], stages)
        for source in seen.sources
    ]
    return [
        _ViewSection("sources", ("source", "state", *stages, "slot holds"), sources),
        _ViewSection(
            "safekeepers",
            ("safekeeper", "state", "behind", "commit", "flush", "term"),
            _quorum_rows(seen),
        ),
        _ViewSection(
            "slots", ("slot", "candidate", "verdict", "lag", "proven", "reason"), _slot_rows(seen)
        ),
        _ViewSection(
            "tables",
            ("table", "state", "rows", "versions behind", "behind"),
            [
                (t.table, t.state, t.rows, _known(t.versions), _seconds(t.seconds))
                for t in sorted(lag.of_tables(seen), key=lambda t: t.state == "live")
            ],
        ),
        _ViewSection(
            "processes",
            ("process", "state", "pid", "restarts", "memory", "CPU"),
            [
                (
                    p.name,
                    p.state,
                    _known(p.pid),
                    p.restarts,
                    _bytes(p.memory),
                    _seconds(p.cpu_seconds),
                )
                for p in seen.processes
            ],
        ),
    ]


def _source(source: SourceView, found: Sequence[Lag], stages: Sequence[str]) -> tuple[object, ...]:
    behind = {each.stage: each for each in found}
    held = (source.server or {}).get("retained_bytes")
    return (source.name, source.state, *(_lag(behind[stage]) for stage in stages), _bytes(held))


def _lag(each: Lag) -> str:
    """Bytes, and seconds unless they are 0 or unknown."""
    if each.bytes is None or not each.seconds:
        return _bytes(each.bytes)
    return f"{_bytes(each.bytes)}, {_seconds(each.seconds)}"


def _quorum_rows(seen: Observation) -> list[tuple[object, ...]]:
    """The quorum, then each safekeeper."""
    if seen.quorum is None:
        return []
    rows: list[tuple[object, ...]] = []
    if seen.quorum.proposer_here:
        lost = "starting" if seen.quorum.starts else "LOST"
        state = "follows" if seen.quorum.quorum else lost
        proposer, session = seen.quorum.proposer, seen.quorum.session
        lsns = (
            _known(proposer and proposer.commit_lsn),
            _known(session and session.end_lsn),
        )
        behind = _bytes(seen.quorum.lag_bytes)
        rows.append(("quorum", state, behind, *lsns, _known(session and session.term)))
    for each in seen.quorum.safekeepers:
        own, behind = each.own, _bytes(each.lag_bytes)
        lsns = (_known(own and own.commit_lsn), _known(each.flush_lsn))
        rows.append((each.name, each.state, behind, *lsns, _known(own and own.term)))
    return rows


def _slot_rows(seen: Observation) -> list[tuple[object, ...]]:
    """Each slot on each candidate."""
    if seen.slots is None:
        return []
    return [
        (
            *(row[name] for name in ("slot", "candidate", "verdict")),
            _bytes(row["lag_bytes"]),
            _UNKNOWN if row["age"] is None else f"{_seconds(row['age'])} ago",
            row["reason"],
        )
        for row in seen.slots.rows
    ]


def _known(value: Any) -> object:
    return _UNKNOWN if value is None else value


def _seconds(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.1f} s"


def _bytes(value: float | None) -> str:
    """In the unit that leaves at most three digits before the decimal point."""
    if value is None:
        return _UNKNOWN
    unit = 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{value:.0f} B"
