"""Transactions and backlogs that are larger than a task and an epoch, of real bytes: what `tests/simulation/test_lake_sizes.py` plans."""

from itertools import pairwise

import pytest

from spark_consumers import read
from spark_consumers.lake.epoch import epoch_writer, plan, stage
from spark_consumers.lake.epoch.draft import Draft
from spark_consumers.lake.epoch.quarantined_rows import rows_of
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import Pipeline

TABLES = (
    "CREATE TABLE big (id int PRIMARY KEY, body bytea)",
    "CREATE TABLE heap (id int, body bytea)",
    "ALTER TABLE heap REPLICA IDENTITY FULL",
    "CREATE TABLE docs (id int PRIMARY KEY, n int, body text)",
    "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL",
    "INSERT INTO docs SELECT g, 0, repeat('x', 4000) FROM generate_series(1, 50) g",
    "INSERT INTO big VALUES (7, 'old'), (-8, 'old')",
    "CREATE TABLE odd (id int PRIMARY KEY, due date, body bytea)",
    "INSERT INTO odd SELECT g, 'infinity' FROM generate_series(1, 20) g",
    # So many bytes that no compression makes fewer.
    """CREATE FUNCTION noise(int) RETURNS bytea LANGUAGE sql VOLATILE AS $$
    SELECT string_agg(decode(md5(random()::text || g), 'hex'), '') FROM generate_series(1, $1 / 16) g $$""",
)
MIB = 1 << 20


@pytest.fixture
def pipeline(spark, tmp_path, database):
    database.execute(*TABLES)
    published = [f"public.{name}" for name in ("big", "heap", "docs", "odd")]
    with Pipeline(spark, tmp_path, database, published) as running:
        running.house = running.lakehouse(on_unrepresentable_value={"default": "quarantine"})
        running.wait_for_tables("big", "heap", "docs", "odd")
        yield running


@pytest.fixture
def seen(monkeypatch):
    """What was planned: for each epoch its tasks, and those that compose its tables."""
    planned: list[list[stage.RangeTask]] = []
    composed: list[list[stage.ComposeTask]] = []

    def recorded(function, found):
        def called(*given):
            found.append(function(*given))
            return found[-1]

        return called

    monkeypatch.setattr(epoch_writer, "tasks", recorded(plan.tasks, planned))
    monkeypatch.setattr(epoch_writer, "composing_of", recorded(stage.composing_of, composed))
    return planned, composed


def test_a_transaction_of_many_entries_is_read_and_composed_in_parts(
    pipeline, database, seen, monkeypatch
):
    monkeypatch.setattr(plan, "RANGE_BYTES", 4 * MIB)
    monkeypatch.setattr(plan, "COMPOSED_RANGES", 1)
    by_parts: dict[str, int] = {}
    locate = Draft.locate

    def recorded(draft, located):
        by_parts[draft.target.name] = max(len(located), by_parts.get(draft.target.name, 0))
        locate(draft, located)

    monkeypatch.setattr(Draft, "locate", recorded)
    before = pipeline.head()
    database.execute(
        "BEGIN;"
        "INSERT INTO docs VALUES (1000, 1, 'first');"
        "INSERT INTO big SELECT g, noise(960) FROM generate_series(10, 8000) g;"
        "INSERT INTO heap SELECT g % 500, noise(960) FROM generate_series(1, 5000) g;"
        "INSERT INTO heap SELECT 1, 'same' FROM generate_series(1, 10);"
        # Keys change from one part to another, and a key that was removed comes back.
        "UPDATE big SET id = 100000 + id WHERE id % 3 = 0;"
        "DELETE FROM big WHERE id % 5 = 0;"
        "INSERT INTO big SELECT g, 'again' FROM generate_series(10, 8000, 5) g;"
        "DELETE FROM heap WHERE ctid IN (SELECT ctid FROM heap WHERE body = 'same' LIMIT 4);"
        # Rows that the lake cannot hold, before this transaction and in it, until all of them but two are others.
        "INSERT INTO odd SELECT g, CASE WHEN g % 3 = 0 THEN '-infinity' ELSE '2024-01-01'::date END, noise(960)"
        " FROM generate_series(100, 3000) g;"
        "UPDATE odd SET due = '2024-01-02' WHERE NOT isfinite(due) AND id NOT IN (7, 300);"
        # Values that are not sent, some of them moved to another key.
        "UPDATE docs SET n = n + 1;"
        "UPDATE docs SET id = id + 2000 WHERE id % 4 = 0;"
        "UPDATE docs SET id = id + 1000 WHERE id > 2000 AND id % 8 = 0;"
        "COMMIT"
    )
    snapshot = pipeline.flush()
    planned, composed = seen
    (work,) = [tasks for tasks in planned if any(task.begun for task in tasks)]
    assert len(work) >= 3
    assert len({task.begun.xid for task in work if task.begun}) == 1
    by_table = {tasks[0].target.name: [t.share.part for t in tasks] for tasks in composed}
    parts = [*range(len(work))]
    assert by_table[f"{STREAM}.public.big"] == by_table[f"{STREAM}.public.heap"] == parts
    # One more for the keys that unsent values have been moved between.
    assert by_table[f"{STREAM}.public.docs"] == [*parts, len(work)]
    assert by_table[f"{STREAM}.public.odd"] == parts
    # Each of these tasks has also found what its part removes.
    assert by_parts == {name: len(parts) for name, parts in by_table.items()}
    # One transaction, one epoch; the others are those of the flush.
    links = {
        link.link: link for link in open_chain(pipeline.lake).links() if link.link > before.link
    }
    assert sum(link.changes > 10_000 for link in links.values()) == 1
    odd = snapshot.manifest.tables[f"{STREAM}.public.odd"]
    aside = {(row.values["id"], row.values["due"]) for row in rows_of(pipeline.lake, "odd", odd)}
    assert aside == {("7", "infinity"), ("300", "-infinity")}
    database.execute("DELETE FROM odd WHERE id IN (7, 300)")
    assert_equal(database.dsn, pipeline.flush())
    database.execute(
        "UPDATE big SET body = 'then' WHERE id % 2 = 0", "DELETE FROM heap WHERE id < 9"
    )
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_backlog_is_caught_up_in_bounded_epochs(pipeline, database, seen):
    """40 MB in transactions of less than 1 MB, and one of 10: epochs of 1 MB, of which that one is larger."""
    # The client cannot read these rows, with which the tables are compared.
    database.execute("DELETE FROM odd WHERE NOT isfinite(due)")
    pipeline.flush()
    head, house = pipeline.head(), pipeline.lakehouse(max_bytes_per_epoch=MIB)
    house.run_once()
    for number in range(40):
        rows = 10_000 if number == 20 else 700
        database.execute(
            f"BEGIN; INSERT INTO big SELECT 20000 * {number + 1} + g, noise(960) FROM generate_series(1, {rows}) g;"
            f"INSERT INTO heap VALUES ({number}, 'x'); UPDATE docs SET n = n + 1; COMMIT"
        )
        # Each is a commit of the log.
        pipeline.barrier()
    assert_equal(database.dsn, pipeline.flush(house))
    links = sorted(open_chain(pipeline.lake).links(), key=lambda link: link.link)
    links = [link for link in links if link.link > head.link]
    epochs = [link for link in links if link.changes > 600]
    # Two transactions are more than an epoch holds.
    assert len(epochs) == 40
    assert sum(link.changes > 10_000 for link in epochs) == 1
    at = [link.streams[STREAM] for link in links]
    assert all(a.offset <= b.offset and a.lsn <= b.lsn for a, b in pairwise(at))
    assert all(a.epoch <= b.epoch for a, b in pairwise(links))
    (split,) = [tasks for tasks in seen[0] if any(task.begun for task in tasks)]
    assert len(split) >= 2
    for link in epochs[::10]:
        snapshot = read(pipeline.spark, pipeline.lake, epoch=link.epoch)
        transactions = snapshot["heap"].count()
        assert {row.n for row in snapshot["docs"].select("n").distinct().collect()} == {
            transactions
        }
        assert (
            snapshot["big"].where("id >= 20000").selectExpr("floor(id / 20000)").distinct().count()
            == transactions
        )
