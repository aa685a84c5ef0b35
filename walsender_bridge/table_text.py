"""Rows as people read them: aligned as psql does it, nothing cut; what is too wide is shown expanded. Pure.

What is not known, or empty, is `-` or nothing: no reader has to know how Python writes it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len

from walsender_bridge.printable import printable

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
    padded = []
    for text, width, ends in zip(cells, widths, right, strict=True):
        blank = " " * (width - cell_len(text))
        padded.append(f"{blank}{text}" if ends else f"{text}{blank}")
    return f" {' | '.join(padded)}".rstrip()


def _expanded(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    wide = max(map(cell_len, titles))
    lines = []
    for number, row in enumerate(cells, 1):
        head = f"-[ {number} ]"
        lines.append(head + "-" * max(0, wide + 1 - len(head)) + "+" + "-" * 20)
        for title, text in zip(titles, row, strict=True):
            lines.append(f"{title}{' ' * (wide - cell_len(title))} | {text}".rstrip())
    return lines
