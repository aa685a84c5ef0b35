"""Rows as people read them: aligned as psql does it, nothing cut; what is too wide is shown expanded. Pure.

What is not known, or empty, is `-` or nothing: no reader has to know how Python writes it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from walsender_bridge.runtime.printable import printable

_UNKNOWN = "-"


def value_text(value: Any) -> str:
    """One value on one line, without control characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value in ({}, [], ()):
        return _UNKNOWN
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {value_text(each)}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(value_text(each) for each in value)
    return printable(str(value))


def rows_text(rows: Sequence[Mapping[str, Any]], width: int | None) -> list[str]:
    """Lines for rows that have the same columns; expanded if a line were longer than `width` (None: never)."""
    titles = [str(name).replace("_", " ") for name in rows[0]]
    cells = [[value_text(value) for value in row.values()] for row in rows]
    columns = list(zip(titles, *cells, strict=True))
    widths = [max(map(cell_len, column)) for column in columns]
    if width is not None and sum(widths) + 3 * (len(widths) - 1) + 2 > width:
        return _expanded(titles, cells)
    right = [
        all(_is_number(value) for value in column) for column in zip(*_values(rows), strict=True)
    ]
    lines = [_line(titles, widths, [False] * len(widths))]
    lines.append("+".join("-" * (each + 2) for each in widths))
    return [*lines, *(_line(row, widths, right) for row in cells)]


def _values(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [list(row.values()) for row in rows]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    return f" {' | '.join(_padded(cells, widths, right))}".rstrip()


def _padded(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> Iterator[str]:
    """As many cells as there are widths."""
    for text, width, ends in zip(cells, widths, right, strict=False):
        blank = " " * (width - cell_len(text))
        yield f"{blank}{text}" if ends else f"{text}{blank}"


def _expanded(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    wide = max(map(cell_len, titles))
    lines = []
    for number, row in enumerate(cells, 1):
        head = f"-[ {number} ]"
        lines.append(head + "-" * max(0, wide + 1 - len(head)) + "+" + "-" * 20)
        for title, text in zip(titles, row, strict=True):
            lines.append(f"{title}{' ' * (wide - cell_len(title))} | {text}".rstrip())
    return lines


def columns_text(titles: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> list[str]:
    """A line of titles and one for each row, for a screen: without the last columns where they do not fit, cut at `width`."""
    cells = [[*titles], *([value_text(value) for value in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    while len(widths) > 1 and sum(widths) + 2 * (len(widths) - 1) > width:
        widths.pop()
    right = [all(map(_is_number, column)) for column in zip(*rows, strict=True)]
    right = right or [False] * len(titles)
    return [_cut("  ".join(_padded(row, widths, right)).rstrip(), width) for row in cells]


def _cut(text: str, width: int) -> str:
    """The text in `width` cells, with `…` where something is missing."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, width - 1).rstrip()}…"
