"""Checks that a relation that is read by its name is the one in the snapshot. Pure: statements, their order, a verdict.

PostgreSQL resolves the names in a query in today's catalog, whatever the snapshot of the transaction. So after a
partition was renamed and another was made under its name, the query would find no rows, and after two columns
swapped their names, each would have the other's values.

A read is safe in `ORDER`. The lock keeps away whatever changes the relation's name, columns or files until the
transaction ends. Renaming a schema waits for no reader; so it is the answer after the read that says that what the read
has resolved, after the lock, was the relation of the snapshot. The answer before it spares reading something else.
Only a schema that is renamed in the milliseconds between lock and read, and named back while the read goes on, goes
undetected.
"""

from dataclasses import dataclass
from enum import Enum, auto

from psycopg import sql

from walsender_bridge.errors import SnapshotError
from walsender_bridge.runtime.sql import load


class RelationStep(Enum):
    """One thing that a task does with the relation that it reads."""

    LOCK = auto()
    ASK = auto()
    READ = auto()


#: In one transaction, which has the snapshot. Each answer is given to `check`.
ORDER = (RelationStep.LOCK, RelationStep.ASK, RelationStep.READ, RelationStep.ASK)


@dataclass(frozen=True, slots=True)
class RelationAnswer:
    """To `question`: whether name, files and columns (their numbers' names) are those of the snapshot."""

    named: bool
    same_file: bool
    same_columns: bool


def lock(relation: tuple[str, str]) -> str:
    """The statement that locks the relation of this name (schema, name)."""
    return sql.SQL(load("snapshot/lock")).format(relation=sql.Identifier(*relation)).as_string()


def question(relation: tuple[str, str], oid: int) -> str:
    """The query with one row, an `RelationAnswer`, where the snapshot knew the relation by this name and OID."""
    name = sql.Identifier(*relation).as_string()
    query = sql.SQL(load("snapshot/check")).format(name=sql.Literal(name), oid=sql.Literal(oid))
    return query.as_string().strip().rstrip(";")


def check(relation: tuple[str, str], answer: RelationAnswer, where: str) -> None:
    """Raises `SnapshotError` if what the name stands for is not what the snapshot knew."""
    fault = difference(answer)
    if fault is not None:
        raise SnapshotError(
            f"{'.'.join(relation)} {fault} after the snapshot",
            where=where,
            repair="export a new snapshot and copy the table again",
        )


def difference(answer: RelationAnswer) -> str | None:
    """What has happened to the relation, or None."""
    if not answer.named:
        return "was renamed, or replaced by another relation,"
    if not answer.same_file:
        return "was truncated or rewritten"
    if not answer.same_columns:
        return "had a column renamed or dropped"
    return None
