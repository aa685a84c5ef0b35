"""One answer of `tuskline doctor`."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from psycopg import sql

from walsender_bridge.errors import Cause
from walsender_bridge.sql import load


class Severity(IntEnum):
    """`error`: it will not work. `warning`: it works, and somebody should know."""

    OK = 0
    WARNING = 1
    ERROR = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `fix` is SQL for the server at `where`; `cause` is the exit code of an error."""

    check: str
    where: str
    what: str
    severity: Severity = Severity.OK
    repair: str = ""
    fix: str = ""
    cause: Cause = Cause.SERVER_SETTING

    def to_json(self) -> dict[str, Any]:
        """The finding for `--json`."""
        return {
            "check": self.check,
            "where": self.where,
            "severity": self.severity.name.lower(),
            "what": self.what,
            "repair": self.repair,
            "fix_sql": self.fix,
            "cause": self.cause.name if self.severity is Severity.ERROR else None,
        }


def fix(text: str, **names: str | int | list[str]) -> str:
    """The statements of `sql/<text>.sql` with names filled in: `a.b` is a table, a list several of them."""
    filled = {key: _composed(key, value) for key, value in names.items()}
    return sql.SQL(load(text)).format(**filled).as_string(None).strip()


def _composed(key: str, value: str | int | list[str]) -> sql.Composable:
    if isinstance(value, int) or key.endswith("value"):
        return sql.Literal(value)
    if isinstance(value, list):
        return sql.SQL(", ").join(sql.Identifier(*name.split(".", 1)) for name in value)
    if key in {"relation", "table"}:
        return sql.Identifier(*value.split(".", 1))
    return sql.Identifier(value)
