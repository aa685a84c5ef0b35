"""Columns of any type with any values, drawn from a seed, for servers to write as their own text.

A column's values are texts that PostgreSQL reads; what it writes for them is the server's business, so a
test compares with that, never with what was put in.
"""

import datetime as dt
import json
import math
import random
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import psycopg
import pyarrow as pa

from tests.support import plain_decoder

Values = Callable[[random.Random], str]

_LETTERS = [*"abcXYZ019 ", *"\"'\\{}(),;=>[]<:\t\n", "é", "€", "😀", "NULL", "null", "\x01", "\x7f"]


def _pick(*values: str) -> Values:
    return lambda draw: draw.choice(values)


def _either(edges: Iterable[str], usual: Values) -> Values:
    pool = list(edges)
    return lambda draw: draw.choice(pool) if draw.random() < 0.3 else usual(draw)


def _text(draw: random.Random, longest: int = 12) -> str:
    return "".join(draw.choice(_LETTERS) for _ in range(draw.randrange(longest)))


def _integer(bits: int) -> Values:
    least, most = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return _either(map(str, (least, -1, 0, most)), lambda draw: str(draw.randint(least, most)))


def _float(code: str) -> Values:
    """Any bits that are a number, of struct's `code`."""

    def usual(draw: random.Random) -> str:
        raw = draw.randbytes(struct.calcsize(code))
        number = struct.unpack(code, raw)[0]
        return repr(number if math.isfinite(number) else 0.1)

    return _either(["NaN", "Infinity", "-Infinity", "-0", "0.1", "1e22"], usual)


def _digits(draw: random.Random, before: int, after: int) -> str:
    whole = "".join(draw.choice("0123456789") for _ in range(draw.randint(0, before))) or "0"
    part = "".join(draw.choice("0123456789") for _ in range(draw.randint(0, after)))
    return draw.choice(["", "-"]) + whole + (f".{part}" if part else "")


def _date(draw: random.Random) -> str:
    return str(dt.date.fromordinal(draw.randint(1, dt.date.max.toordinal())))


def _timestamp(draw: random.Random) -> str:
    moment = dt.datetime.min + dt.timedelta(
        days=draw.randrange(3_652_058), microseconds=draw.randrange(86_400_000_000)
    )
    return str(moment if draw.random() < 0.7 else moment.replace(microsecond=0))


def _bits(draw: random.Random, count: int) -> str:
    return "".join(draw.choice("01") for _ in range(count))


def _number(draw: random.Random) -> str:
    return repr(round(draw.uniform(-1e6, 1e6), draw.randrange(6)))


def _point(draw: random.Random) -> str:
    return f"({_number(draw)},{_number(draw)})"


def _interval(draw: random.Random) -> str:
    parts = [f"{draw.randint(-9999, 9999)} {unit}" for unit in ("years", "mons", "days")]
    clock = f"{draw.choice(['', '-'])}{draw.randrange(99)}:{draw.randrange(60)}:{draw.random() * 59:.6f}"
    return " ".join([*draw.sample(parts, draw.randrange(4)), clock])


def _json(draw: random.Random) -> str:
    def value(depth: int) -> Any:
        match draw.randrange(7 if depth else 5):
            case 0:
                return _text(draw)
            case 1:
                return draw.choice([None, True, False])
            case 2 | 3:
                return draw.randint(-(10**18), 10**18)
            case 4:
                return round(draw.uniform(-1e9, 1e9), 6)
            case 5:
                return [value(depth - 1) for _ in range(draw.randrange(4))]
            case _:
                return {_text(draw): value(depth - 1) for _ in range(draw.randrange(4))}

    return json.dumps(value(2), ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))


def _network(draw: random.Random) -> str:
    if draw.random() < 0.5:
        address = ".".join(str(draw.randrange(256)) for _ in range(4))
        return address + draw.choice(["", f"/{draw.randrange(33)}"])
    address = ":".join(f"{draw.randrange(65536):x}" for _ in range(8))
    return address + draw.choice(["", f"/{draw.randrange(129)}"])


def _range(bound: Values, order: Callable[[str], Any]) -> Values:
    def one(draw: random.Random) -> str:
        if draw.random() < 0.1:
            return "empty"
        low, high = sorted((bound(draw), bound(draw)), key=order)
        ends = [f'"{b}"' if draw.random() < 0.8 else "" for b in (low, high)]
        return f"{draw.choice('([')}{ends[0]},{ends[1]}{draw.choice(')]')}"

    return one


def _multirange(one: Values) -> Values:
    return lambda draw: "{" + ",".join(one(draw) for _ in range(draw.randrange(4))) + "}"


def _words(draw: random.Random) -> str:
    word = "".join(draw.choice("abcé") for _ in range(3))
    return f"'{word}':{draw.randrange(1, 99)}{draw.choice('ABC ')} 'b c':2"


_int4, _int8 = _integer(32), _integer(64)
_small: Values = lambda draw: str(draw.randint(-1000, 1000))  # noqa: E731  # one of a table of values
_numeric: Values = lambda draw: _digits(draw, 40, 40)  # noqa: E731  # as above

#: Types whose columns have a type of their own, with values that it holds.
TYPED: dict[str, Values] = {
    "boolean": _pick("t", "f"),
    "smallint": _integer(16),
    "integer": _int4,
    "bigint": _int8,
    "real": _float("f"),
    "double precision": _float("d"),
    "numeric(38,0)": _either(["9" * 38, "-" + "9" * 38], lambda d: _digits(d, 38, 0)),
    "numeric(38,38)": lambda draw: "0." + _digits(draw, 38, 0).lstrip("-"),
    "numeric(12,3)": lambda draw: _digits(draw, 9, 3),
    "text": _text,
    "varchar(20)": lambda draw: _text(draw)[:20],
    "char(14)": lambda draw: _text(draw, 3),
    "name": lambda draw: _text(draw, 5),
    "bytea": lambda draw: f"\\x{draw.randbytes(draw.randrange(20)).hex()}",
    "date": _either(["0001-01-01", "9999-12-31", "2000-02-29"], _date),
    "timestamp": _either(["0001-01-01", "9999-12-31 23:59:59.999999"], _timestamp),
    "timestamp(0)": lambda draw: _timestamp(draw).replace("9999", "1999"),
    "timestamptz": lambda draw: f"{_timestamp(draw)}+00",
    "uuid": lambda draw: draw.randbytes(16).hex(),
    "json": _json,
    "jsonb": _either(["1e500", "null"], _json),
}
#: Types that are kept as text.
TEXTUAL: dict[str, Values] = {
    "numeric": _either(["NaN", "1e-500", "9" * 400, "0.00", "1e131071"], _numeric),
    "numeric(50,7)": _either(["NaN"], lambda draw: _digits(draw, 43, 7)),
    "interval": _either(["178000000 years", "0", "-1 day", "1 mon -1 day"], _interval),
    "interval hour to minute": _interval,
    "time": _either(["24:00:00", "00:00:00"], lambda draw: _timestamp(draw)[11:]),
    "timetz": lambda draw: _timestamp(draw)[11:] + draw.choice(["+05:30", "-12", "+00"]),
    "money": _either(["-92233720368547758.08", "92233720368547758.07"], lambda d: _digits(d, 9, 2)),
    "inet": _network,
    "cidr": lambda draw: f"{draw.randrange(256)}.{draw.randrange(256)}.0.0/16",
    "macaddr": lambda draw: draw.randbytes(6).hex(":"),
    "macaddr8": lambda draw: draw.randbytes(8).hex(":"),
    "bit(9)": lambda draw: _bits(draw, 9),
    "varbit": lambda draw: _bits(draw, draw.randrange(30)),
    "point": _point,
    "line": lambda draw: "{1," + _number(draw) + "," + _number(draw) + "}",
    "lseg": lambda draw: f"[{_point(draw)},{_point(draw)}]",
    "box": lambda draw: f"{_point(draw)},{_point(draw)}",
    "path": lambda draw: draw.choice(["({})", "[{}]"]).format(f"{_point(draw)},{_point(draw)}"),
    "polygon": lambda draw: f"({_point(draw)},{_point(draw)},{_point(draw)})",
    "circle": lambda draw: f"<{_point(draw)},{abs(float(_number(draw)))}>",
    "int4range": _range(_small, int),
    "int8range": _range(_integer(60), int),
    "numrange": _range(_numeric, Decimal),
    "daterange": _range(_date, str),
    "tsrange": _range(_timestamp, str),
    "tstzrange": _either(["(,infinity]", "[-infinity,)"], _range(_timestamp, str)),
    "tsvector": _words,
    "tsquery": _pick("'a' & !'b':*A | 'c d'", "'é' <-> 'x'", ""),
    "oid": lambda draw: str(draw.randrange(2**32)),
    "xid": lambda draw: str(draw.randrange(2**32)),
    "tid": lambda draw: f"({draw.randrange(2**32)},{draw.randrange(2**16)})",
    "pg_lsn": lambda draw: f"{draw.randrange(2**32):X}/{draw.randrange(2**32):X}",
    "txid_snapshot": _pick("10:20:10,14,15", "1:1:"),
    '"char"': _pick("a", "", "\\", "{"),
    "int2vector": _pick("1 2 3", ""),
    "refcursor": _text,
    "regclass": _pick("pg_class", "-", "4294967295"),
}


@dataclass(frozen=True)
class Kind:
    """A column's type. `as_list`: an array whose values may lie outside of the list that it becomes."""

    ddl: str
    values: Values
    as_list: bool = False


@dataclass
class Kinds:
    """Types of one database, those that it creates among them. Made with a connection to it."""

    connection: psycopg.Connection
    draw: random.Random
    typed: dict[str, Values] = field(default_factory=lambda: dict(TYPED))
    textual: dict[str, Values] = field(default_factory=lambda: dict(TEXTUAL))
    made: int = 0

    def __post_init__(self) -> None:
        version = self.connection.info.server_version
        if version >= 140000:
            self.textual["int4multirange"] = _multirange(_range(_small, int))
            self.textual["tstzmultirange"] = _multirange(_range(_timestamp, str))
            self.textual["numeric"] = _either(["Infinity", "-Infinity"], self.textual["numeric"])
        if version >= 150000:
            self.textual["numeric(5,-2)"] = lambda draw: _digits(draw, 6, 0)
            self.textual["numeric(3,5)"] = lambda draw: f"0.00{draw.randrange(1000):03}"
        if version >= 170000:
            self.textual["interval"] = _either(["infinity", "-infinity"], self.textual["interval"])
        xml = self.connection.execute(
            "SELECT setting LIKE '%with-libxml%' FROM pg_config WHERE name = 'CONFIGURE'"
        ).fetchone()
        if xml == (True,):
            self.textual["xml"] = _pick("<a>1</a>", "plain", '<b c="d"/>')
        extensions: dict[str, dict[str, Values]] = {
            "vector": {"vector(3)": lambda draw: f"[{_number(draw)},1e-30,{_number(draw)}]"},
            "hstore": {"hstore": _pick('a=>1, "b c"=>NULL', "", '"\\""=>"\\\\"')},
            "citext": {"citext": _text},
            "ltree": {"ltree": _pick("Top.Science", "")},
        }
        rows = self.connection.execute("SELECT name FROM pg_available_extensions").fetchall()
        for name in sorted(extensions.keys() & {row[0] for row in rows}):
            self.connection.execute(f"CREATE EXTENSION {name}".encode())
            self.textual |= extensions[name]

    def any(self) -> Kind:
        """A type at random."""
        shape = self.draw.randrange(12)
        if shape < 3:
            return Kind(*self._choice(self.typed))
        if shape < 6:
            return Kind(*self._choice(self.textual))
        if shape < 8:
            ddl, values = self._choice(self.typed)
            nested = self.draw.random() < 0.3
            return Kind(f"{ddl}[]", _array(values, nested=nested), as_list=nested)
        if shape == 8:
            ddl, values = self._choice(self.textual)
            # The one type whose elements are told apart by another mark.
            mark = ";" if ddl == "box" else ","
            return Kind(f"{ddl}[]", _array(values, nested=True, mark=mark))
        return (self._domain, self._composite, self._enum)[shape - 9]()

    def _choice(self, kinds: dict[str, Values]) -> tuple[str, Values]:
        return self.draw.choice(sorted(kinds.items()))

    def _create(self, what: str, ending: str) -> str:
        self.made += 1
        name = f"made_{self.made}"
        self.connection.execute(f"CREATE {what} {name} AS {ending}".encode())
        return name

    def _domain(self) -> Kind:
        ddl, values = self._choice({**self.typed, **self.textual})
        name = self._create("DOMAIN", ddl)
        chance = self.draw.random()
        if chance < 0.3:
            return Kind(self._create("DOMAIN", name), values)
        if chance < 0.5 and ddl != "box":
            return Kind(f"{name}[]", _array(values, nested=True))
        if chance < 0.7 and ddl in self.typed:
            return Kind(self._create("DOMAIN", f"{ddl}[]"), _array(values, nested=False))
        return Kind(name, values)

    def _composite(self) -> Kind:
        kinds = {**self.typed, **self.textual}
        parts = [self._choice(kinds) for _ in range(self.draw.randint(1, 4))]
        name = self._create("TYPE", f"({', '.join(f'f{i} {p[0]}' for i, p in enumerate(parts))})")

        def values(draw: random.Random) -> str:
            found = ["" if draw.random() < 0.2 else _quoted(p[1](draw)) for p in parts]
            return f"({','.join(found)})"

        if self.draw.random() < 0.3:
            return Kind(f"{name}[]", _array(values, nested=True))
        return Kind(name, values)

    def _enum(self) -> Kind:
        labels = sorted({_text(self.draw)[:20] for _ in range(5)} | {"so so", "NULL"})
        told = ", ".join("'" + label.replace("'", "''") + "'" for label in labels)
        name = self._create("TYPE", f"ENUM ({told})")
        if self.draw.random() < 0.3:
            name = self._create("DOMAIN", name)
        values = _pick(*labels)
        if self.draw.random() < 0.3:
            return Kind(f"{name}[]", _array(values, nested=True))
        return Kind(name, values)


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _array(values: Values, *, nested: bool, mark: str = ",") -> Values:
    """Array texts: lists; if `nested`, of up to three dimensions and with any first index too."""

    def level(draw: random.Random, sizes: list[int]) -> str:
        if not sizes:
            return "NULL" if draw.random() < 0.2 else _quoted(values(draw))
        return "{" + mark.join(level(draw, sizes[1:]) for _ in range(sizes[0])) + "}"

    def one(draw: random.Random) -> str:
        if not nested:
            return level(draw, [draw.randrange(5)])
        sizes = [draw.randint(1, 3) for _ in range(draw.choice([1, 1, 2, 3]))]
        if draw.random() < 0.1:
            return "{}"
        if draw.random() < 0.2:
            first = draw.randint(-3, 3)
            bounds = "".join(f"[{first}:{first + size - 1}]" for size in sizes)
            return f"{bounds}={level(draw, sizes)}"
        return level(draw, sizes)

    return one


def same(value: Any, own: str | None, arrow: pa.DataType) -> bool:
    """Whether a value in Arrow is what PostgreSQL wrote, byte for byte (floats: bit for bit)."""
    if value is None or own is None:
        return value is None and own is None
    if pa.types.is_list(arrow):
        inner = arrow.value_type
        if not pa.types.is_floating(inner):
            return _array_text([None if v is None else as_own_text(v, inner) for v in value]) == own
        items = plain_decoder.array(own)
        return len(items) == len(value) and all(map(lambda v, t: same(v, t, inner), value, items))
    if pa.types.is_floating(arrow):
        code = "f" if pa.types.is_float32(arrow) else "d"
        return struct.pack(code, value) == struct.pack(code, float(own))
    return as_own_text(value, arrow) == own


def as_own_text(value: Any, arrow: pa.DataType) -> str:
    """A value as PostgreSQL writes it."""
    if pa.types.is_boolean(arrow):
        return "t" if value else "f"
    if pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow):
        return f"\\x{value.hex()}"
    if pa.types.is_timestamp(arrow):
        zone = "+00" if arrow.tz else ""
        text = value.replace(tzinfo=None).isoformat(sep=" ")
        return (text.rstrip("0") if "." in text else text) + zone
    if pa.types.is_decimal(arrow):
        return format(value, "f")
    return str(value)


def _array_text(items: list[str | None]) -> str:
    """A list as `array_out` writes it."""

    def element(item: str | None) -> str:
        if item is None:
            return "NULL"
        plain = item and item.upper() != "NULL" and not set(item) & set('{}",\\ \t\n\r\v\f')
        return item if plain else _quoted(item)

    return "{" + ",".join(map(element, items)) + "}"
