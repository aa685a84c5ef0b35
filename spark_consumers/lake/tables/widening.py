"""Which changes of a column's type leave every value as it is, in PostgreSQL and in the lake. Pure.

Iceberg reads a file with the earlier type as the later one if that is wider: `int` as `long`, `float` as `double`, a decimal as one of
more digits and the same scale. PostgreSQL converts each value by the same rule: an integer is the same number, a `real` is the
`double precision` of the same binary value, a `numeric` of the same scale keeps its digits. Texts are texts in the lake, and a longer
limit, or none, changes none of them. (A shorter limit, or `char(n)`, would cut or pad.)

That holds for PostgreSQL's own conversion. `USING` may say anything, so the command has to be known: `has_no_using` reads it.
"""

from typing import Any

from spark_consumers.decode.types import column_type
from spark_consumers.lake.manifest.table_version import Column

_INT2, _INT4, _INT8, _FLOAT4, _FLOAT8 = 21, 23, 20, 700, 701
_TEXT, _VARCHAR, _NUMERIC = 25, 1043, 1700
_WIDER = {(_INT2, _INT4), (_INT2, _INT8), (_INT4, _INT8), (_FLOAT4, _FLOAT8), (_VARCHAR, _TEXT)}
#: What a modifier is greater than the number of characters by, or than a numeric's digits and scale.
_HEADER = 4


def is_wider(before: Column, after: Column) -> bool:
    """Whether the type of the second column has all values of the first one's, as they are; or is the same."""
    (_, old, old_limit), (_, new, new_limit) = before, after
    if (old, old_limit) == (new, new_limit):
        return True
    if (old, new) in _WIDER:
        return new_limit == -1
    if old != new:
        return False
    if old == _VARCHAR:
        return new_limit == -1 or (old_limit != -1 and new_limit >= old_limit)
    if old == _NUMERIC and -1 not in {old_limit, new_limit}:
        return _is_longer(old_limit, new_limit)
    return False


def _is_longer(old: int, new: int) -> bool:
    """Whether a `numeric` has more digits, the same scale, and is a decimal in the lake before and after."""
    digits = [((limit - _HEADER) >> 16) & 0xFFFF for limit in (old, new)]
    scales = [(limit - _HEADER) & 0xFFFF for limit in (old, new)]
    kinds = [str(column_type(_NUMERIC, limit).arrow) for limit in (old, new)]
    both = all(kind.startswith("decimal128") for kind in kinds)
    return both and scales[0] == scales[1] and digits[0] <= digits[1]


def has_no_using(query: str, table: str, column: str) -> bool:
    """Whether this is one ALTER TABLE of that table that changes the column's type by PostgreSQL's own conversion.

    It must change nothing but types of columns, all of them without USING. The names are compared because a trigger of the
    user's may run other commands within this one.
    """
    # Not every driver reads one, and it takes a while to import.
    import sqlglot
    from sqlglot import exp

    if not query:
        return False
    try:
        read = sqlglot.parse(query, dialect="postgres")
    except (sqlglot.errors.SqlglotError, RecursionError):
        # Whoever owns the table has chosen how deeply an expression in it is nested.
        return False
    if len(read) != 1 or not isinstance(read[0], exp.Alter):
        return False
    actions = read[0].args.get("actions") or []
    named = read[0].this
    if not isinstance(named, exp.Table) or _folded(named.this) != table:
        return False
    return column in {_folded(one.this) for one in actions} and all(
        isinstance(one, exp.AlterColumn)
        and isinstance(one.args.get("dtype"), exp.DataType)
        and not one.args.get("using")
        for one in actions
    )


def _folded(identifier: Any) -> str | None:
    """A name as the catalog has it; None for what is no plain name."""
    name = getattr(identifier, "this", None)
    if not isinstance(name, str):
        return None
    return name if identifier.args.get("quoted") else name.lower()
