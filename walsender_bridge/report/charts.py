"""Charts as SVG: lines over time, and bars of what ran. Pure. Text is escaped; nothing is loaded from elsewhere."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Final

WIDTH, HEIGHT = 960, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 28
#: Distinguishable without color vision, too (Okabe and Ito).
COLORS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a6d00")
_TICKS = 5
#: Where bars begin, right of their names.
_NAMES = 190
_ROW = 22
#: Points of a line; of more, the highest in each part is drawn.
_POINTS = 480


@dataclass(frozen=True)
class Line:
    """A line: (seconds since the Unix epoch, value); a None interrupts it. `dots`: no line between the points."""

    name: str
    points: Sequence[tuple[float, float | None]]
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment that is marked in a chart, and what happened then."""

    at: float
    text: str


@dataclass(frozen=True)
class Bar:
    """A row of a chart of bars: when it was down; None: until the end."""

    name: str
    down: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Span:
    """The time that a chart covers, in seconds since the Unix epoch."""

    begin: float
    end: float
    #: Where it begins in the chart; names are left of that.
    left: int = _LEFT

    def x(self, at: float) -> float:
        """Where a time is in the chart."""
        part = (min(max(at, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return round(self.left + part * (WIDTH - self.left - _RIGHT), 1)


def lines(
    span: Span,
    drawn: Sequence[Line],
    show: Callable[[float], str],
    marks: Sequence[Mark] = (),
) -> str:
    """A chart of these lines from 0 on; `show` makes the text of a value."""
    values = [value for line in drawn for _, value in line.points if value is not None]
    top = nice(max(values, default=0.0))
    parts = [*_marks(span, marks, HEIGHT), *_values_axis(top, show), *_time_axis(span, HEIGHT)]
    for number, line in enumerate(drawn):
        parts += _line(span, line, top, COLORS[number % len(COLORS)], show)
    legend = "".join(
        f'<span><i style="background:{COLORS[number % len(COLORS)]}"></i>{escape(line.name)}</span>'
        for number, line in enumerate(drawn)
    )
    return f'{_svg(parts, HEIGHT)}<p class="legend">{legend}</p>'


def bars(span: Span, drawn: Sequence[Bar], marks: Sequence[Mark] = ()) -> str:
    """A row for each bar, with gaps where it was down."""
    height = _TOP + _ROW * len(drawn) + _BOTTOM
    span = replace(span, left=_NAMES)
    parts = [*_marks(span, marks, height), *_time_axis(span, height)]
    for number, bar in enumerate(drawn):
        y = _TOP + _ROW * number
        parts.append(f'<text x="{_NAMES - 6}" y="{y + 14}" class="name">{escape(bar.name)}</text>')
        parts.append(_box(span, span.begin, span.end, y, "up", bar.name))
        for begin, end in bar.down:
            lasted = f"down for {end - begin:.1f} s" if end is not None else "down until the end"
            parts.append(
                _box(
                    span,
                    begin,
                    span.end if end is None else end,
                    y,
                    "down",
                    f"{bar.name}: {lasted}",
                )
            )
    return _svg(parts, height)


def nice(value: float) -> float:
    """The end of an axis that has this value: 1, 2 or 5 times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9))


def thinned(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """At most `_POINTS` of these points: the highest of each part, so no peak is lost."""
    size = math.ceil(len(points) / _POINTS)
    if size <= 1:
        return list(points)
    parts = (points[start : start + size] for start in range(0, len(points), size))
    return [max(part, key=lambda point: -1.0 if point[1] is None else point[1]) for part in parts]


def _svg(parts: Sequence[str], height: int) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'


def _y(value: float, top: float) -> float:
    return round(_TOP + (1 - value / top) * (HEIGHT - _TOP - _BOTTOM), 1)


def _line(
    span: Span, line: Line, top: float, color: str, show: Callable[[float], str]
) -> Iterator[str]:
    points = thinned(line.points)
    if not line.dots:
        for piece in _pieces(points):
            path = " ".join(f"{span.x(at)},{_y(value, top)}" for at, value in piece)
            yield f'<polyline points="{path}" stroke="{color}"/>'
    few = len(points) <= _POINTS // 4
    for at, value in points:
        if value is not None and (line.dots or few):
            told = escape(f"{line.name}, {clock(at - span.begin)}: {show(value)}")
            yield (
                f'<circle cx="{span.x(at)}" cy="{_y(value, top)}" r="2.5" fill="{color}">'
                f"<title>{told}</title></circle>"
            )


def _pieces(
    points: Sequence[tuple[float, float | None]],
) -> Iterator[list[tuple[float, float]]]:
    """The parts of a line between its interruptions."""
    piece: list[tuple[float, float]] = []
    for at, value in points:
        if value is not None:
            piece.append((at, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _box(span: Span, begin: float, end: float, y: float, kind: str, told: str) -> str:
    # A short outage has to be seen.
    width = max(span.x(end) - span.x(begin), 2.0)
    return (
        f'<rect x="{span.x(begin)}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" class="{kind}">'
        f"<title>{escape(told)}</title></rect>"
    )


def _marks(span: Span, marks: Sequence[Mark], height: int) -> Iterator[str]:
    for mark in marks:
        x = span.x(mark.at)
        yield (
            f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{height - _BOTTOM}" class="mark">'
            f"<title>{escape(f'{mark.text}, {clock(mark.at - span.begin)}')}</title></line>"
        )


def _values_axis(top: float, show: Callable[[float], str]) -> Iterator[str]:
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        y = _y(value, top)
        yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="grid"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" class="name">{escape(show(value))}</text>'


def _time_axis(span: Span, height: int) -> Iterator[str]:
    seconds = span.end - span.begin
    step = nice(seconds / 8)
    for number in range(int(seconds / step) + 1):
        x = span.x(span.begin + number * step)
        yield f'<text x="{x}" y="{height - 8}" class="time">{clock(number * step)}</text>'


def clock(seconds: float) -> str:
    """Time since the begin, as minutes and seconds."""
    tenths = round(seconds * 10)
    minutes, left = divmod(tenths, 600)
    return f"{minutes}:{left // 10:02d}" + (f".{left % 10}" if left % 10 else "")
