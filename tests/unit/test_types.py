"""PostgreSQL's text in Arrow: what each type becomes, and what is refused rather than lost."""

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_consumers.decode import types
from spark_consumers.decode.spans import contents, gather
from spark_consumers.decode.types import column_type, from_text, numeric_limits, with_base_types
from spark_consumers.decode.unrepresentable import UnrepresentableValueError
from tests.support.change_entries import TYPED
from tests.support.plain_decoder import value
from walsender_bridge.postgres.protocol.pgoutput import Column, Relation


def typmod(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


def test_a_domain_is_its_base_type_and_one_over_numeric_is_text() -> None:
    columns = tuple(Column(f"c{i}", 20_000 + i, -1, is_key=False) for i in range(5))
    bases = {
        20_000: ("pg_catalog", "int4"),
        20_001: ("pg_catalog", "_timestamptz"),
        20_002: ("pg_catalog", "numeric"),
        20_003: ("pg_catalog", "inet"),
        # A type of somebody's own that is called like one of ours.
        20_004: ("public", "int4"),
    }
    relation = with_base_types(Relation(1, "public", "t", "d", columns, bases))
    assert [column_type(c.type_oid, c.typmod).arrow for c in relation.columns] == [
        *(pa.int32(), pa.list_(pa.timestamp("us", "UTC")), pa.string(), pa.string(), pa.string())
    ]


def converted(type_oid: int, texts: list[str | None], modifier: int = -1) -> list[Any]:
    found = from_text(pa.array(texts, pa.string()), column_type(type_oid, modifier))
    found.validate(full=True)
    assert found.type == column_type(type_oid, modifier).arrow
    return found.to_pylist()


@pytest.mark.parametrize(
    ("type_oid", "arrow"),
    [
        (types.BOOL, pa.bool_()),
        (types.INT2, pa.int16()),
        (types.INT4, pa.int32()),
        (types.INT8, pa.int64()),
        (types.FLOAT4, pa.float32()),
        (types.FLOAT8, pa.float64()),
        (types.TEXT, pa.string()),
        (types.BYTEA, pa.binary()),
        (types.DATE, pa.date32()),
        (types.TIMESTAMP, pa.timestamp("us")),
        (types.TIMESTAMPTZ, pa.timestamp("us", "UTC")),
        (types.UUID, pa.string()),
        (types.JSONB, pa.string()),
        (types.INT4_ARRAY, pa.list_(pa.int32())),
        (types.TEXT_ARRAY, pa.list_(pa.string())),
        (1000, pa.list_(pa.bool_())),
        (1001, pa.list_(pa.binary())),
        (1022, pa.list_(pa.float64())),
        (1182, pa.list_(pa.date32())),
        (2951, pa.list_(pa.string())),
    ],
)
def test_common_types_have_a_type_of_their_own(type_oid: int, arrow: pa.DataType) -> None:
    found = column_type(type_oid, -1)
    assert found.arrow == arrow
    assert not found.kept_as_text


@pytest.mark.parametrize("type_oid", [26, 650, 829, 869, 1186, 1266, 1560, 3904, 3614, 16999])
def test_every_other_type_is_text_and_says_so(type_oid: int) -> None:
    found = column_type(type_oid, -1)
    assert found.arrow == pa.string()
    assert found.kept_as_text
    assert types.text_columns([Column("c", type_oid, -1, is_key=False)]) == ["c"]


@pytest.mark.parametrize(
    ("modifier", "limits"),
    [
        (-1, None),
        (typmod(38, 38), (38, 38)),
        (typmod(1, 0), (1, 0)),
        (typmod(39, 2), None),
        (typmod(1000, 1000), None),
        (typmod(3, 5), None),
        (typmod(5, -3), None),
    ],
)
def test_numeric_is_a_decimal_only_where_a_decimal_holds_it(
    modifier: int, limits: tuple[int, int] | None
) -> None:
    assert numeric_limits(modifier) == limits
    assert column_type(types.NUMERIC, modifier).kept_as_text == (limits is None)


@pytest.mark.parametrize(
    ("type_oid", "modifier", "text", "expected"),
    [
        (types.BOOL, -1, "t", True),
        (types.INT2, -1, "-32768", -32768),
        (types.INT8, -1, "9223372036854775807", 2**63 - 1),
        (types.NUMERIC, typmod(38, 38), f"-0.{'9' * 38}", Decimal(f"-0.{'9' * 38}")),
        (types.NUMERIC, typmod(38, 0), "9" * 38, Decimal("9" * 38)),
        (types.NUMERIC, -1, "1" + "0" * 500 + ".5", "1" + "0" * 500 + ".5"),
        (types.NUMERIC, -1, "NaN", "NaN"),
        (types.NUMERIC, typmod(5, -3), "12000", "12000"),
        (types.BYTEA, -1, "\\x", b""),
        (types.BYTEA, -1, "\\x00ff10", b"\0\xff\x10"),
        (types.DATE, -1, "0001-01-01", dt.date(1, 1, 1)),
        (types.DATE, -1, "9999-12-31", dt.date(9999, 12, 31)),
        (types.TIMESTAMP, -1, "1970-01-01 00:00:00", dt.datetime(1970, 1, 1)),
        (
            types.TIMESTAMPTZ,
            -1,
            "1969-12-31 23:59:59.999999+00",
            dt.datetime(1969, 12, 31, 23, 59, 59, 999999, dt.UTC),
        ),
        (types.INT2_ARRAY, -1, "{}", []),
        (types.INT8_ARRAY, -1, "{NULL,-9223372036854775808}", [None, -(2**63)]),
        (types.TEXT_ARRAY, -1, r'{a,"NULL",NULL,"","a b","\\","\"","{}",é}', None),
    ],
)
def test_values(type_oid: int, modifier: int, text: str, expected: Any) -> None:
    if type_oid == types.TEXT_ARRAY:
        expected = ["a", "NULL", None, "", "a b", "\\", '"', "{}", "é"]
    assert converted(type_oid, [None, text, None, text], modifier) == [
        *(None, expected),
        *(None, expected),
    ]


@pytest.mark.parametrize("key", sorted(TYPED))
@given(data=st.data())
def test_equal_to_the_straightforward_conversion(key: tuple[int, int], data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.none() | TYPED[key], max_size=30))
    plain = [None if text is None else value(text, *key) for text in texts]
    assert converted(key[0], texts, key[1]) == plain


@pytest.mark.parametrize(
    ("type_oid", "modifier", "text", "what"),
    [
        (types.NUMERIC, typmod(9, 2), "NaN", "'NaN' is not in decimal128"),
        (types.NUMERIC, typmod(9, 2), "Infinity", "'Infinity'"),
        (types.DATE, -1, "infinity", "'infinity' is not in date32"),
        (types.DATE, -1, "-infinity", "'-infinity'"),
        (types.DATE, -1, "0044-03-15 BC", "BC"),
        (types.DATE, -1, "10000-01-01", "10000"),
        (types.TIMESTAMP, -1, "infinity", "'infinity' is not in timestamp"),
        (types.TIMESTAMP, -1, "0044-03-15 00:00:00 BC", "BC"),
        (types.TIMESTAMPTZ, -1, "294276-12-31 23:59:59.999999+00", "294276"),
        (types.INT4_ARRAY, -1, "{{1,2},{3,4}}", "more than one dimension"),
        (types.TEXT_ARRAY, -1, '{{"a{"},{b}}', "more than one dimension"),
        (types.INT4_ARRAY, -1, "[0:1]={1,2}", "first index"),
    ],
)
def test_what_the_target_cannot_hold_is_told_with_its_position(
    type_oid: int, modifier: int, text: str, what: str
) -> None:
    good = {types.NUMERIC: "1.00", types.DATE: "2024-01-01", types.INT4_ARRAY: "{1}"}.get(type_oid)
    with pytest.raises(UnrepresentableValueError) as caught:
        converted(type_oid, [good, None, good, text, good], modifier)
    assert what in str(caught.value)
    assert caught.value.index == 3
    assert not caught.value.malformed


@pytest.mark.parametrize(
    ("type_oid", "text"),
    [
        (types.BOOL, "true"),
        (types.BOOL, "x"),
        (types.INT4, ""),
        (types.INT4, "2147483648"),
        (types.FLOAT8, "one"),
        (types.BYTEA, "\\x0"),
        (types.BYTEA, "\\xzz"),
        (types.BYTEA, "\\000"),
        (types.DATE, "2024-02-30"),
        (types.INT4_ARRAY, "{1,,2}"),
        (types.INT4_ARRAY, "1,2"),
        (types.TEXT_ARRAY, '{"a}'),
        (types.TEXT_ARRAY, "{a"),
        (types.TEXT_ARRAY, ""),
    ],
)
def test_what_no_server_writes_is_damage(type_oid: int, text: str) -> None:
    with pytest.raises(UnrepresentableValueError) as caught:
        converted(type_oid, [None, text])
    assert caught.value.index == 1
    assert caught.value.malformed


@given(st.lists(st.none() | st.binary(max_size=9)))
def test_spans_are_gathered_from_a_buffer(values: list[bytes | None]) -> None:
    pieces = [b"--" + (value or b"") for value in values]
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    lengths = [len(value or b"") for value in values]
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    found = gather(
        pa.py_buffer(b"".join(pieces)),
        np.array(starts, np.int64),
        np.array(lengths, np.int64),
        np.array([v is not None for v in values], np.bool_),
        pa.binary(),
    )
    found.validate(full=True)
    assert found.to_pylist() == values


def test_contents_of_a_slice_with_nulls_that_hold_bytes() -> None:
    whole = pa.Array.from_buffers(
        pa.string(),
        4,
        [
            pa.py_buffer(bytes([0b1101])),
            pa.py_buffer(bytes.fromhex("00000000010000000300000004000000 06000000")),
            pa.py_buffer(b"abbcdd"),
        ],
    )
    offsets, data, valid = contents(whole.slice(1))
    assert offsets.tolist() == [0, 0, 1, 3]
    assert data.tobytes() == b"cdd"
    assert valid is not None
    assert valid.tolist() == [False, True, True]
