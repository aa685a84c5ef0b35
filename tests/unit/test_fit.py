"""Whether changes are of the table as it was copied: decided from the Relation message alone."""

import re
from itertools import product

import numpy as np
import pyarrow as pa
import pytest

from spark_consumers.decode import ChangeBatch
from spark_consumers.lakehouse.fit import Layout, key_of, misfit
from spark_consumers.lakehouse.stage import Target
from walsender_bridge.wire.pgoutput import Column, Relation

COLUMNS = (("id", 23, -1), ("region", 23, -1))
#: Replica identity, the columns that the server flags, the key that follows.
SAID: tuple[tuple[str, tuple[str, ...], set[str]], ...] = (
    ("d", ("id",), {"id"}),
    ("d", ("id", "region"), {"id", "region"}),
    ("d", (), set()),
    ("i", ("region",), {"region"}),
    ("n", (), set()),
    ("f", ("id", "region"), set()),
)


def batch(identity, flagged, op):
    """One change of a table that is described so."""
    columns = tuple(Column(*column, is_key=column[0] in flagged) for column in COLUMNS)
    one = np.ones(1, np.int64)
    return ChangeBatch(
        relation=Relation(7, "public", "t", identity, columns),
        schema_hash=b"",
        ops=np.array([ord(op)], np.uint8),
        commit_lsn=one.astype(np.uint64),
        xid=one.astype(np.uint32),
        commit_time=one,
        offset=one.astype(np.uint64),
        version=one.astype(np.uint64),
        sequence=one.astype(np.uint32),
        columns=[pa.array([1], pa.int32())] * 2,
        unchanged=None,
        old_columns=None,
        old_kind=np.zeros(1, np.uint8),
    )


@pytest.mark.parametrize("op", ["I", "U", "T"])
def test_32_changes_fit_a_table_of_just_the_key_that_their_relation_flags(op):
    schema = pa.schema([("id", pa.int32()), ("region", pa.int32())])
    layouts = (Layout(0, COLUMNS),)
    for (identity, flagged, key), (*_, other) in product(SAID, SAID):
        change = batch(identity, flagged, op)
        assert key_of(change.relation) == key
        reason = misfit(change, schema, layouts, tuple(sorted(other)), 7)
        assert (reason is None) == (key == other)
        assert reason is None or "replica identity changed" in reason


@pytest.mark.parametrize("table", ["x/../../../planted/y", "a" * 63, "plain", "nul\x01"])
def test_scratch_files_have_names_that_no_table_chooses(table):
    names = [f"{stream}.public.{table}" for stream in ("shop", "bank")]
    schema = pa.schema([("id", pa.int32())])
    made = {Target(name, "r", "p", schema, schema, ("id",), 0, 1).scratch_name for name in names}
    assert len(made) == 2, "two tables of an epoch would share a file"
    assert all(re.fullmatch(r"[0-9a-f]{20}", name) for name in made)
