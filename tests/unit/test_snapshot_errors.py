"""What a refused copy says: the server's words, whatever the query that ADBC puts before them holds."""

import pytest

from spark_consumers.sources.snapshot import _without_query

QUERIES = ("LOCK TABLE a", 'SELECT x\nFROM "it\': s"  ')


@pytest.mark.parametrize("query", QUERIES)
def test_the_query_is_taken_out_of_the_servers_words(query):
    told = "ERROR: permission denied for table a. SQLSTATE: 42501"
    text = f"INVALID_DATA: [libpq] Failed to execute query '{query}': {told}"
    assert _without_query(text, QUERIES) == f"INVALID_DATA: [libpq] {told}"


def test_what_is_no_query_of_ours_stays():
    text = "[libpq] Failed to execute query 'COMMIT': ERROR: no: 'x': y"
    assert _without_query(text, QUERIES) == text
