"""A table of the lake and the effect of later changes, merged by a query.

Without Spark's JVM: it runs over Spark Connect, too. What a query costs beyond the table's own is one probe of a hash table for each
row, if the effect is small: then Spark sends it to all executors. A larger one is joined as Spark chooses.

Expressions are texts: PySpark asks the JVM some ten times for each part of one that is made of columns, which for a hundred tables
takes longer than what is read.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spark_consumers.decode.identity import VALID_TO_LSN
from spark_consumers.fold.kept import MARKS
from spark_consumers.lake.live.effect import ADDED, GONE, KIND, PATCHED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

#: What the names of an effect's columns begin with beside a table's.
_BESIDE = "_tuskline_"


def merged(
    table: "DataFrame",
    effect: "DataFrame",
    columns: Sequence[str],
    key: Sequence[str],
    *,
    small: bool,
    patches: bool,
    truncated: bool,
    emptied: Sequence[int] | None = None,
) -> "DataFrame":
    """The table with the effect (`effect.effect_schema`): the columns of `table`, in their order.

    `columns`: of the effect, by position; `key`: those of the key, none without one. `patches`: whether there may be some;
    `truncated`: whether nothing of the table stays. `emptied`: the marks that the table's living rows get (`fold.kept`), or the end of its open
    versions (`fold.history`), unless changes are of them.
    """
    from pyspark.sql import functions as f

    place = {name: number for number, name in enumerate(columns)}
    types = {field.name: field.dataType for field in table.schema}
    added = effect.where(f"{KIND} = {ADDED}").selectExpr(
        *(f"{_cast(f'c{place[name]}', kind)} AS {_quoted(name)}" for name, kind in types.items())
    )
    if truncated:
        return added
    beside = _BESIDE
    while any(name.casefold().startswith(beside) for name in types):
        beside += "_"
    others = effect.where(f"{KIND} <> {ADDED}")
    others = others.selectExpr(*(f"{name} AS {beside}{name}" for name in others.columns))
    if small:
        others = others.hint("broadcast")
    if not key:
        return _without_counted(table, others, columns, types, beside).unionAll(added)
    same = f.expr(
        " AND ".join(
            # The end of an open version is NULL.
            f"{_quoted(name)} {'<=>' if name == VALID_TO_LSN else '='} {_cast(f'{beside}g{number}', types[name])}"
            for number, name in enumerate(key)
        )
    )
    ended = {}
    if emptied is not None:
        values = f"timestamp_micros({emptied[0]})", f"{emptied[1]}L"
        ended = dict(zip(columns[-MARKS:], values, strict=True))

    def stays(name: str) -> str:
        """The value in a row that no change is of."""
        own = _quoted(name)
        return f"coalesce({own}, {ended[name]})" if name in ended else own

    if not patches:
        rest = table.join(others, same, "left_anti")
        return rest.selectExpr(*(f"{stays(name)} AS {_quoted(name)}" for name in types)).unionAll(
            added
        )
    kind = f"{beside}{KIND}"
    kept = table.join(others, same, "left").where(f"{kind} IS NULL OR {kind} = {PATCHED}")

    def patched(name: str) -> str:
        number, own = place[name], _quoted(name)
        sent = _cast(f"{beside}c{number}", types[name])
        return f"CASE WHEN {kind} IS NULL THEN {stays(name)} WHEN {beside}u{number} THEN {own} ELSE {sent} END AS {own}"

    return kept.selectExpr(*map(patched, types)).unionAll(added)


def _without_counted(
    table: "DataFrame",
    gone: "DataFrame",
    columns: Sequence[str],
    types: "dict[str, DataType]",
    beside: str,
) -> "DataFrame":
    """The table's rows less `n` of those that equal each row that is gone."""
    from pyspark.sql import functions as f

    gone = gone.where(f"{beside}{KIND} = {GONE}")
    pairs = (
        (
            _exact(_quoted(name), kind),
            _exact(_cast(f"{beside}c{columns.index(name)}", kind), kind),
        )
        for name, kind in types.items()
    )
    same = f.expr(" AND ".join(f"{own} <=> {other}" for own, other in pairs))
    own = [*map(_quoted, types)]
    equal = f"row_number() OVER (PARTITION BY {beside}i ORDER BY {beside}i) AS {beside}number"
    left = (
        table.join(gone, same, "inner")
        .selectExpr(*own, f"{beside}n", equal)
        .where(f"{beside}number > {beside}n")
        .selectExpr(*own)
    )
    return table.join(gone, same, "left_anti").unionAll(left)


def _cast(column: str, kind: "DataType") -> str:
    return f"CAST({column} AS {kind.simpleString()})"


def _exact(column: str, kind: "DataType") -> str:
    """A value that differs if the column's does, where Spark's equality is wider: it takes 0.0 for -0.0."""
    text = kind.simpleString()
    return f"CAST({column} AS string)" if "double" in text or "float" in text else column


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
