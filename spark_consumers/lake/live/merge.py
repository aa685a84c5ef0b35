"""A table of the lake and the effect of later changes, merged by a query.

Without Spark's JVM: it runs over Spark Connect, too. What a query costs beyond the table's own is one probe of a hash table for each
row, if the effect is small: then Spark sends it to all executors. A larger one is joined as Spark chooses.
"""

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

from spark_consumers.lake.live.effect import ADDED, GONE, KIND, PATCHED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
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
) -> "DataFrame":
    """The table with the effect (`effect.effect_schema`): the columns of `table`, in their order.

    `columns`: of the effect, by position; `key`: those of the key, none without one. `patches`: whether there may be some;
    `truncated`: whether nothing of the table stays.
    """
    from pyspark.sql import functions as f

    place = {name: number for number, name in enumerate(columns)}
    types = {field.name: field.dataType for field in table.schema}
    added = effect.filter(f.col(KIND) == ADDED).select(
        *(f.col(f"c{place[name]}").cast(kind).alias(name) for name, kind in types.items())
    )
    if truncated:
        return added
    beside = _BESIDE
    while any(name.casefold().startswith(beside) for name in types):
        beside += "_"
    others = effect.filter(f.col(KIND) != ADDED)
    others = others.select(*(f.col(name).alias(f"{beside}{name}") for name in others.columns))
    if small:
        others = f.broadcast(others)
    if not key:
        return _without_counted(table, others, columns, types, beside).unionAll(added)
    same = reduce(
        lambda one, other: one & other,
        (
            f.col(_quoted(name)) == f.col(f"{beside}g{number}").cast(types[name])
            for number, name in enumerate(key)
        ),
    )
    if not patches:
        return table.join(others, same, "left_anti").unionAll(added)
    kind = f.col(f"{beside}{KIND}")
    kept = table.join(others, same, "left").filter(kind.isNull() | (kind == PATCHED))

    def patched(name: str) -> "Column":
        number, own = place[name], f.col(_quoted(name))
        stays = kind.isNull() | f.col(f"{beside}u{number}")
        sent = f.col(f"{beside}c{number}").cast(types[name])
        return f.when(stays, own).otherwise(sent).alias(name)

    return kept.select(*map(patched, types)).unionAll(added)


def _without_counted(
    table: "DataFrame",
    gone: "DataFrame",
    columns: Sequence[str],
    types: "dict[str, DataType]",
    beside: str,
) -> "DataFrame":
    """The table's rows less `n` of those that equal each row that is gone."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    gone = gone.filter(f.col(f"{beside}{KIND}") == GONE)
    same = reduce(
        lambda one, other: one & other,
        (
            _exact(f.col(_quoted(name)), kind).eqNullSafe(
                _exact(f.col(f"{beside}c{columns.index(name)}").cast(kind), kind)
            )
            for name, kind in types.items()
        ),
    )
    number = f"{beside}number"
    equal = f.row_number().over(
        Window.partitionBy(f.col(f"{beside}i")).orderBy(f.col(f"{beside}i"))
    )
    left = (
        table.join(gone, same, "inner")
        .withColumn(number, equal)
        .filter(f.col(number) > f.col(f"{beside}n"))
        .select(*(f.col(_quoted(name)) for name in types))
    )
    return table.join(gone, same, "left_anti").unionAll(left)


def _exact(column: "Column", kind: "DataType") -> "Column":
    """A value that differs if the column's does, where Spark's equality is wider: it takes 0.0 for -0.0."""
    text = kind.simpleString()
    return column.cast("string") if "double" in text or "float" in text else column


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
