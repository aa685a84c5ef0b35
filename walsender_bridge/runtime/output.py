"""The output of commands: text for people or JSON for programs, behind one class.

Results go to stdout, everything else (progress, errors) to stderr. With `--json` the result is one object
on stdout's last line, and an error is one object on stderr.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.printable import printable
from walsender_bridge.runtime.table_text import rows_text, value_text

if TYPE_CHECKING:
    from rich.console import Console


class Output:
    """Prints results as text or as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json

    @cached_property
    def progress(self) -> "Console":
        """A console on standard error for progress bars, whose library is imported only for them."""
        from rich.console import Console

        return Console(stderr=True, soft_wrap=True)

    def record(self, record: Mapping[str, Any]) -> None:
        """One result: `name: value` lines, or one JSON object."""
        if self.as_json:
            print(json.dumps(record), flush=True)
            return
        for name, value in record.items():
            shown = printable(value, lines=True) if isinstance(value, str) else value_text(value)
            print(f"{name.replace('_', ' ')}: {shown}", flush=True)

    def rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """A list of equal records: a table below its name, or one JSON object `{name: [...]}`.

        On a terminal, rows that are too wide are shown expanded; in a pipe each row is one line. Nothing is truncated.
        """
        if self.as_json:
            print(json.dumps({name: list(rows)}), flush=True)
            return
        if not rows:
            print(f"no {name}", flush=True)
            return
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print("\n".join(rows_text(rows, width)), flush=True)

    def line(self, text: str) -> None:
        """One line of a result, with control characters in names escaped."""
        print(printable(text), flush=True)

    def text(self, text: str) -> None:
        """Lines of a result that is text by nature."""
        print(printable(text, lines=True), flush=True)

    def note(self, text: str) -> None:
        """A line of progress, on stderr; above the bars, if there are any."""
        if "progress" in self.__dict__:
            self.progress.print(printable(text), markup=False, highlight=False)
        else:
            logs.say(printable(text) + "\n")

    def error(self, error: TusklineError) -> None:
        """An error, on stderr: message and hint, or one JSON object. Failure to write it does not change the exit code."""
        if self.as_json:
            logs.say(json.dumps({"error": error.to_wire()}) + "\n")
        else:
            logs.say(printable(f"error: {error}\n", lines=True))
