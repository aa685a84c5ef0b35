"""Deletion vectors as bytes: what Iceberg's and other readers expect, and damage that is found."""

import json
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.puffin import (
    decode,
    encode,
    positions_of,
    read_vector,
    write_vectors,
)
from spark_consumers.lake.format.table_format import Vector
from walsender_bridge.errors import CorruptError

#: Positions 1 and 3, by hand from the specifications of Puffin and of roaring bitmaps.
BITMAP = bytes.fromhex(
    "0100000000000000"  # one bitmap of 32 bits,
    "00000000"  # for positions below 2^32
    "3a300000" "01000000"  # which has no runs, and one container,
    "0000" "0100"  # for positions below 2^16, with 2 of them,
    "10000000"  # which begin after the header:
    "0100" "0300"
)  # fmt: skip
VECTOR = bytes.fromhex("d1d33964") + BITMAP
GOLDEN = struct.pack(">I", len(VECTOR)) + VECTOR + struct.pack(">I", zlib.crc32(VECTOR))


def test_a_vector_has_the_bytes_that_the_specifications_demand():
    assert encode(BitMap64([1, 3])).hex() == GOLDEN.hex()
    assert list(decode(GOLDEN, "x")) == [1, 3]


@given(st.sets(st.integers(0, 2**32 - 1), max_size=50), st.integers(0, 3), st.integers(0, 10**6))
def test_a_vector_that_is_read_is_the_one_that_was_written(some, runs, start):
    positions = BitMap64(some)
    for run in range(runs):
        positions.add_range(start + run * 70_000, start + run * 70_000 + 5_000)
    assert decode(encode(positions.copy()), "x") == positions
    assert positions_of(positions).tolist() == list(positions)


@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 7))
def test_no_damaged_vector_is_read(place, bit):
    damaged = bytearray(GOLDEN)
    damaged[place] ^= 1 << bit
    for blob in (bytes(damaged), GOLDEN[:place]):
        with pytest.raises(CorruptError, match="deletion vector"):
            decode(blob, "x")


def test_each_vector_has_a_file_with_a_footer_that_names_it(tmp_path: Path):
    vectors = {"data/a.parquet": BitMap64([1, 3]), "data/b.parquet": BitMap64(range(5000))}
    made = write_vectors(str(tmp_path), "e", vectors)
    assert [(v.file, v.rows) for v in made] == [("data/a.parquet", 2), ("data/b.parquet", 5000)]
    # DuckDB takes two vectors of one file for the same.
    assert [v.puffin for v in made] == ["data/e-0.puffin", "data/e-1.puffin"]
    assert [read_vector(tmp_path, v) for v in made] == list(vectors.values())
    for vector in made:
        content = (tmp_path / vector.puffin).read_bytes()
        assert checksums.check(tmp_path / vector.puffin)
        assert content[:4] == content[-4:] == b"PFA1"
        (length,) = struct.unpack("<i", content[-12:-8])
        assert content[-12 - length - 4 : -12 - length] == b"PFA1"
        (blob,) = json.loads(content[-12 - length : -12])["blobs"]
        assert vector.size == len(content)
        assert (blob["offset"], blob["length"]) == (vector.offset, vector.length)
        assert vector.offset + vector.length == len(content) - 12 - length - 4
        assert blob["properties"] == {
            "referenced-data-file": f"{tmp_path}/{vector.file}",
            "cardinality": str(vector.rows),
        }
    first = (tmp_path / made[0].puffin).read_bytes()
    assert first[made[0].offset :][: made[0].length] == GOLDEN


def test_a_vector_with_another_number_of_positions_than_recorded_is_damage(tmp_path: Path):
    (made,) = write_vectors(str(tmp_path), "e", {"data/a.parquet": BitMap64([1, 3])})
    wrong = Vector(made.file, made.puffin, made.offset, made.length, 3, made.size)
    with pytest.raises(CorruptError, match="has 2 positions, but its manifest records 3"):
        read_vector(tmp_path, wrong)
    (tmp_path / made.puffin).unlink()
    with pytest.raises(CorruptError, match="is missing"):
        read_vector(tmp_path, made)
