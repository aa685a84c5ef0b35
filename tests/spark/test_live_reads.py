"""Live reads: the newest version of the log over all tables, before the epoch that has it is written."""

import pytest

from spark_consumers import read
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.live import log_tail
from tests.support.lake_check import assert_equal


def live(pipeline, **options):
    """A live read of everything that was committed before."""
    pipeline.barrier()
    return read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address, **options)


CHANGES = (
    # The first sets the TOASTed value, the second leaves it.
    "UPDATE docs SET body = repeat('new', 2000) WHERE id = 1",
    "UPDATE docs SET title = 'again' WHERE id = 1",
    # Never sent: it has to come from the table.
    "UPDATE docs SET title = 'kept' WHERE id IN (2, 3)",
    # Two rows swap their keys, and keep their unsent values.
    "UPDATE docs SET id = CASE id WHEN 4 THEN 5 ELSE 4 END + 100 WHERE id IN (4, 5)",
    "UPDATE docs SET id = id - 100 WHERE id > 100",
    "DELETE FROM docs WHERE id = 6",
    "INSERT INTO docs VALUES (6, 'reborn', NULL, 1.5, 'NaN')",
    "UPDATE pairs SET b = 'z', tags = '{}' WHERE a = 1",
    # One of three equal rows goes; the row with -0 is another one.
    "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
    "UPDATE bag SET a = 7 WHERE t IS NULL",
    "INSERT INTO bag SELECT * FROM bag WHERE f = 'NaN'",
)


@pytest.mark.parametrize("stored", [False, True], ids=["sent", "stored"])
def test_a_live_read_has_what_no_epoch_has_yet(pipeline, database, monkeypatch, stored):
    """`stored`: as if the tail were large."""
    if stored:
        monkeypatch.setattr(plan, "RANGE_BYTES", 1)
        monkeypatch.setattr(plan, "COMPOSED_RANGES", 2)
        monkeypatch.setattr(log_tail, "_SMALL", 0)
    before = pipeline.head()
    assert_equal(database.dsn, live(pipeline), counted=False)
    for change in CHANGES:
        database.execute(change)
        assert_equal(database.dsn, live(pipeline), counted=False)
    database.execute("TRUNCATE pairs", "INSERT INTO pairs VALUES (5, 'new', NULL, NULL)")
    snapshot = live(pipeline)
    assert_equal(database.dsn, snapshot, counted=False)
    database.execute("TRUNCATE docs, bag", "INSERT INTO bag VALUES (1, '-0', 'x', NULL)")
    assert_equal(database.dsn, live(pipeline), counted=False)
    assert pipeline.head().link == before.link, "no epoch was written"
    assert len(snapshot["docs"].collect()) == 9, "an earlier one stays as it was"
    assert_equal(database.dsn, pipeline.flush())
