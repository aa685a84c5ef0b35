"""What a refused copy says: the server's words, whatever the query that ADBC puts before them holds."""

import pyarrow as pa
import pytest

from spark_consumers.decode import types
from spark_consumers.sources.snapshot import _BINARY, _without_query, converted
from walsender_bridge.errors import SnapshotError

QUERIES = ("LOCK TABLE a", 'SELECT x\nFROM "it\': s"  ')


@pytest.mark.parametrize("query", QUERIES)
def test_the_query_is_taken_out_of_the_servers_words(query):
    told = "ERROR: permission denied for table a. SQLSTATE: 42501"
    text = f"INVALID_DATA: [libpq] Failed to execute query '{query}': {told}"
    assert _without_query(text, QUERIES) == f"INVALID_DATA: [libpq] {told}"


def test_what_is_no_query_of_ours_stays():
    text = "[libpq] Failed to execute query 'COMMIT': ERROR: no: 'x': y"
    assert _without_query(text, QUERIES) == text


TEXTS = {types.TEXT, types.VARCHAR, types.BPCHAR}


@pytest.mark.parametrize("oid", sorted(_BINARY - TEXTS - {types.BYTEA}))
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_the_bytes_of_a_type_that_adbc_does_not_recognize_are_no_value(oid, size):
    """The integer 825373492 is the bytes "1234", and would become 1234."""
    for made in (pa.binary(), pa.large_binary(), pa.string()):
        with pytest.raises(SnapshotError, match=str(oid)):
            converted(pa.array([b"12345678"[:size], None], made), oid, -1)


@pytest.mark.parametrize("oid", sorted(TEXTS))
def test_the_bytes_of_a_text_are_the_text(oid):
    assert converted(pa.array([b"\xc3\xb6", None], pa.binary()), oid, -1).to_pylist() == ["ö", None]
