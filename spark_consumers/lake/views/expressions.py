"""PostgreSQL's expressions as Spark's, where both mean the same. Pure.

The safety of a view rests here. An expression is translated only if it is in `_TRANSLATED`, and each of these functions
accepts only the types for which PostgreSQL and Spark (with ANSI errors) have the same result for every value, NULL included, or fail
both. All else is refused by name: nothing is passed on because its spelling is known to both. In particular:

- integers: the same width and the same overflow errors; `/` is Spark's `DIV`; a literal is `integer` if it fits.
- numeric: exact while the result's digits fit 38, which is checked by precision and scale; PostgreSQL never rounds these.
  Division is refused: the digits of its result depend on the values.
- floats: passed through and compared (both have NaN equal to itself and greatest); no arithmetic and no sums, whose results depend on the order.
- text: equality, length in characters, concatenation; no order, since that is a collation's; no case, which is a locale's.
- no function of the time, of chance, or of a session's settings; no `timestamptz` beside its own literals with an offset.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from sqlglot import exp

from spark_consumers.lake.views.sql_types import (
    BOOL,
    DATE,
    EQUAL,
    FLOATS,
    INT4,
    INT8,
    INTEGERS,
    NUMERIC_TEXT,
    ORDERED,
    TEXT,
    TIMESTAMP,
    TIMESTAMPTZ,
    UNKNOWN,
    Kind,
    SqlType,
    as_numeric,
    common,
    numeric,
)
from walsender_bridge.errors import NotSupportedError

#: The texts of dates and times that mean the same whatever a session's settings are.
_DATE = re.compile(r"[1-9]\d{3}-\d\d-\d\d")
_TIMESTAMP = re.compile(r"[1-9]\d{3}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?")
_TIMESTAMPTZ = re.compile(r"[1-9]\d{3}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?[+-]\d\d:\d\d")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
#: What EXTRACT gives of a date or a timestamp as a whole number.
_FIELDS: Final = {"year", "quarter", "month", "day", "hour", "minute"}
_OF_TIME: Final = {"hour", "minute"}
#: Without quotes and without a table before them, these are no columns in PostgreSQL.
_FUNCTIONS: Final = {
    *(
        "current_catalog",
        "current_date",
        "current_role",
        "current_schema",
        "current_time",
        "current_timestamp",
    ),
    *("current_user", "localtime", "localtimestamp", "session_user", "system_user", "user"),
}
_MOST_INT4, _MOST_INT8 = 2**31 - 1, 2**63 - 1
_MOST_CODE_UNIT = 0xFFFF


class Typed(NamedTuple):
    """An expression in Spark's SQL, in parentheses where that matters, and its type in PostgreSQL."""

    text: str
    type: SqlType
    #: The text of a literal in quotes.
    literal: str | None = None


class Column(NamedTuple):
    """A column that can be named: of the table with the alias `table`."""

    table: str
    name: str
    type: SqlType


def refused(what: str, repair: str = "") -> NotSupportedError:
    """The error for what cannot be kept as PostgreSQL computes it."""
    return NotSupportedError(what, repair=repair or "see docs/views.md for what a view may contain")


def can_be_quoted(name: str) -> bool:
    """Whether a statement may have this name: Spark substitutes `${`."""
    return "${" not in name


def quoted(name: str) -> str:
    """A name in Spark's SQL, inside a text with placeholders. Raises `NotSupportedError` for one that Spark would substitute (`string`)."""
    if not can_be_quoted(name):
        raise refused(f"a column or alias with the name {name!r}", "give it another name")
    return "`" + name.replace("`", "``").replace("{", "{{").replace("}", "}}") + "`"


def string(value: str) -> str:
    """A text in Spark's SQL, likewise. Spark would replace `${name}` in it by a setting or a variable of the environment."""
    text = value.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    text = text.replace("{", "{{").replace("}", "}}")
    return f"'{text}'"


def name_of(identifier: exp.Expression) -> str:
    """A name as PostgreSQL takes it: without quotes, in lower case."""
    if not isinstance(identifier, exp.Identifier):
        raise refused(f"{identifier.sql(dialect='postgres')} is not a name")
    text: str = identifier.this
    return text if identifier.args.get("quoted") else text.lower()


@dataclass
class Expressions:
    """Translates expressions over these columns. `special`: what else is known where they stand, asked first."""

    columns: tuple[Column, ...]
    special: "Callable[[exp.Expression], Typed | None] | None" = None

    def of(self, node: exp.Expression) -> Typed:
        """The expression in Spark's SQL. Raises `NotSupportedError`."""
        if self.special is not None and (found := self.special(node)) is not None:
            return found
        translate = _TRANSLATED.get(type(node))
        if translate is None:
            raise refused(f"{_short(node)}: not supported in a view")
        # A part that no function looks at would be lost.
        check_parts(node, _PARTS.get(type(node), _PLAIN))
        return translate(self, node)

    def condition(self, node: exp.Expression) -> str:
        """A condition."""
        found = self.of(node)
        if found.type.kind is not Kind.BOOL:
            raise refused(f"{_short(node)} is {found.type.name}, not boolean")
        return found.text

    def resolve(self, node: exp.Column) -> Column:
        """The column that is named."""
        if node.args.get("db") or node.args.get("catalog"):
            raise refused(f"{_short(node)}: name a column by its table's alias")
        name = name_of(node.this)
        table = name_of(node.args["table"]) if node.args.get("table") else None
        if table is None and name in _FUNCTIONS and not node.this.args.get("quoted"):
            raise refused(
                f"{name}: not supported in a view", "write a column of this name in double quotes"
            )
        found = [c for c in self.columns if c.name == name and table in {None, c.table}]
        if not found:
            raise refused(
                f"column {_short(node)} does not exist", "check the view's SQL against the table"
            )
        if len(found) > 1:
            raise refused(f"column {_short(node)} is ambiguous", "name its table's alias")
        return found[0]


def check_parts(node: exp.Expression, known: Collection[str]) -> None:
    """Refuse a node with a part that is not among these."""
    for name, value in node.args.items():
        if value and name not in known:
            what = name.rstrip("_").replace("_", " ").upper()
            raise refused(f"{_short(node)}: {what} is not supported in a view")


def _short(node: exp.Expression) -> str:
    text = node.sql(dialect="postgres")
    return text if len(text) <= 60 else f"{text[:57]}..."


def _column(made: Expressions, node: exp.Column) -> Typed:
    found = made.resolve(node)
    return Typed(f"{quoted(found.table)}.{quoted(found.name)}", found.type)


def _literal(made: Expressions, node: exp.Literal) -> Typed:
    del made
    text: str = node.this
    if node.is_string:
        return Typed(string(text), UNKNOWN, text)
    if re.fullmatch(r"\d+", text):
        number = int(text)
        if number <= _MOST_INT4:
            return Typed(text, INT4)
        if number <= _MOST_INT8:
            return Typed(f"{number}L", INT8)
        return Typed(f"{number}BD", numeric(len(str(number)), 0))
    if re.fullmatch(r"\d*\.\d+|\d+\.", text):
        whole, _, fraction = text.partition(".")
        whole = whole.lstrip("0")
        made_of = numeric(max(len(whole) + len(fraction), 1), len(fraction))
        return Typed(f"CAST({string(text)} AS {made_of.spark})", made_of)
    raise refused(f"{text}: write the number without an exponent")


def cast(found: Typed, kind: SqlType) -> str:
    """The value as this type, which has all its values."""
    return found.text if found.type == kind else f"CAST({found.text} AS {kind.spark})"


def fitted(found: Typed, kind: SqlType) -> Typed:
    """The value; a literal in quotes or NULL with the type beside which it stands."""
    if found.type.kind is not Kind.UNKNOWN:
        return found
    if kind.kind is Kind.UNKNOWN:
        kind = TEXT
    if found.literal is None:
        return Typed("NULL" if kind.kind is Kind.OPAQUE else f"CAST(NULL AS {kind.spark})", kind)
    text = found.literal
    made = {
        Kind.TEXT: (re.compile(r"[\s\S]*"), ""),
        Kind.UUID: (_UUID, ""),
        Kind.DATE: (_DATE, "DATE "),
        Kind.TIMESTAMP: (_TIMESTAMP, "TIMESTAMP_NTZ "),
        Kind.TIMESTAMPTZ: (_TIMESTAMPTZ, "TIMESTAMP "),
    }.get(kind.kind)
    if made is None or not made[0].fullmatch(text):
        raise refused(
            f"'{text}' as {kind.name}: PostgreSQL and Spark may read this text differently",
            "write it as 2024-01-31, 2024-01-31 10:00:00 or 2024-01-31 10:00:00+00:00, or without quotes where it is a number",
        )
    return Typed(f"{made[1]}{found.text}", kind)


def _compared(one: Typed, other: Typed, what: str, *, ordered: bool) -> tuple[str, str]:
    """Both sides of a comparison."""
    one, other = fitted(one, other.type), fitted(other, one.type)
    kinds = {one.type.kind, other.type.kind}
    numbers = {*INTEGERS, Kind.NUMERIC}
    alike = len(kinds) == 1 or kinds <= numbers
    if not alike:
        raise refused(
            f"{what} compares {one.type.name} with {other.type.name}", "cast one of them explicitly"
        )
    if not kinds <= EQUAL:
        raise refused(f"{what} compares {one.type.name}")
    if ordered and not kinds <= ORDERED:
        raise refused(f"{what} depends on the order of {one.type.name}")
    if len(kinds) > 1:
        both = common([one.type, other.type], what)
        return cast(one, both), cast(other, both)
    return one.text, other.text


def _comparison(
    operator: str, *, ordered: bool
) -> "Callable[[Expressions, exp.Expression], Typed]":
    def translate(made: Expressions, node: exp.Expression) -> Typed:
        one, other = _compared(
            made.of(node.this), made.of(node.expression), _short(node), ordered=ordered
        )
        return Typed(f"({one} {operator} {other})", BOOL)

    return translate


def _distinct(made: Expressions, node: exp.Expression) -> Typed:
    one, other = _compared(
        made.of(node.this), made.of(node.expression), _short(node), ordered=False
    )
    return Typed(f"(NOT ({one} <=> {other}))", BOOL)


def _logical(operator: str) -> "Callable[[Expressions, exp.Expression], Typed]":
    def translate(made: Expressions, node: exp.Expression) -> Typed:
        return Typed(
            f"({made.condition(node.this)} {operator} {made.condition(node.expression)})", BOOL
        )

    return translate


def _not(made: Expressions, node: exp.Not) -> Typed:
    return Typed(f"(NOT {made.condition(node.this)})", BOOL)


def _is(made: Expressions, node: exp.Is) -> Typed:
    value, negated = node.expression, bool(node.args.get("negate"))
    if isinstance(value, exp.Null):
        word = "IS NOT NULL" if negated else "IS NULL"
        found = made.of(node.this)
        if found.type.may_be_row:
            # One of a composite type is NULL in PostgreSQL if all its fields are.
            raise refused(
                f"{_short(node)}: the type is not one of PostgreSQL's own, and may be composite"
            )
        return Typed(f"({found.text} {word})", BOOL)
    if isinstance(value, exp.Boolean):
        text = f"({made.condition(node.this)} <=> {'TRUE' if value.this else 'FALSE'})"
        return Typed(f"(NOT {text})" if negated else text, BOOL)
    raise refused(f"{_short(node)}: not supported in a view")


def _between(made: Expressions, node: exp.Between) -> Typed:
    if node.args.get("symmetric"):
        raise refused("BETWEEN SYMMETRIC: not supported in a view")
    value = made.of(node.this)
    low = _compared(value, made.of(node.args["low"]), _short(node), ordered=True)
    high = _compared(value, made.of(node.args["high"]), _short(node), ordered=True)
    return Typed(f"(({low[0]} >= {low[1]}) AND ({high[0]} <= {high[1]}))", BOOL)


def _in(made: Expressions, node: exp.In) -> Typed:
    if not node.expressions or any(node.args.get(name) for name in ("query", "unnest", "field")):
        raise refused(f"{_short(node)}: IN is supported with a list of values")
    value = made.of(node.this)
    pairs = [
        _compared(value, made.of(each), _short(node), ordered=False) for each in node.expressions
    ]
    return Typed("(" + " OR ".join(f"({one} = {other})" for one, other in pairs) + ")", BOOL)


def _like(made: Expressions, node: exp.Like) -> Typed:
    value, pattern = made.of(node.this), made.of(node.expression)
    if value.type.kind is not Kind.TEXT or pattern.literal is None or "\\" in pattern.literal:
        raise refused(
            f"{_short(node)}: LIKE is supported for text, with a pattern in quotes that has no backslash"
        )
    if any(ord(character) > _MOST_CODE_UNIT for character in pattern.literal):
        # Spark makes a regular expression of the pattern's UTF-16 code units, one by one.
        raise refused(f"{_short(node)}: a character beyond U+FFFF in a pattern is not supported")
    word = "NOT LIKE" if node.args.get("negate") else "LIKE"
    return Typed(f"({value.text} {word} {pattern.text})", BOOL)


def _numbers(made: Expressions, node: exp.Expression) -> tuple[Typed, Typed, bool]:
    """The operands of arithmetic, and whether both are integers."""
    one, other = made.of(node.this), made.of(node.expression)
    for each in (one, other):
        if each.type.kind in FLOATS:
            raise refused(
                f"{_short(node)}: arithmetic on {each.type.name} is not supported in a view",
                "cast it to numeric(p,s) at the source, or compute it in the query that reads the view",
            )
        if each.type.kind not in {*INTEGERS, Kind.NUMERIC}:
            raise refused(
                f"{_short(node)}: arithmetic on {each.type.name} is not supported in a view"
            )
    return one, other, {one.type.kind, other.type.kind} <= set(INTEGERS)


def _arithmetic(operator: str) -> "Callable[[Expressions, exp.Expression], Typed]":
    def translate(made: Expressions, node: exp.Expression) -> Typed:
        one, other, integers = _numbers(made, node)
        if integers:
            kind = common([one.type, other.type], _short(node))
            # The lake has smallint as integer, and the overflow is that of smallint.
            sides = f"{cast(one, kind)} {operator} {cast(other, kind)}"
            text = f"({sides})" if kind.kind is not Kind.INT2 else f"CAST({sides} AS SMALLINT)"
            return Typed(text, kind)
        left, right = as_numeric(one.type), as_numeric(other.type)
        if operator == "*":
            kind = numeric(left.precision + right.precision + 1, left.scale + right.scale)
            is_padded = left.is_padded or right.is_padded
        else:
            scale = max(left.scale, right.scale)
            whole = max(left.precision - left.scale, right.precision - right.scale)
            kind = numeric(whole + scale + 1, scale)
            is_padded = all(each.is_padded or each.scale < scale for each in (left, right))
        kind = replace(kind, is_padded=is_padded)
        return Typed(f"({cast(one, left)} {operator} {cast(other, right)})", kind)

    return translate


def _integer_division(operator: str) -> "Callable[[Expressions, exp.Expression], Typed]":
    def translate(made: Expressions, node: exp.Expression) -> Typed:
        one, other, integers = _numbers(made, node)
        if not integers:
            raise refused(
                f"{_short(node)}: the digits of a numeric's quotient depend on its values",
                "keep dividend and divisor as columns of the view, and divide in the query that reads it",
            )
        kind = common([one.type, other.type], _short(node))
        sides = f"{cast(one, kind)} {operator} {cast(other, kind)}"
        return Typed(f"CAST({sides} AS {kind.spark})", kind)

    return translate


def _negative(made: Expressions, node: exp.Neg) -> Typed:
    found = made.of(node.this)
    if found.type.kind not in {*INTEGERS, Kind.NUMERIC}:
        raise refused(f"{_short(node)}: arithmetic on {found.type.name} is not supported in a view")
    text = f"(- {found.text})"
    return Typed(f"CAST({text} AS SMALLINT)" if found.type.kind is Kind.INT2 else text, found.type)


def _concatenated(made: Expressions, node: exp.DPipe) -> Typed:
    parts = [fitted(made.of(each), TEXT) for each in (node.this, node.expression)]
    if any(each.type.kind is not Kind.TEXT for each in parts):
        raise refused(f"{_short(node)}: || is supported for text", "cast an integer with ::text")
    return Typed(f"({parts[0].text} || {parts[1].text})", TEXT)


def _case(made: Expressions, node: exp.Case) -> Typed:
    conditions, values = [], []
    for each in node.args["ifs"]:
        if node.this is None:
            conditions.append(made.condition(each.this))
        else:
            one, other = _compared(
                made.of(node.this), made.of(each.this), _short(node), ordered=False
            )
            conditions.append(f"({one} = {other})")
        values.append(made.of(each.args["true"]))
    default = node.args.get("default")
    last = made.of(default) if default is not None else Typed("NULL", UNKNOWN)
    kind = common([each.type for each in [*values, last]], _short(node))
    branches = [
        f"WHEN {t} THEN {_branch(v, kind)}" for t, v in zip(conditions, values, strict=True)
    ]
    return Typed(f"(CASE {' '.join(branches)} ELSE {_branch(last, kind)} END)", kind)


def _branch(found: Typed, kind: SqlType) -> str:
    return cast(fitted(found, kind), kind)


def _coalesce(made: Expressions, node: exp.Coalesce) -> Typed:
    return _of_all("COALESCE", made, node, [node.this, *node.expressions])


def _extreme(name: str) -> "Callable[[Expressions, exp.Expression], Typed]":
    def translate(made: Expressions, node: exp.Expression) -> Typed:
        found = _of_all(name, made, node, [node.this, *node.expressions])
        if found.type.kind not in ORDERED or found.type.kind in FLOATS:
            raise refused(f"{_short(node)} depends on the order of {found.type.name}")
        return found

    return translate


def _of_all(
    name: str, made: Expressions, node: exp.Expression, each: list[exp.Expression]
) -> Typed:
    values = [made.of(one) for one in each]
    kind = common([one.type for one in values], _short(node))
    texts = [_branch(one, kind) for one in values]
    return Typed(f"{name}({', '.join(texts)})" if len(texts) > 1 else texts[0], kind)


def _nullif(made: Expressions, node: exp.Nullif) -> Typed:
    value, beside = made.of(node.this), made.of(node.expression)
    value = fitted(value, beside.type)
    one, other = _compared(value, beside, _short(node), ordered=False)
    if {value.type.kind, beside.type.kind} - set(INTEGERS) == {Kind.NUMERIC}:
        # The result is the left side of the comparison, which is one of numerics.
        kind = common([value.type, beside.type], _short(node))
        value = Typed(cast(value, kind), kind)
    return Typed(f"(CASE WHEN ({one} = {other}) THEN NULL ELSE {value.text} END)", value.type)


def of_data_type(node: exp.DataType) -> SqlType:
    """The type that is named in a cast."""
    names = {
        exp.DataType.Type.SMALLINT: SqlType(Kind.INT2),
        exp.DataType.Type.INT: INT4,
        exp.DataType.Type.BIGINT: INT8,
        exp.DataType.Type.TEXT: TEXT,
        exp.DataType.Type.DATE: DATE,
        exp.DataType.Type.TIMESTAMP: TIMESTAMP,
        exp.DataType.Type.TIMESTAMPTZ: TIMESTAMPTZ,
        exp.DataType.Type.UUID: SqlType(Kind.UUID),
        exp.DataType.Type.BOOLEAN: BOOL,
    }
    if node.this is exp.DataType.Type.DECIMAL:
        limits = [_whole(each.this) for each in node.expressions]
        if not limits:
            return NUMERIC_TEXT
        precision, scale, *others = [*limits, 0, 0][: max(len(limits), 2)]
        if precision is None or scale is None or others:
            raise refused(f"a cast to {node.sql(dialect='postgres')}: not supported in a view")
        return numeric(precision, scale)
    found = names.get(node.this)
    if found is None or node.expressions:
        raise refused(f"a cast to {node.sql(dialect='postgres')}: not supported in a view")
    return found


def _cast(made: Expressions, node: exp.Cast) -> Typed:
    value, kind = made.of(node.this), of_data_type(node.to)
    if value.type.kind is Kind.UNKNOWN:
        return fitted(value, kind)
    if value.type == kind:
        return Typed(value.text, kind)
    of, to = value.type.kind, kind.kind
    if to is Kind.NUMERIC_TEXT and of in {*INTEGERS, Kind.NUMERIC}:
        # `numeric` without limits keeps the digits that are there.
        wide = as_numeric(value.type)
        return Typed(cast(value, wide), wide)
    # Both round half away from zero, and fail where the value does not fit.
    exact = (
        (of in INTEGERS and to in {*INTEGERS, Kind.NUMERIC, Kind.TEXT})
        or (of in {Kind.NUMERIC, Kind.NUMERIC_TEXT} and to is Kind.NUMERIC)
        or (of is Kind.TIMESTAMP and to is Kind.DATE)
        or (of is Kind.DATE and to is Kind.TIMESTAMP)
        or (of is Kind.UUID and to is Kind.TEXT)
    )
    if not exact:
        raise refused(
            f"{_short(node)}: a cast of {value.type.name} to {kind.name} is not supported in a view"
        )
    return Typed(f"CAST({value.text} AS {kind.spark})", kind)


def _whole(node: exp.Expression | None) -> int | None:
    """A constant that is written in digits only; None for everything else, also for one with a sign."""
    if not isinstance(node, exp.Literal) or node.is_string or not node.this.isdecimal():
        return None
    return int(node.this)


def _length(made: Expressions, node: exp.Length) -> Typed:
    value = made.of(node.this)
    if value.type.kind is not Kind.TEXT:
        raise refused(f"{_short(node)}: supported for text")
    return Typed(f"CHAR_LENGTH({value.text})", INT4)


def _absolute(made: Expressions, node: exp.Abs) -> Typed:
    value = made.of(node.this)
    if value.type.kind not in {Kind.INT4, Kind.INT8, Kind.NUMERIC}:
        raise refused(f"{_short(node)}: supported for integer, bigint and numeric")
    return Typed(f"ABS({value.text})", value.type)


def _round(made: Expressions, node: exp.Round) -> Typed:
    value, digits = made.of(node.this), node.args.get("decimals")
    count = 0 if digits is None else _whole(digits)
    if value.type.kind is Kind.NUMERIC_TEXT and count is not None:
        kind = numeric(38, count)
        return Typed(f"CAST({value.text} AS {kind.spark})", kind)
    if value.type.kind is not Kind.NUMERIC or count is None:
        raise refused(f"{_short(node)}: supported for numeric, to a constant number of digits")
    if count >= value.type.scale:
        kind = numeric(value.type.precision - value.type.scale + count, count)
        return Typed(cast(value, kind), kind)
    kind = numeric(min(38, value.type.precision - value.type.scale + count + 1), count)
    return Typed(f"CAST(ROUND({value.text}, {count}) AS {kind.spark})", kind)


def _substring(made: Expressions, node: exp.Substring) -> Typed:
    value, start, length = made.of(node.this), node.args.get("start"), node.args.get("length")
    first = _whole(start)
    if value.type.kind is not Kind.TEXT or not first:
        raise refused(f"{_short(node)}: supported for text, from a constant position of 1 or more")
    if length is None:
        return Typed(f"SUBSTRING({value.text}, {first})", TEXT)
    count = _whole(length)
    if count is None:
        raise refused(f"{_short(node)}: supported with a constant length")
    return Typed(f"SUBSTRING({value.text}, {first}, {count})", TEXT)


def _extract(made: Expressions, node: exp.Extract) -> Typed:
    field, value = node.this.name.lower(), made.of(node.expression)
    of_date = value.type.kind is Kind.DATE and field not in _OF_TIME
    if field not in _FIELDS or not (of_date or value.type.kind is Kind.TIMESTAMP):
        raise refused(
            f"{_short(node)}: the supported fields are {', '.join(sorted(_FIELDS))}, of a date or a timestamp without time zone"
        )
    kind = numeric(10, 0)
    return Typed(f"CAST(EXTRACT({field.upper()} FROM {value.text}) AS {kind.spark})", kind)


#: The parts of a node that its function looks at, or that mean nothing here; of all others `this` and `expression`.
_PLAIN: Final = frozenset({"this", "expression"})
_PARTS: Final[Mapping[type[exp.Expression], Collection[str]]] = {
    exp.Column: {"this", "table", "db", "catalog"},
    exp.Literal: {"this", "is_string"},
    exp.Is: {"this", "expression", "negate"},
    exp.Like: {"this", "expression", "negate"},
    exp.Between: {"this", "low", "high", "symmetric"},
    exp.In: {"this", "expressions", "query", "unnest", "field"},
    exp.DPipe: {"this", "expression", "safe"},
    exp.Div: {"this", "expression", "typed"},
    exp.Case: {"this", "ifs", "default"},
    exp.Coalesce: {"this", "expressions"},
    exp.Greatest: {"this", "expressions", "ignore_nulls"},
    exp.Least: {"this", "expressions", "ignore_nulls"},
    exp.Cast: {"this", "to"},
    exp.Round: {"this", "decimals"},
    exp.Substring: {"this", "start", "length"},
}

_TRANSLATED: Final[Mapping[type[exp.Expression], Callable[[Expressions, Any], Typed]]] = {
    exp.Column: _column,
    exp.Literal: _literal,
    exp.Null: lambda *_: Typed("NULL", UNKNOWN),
    exp.Boolean: lambda _, node: Typed("TRUE" if node.this else "FALSE", BOOL),
    exp.Paren: lambda made, node: made.of(node.this),
    exp.And: _logical("AND"),
    exp.Or: _logical("OR"),
    exp.Not: _not,
    exp.EQ: _comparison("=", ordered=False),
    exp.NEQ: _comparison("<>", ordered=False),
    exp.LT: _comparison("<", ordered=True),
    exp.LTE: _comparison("<=", ordered=True),
    exp.GT: _comparison(">", ordered=True),
    exp.GTE: _comparison(">=", ordered=True),
    exp.NullSafeEQ: _comparison("<=>", ordered=False),
    exp.NullSafeNEQ: _distinct,
    exp.Is: _is,
    exp.Between: _between,
    exp.In: _in,
    exp.Like: _like,
    exp.Add: _arithmetic("+"),
    exp.Sub: _arithmetic("-"),
    exp.Mul: _arithmetic("*"),
    exp.Div: _integer_division("DIV"),
    exp.Mod: _integer_division("%"),
    exp.Neg: _negative,
    exp.DPipe: _concatenated,
    exp.Case: _case,
    exp.Coalesce: _coalesce,
    exp.Greatest: _extreme("GREATEST"),
    exp.Least: _extreme("LEAST"),
    exp.Nullif: _nullif,
    exp.Cast: _cast,
    exp.Length: _length,
    exp.Abs: _absolute,
    exp.Round: _round,
    exp.Substring: _substring,
    exp.Extract: _extract,
}
