"""An error as JSON: in status files, and in the answers of the change log's services."""

from dataclasses import dataclass

from walsender_bridge.errors import TusklineError, from_wire
from walsender_bridge.runtime import json_model


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """The fields of `TusklineError.to_wire`."""

    code: str
    what: str
    where: str
    repair: str

    @classmethod
    def of(cls, error: TusklineError) -> "ErrorRecord":
        """The record of an error."""
        return cls(**error.to_wire())

    def error(self) -> TusklineError:
        """The error, as its own class."""
        return from_wire(json_model.plain(self))

    @property
    def sentence(self) -> str:
        """The message and the hint, if it has one, on one line."""
        lines = [line.strip() for line in self.what.splitlines()]
        # After a colon, the lines are a list.
        what = "; ".join(lines).replace(":; ", ": ")
        return f"{what}; {self.repair}" if self.repair else what
