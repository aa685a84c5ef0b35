"""A value that the lake cannot hold stops its table alone, by name and with ways out that work; the others go on."""

import pytest

from spark_consumers import read
from spark_consumers.lake.epoch.epoch_writer import EpochWriter
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal
from walsender_bridge.errors import LakeError, UnsupportedValueError

BILLS, PAIRS = (f"{STREAM}.public.{name}" for name in ("bills", "pairs"))
SETUP = (
    "CREATE TABLE bills (id int PRIMARY KEY, due timestamptz)",
    "INSERT INTO bills VALUES (1, '2024-01-01 00:00+00')",
    f"ALTER PUBLICATION {PUBLICATION} ADD TABLE bills",
)


@pytest.fixture
def bills(pipeline, database):
    database.execute(*SETUP)
    pipeline.wait_for_tables("bills")
    return pipeline


def ask(pipeline, house, kind):
    """Ask for it, and look until it is done; what was said of it."""
    request = requests.ask(open_chain(pipeline.lake), kind, [BILLS])
    while True:
        pipeline.flush(house)
        done = requests.finished(pipeline.head(), request)
        if done is not None:
            return done


def spoil(pipeline, database):
    """A transaction over two tables, one of which cannot hold it; the epochs before and after."""
    before = pipeline.flush()
    database.execute(
        "BEGIN; INSERT INTO bills VALUES (2, '-infinity'), (3, '2024-01-03 00:00+00');"
        " UPDATE docs SET n = 7 WHERE id = 1; COMMIT"
    )
    return before, pipeline.flush()


@pytest.mark.both_formats
def test_12_one_bad_value_stops_its_table_alone(bills, database):
    before, after = spoil(bills, database)
    table = after.manifest.tables[BILLS]
    assert (table.state, table.as_of) == ("stale", before.epoch)
    for word in ("public.bills.due", "-infinity", "quarantine", f"table resync {BILLS}"):
        assert word in table.reason
    assert after["docs"].where("id = 1").first().n == 7
    # A reader gets no part of that transaction without the other.
    assert BILLS not in after.tables
    assert set(after.stale) == {BILLS}
    with pytest.raises(LakeError, match=r"not of epoch(?s:.)*infinity(?s:.)*allow_stale=True"):
        after["bills"]
    assert not [view for view in after.register_views("now") if "bills" in view]
    kept = read(bills.spark, bills.lake, allow_stale=True)
    assert [row.id for row in kept["bills"].collect()] == [1]
    assert read(bills.spark, bills.lake, epoch=before.epoch)["bills"].count() == 1


@pytest.mark.long
def test_a_value_that_was_changed_at_the_source_and_a_copy_are_a_way_out(bills, database):
    spoil(bills, database)
    # The log has the value still.
    database.execute("UPDATE bills SET due = '2024-01-02 00:00+00' WHERE id = 2")
    with pytest.raises(LakeError, match="infinity"):
        ask(bills, bills.house, "resume")
    ask(bills, bills.house, "resync")
    assert_equal(database.dsn, bills.flush())


@pytest.mark.long
def test_setting_such_rows_aside_is_a_way_out_without_a_copy(bills, database):
    before, stopped = spoil(bills, database)

    def kept():
        """From which version on the log is kept for a table."""
        state = bills.log.repository._state.consumers
        return [consumer.version for name, consumer in state.items() if BILLS in name]

    assert kept() == [before.epoch]
    with pytest.raises(LakeError, match="infinity"):
        ask(bills, bills.house, "resume")
    bills.flush()
    assert kept() == [before.epoch], "also after it has failed once more"
    bills.house.close()
    house = bills.house = bills.lakehouse(on_unrepresentable_value={BILLS: "quarantine"})
    bills.flush()
    assert bills.head().tables[BILLS].state == "stale", "nobody has asked yet"
    ask(bills, house, "resume")
    after = bills.flush()
    assert sorted(row.id for row in after["bills"].collect()) == [1, 3]
    assert after.manifest.tables[BILLS].path == stopped.manifest.tables[BILLS].path
    assert after.manifest.tables[BILLS].quarantined_rows == 1


@pytest.mark.long
def test_12_who_wants_all_or_nothing_gets_it(bills, database):
    bills.all_or_nothing()
    with pytest.raises(UnsupportedValueError, match=r"holds the epochs back(?s:.)*infinity"):
        spoil(bills, database)
    assert bills.head().tables[BILLS].state == "held"
    requests.ask(open_chain(bills.lake), "pause", [BILLS])
    assert bills.flush()["docs"].where("id = 1").first().n == 7


def test_a_column_that_iceberg_has_no_name_for_stops_its_table_alone(pipeline, database):
    """An array's elements have a name in Iceberg, which a new column may have too."""
    database.execute(
        'ALTER TABLE pairs ADD "tags.element" int',
        """INSERT INTO pairs VALUES (3, 'z', NULL, '{1}', 7)""",
        "UPDATE docs SET n = 7 WHERE id = 1",
    )
    after = pipeline.flush()
    assert after["docs"].where("id = 1").first().n == 7
    table = after.manifest.tables[PAIRS]
    assert table.state == "stale"
    assert "'tags.element' has the name that Iceberg gives" in table.reason
    assert "add or rename a column" in after.manifest.not_copied[PAIRS]


@pytest.mark.long
def test_the_name_of_the_hidden_row_id_is_an_ordinary_one_where_there_is_a_key(pipeline, database):
    database.execute(
        'CREATE TABLE marked (id int PRIMARY KEY, "_tuskline_row" text)',
        "INSERT INTO marked VALUES (1, 'a'), (2, 'b')",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE marked",
    )
    pipeline.wait_for_tables("marked")
    database.execute(
        """UPDATE marked SET "_tuskline_row" = 'c' WHERE id = 2""",
        "DELETE FROM marked WHERE id = 1",
        'ALTER TABLE docs ADD "_tuskline_row" text',
        """UPDATE docs SET "_tuskline_row" = 'd' WHERE id = 1""",
    )
    after = pipeline.flush()
    assert_equal(database.dsn, after)
    assert after["marked"].columns == ["id", "_tuskline_row"]


def test_a_bug_that_one_table_meets_before_its_changes_are_read_stops_it_alone(
    pipeline, database, monkeypatch
):
    original = EpochWriter._target

    def target(self, name, table):
        if name == PAIRS:
            raise KeyError(name)
        return original(self, name, table)

    # A table is looked at again after it was written.
    database.execute("UPDATE pairs SET at = now()")
    pipeline.flush()
    monkeypatch.setattr(EpochWriter, "_target", target)
    database.execute(
        "UPDATE pairs SET a = 9 WHERE b = 'x'",
        "UPDATE docs SET n = 7 WHERE id = 1",
    )
    after = pipeline.flush()
    assert after["docs"].where("id = 1").first().n == 7
    assert after.manifest.tables[PAIRS].state == "stale"
    assert "report this bug" in after.manifest.tables[PAIRS].reason
