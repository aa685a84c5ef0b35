"""The types of PostgreSQL's expressions in a view, and what Spark has for them. Pure.

A type has the values that the lake's columns have (docs/types.md). What may be computed with it is decided in `expressions`:
a type that is kept as text, or compared otherwise by the two systems, can be passed through and not much more.
"""

from dataclasses import dataclass, field, replace
from enum import Enum

import pyarrow as pa

from spark_consumers.decode import types as pg
from spark_consumers.decode.types import MAX_DECIMAL, column_type
from walsender_bridge.errors import NotSupportedError


class Kind(Enum):
    """What PostgreSQL calls it, and the group that it compares with."""

    INT2 = "smallint"
    INT4 = "integer"
    INT8 = "bigint"
    NUMERIC = "numeric"
    #: A numeric without limits, which is kept as text.
    NUMERIC_TEXT = "numeric without precision"
    BOOL = "boolean"
    TEXT = "text"
    DATE = "date"
    TIMESTAMP = "timestamp"
    TIMESTAMPTZ = "timestamptz"
    FLOAT4 = "real"
    FLOAT8 = "double precision"
    UUID = "uuid"
    BYTEA = "bytea"
    #: A literal in quotes, or NULL: it takes the type of what it stands beside.
    UNKNOWN = "unknown"
    #: Passed through, and nothing else.
    OPAQUE = "a type that is kept as text, or is compared in its own way"


INTEGERS = (Kind.INT2, Kind.INT4, Kind.INT8)
FLOATS = (Kind.FLOAT4, Kind.FLOAT8)
#: Equal in PostgreSQL means equal in Spark. Text is equal if its bytes are, in every deterministic collation.
EQUAL = {
    *INTEGERS,
    Kind.NUMERIC,
    Kind.BOOL,
    Kind.TEXT,
    Kind.DATE,
    Kind.TIMESTAMP,
    Kind.TIMESTAMPTZ,
    Kind.UUID,
    Kind.BYTEA,
    *FLOATS,
}
#: Ordered alike. Text is not: its order is that of a collation; nor is uuid, whose text Spark would compare.
ORDERED = EQUAL - {Kind.TEXT, Kind.UUID, Kind.BYTEA, Kind.BOOL}

_SPARK = {
    Kind.INT2: "SMALLINT",
    Kind.INT4: "INT",
    Kind.INT8: "BIGINT",
    Kind.BOOL: "BOOLEAN",
    Kind.TEXT: "STRING",
    Kind.NUMERIC_TEXT: "STRING",
    Kind.UUID: "STRING",
    Kind.DATE: "DATE",
    Kind.TIMESTAMP: "TIMESTAMP_NTZ",
    Kind.TIMESTAMPTZ: "TIMESTAMP",
    Kind.FLOAT4: "FLOAT",
    Kind.FLOAT8: "DOUBLE",
    Kind.BYTEA: "BINARY",
}
_ARROW = {
    Kind.INT2: pa.int16(),
    Kind.INT4: pa.int32(),
    Kind.INT8: pa.int64(),
    Kind.BOOL: pa.bool_(),
    Kind.TEXT: pa.string(),
    Kind.NUMERIC_TEXT: pa.string(),
    Kind.UUID: pa.string(),
    Kind.DATE: pa.date32(),
    Kind.TIMESTAMP: pa.timestamp("us"),
    Kind.TIMESTAMPTZ: pa.timestamp("us", "UTC"),
    Kind.FLOAT4: pa.float32(),
    Kind.FLOAT8: pa.float64(),
    Kind.BYTEA: pa.binary(),
}
_OF_OID = {
    pg.INT2: Kind.INT2,
    pg.INT4: Kind.INT4,
    pg.INT8: Kind.INT8,
    pg.BOOL: Kind.BOOL,
    pg.TEXT: Kind.TEXT,
    pg.VARCHAR: Kind.TEXT,
    pg.DATE: Kind.DATE,
    pg.TIMESTAMP: Kind.TIMESTAMP,
    pg.TIMESTAMPTZ: Kind.TIMESTAMPTZ,
    pg.FLOAT4: Kind.FLOAT4,
    pg.FLOAT8: Kind.FLOAT8,
    pg.UUID: Kind.UUID,
    pg.BYTEA: Kind.BYTEA,
}
#: Types from this OID on are no types of PostgreSQL's own: enums, composite types and those of extensions.
_OWN_TYPES = 16384
#: Decimal digits of the integers.
_DIGITS = {Kind.INT2: 5, Kind.INT4: 10, Kind.INT8: 19}


@dataclass(frozen=True, slots=True)
class SqlType:
    """A type. `precision` and `scale`: of a numeric. `arrow`: of an opaque one, as the lake has it.

    `is_padded`: PostgreSQL's values of a numeric may have fewer digits behind the point, which only shows in the digits of their `avg`.
    `may_be_row`: an opaque one may be a composite type.
    """

    kind: Kind
    precision: int = 0
    scale: int = 0
    arrow: pa.DataType | None = None
    is_padded: bool = field(default=False, compare=False, repr=False)
    may_be_row: bool = field(default=False, repr=False)

    @property
    def name(self) -> str:
        """As PostgreSQL writes it."""
        if self.kind is Kind.NUMERIC:
            return f"numeric({self.precision},{self.scale})"
        return str(self.kind.value)

    @property
    def spark(self) -> str:
        """As Spark's SQL writes it; not of an opaque one."""
        if self.kind is Kind.NUMERIC:
            return f"DECIMAL({self.precision},{self.scale})"
        return _SPARK[self.kind]

    @property
    def in_arrow(self) -> pa.DataType:
        """As a column of the lake has it."""
        if self.kind is Kind.OPAQUE:
            assert self.arrow is not None
            return self.arrow
        if self.kind is Kind.NUMERIC:
            return pa.decimal128(self.precision, self.scale)
        return _ARROW[self.kind]


INT4, INT8, BOOL = SqlType(Kind.INT4), SqlType(Kind.INT8), SqlType(Kind.BOOL)
TEXT, DATE, UNKNOWN = SqlType(Kind.TEXT), SqlType(Kind.DATE), SqlType(Kind.UNKNOWN)
TIMESTAMP, TIMESTAMPTZ = SqlType(Kind.TIMESTAMP), SqlType(Kind.TIMESTAMPTZ)
NUMERIC_TEXT = SqlType(Kind.NUMERIC_TEXT)


def of_column(type_oid: int, typmod: int) -> SqlType:
    """The type of a column, as the log describes it."""
    found = column_type(type_oid, typmod)
    if type_oid == pg.NUMERIC:
        if found.kept_as_text:
            return NUMERIC_TEXT
        return numeric(found.arrow.precision, found.arrow.scale)
    kind = _OF_OID.get(type_oid)
    if kind is None:
        return SqlType(Kind.OPAQUE, arrow=found.arrow, may_be_row=type_oid >= _OWN_TYPES)
    return SqlType(kind)


def numeric(precision: int, scale: int) -> SqlType:
    """A numeric of these limits. Raises `NotSupportedError` for one that Spark does not have."""
    if not (0 <= scale <= precision <= MAX_DECIMAL and precision):
        raise NotSupportedError(
            f"a numeric of {precision} digits, {scale} of them behind the point, may have more than Spark's 38 digits",
            repair="cast the operands to numeric(p,s) with fewer digits",
        )
    return SqlType(Kind.NUMERIC, precision, scale)


def as_numeric(kind: SqlType) -> SqlType:
    """The numeric that has all values of an integer type; a numeric itself."""
    return kind if kind.kind is Kind.NUMERIC else numeric(_DIGITS[kind.kind], 0)


def common(types: list[SqlType], what: str) -> SqlType:
    """The type of a CASE, COALESCE or UNION of these. Raises `NotSupportedError` where PostgreSQL would convert otherwise."""
    known = [each for each in types if each.kind is not Kind.UNKNOWN]
    if not known:
        return TEXT
    kinds = {each.kind for each in known}
    if len(set(known)) == 1:
        return replace(known[0], is_padded=any(each.is_padded for each in known))
    if kinds <= set(INTEGERS):
        return SqlType(max(kinds, key=INTEGERS.index))
    if kinds <= {*INTEGERS, Kind.NUMERIC}:
        wide = [as_numeric(each) for each in known]
        scale = max(each.scale for each in wide)
        made = numeric(max(each.precision - each.scale for each in wide) + scale, scale)
        # PostgreSQL leaves each value the digits that it has.
        is_padded = any(each.is_padded or each.scale < scale for each in wide)
        return replace(made, is_padded=is_padded)
    names = ", ".join(sorted({each.name for each in known}))
    raise NotSupportedError(
        f"{what} has values of different types: {names}", repair="cast them to one type"
    )


def has_fixed_average(kind: SqlType) -> bool:
    """Whether the digits of an average are the same if values have fewer digits behind the point than their type.

    An average has at least 16 digits from its first one in base 10000 on, and is not greater than the greatest value (`average`).
    """
    weight = max(-(-(kind.precision - kind.scale) // 4) - 1, 0)
    return not kind.is_padded or kind.scale <= 16 - 4 * weight


def summed(kind: SqlType) -> SqlType:
    """The type of `sum` over values of this type: PostgreSQL's, with the digits that Spark can have."""
    if kind.kind in {Kind.INT2, Kind.INT4}:
        return INT8
    wide = as_numeric(kind)
    return replace(wide, precision=min(MAX_DECIMAL, wide.precision + 10))
