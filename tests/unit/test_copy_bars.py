"""The bars of copies: rows, bytes and rate, and nothing where nobody looks."""

import io
from dataclasses import replace

from rich.console import Console

from spark_consumers.lake.status import CopyStatus
from walsender_bridge.cli.copy_bars import CopyBars

COPY = CopyStatus(0.0, 12_345, 5_000_000, 4, 1, 617.3, 250_000.0)


def shown(*, is_shown):
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    with CopyBars(shown=is_shown, console=console) as bars:
        bars.show({"shop.public.a": replace(COPY, pieces=0, pieces_done=0)})
        bars.show({"shop.public.a": COPY, "shop.public.b": COPY})
        bars._bars.refresh()
        bars.show({})
    return text.getvalue()


def test_a_bar_for_each_table():
    text = shown(is_shown=True)
    for word in ("shop.public.a", "shop.public.b", "12,345 rows", "5.0 MB", "250.0 kB/s"):
        assert word in text


def test_nothing_where_nobody_looks():
    assert shown(is_shown=False) == ""
