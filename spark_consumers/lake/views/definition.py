"""A view as a configuration has it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ViewDefinition:
    """A view's name, `schema.view`, and its SQL in PostgreSQL's dialect."""

    name: str
    sql: str
