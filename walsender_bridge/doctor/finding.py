"""A finding of `tuskline doctor`."""

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from walsender_bridge.errors import Cause


class Severity(IntEnum):
    """`ERROR`: it will not work. `WARNING`: it works, but an administrator should know."""

    OK = 0
    WARNING = 1
    ERROR = 2


_VERIFIER = re.compile(r"SCRAM-SHA-256\$[^']*")


def counted(count: int, noun: str) -> str:
    """`1 table`, `2 tables`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. `fix`: SQL for the server at `where`, or for its primary; `cause`: the exit code of an error."""

    check: str
    where: str
    what: str
    severity: Severity = Severity.OK
    repair: str = ""
    fix: str = ""
    cause: Cause = Cause.SERVER_SETTING
    #: Whether an error is a reason not to start; not if it harms a single table whether the parts run or not.
    prevents: bool = True

    def to_json(self) -> dict[str, Any]:
        """The finding for `--json`."""
        return {
            "check": self.check,
            "where": self.where,
            "severity": self.severity.name.lower(),
            "what": self.what,
            "repair": self.repair,
            # A role's verifier allows guessing its password: only the script has it, which has to be requested.
            "fix_sql": _VERIFIER.sub("SCRAM-SHA-256$...", self.fix),
            "cause": self.cause.name if self.severity is Severity.ERROR else None,
        }
