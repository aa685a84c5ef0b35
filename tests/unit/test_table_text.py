"""What people read: nothing cut, nothing of Python's own words, expanded where a line does not fit."""

import io
import json
import sys

import pytest
from rich.cells import cell_len

from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.table_text import rows_text, value_text
from walsender_bridge.runtime.times import iso_time

LONG = "FFFFFFFF/FFFFFFFF"
ROWS = [
    {"table": "shop.public.orders", "end_lsn": LONG, "rows": 7, "lag": None, "live": True},
    {"table": "shop.public.注文", "end_lsn": "0/1", "rows": 12_345, "lag": 0.5, "live": False},
]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, columns: int | None, rows=ROWS) -> list[str]:
    out = io.StringIO() if columns is None else _Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    Output(as_json=False).rows("tables", rows)
    return out.getvalue().splitlines()


def test_rows_are_aligned_with_numbers_to_the_right():
    assert rows_text(ROWS, 80) == [
        " table              | end lsn           | rows  | lag | live",
        "--------------------+-------------------+-------+-----+------",
        f" shop.public.orders | {LONG} |     7 |   - | yes",
        " shop.public.注文   | 0/1               | 12345 | 0.5 | no",
    ]


@pytest.mark.parametrize("columns", [20, 40, 62, 63, 64, 80, 200])
def test_a_terminal_is_never_overrun_by_a_table_and_nothing_is_cut(monkeypatch, columns):
    lines = shown(monkeypatch, columns)
    text = "\n".join(lines)
    for value in (LONG, "shop.public.orders", "12345", "shop.public.注文"):
        assert value in text
    if not lines[0].startswith("-["):
        assert max(map(cell_len, lines)) <= columns
    else:  # a value alone may be wider than the terminal, which breaks the line
        assert all(cell_len(line) <= columns or " | " in line for line in lines if line[0] != "-")


def test_into_a_pipe_each_row_is_one_line_whatever_its_length(monkeypatch):
    rows = [{"reason": "x" * 500, "table": "t"}]
    assert len(shown(monkeypatch, None, rows)) == 3
    assert shown(monkeypatch, 80, rows)[0].startswith("-[ 1 ]")


@pytest.mark.parametrize("value", [None, {}, [], ()])
def test_what_is_not_known_or_empty_is_a_dash(value):
    assert value_text(value) == "-"


def test_values_are_not_written_as_python_writes_them(monkeypatch):
    value = {"a": True, "b": [1, None], "c": {}}
    assert value_text(value) == "a yes, b 1, -, c -"
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    Output(as_json=False).record({"not_copied": {}, "published_at": None, "told": "two\nlines"})
    assert out.getvalue() == "not copied: -\npublished at: -\ntold: two\nlines\n"


def test_a_name_cannot_begin_a_line_or_move_the_cursor(monkeypatch):
    lines = shown(monkeypatch, 80, [{"table": "a\nb\x1b[2J"}])
    assert lines[2:] == [r" a\nb\x1b[2J"]


def test_json_keeps_values_as_they_are(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    Output(as_json=True).rows("tables", ROWS)
    assert json.loads(out.getvalue()) == {"tables": ROWS}


def test_times_are_iso_8601():
    assert iso_time(1_700_000_000.1239) == "2023-11-14T22:13:20.123Z"
    assert iso_time(0) is None
    assert iso_time(None) is None
