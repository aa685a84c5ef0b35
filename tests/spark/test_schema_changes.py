"""Tables that change their shape: taken as they are or copied again, alone, and never seen in part."""

import pytest
from pyspark.errors import AnalysisException

from spark_consumers import read
from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.waiting import wait_for

BAG, DOCS, PAIRS = (f"{STREAM}.public.{name}" for name in ("bag", "docs", "pairs"))


def paths(pipeline):
    """Where each table of the newest link is: a table that is copied again gets a place of its own."""
    return {name: table.path for name, table in pipeline.head().tables.items()}


def test_14_a_plain_new_column_is_taken_as_it_is(pipeline, database, monkeypatch):
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 2)
    before, old = paths(pipeline), pipeline.flush()
    # In the middle of a transaction, which also changes another table.
    database.execute(
        "BEGIN; UPDATE docs SET n = 77 WHERE id = 2; ALTER TABLE docs ADD extra int;"
        " UPDATE docs SET extra = 1 WHERE id = 1; UPDATE pairs SET a = 9 WHERE b = 'x';"
        " ALTER TABLE docs ADD more text[]; INSERT INTO docs VALUES (50, 'x', 'y', 0, 0, 5, '{z}');"
        " COMMIT",
        "ALTER TABLE bag ADD extra timestamptz",
        "UPDATE bag SET extra = '2024-01-01' WHERE t IS NULL",
    )
    changed = pipeline.flush()
    assert_equal(database.dsn, changed)
    assert changed["docs"].columns == ["id", "title", "body", "n", "f", "extra", "more"]
    assert changed["bag"].columns == ["a", "f", "t", "l", "extra"]
    # A reader who holds on to an older epoch keeps its columns, and another who asks for it gets them.
    for snapshot in (old, read(pipeline.spark, pipeline.lake, epoch=old.epoch)):
        assert snapshot["docs"].columns == ["id", "title", "body", "n", "f"]
        assert snapshot["bag"].columns == ["a", "f", "t", "l"]
        assert {row.id: int(row.n) for row in snapshot["docs"].collect()}[2] == 2
    with pytest.raises(AnalysisException):
        old["docs"].select("extra")
    # What was never sent, rows that are equal, and rewriting find their values in files without the column.
    for turn in range(4):
        database.execute(
            f"UPDATE docs SET title = 'kept {turn}' WHERE id IN (3, {turn + 4})",
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
            f"INSERT INTO bag (a, extra) VALUES ({turn}, now())",
        )
        assert_equal(database.dsn, pipeline.flush())
    assert list(pipeline.lake.glob("tables/*/*/*/data/*-rewritten-*"))
    assert paths(pipeline) == before
    assert_no_orphans(pipeline.spark, pipeline.lake)


REMADE = (
    "BEGIN; DROP TABLE docs; CREATE TABLE docs (id int PRIMARY KEY, body text);"
    f" ALTER PUBLICATION {PUBLICATION} ADD TABLE docs; INSERT INTO docs VALUES (1, 'new'); COMMIT"
)
#: Each changes `docs` and then touches it; the words are in what is said of it.
CHANGES = (
    (("ALTER TABLE docs DROP COLUMN f",), "lost f"),
    (("ALTER TABLE docs RENAME COLUMN title TO heading",), "renamed to 'heading'"),
    (("ALTER TABLE docs ALTER n TYPE text USING 'n' || n",), "another type for n"),
    (("ALTER TABLE docs ADD given int DEFAULT 7",), "with a default"),
    ((REMADE,), "dropped, and another one created"),
)
MORE_CHANGES = (
    (("ALTER TABLE docs ALTER n TYPE numeric(20, 3)",), "another type for n"),
    (("ALTER TABLE docs ALTER id TYPE bigint",), "another type for id"),
    (("ALTER TABLE docs ADD drawn float8 DEFAULT random()",), "with a default"),
    (("ALTER TABLE docs DROP f", "ALTER TABLE docs ADD f float8, ADD g int"), "lost f"),
    (("ALTER TABLE docs DROP title", "ALTER TABLE docs ADD title text"), "lost title"),
    # One change, if nobody looked between them.
    (("ALTER TABLE docs ADD plain int", "ALTER TABLE docs DROP plain, ADD plain bigint"), ""),
    (("ALTER TABLE docs REPLICA IDENTITY FULL",), ""),
    (
        (
            "ALTER TABLE docs REPLICA IDENTITY DEFAULT",
            "ALTER TABLE docs DROP CONSTRAINT docs_pkey, ADD PRIMARY KEY (id, n)",
        ),
        "replica identity changed",
    ),
)


@pytest.mark.parametrize(
    "changes", [CHANGES, pytest.param(MORE_CHANGES, marks=pytest.mark.long)], ids=["most", "rest"]
)
def test_14_any_other_change_copies_that_table_alone(pipeline, database, changes):
    others = {name: path for name, path in paths(pipeline).items() if name != DOCS}
    for statements, word in changes:
        before = pipeline.flush()
        columns, count = before["docs"].columns, before["docs"].count()
        database.execute(
            *statements,
            "BEGIN; UPDATE docs SET body = 'touched' WHERE id = 1; UPDATE pairs SET tags = '{}'; COMMIT",
        )
        link = pipeline.head().link
        after = pipeline.flush()
        assert_equal(database.dsn, after)
        told = {m.tables[DOCS].reason for m in open_chain(pipeline.lake).links() if m.link > link}
        if word:
            assert any(word in reason for reason in told), (word, told)
            assert after.manifest.tables[DOCS].path != before.manifest.tables[DOCS].path
        assert {n: p for n, p in paths(pipeline).items() if n != DOCS} == others
        # The epoch before is as it was, with its own columns.
        again = read(pipeline.spark, pipeline.lake, epoch=before.epoch)
        assert again["docs"].columns == columns
        assert again["docs"].count() == count
    # No epoch came between a change and its copy: while it was held, the rows were those of the epoch before.
    links = [m for m in open_chain(pipeline.lake).links() if DOCS in m.tables]
    assert {m.epoch - m.tables[DOCS].as_of for m in links if m.tables[DOCS].state == "held"} == {0}
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_by_policy_the_others_go_on_while_a_changed_table_is_copied(
    pipeline, database, monkeypatch
):
    """The copy fails for as long as the test wants; epochs go on, and name the table and its epoch."""
    pipeline.house.close()
    house = pipeline.house = pipeline.lakehouse(failing_table="go_on")
    monkeypatch.setattr("spark_consumers.lake.writer.table_work._AFTER_FAILURE", 0.1)
    before = pipeline.flush()
    database.execute(
        "ALTER TABLE docs DROP COLUMN f",
        "BEGIN; UPDATE docs SET n = 5; DELETE FROM pairs WHERE a = 1; COMMIT",
    )
    broken = house._writer.tables._copies._copier
    copy = type(broken)._copy
    monkeypatch.setattr(
        type(broken), "_copy", lambda *_: (_ for _ in ()).throw(OSError(13, "Permission denied"))
    )
    # Without the copy: the first look finds that it does not fit, the next epoch leaves it out.
    epoch = pipeline.flush(house)
    stopped = epoch.manifest.tables[DOCS]
    assert (stopped.state, stopped.as_of) == ("stale", before.epoch)
    assert "lost f" in stopped.reason
    assert DOCS not in epoch
    kept = read(pipeline.spark, pipeline.lake, allow_stale=True)
    assert kept["docs"].columns == before["docs"].columns
    assert epoch.stale == {DOCS: f"as of epoch {before.epoch}: it lost f"}
    assert epoch["pairs"].count() == 1

    def failure_is_told():
        pipeline.flush(house)
        return "Permission denied" in pipeline.head().not_copied.get(DOCS, "")

    wait_for(failure_is_told, 30, "the copy's failure in the manifest")
    monkeypatch.setattr(type(broken), "_copy", copy)

    def is_live():
        pipeline.flush(house)
        return pipeline.head().tables[DOCS].state == "live"

    wait_for(is_live, 60, "the copy")
    assert_equal(database.dsn, pipeline.flush(house))
    assert not pipeline.head().not_copied
