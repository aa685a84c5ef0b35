"""Which rows of a table the lake has: a condition in PostgreSQL's SQL (`rows` of `[[lake.tables]]`). Pure.

The condition is read into a tree, or refused (`row_condition`). PostgreSQL gets the text of the tree (`RowFilter.sql`), in a copy and in `tuskline verify`;
executors evaluate the same tree on Arrow arrays, for the rows that changes leave. So the lake has the rows of
`SELECT ... WHERE condition` if both give the same for any row. That is why little is allowed:

- AND, OR and NOT are Kleene's in both, and what is NULL is not kept.
- Integers, `numeric(p, s)`, booleans, dates and timestamps compare by their values, which Arrow has exactly. A literal is converted here, as
  PostgreSQL converts it, or refused; none depends on a setting of a session.
- Floating-point numbers compare as PostgreSQL's do: NaN equals NaN, and is greater than any other. All are compared as `float8`.
- Texts are equal or not, byte by byte: the text of the tree has `COLLATE "C"`, since there are collations by which others are equal. Their
  order depends on the server's libraries, and is refused.
- IS NULL is refused for types that are not PostgreSQL's own: a composite value of NULLs is NULL, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Bools = Any
Rows = Mapping[str, pa.Array]

_COMPARED: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@dataclass(frozen=True, slots=True)
class Value:
    """A column, or a literal (its `scalar`); `family`: what it can be compared with, in which `sql` is compared."""

    family: str
    sql: str
    column: str = ""
    scalar: pa.Scalar | None = None

    def of(self, rows: Rows) -> Any:
        """Its value in each row."""
        if self.scalar is not None:
            return self.scalar
        found = rows[self.column]
        if self.family == "integer":
            return found.cast(pa.int64())
        return found.cast(pa.float64()) if self.family == "float" else found


@dataclass(frozen=True, slots=True)
class Compare:
    """left `operator` right."""

    operator: str
    left: Value
    right: Value

    @property
    def sql(self) -> str:
        """The text, as PostgreSQL gets it."""
        return f"({self.left.sql} {self.operator} {self.right.sql})"

    def of(self, rows: Rows, count: int) -> pa.Array:
        """TRUE, FALSE or NULL for each of these rows, of which there are `count`."""
        left, right = (
            pa.repeat(value, count) if isinstance(value, pa.Scalar) else value
            for value in (self.left.of(rows), self.right.of(rows))
        )
        if self.left.family == "float":
            left, right = _ordered(left), _ordered(right)
        return _COMPARED[self.operator](left, right)


def _ordered(values: pa.Array) -> pa.Array:
    """Integers in the order of these numbers: -0.0 is 0.0, and NaN comes last."""
    numbers = np.asarray(pc.fill_null(values, 0.0), np.float64) + 0.0
    bits = numbers.view(np.int64)
    order = np.where(bits < 0, np.int64(-(2**63)) - bits, bits)
    order = np.where(np.isnan(numbers), np.iinfo(np.int64).max, order)
    return pa.array(order, mask=np.asarray(pc.is_null(values)))


@dataclass(frozen=True, slots=True)
class IsNull:
    """column IS NULL."""

    column: str
    quoted: str

    @property
    def sql(self) -> str:
        """The text, as PostgreSQL gets it."""
        return f"({self.quoted} IS NULL)"

    def of(self, rows: Rows, count: int) -> pa.Array:
        """TRUE, FALSE or NULL for each of these rows, of which there are `count`."""
        del count
        return pc.is_null(rows[self.column])


@dataclass(frozen=True, slots=True)
class Is:
    """A boolean column IS TRUE or IS FALSE; or, without `value`, the column itself."""

    column: str
    quoted: str
    value: bool | None = None

    @property
    def sql(self) -> str:
        """The text, as PostgreSQL gets it."""
        return (
            self.quoted if self.value is None else f"({self.quoted} IS {str(self.value).upper()})"
        )

    def of(self, rows: Rows, count: int) -> pa.Array:
        """TRUE, FALSE or NULL for each of these rows, of which there are `count`."""
        del count
        found = rows[self.column]
        if self.value is None:
            return found
        return pc.fill_null(pc.equal(found, pa.scalar(self.value)), False)


@dataclass(frozen=True, slots=True)
class Logic:
    """AND, OR, or NOT of one."""

    operator: str
    parts: "tuple[Node, ...]"

    @property
    def sql(self) -> str:
        """The text, as PostgreSQL gets it."""
        if self.operator == "NOT":
            return f"(NOT {self.parts[0].sql})"
        return f"({f' {self.operator} '.join(part.sql for part in self.parts)})"

    def of(self, rows: Rows, count: int) -> pa.Array:
        """TRUE, FALSE or NULL for each of these rows, of which there are `count`."""
        found = [part.of(rows, count) for part in self.parts]
        if self.operator == "NOT":
            return pc.invert(found[0])
        return reduce(pc.and_kleene if self.operator == "AND" else pc.or_kleene, found)


Node = Compare | IsNull | Is | Logic


@dataclass(frozen=True)
class RowFilter:
    """A condition that rows of a table have to meet: for PostgreSQL its `sql`; the columns that it reads."""

    tree: Node
    columns: frozenset[str]

    @property
    def sql(self) -> str:
        """The condition, as PostgreSQL gets it."""
        return self.tree.sql

    def matches(self, names: Sequence[str], columns: Sequence[pa.Array]) -> Bools:
        """Which of these rows meet it."""
        rows = dict(zip(names, columns, strict=False))
        found = self.tree.of(rows, len(columns[0]))
        return pc.fill_null(found, False).to_numpy(zero_copy_only=False)
