"""Reads the condition of a row filter into its tree (`row_filter`), or refuses it. Pure.

Every form that is not known here is refused, and every argument of a known form (`_ARGUMENTS`), such as one that negates it. So another
version of sqlglot may add forms, and changes the meaning of none.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from functools import lru_cache, partial
from typing import Final

import pyarrow as pa
from sqlglot import exp, parse
from sqlglot.errors import SqlglotError

from spark_consumers.decode.spans import of_texts
from spark_consumers.decode.types import TIMESTAMP, TIMESTAMPTZ, UUID, column_type, from_text
from spark_consumers.decode.unrepresentable import UnrepresentableValueError
from spark_consumers.lake.tables.row_filter import (
    Compare,
    Is,
    IsNull,
    Logic,
    Node,
    RowFilter,
    Value,
)
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.protocol.pgoutput import Column

_INTEGERS: Final = (21, 23, 20)
_REAL: Final = 700
_FLOATS: Final = (_REAL, 701)
_TEXTS: Final = (25, 1043)
_BOOLEAN: Final = 16
_DATE: Final = 1082
_NUMERIC: Final = 1700
_OWN_TYPES: Final = 16384
_UUID: Final = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MOMENT: Final = re.compile(
    r"((?!0000)\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d:\d\d(?:\.\d{1,6})?)(\+00(?::00)?)?)?"
)
_NUMBER: Final = re.compile(r"\d{1,38}(\.\d{1,37})?")
_OPERATORS: Final[Mapping[type[exp.Expr], str]] = {
    exp.EQ: "=",
    exp.NEQ: "<>",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.GT: ">",
    exp.GTE: ">=",
}


def opened(
    text: str, columns: tuple[Column, ...], masked: frozenset[str], *, where: str
) -> RowFilter:
    """The filter of a table with these columns, as the source has them. Raises `NotSupportedError`, with `where`, for what it may not be."""
    try:
        return _opened(text, columns, masked)
    except NotSupportedError as error:
        raise NotSupportedError(error.what, where=where, repair=error.repair) from None


@lru_cache(maxsize=1000)
def _opened(text: str, columns: tuple[Column, ...], masked: frozenset[str]) -> RowFilter:
    try:
        found = [each for each in parse(f"SELECT 1 WHERE ({text}\n)", dialect="postgres") if each]
    except SqlglotError as error:
        line = str(error).partition("\n")[0]
        raise _refused(f"the condition cannot be read: {line}") from None
    except RecursionError:
        raise _refused("the condition is nested too deeply") from None
    query = found[0] if len(found) == 1 else None
    if not isinstance(query, exp.Select):
        raise _refused("it must be one condition")
    where = query.args.get("where")
    others = {name for name, value in query.args.items() if value} - {
        "where",
        "expressions",
        "kind",
    }
    if where is None or others:
        raise _refused("it must be one condition")
    reader = _Reader({c.name: c for c in columns}, masked)
    try:
        _check_arguments(where.this)
        tree = reader.condition(where.this)
    except RecursionError:
        raise _refused("the condition is nested too deeply") from None
    return RowFilter(tree, frozenset(reader.read))


#: The forms of a condition, and the arguments that each may have.
_ARGUMENTS: Final[Mapping[type[exp.Expr], frozenset[str]]] = {
    **{kind: frozenset({"this", "expression"}) for kind in (*_OPERATORS, exp.And, exp.Or)},
    **{kind: frozenset({"this"}) for kind in (exp.Paren, exp.Not, exp.Neg, exp.Column)},
    **{kind: frozenset({"this"}) for kind in (exp.Boolean, exp.Null, exp.DataType)},
    exp.Is: frozenset({"this", "expression", "negate"}),
    exp.Between: frozenset({"this", "low", "high"}),
    exp.In: frozenset({"this", "expressions"}),
    exp.Identifier: frozenset({"this", "quoted"}),
    exp.Literal: frozenset({"this", "is_string"}),
    exp.Cast: frozenset({"this", "to"}),
}


def _check_arguments(condition: exp.Expr) -> None:
    """Refuse a known form with an argument that is not known."""
    for node in condition.walk():
        known = _ARGUMENTS.get(type(node))
        given = {name for name, value in node.args.items() if value not in (None, False, [])}
        if known is not None and given - known:
            raise _refused(f"{node.sql(dialect='postgres')!r:.80} is not supported")


class _Reader:
    def __init__(self, columns: Mapping[str, Column], masked: frozenset[str]) -> None:
        self._columns = columns
        self._masked = masked
        self.read: set[str] = set()

    def condition(self, node: exp.Expr) -> Node:
        if isinstance(node, exp.Paren):
            return self.condition(node.this)
        if isinstance(node, exp.And | exp.Or):
            word = "AND" if isinstance(node, exp.And) else "OR"
            # One node for a AND b AND c: a nested tree of many cannot be sent to executors.
            parts: list[Node] = []
            for found in map(self.condition, (node.this, node.expression)):
                if isinstance(found, Logic) and found.operator == word:
                    parts += found.parts
                else:
                    parts.append(found)
            return Logic(word, tuple(parts))
        if isinstance(node, exp.Not):
            return Logic("NOT", (self.condition(node.this),))
        if isinstance(node, exp.Is):
            return self._is(node)
        if isinstance(node, exp.Between) and not node.args.get("symmetric"):
            low, high = node.args["low"], node.args["high"]
            bounds = (self._compared(">=", node.this, low), self._compared("<=", node.this, high))
            return Logic("AND", bounds)
        if isinstance(node, exp.In) and node.expressions:
            if isinstance(node.this, exp.Column) and self._column(node.this).type_oid == _REAL:
                # PostgreSQL rounds the values of a list to the column's type, and none that is compared by =.
                raise _refused("a real column cannot be compared with a list: use =")
            return Logic(
                "OR", tuple(self._compared("=", node.this, each) for each in node.expressions)
            )
        if type(node) in _OPERATORS:
            return self._compared(_OPERATORS[type(node)], node.this, node.expression)
        if isinstance(node, exp.Column):
            column = self._column(node)
            if column.type_oid != _BOOLEAN:
                raise _refused(f"the column {column.name!r} is not boolean")
            return Is(column.name, _quoted(column.name))
        raise _refused(
            f"{node.sql(dialect='postgres')!r:.80} is not among the conditions that can be evaluated for changes"
        )

    def _column(self, node: exp.Expr) -> Column:
        if (
            not isinstance(node, exp.Column)
            or node.table
            or not isinstance(node.this, exp.Identifier)
        ):
            raise _refused(f"{node.sql(dialect='postgres')!r:.80} is not a column of the table")
        name = node.this.name if node.this.quoted else node.this.name.lower()
        if name not in self._columns:
            raise _refused(f"the table has no column {name!r}")
        if name in self._masked:
            raise _refused(
                f"the column {name!r} is masked, and the rows that the lake has would reveal its values"
            )
        self.read.add(name)
        return self._columns[name]

    def _is(self, node: exp.Is) -> Node:
        found = self._is_so(node)
        return Logic("NOT", (found,)) if node.args.get("negate") else found

    def _is_so(self, node: exp.Is) -> Node:
        column = self._column(node.this)
        if isinstance(node.expression, exp.Null):
            if column.type_oid >= _OWN_TYPES:
                raise _refused(
                    f"the type of the column {column.name!r} is not one of PostgreSQL's own"
                )
            return IsNull(column.name, _quoted(column.name))
        if isinstance(node.expression, exp.Boolean) and column.type_oid == _BOOLEAN:
            return Is(column.name, _quoted(column.name), bool(node.expression.this))
        raise _refused(f"{node.sql(dialect='postgres')!r:.80} is not supported")

    def _compared(self, operator: str, left: exp.Expr, right: exp.Expr) -> Node:
        while isinstance(left, exp.Paren):
            left = left.this
        while isinstance(right, exp.Paren):
            right = right.this
        if isinstance(left, exp.Column):
            column = self._column(left)
            ours = self._operand(column)
            theirs = (
                self._operand(self._column(right))
                if isinstance(right, exp.Column)
                else _literal(right, column, ours.family)
            )
        elif isinstance(right, exp.Column):
            column = self._column(right)
            theirs = self._operand(column)
            ours = _literal(left, column, theirs.family)
        else:
            raise _refused("a comparison needs a column on one of its sides")
        if ours.family != theirs.family:
            raise _refused(f"{ours.sql} and {theirs.sql} have types that cannot be compared here")
        if ours.family in {"text", "uuid", "boolean"} and operator not in {"=", "<>"}:
            raise _refused(
                f"values like {ours.sql} are compared by = and <> only: their order may depend on the server"
            )
        return Compare(operator, ours, theirs)

    def _operand(self, column: Column) -> Value:
        kind, quoted = column.type_oid, _quoted(column.name)
        made = partial(Value, column=column.name)
        if kind in _INTEGERS:
            return made("integer", quoted)
        if kind in _FLOATS:
            return made("float", f"{quoted}::float8")
        if kind in _TEXTS:
            return made("text", f'{quoted} COLLATE "C"')
        if kind in _MOMENTS:
            return made(_MOMENTS[kind], quoted)
        if kind == UUID:
            return made("uuid", quoted)
        if kind == _BOOLEAN:
            return made("boolean", quoted)
        if kind == _NUMERIC:
            known = column_type(kind, column.typmod)
            if not known.kept_as_text:
                return made(f"numeric {known.arrow}", quoted)
        raise _refused(f"the column {column.name!r} has a type that cannot be compared for changes")


_MOMENTS: Final = {_DATE: "date", TIMESTAMP: "timestamp", TIMESTAMPTZ: "timestamptz"}


def _literal(node: exp.Expr, column: Column, family: str) -> Value:
    """A literal as PostgreSQL takes it beside this column."""
    kind = column_type(column.type_oid, column.typmod).arrow
    if isinstance(node, exp.Null):
        if family == "integer":
            kind = pa.int64()
        elif family == "float":
            kind = pa.float64()
        return Value(family, "NULL", scalar=pa.scalar(None, kind))
    if isinstance(node, exp.Cast) and family in _MOMENTS.values():
        # DATE '2024-01-01'
        if node.to.sql(dialect="postgres").lower() != family:
            raise _refused(
                f"{node.sql(dialect='postgres')!r:.80} has another type than {column.name!r}"
            )
        node = node.this
    negative = isinstance(node, exp.Neg)
    if negative:
        node = node.this
    if isinstance(node, exp.Boolean) and family == "boolean":
        return Value(family, str(bool(node.this)).upper(), scalar=pa.scalar(bool(node.this)))
    if isinstance(node, exp.Literal):
        if not node.is_string:
            text = ("-" if negative else "") + str(node.this)
            if _NUMBER.fullmatch(str(node.this)):
                return _number(text, kind, family)
        elif not negative:
            return _of_text(str(node.this), column, family)
    raise _refused(
        f"{node.sql(dialect='postgres')!r:.80} is not a value with which {column.name!r} can be compared"
    )


def _number(text: str, kind: pa.DataType, family: str) -> Value:
    if family == "integer" and "." not in text and -(2**63) <= int(text) < 2**63:
        return Value(family, f"'{text}'::bigint", scalar=pa.scalar(int(text), pa.int64()))
    if family == "float":
        return Value(family, f"'{text}'::float8", scalar=pa.scalar(float(text), pa.float64()))
    if family.startswith("numeric"):
        number = Decimal(text)
        scale = max(0, -int(number.as_tuple().exponent))
        whole = len(number.as_tuple().digits) - scale
        # Both have to fit into one decimal.
        if max(whole, kind.precision - kind.scale) + max(scale, kind.scale) <= 38:
            of = pa.decimal128(max(whole, 0) + scale or 1, scale)
            return Value(family, f"'{text}'::numeric", scalar=pa.scalar(number, of))
    raise _refused(f"the number {text} cannot be compared with the column's type")


def _of_text(text: str, column: Column, family: str) -> Value:
    if family == "text" and "\0" not in text:
        escaped = text.replace("\\", "\\\\").replace("'", "''")
        return Value(family, f"E'{escaped}'", scalar=pa.scalar(text, pa.string()))
    if family == "uuid" and _UUID.fullmatch(text.lower()):
        return Value(family, f"'{text.lower()}'::uuid", scalar=pa.scalar(text.lower()))
    moment = _MOMENT.fullmatch(text) if family in _MOMENTS.values() else None
    if moment is not None:
        date, time, zone = moment[1], moment[2], moment[3]
        wanted = {"date": (False, False), "timestamp": (True, False), "timestamptz": (True, True)}
        if family == "timestamp" and time is None:
            time = "00:00:00"
        if wanted[family] == (time is not None, zone is not None):
            exact = date if time is None else f"{date} {time}{'+00' if zone else ''}"
            try:
                found = from_text(of_texts([exact]), column_type(column.type_oid, column.typmod))
            except UnrepresentableValueError as fault:
                raise _refused(f"{text!r}: {fault.what}") from None
            return Value(family, f"'{exact}'::{family}", scalar=found[0])
    raise _refused(
        f"{text!r:.80} cannot be compared with {column.name!r} here (a timestamptz is written in UTC, with the offset +00)"
    )


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _refused(what: str) -> NotSupportedError:
    return NotSupportedError(
        f"its row filter cannot be used: {what}",
        repair="correct rows in the first [[lake.tables]] whose pattern matches the table, and start `lake run` again",
    )
