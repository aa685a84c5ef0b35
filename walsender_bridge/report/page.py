"""A recording as one HTML page: no script, nothing that is loaded from elsewhere, all text escaped. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from statistics import median, quantiles
from typing import Final

from walsender_bridge.observability.lag import STAGES
from walsender_bridge.report import charts
from walsender_bridge.report.charts import Bar, Line, Mark, Span
from walsender_bridge.report.recording import (
    Outage,
    Recording,
    StageLag,
    epoch_after,
    outages,
    problem_spans,
)
from walsender_bridge.runtime.times import iso_time

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin: 2em 0 .2em } p { margin: .3em 0 }
.note { color: #555 } svg { width: 100%; height: auto; display: block }
svg polyline { fill: none; stroke-width: 1.6 } svg text { font: 11px system-ui, sans-serif; fill: #555 }
svg .name { text-anchor: end } svg .time { text-anchor: middle } svg .grid { stroke: #e4e4e4 }
svg .mark { stroke: #d55e00; stroke-dasharray: 3 3; stroke-width: 1.4 } svg .up { fill: #cfe3d6 } svg .down { fill: #d55e00 }
.legend span { margin-right: 1.2em; font-size: 13px } .legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px }
table { border-collapse: collapse; font-size: 14px } th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #e4e4e4 }
td.number { text-align: right }
.figures { display: flex; flex-wrap: wrap; gap: 10px } .figures div { border: 1px solid #ddd; border-radius: 6px; padding: 6px 12px }
.figures b { display: block; font-size: 1.25em; font-weight: 600 } .figures small { color: #555 }
"""
_UNITS: Final = ("B", "kB", "MB", "GB", "TB")
_STAGE_WORDS: Final = {
    "capture": "capture: from the WAL into the log",
    "gate": "gate: until failover candidates have it",
    "barrier": "barrier: until a version cuts it",
    "merge": "merge: until an epoch has it",
}


def page(recording: Recording) -> str:
    """The whole page."""
    span = Span(recording.begin, recording.end)
    marks = [Mark(kill.at, f"killed: {kill.what}") for kill in recording.kills]
    down = outages(recording.samples)
    body = [
        *_head(recording),
        *_freshness(recording, span, marks),
        *_lag(recording, span, marks),
        *_epochs(recording, span, marks),
        *_processes(recording, span, marks, down),
        *_kills(recording, down),
        *_problems(recording),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(recording.title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def seconds_text(value: float) -> str:
    """Seconds for people."""
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s" if value else "0 s"


def bytes_text(value: float) -> str:
    """Bytes for people, in decimal units."""
    for unit in _UNITS[:-1]:
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} {_UNITS[-1]}"


def _head(recording: Recording) -> Iterator[str]:
    begin, end = iso_time(recording.begin), iso_time(recording.end)
    yield f"<h1>{escape(recording.title)}</h1>"
    yield (
        f'<p class="note">{begin} to {end}; {len(recording.samples)} samples, one every '
        f"{recording.every:g} s. Times in the charts are minutes and seconds since the beginning; dashed lines are kills.</p>"
    )
    figures = {
        "epochs": len(recording.epochs),
        "row changes": f"{sum(mark.changes for mark in recording.epochs):,}",
        **recording.figures,
    }
    delays = [delay.seconds for delay in recording.delays]
    if len(delays) > 1:
        figures["p50 from commit to epoch"] = seconds_text(median(delays))
        figures["p99 from commit to epoch"] = seconds_text(quantiles(delays, n=100)[98])
    shown = "".join(
        f"<div><b>{escape(str(value))}</b><small>{escape(name)}</small></div>"
        for name, value in figures.items()
    )
    yield f'<div class="figures">{shown}</div>'


def _freshness(recording: Recording, span: Span, marks: Sequence[Mark]) -> Iterator[str]:
    yield "<h2>Freshness</h2>"
    if recording.delays:
        yield '<p class="note">Seconds from a commit to the first epoch that has it, by the time of the commit.</p>'
        found = sorted((delay.at, delay.seconds) for delay in recording.delays)
        yield charts.lines(span, [Line("commits", found)], seconds_text, marks)
        return
    yield '<p class="note">Age of each source\'s newest transaction in an epoch when it was published.</p>'
    names = sorted({name for mark in recording.epochs for name in mark.ages})
    drawn = [
        Line(name, [(mark.at, mark.ages.get(name)) for mark in recording.epochs], dots=True)
        for name in names
    ]
    yield charts.lines(span, drawn, seconds_text, marks)


def _lag(recording: Recording, span: Span, marks: Sequence[Mark]) -> Iterator[str]:
    yield "<h2>Lag by stage</h2>"
    yield (
        '<p class="note">How far each stage is behind the one before, of the source that is farthest behind. '
        "A gap: unknown, since a part did not answer.</p>"
    )
    seen = {each.stage for one in recording.samples for each in one.lags if each.bytes}
    stages = [stage for stage in STAGES if stage in seen]

    def drawn(value: Callable[[StageLag], float | None]) -> list[Line]:
        return [
            Line(
                _STAGE_WORDS[stage],
                [
                    (one.at, _most(value(each) for each in one.lags if each.stage == stage))
                    for one in recording.samples
                ],
            )
            for stage in stages
        ]

    yield charts.lines(span, drawn(lambda each: each.seconds), seconds_text, marks)
    yield charts.lines(span, drawn(lambda each: each.bytes), bytes_text, marks)


def _most(values: Iterable[float | None]) -> float | None:
    """The highest; None if one is unknown, or there is none."""
    found = list(values)
    known = [value for value in found if value is not None]
    return max(known) if known and len(known) == len(found) else None


def _epochs(recording: Recording, span: Span, marks: Sequence[Mark]) -> Iterator[str]:
    yield "<h2>Epochs</h2>"
    yield '<p class="note">Seconds that the round of each epoch took, and seconds since the previous epoch.</p>'
    pairs = zip(recording.epochs, recording.epochs[1:], strict=False)
    drawn = [
        Line("round", [(mark.at, mark.seconds) for mark in recording.epochs], dots=True),
        Line("since the previous one", [(two.at, two.at - one.at) for one, two in pairs]),
    ]
    yield charts.lines(span, drawn, seconds_text, marks)


def _processes(
    recording: Recording, span: Span, marks: Sequence[Mark], down: Sequence[Outage]
) -> Iterator[str]:
    names = sorted({name for each in recording.samples for name in each.pids})
    if not names:
        return
    yield "<h2>Processes</h2>"
    yield '<p class="note">Green: running. Red: down, until the sample that shows it running again.</p>'
    drawn = [
        Bar(name, [(each.begin, each.end) for each in down if each.process == name])
        for name in names
    ]
    yield charts.bars(span, drawn, marks)


def _kills(recording: Recording, down: Sequence[Outage]) -> Iterator[str]:
    if not recording.kills:
        return
    yield "<h2>Kills and recoveries</h2>"
    rows = []
    for kill in recording.kills:
        ended = [
            each
            for each in down
            if each.begin - recording.every <= kill.at <= (each.end or kill.at)
        ]
        again = max((each.end - kill.at for each in ended if each.end), default=None)
        rows.append(
            (
                _since(recording, kill.at),
                kill.what,
                ", ".join(dict.fromkeys(each.process for each in ended)),
                "" if again is None else seconds_text(again),
                _or_none(epoch_after(kill, recording.epochs)),
            )
        )
    yield _table(("at", "killed", "was down", "all running after", "next epoch after"), rows)


def _problems(recording: Recording) -> Iterator[str]:
    yield "<h2>Problems</h2>"
    found = problem_spans(recording.samples)
    if not found:
        yield "<p>None was observed.</p>"
        return
    yield _table(
        ("first seen", "last seen", "problem"),
        [(_since(recording, first), _since(recording, last), text) for text, first, last in found],
    )


def _since(recording: Recording, at: float) -> str:
    return charts.clock(at - recording.begin)


def _or_none(value: float | None) -> str:
    return "none" if value is None else seconds_text(value)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
