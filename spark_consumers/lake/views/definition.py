"""A view as a configuration has it."""

from dataclasses import dataclass
from typing import Final

#: Seconds that a view's queries may take in an epoch, and rows that it may have, unless the configuration says otherwise.
TIMEOUT: Final = 600.0
MAX_ROWS: Final = 100_000_000


@dataclass(frozen=True, slots=True)
class ViewDefinition:
    """A view's name, `schema.view`, and its SQL in PostgreSQL's dialect.

    `timeout`: seconds that its queries may take in an epoch. `max_rows`: that it may have.
    """

    name: str
    sql: str
    timeout: float = TIMEOUT
    max_rows: int = MAX_ROWS
