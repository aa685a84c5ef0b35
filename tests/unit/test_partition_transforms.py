"""Partition values of whole columns: those that PyIceberg has for each value."""

import datetime as dt
import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg import transforms as reference
from pyiceberg import types

from spark_consumers.lake.layout.arrangement import Arrangement, Field, parsed, parts
from spark_consumers.lake.layout.single_value import json_value
from spark_consumers.lake.layout.transforms import applied, applies
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.table_layout import SortField

_EPOCH = dt.date(1970, 1, 1)
_MOMENT = dt.datetime(1970, 1, 1)
_DECIMAL = pa.decimal128(38, 5)
#: By type: values, Iceberg's type, and a value as PyIceberg's transforms take it.
KINDS = {
    pa.int32(): (st.integers(-(2**31), 2**31 - 1), types.IntegerType(), lambda v: v),
    pa.int64(): (st.integers(-(2**63), 2**63 - 1), types.LongType(), lambda v: v),
    _DECIMAL: (
        # A truncation of the least ones has more digits.
        st.decimals(-(10**33) + 2**31, 10**33 - 1, allow_nan=False, places=5),
        types.DecimalType(38, 5),
        lambda v: v,
    ),
    pa.string(): (st.text(max_size=40), types.StringType(), lambda v: v),
    pa.binary(): (st.binary(max_size=40), types.BinaryType(), lambda v: v),
    pa.date32(): (st.dates(), types.DateType(), lambda v: (v - _EPOCH).days),
    pa.timestamp("us"): (
        st.datetimes(),
        types.TimestampType(),
        lambda v: (v - _MOMENT) // dt.timedelta(microseconds=1),
    ),
}
TRANSFORMS = {
    "bucket": reference.BucketTransform,
    "truncate": reference.TruncateTransform,
    "year": reference.YearTransform,
    "month": reference.MonthTransform,
    "day": reference.DayTransform,
    "hour": reference.HourTransform,
}
ALL = [(k, t) for k in KINDS for t in TRANSFORMS if applies(t, k)]


def internal(value):
    """A value of a transform as PyIceberg has it."""
    if isinstance(value, dt.datetime):
        return (value - _MOMENT) // dt.timedelta(microseconds=1)
    return (value - _EPOCH).days if isinstance(value, dt.date) else value


@pytest.mark.parametrize(("kind", "name"), ALL, ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_a_transform_of_a_column_is_that_of_each_value(kind, name, data):
    values, iceberg, taken = KINDS[kind]
    column = data.draw(st.lists(st.none() | values, max_size=8))
    number = data.draw(st.integers(1, 2**31 - 1)) if name in {"bucket", "truncate"} else None
    one = TRANSFORMS[name]() if number is None else TRANSFORMS[name](number)
    if name == "truncate" and kind in {pa.int32(), pa.int64()}:
        least = -(2**31) if kind == pa.int32() else -(2**63)
        column = [v if v is None or v - v % number >= least else None for v in column]
    transform = one.transform(iceberg)
    wanted = [None if value is None else transform(taken(value)) for value in column]
    found = applied(name, number, pa.array(column, kind)).to_pylist()
    assert [internal(value) for value in found] == wanted


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int32(), -(2**31)),
        (pa.int64(), -(2**63)),
        (pa.decimal128(3, 1), Decimal("-99.9")),
        (_DECIMAL, Decimal(f"-{'9' * 33}.99999")),
    ],
    ids=str,
)
def test_a_number_whose_truncation_its_type_lacks_has_no_partition(kind, value):
    with pytest.raises(NotSupportedError, match="near the least") as found:
        applied("truncate", 1000, pa.array([None, value], kind))
    assert "choose another partition" in found.value.repair
    # The same of the greatest one.
    greatest = value.copy_negate() if isinstance(value, Decimal) else -value - 1
    assert applied("truncate", 1000, pa.array([greatest], kind))[0].as_py() <= greatest


def test_which_transforms_a_type_can_have():
    found = {
        str(kind): [t for t in ("identity", *TRANSFORMS) if applies(t, kind)]
        for kind in (pa.bool_(), pa.float64(), pa.list_(pa.int32()), pa.date32(), pa.string())
    }
    assert found == {
        "bool": ["identity"],
        "double": [],
        "list<item: int32>": [],
        "date32[day]": ["identity", "bucket", "year", "month", "day"],
        "string": ["identity", "bucket", "truncate"],
    }


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        (-1, pa.date32(), "1969-12-31"),
        (2_932_897, pa.date32(), "+10000-01-01"),
        (-734_908, pa.date32(), "-0043-11-22"),
        (-1, pa.timestamp("us"), "1969-12-31T23:59:59.999999"),
        (3_600_000_001, pa.timestamp("us", "UTC"), "1970-01-01T01:00:00.000001+00:00"),
        (Decimal("-12345678901234567890123456789012.50"), pa.decimal128(38, 2), None),
        (b"\x01\xff", pa.binary(), "01FF"),
        (True, pa.bool_(), True),
        ("x", pa.string(), "x"),
        (None, pa.string(), None),
    ],
)
def test_a_partition_value_in_iceberg_s_json(value, kind, wanted):
    whole = {pa.date32(): pa.int32()}.get(kind, pa.int64() if pa.types.is_timestamp(kind) else kind)
    scalar = pa.array([value], whole).cast(kind)[0]
    wanted = str(value) if isinstance(value, Decimal) else wanted
    assert json_value(scalar) == wanted


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.none() | st.text("ab", max_size=2))),
    st.booleans(),
    st.booleans(),
)
def test_rows_are_parted_by_partition_and_sorted_within(rows, descending, nulls_first):
    fields = (Field(1000, "a", "identity"), Field(1001, "a", "bucket", 2))
    sort = (SortField("t", descending, nulls_first), SortField("a"))
    made = Arrangement(spec=3, fields=fields, order=1, sort=sort)
    columns = [
        pa.array([a for a, _ in rows], pa.int32()),
        pa.array([t for _, t in rows], pa.string()),
    ]
    found = parts(columns, ["a", "t"], made)
    assert sorted(np.concatenate([np.zeros(0, int), *(r for _, r in found)])) == [*range(len(rows))]
    assert len({partition for partition, _ in found}) == len(found)
    for partition, at in found:
        spec, values = parsed(partition)
        here = [rows[i] for i in at]
        assert spec == 3
        assert {a for a, _ in here} == {None if '"1000"' not in values else here[0][0]}
        texts = [t for _, t in here]
        there = sorted((t for t in texts if t is not None), reverse=descending)
        nulls = [None] * texts.count(None)
        assert texts == (nulls + there if nulls_first else there + nulls)
        for t in set(texts):
            same = [a for a, other in here if other == t]
            assert same == sorted(same, key=lambda a: (a is None, a))


@given(st.lists(st.none() | st.floats(), max_size=8), st.booleans())
def test_floating_point_numbers_are_sorted_with_nan_above_all(values, descending):
    made = Arrangement(sort=(SortField("f", descending),))
    ((partition, at),) = parts([pa.array([*values, 1.0])], ["f"], made)
    assert not partition
    found = [[*values, 1.0][i] for i in at]
    numbers = [v for v in found if v is not None]
    assert found == [*numbers, *[None] * (len(found) - len(numbers))]
    keys = [(math.isnan(v), 0.0 if math.isnan(v) else v) for v in numbers]
    assert keys == sorted(keys, reverse=descending)
