"""Values that the lake cannot hold: rows set aside with their epoch, and what becomes of them later."""

import json
import re
import subprocess
import sys
from datetime import UTC
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spark_consumers.lake.catalog.links import folders
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.epoch.quarantined_rows import rows_of
from spark_consumers.lake.format import checksums
from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import STREAM
from tests.support.lake_pipeline import Pipeline
from tests.support.pinned import connect_pinned
from walsender_bridge.errors import LakeError

SETUP = (
    "CREATE TABLE docs (id int PRIMARY KEY, price numeric(10,2), due date, grid int[], body text)",
    "ALTER TABLE docs ALTER body SET STORAGE EXTERNAL, ALTER grid SET STORAGE EXTERNAL",
    "INSERT INTO docs SELECT g, g, '2024-01-01', '{1}', repeat(chr(96 + g), 4000) FROM generate_series(1, 6) g",
    "INSERT INTO docs VALUES (7, 'NaN', 'infinity', NULL, 'copied unrepresentable')",
    "CREATE TABLE pairs (at timestamptz, b int, note text, PRIMARY KEY (at, b))",
    "INSERT INTO pairs VALUES ('2024-01-01', 1, 'fit'), ('infinity', 1, 'copied unrepresentable')",
    "CREATE TABLE bag (a int, due date)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    "INSERT INTO bag VALUES (1, '2024-01-01'), (2, '-infinity'), (2, '-infinity')",
)
DOCS, PAIRS, BAG = (f"{STREAM}.public.{name}" for name in ("docs", "pairs", "bag"))
#: What a row has to be for the lake to hold it.
FIT = {
    DOCS: "coalesce(price <> 'NaN', true) AND coalesce(array_ndims(grid), 1) = 1"
    " AND coalesce(due BETWEEN '0001-01-01' AND '9999-12-31', true)",
    PAIRS: "isfinite(at)",
    BAG: "isfinite(due)",
}
POLICY = {"default": "quarantine"}


@pytest.fixture
def pipeline(spark, tmp_path, database):
    database.execute(*SETUP)
    with Pipeline(spark, tmp_path, database) as running:
        running.house = running.lakehouse(on_unrepresentable_value=POLICY)
        running.wait_for_tables("docs", "pairs", "bag")
        yield running


def check(pipeline):
    """Table by table: the rows that fit are in the lake, and all others are set aside with their texts."""
    snapshot = pipeline.flush()
    with connect_pinned(pipeline.database.dsn) as connection:
        for name, condition in FIT.items():
            relation = name.partition(".")[2]
            columns = snapshot[name].columns
            texts = ", ".join(f"{column}::text" for column in columns)
            query = f"SELECT {texts} FROM {relation} WHERE ({condition}) IS %s true"
            fit, quarantined = (
                sorted(connection.execute((query % word).encode()).fetchall(), key=repr)
                for word in ("", "NOT")
            )
            found = [tuple(map(as_text, row)) for row in snapshot[name].collect()]
            assert sorted(found, key=repr) == fit, name
            version = snapshot.manifest.tables[name]
            assert version.rows == len(fit)
            aside = list(rows_of(pipeline.lake, name, version))
            told = [tuple(row.values[column] for column in columns) for row in aside]
            assert sorted(told, key=repr) == quarantined, name
            assert version.quarantined_rows == len(quarantined)
            for row in aside:
                assert row.unrepresentable
                assert set(row.unrepresentable) <= set(columns)
    return snapshot


def as_text(value):
    """A value of Spark as PostgreSQL's cast writes it."""
    if isinstance(value, list):
        return "{" + ",".join("NULL" if v is None else str(v) for v in value) + "}"
    if hasattr(value, "hour"):
        return value.astimezone(UTC).isoformat(sep=" ").removesuffix(":00")
    return None if value is None else str(value)


def test_26_rows_are_set_aside_and_settle_with_what_becomes_of_them(pipeline, database):
    check(pipeline)
    database.execute(
        # An insert; an update of a row that was fit, and that leaves its TOASTed column alone.
        "INSERT INTO docs VALUES (8, 1, '0044-03-15 BC', '{2}', 'streamed unrepresentable')",
        "UPDATE docs SET price = 'NaN' WHERE id = 1",
        "UPDATE docs SET grid = '{{1,2},{3,4}}' WHERE id = 2",
        "INSERT INTO pairs VALUES ('-infinity', 2, 'streamed unrepresentable')",
        "INSERT INTO bag VALUES (3, 'infinity'), (3, 'infinity')",
    )
    check(pipeline)
    database.execute(
        # Nothing that does not fit is sent, and both rows still do not fit: by what was not sent.
        "UPDATE docs SET due = '2025-01-01' WHERE id = 2",
        "UPDATE docs SET price = 2 WHERE id = 7",
        # One column fits now, another does not.
        "UPDATE docs SET price = 'NaN', due = '2025-01-01' WHERE id = 8",
        # The key of a quarantined row changes, and stays unrepresentable.
        "UPDATE pairs SET b = 5 WHERE at = '-infinity'",
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 3)",
    )
    check(pipeline)
    database.execute(
        # Fit again: with a TOASTed value that only the lake's quarantine still has.
        "UPDATE docs SET price = 1 WHERE id = 1",
        "UPDATE docs SET grid = '{7}' WHERE id = 2",
        "UPDATE docs SET due = '2025-02-02' WHERE id = 7",
        "UPDATE pairs SET at = '2024-02-02' WHERE b = 5",
        "UPDATE bag SET due = '2024-02-02' WHERE a = 3",
        # Gone.
        "DELETE FROM docs WHERE id = 8",
        "DELETE FROM pairs WHERE at = 'infinity'",
    )
    snapshot = check(pipeline)
    assert snapshot.manifest.tables[DOCS].quarantined_rows == 0
    assert snapshot.manifest.tables[BAG].quarantined_rows == 2
    database.execute(
        "INSERT INTO docs VALUES (9, 'NaN')",
        "BEGIN; TRUNCATE docs, bag; INSERT INTO docs VALUES (10, 'NaN'), (11, 1); COMMIT",
    )
    check(pipeline)


def test_26_rows_that_come_and_go_within_an_epoch_of_many_ranges(pipeline, database, monkeypatch):
    monkeypatch.setattr(plan, "RANGE_BYTES", 1)
    for number in range(4):
        database.execute(
            f"UPDATE docs SET price = 'NaN' WHERE id = {number + 1}",
            f"UPDATE docs SET due = 'infinity' WHERE id = {number}",
            f"UPDATE docs SET price = 1 WHERE id = {number}",
            f"UPDATE docs SET due = '2024-01-01', id = id + 20 WHERE id = {number - 1}",
            "INSERT INTO bag VALUES (9, 'infinity')",
            "UPDATE bag SET due = 'infinity' WHERE ctid = (SELECT min(ctid) FROM bag)",
        )
        # A commit of the log of its own, so that each is a range.
        pipeline.barrier()
    snapshot = check(pipeline)
    assert snapshot.manifest.tables[DOCS].quarantined_rows


@pytest.mark.long
def test_26_the_policy_is_fail_where_nothing_else_is_said(pipeline, database):
    house = pipeline.lakehouse(on_unrepresentable_value={PAIRS: "quarantine"})
    pipeline.flush(house)
    database.execute("INSERT INTO pairs VALUES ('infinity', 7, 'set aside')")
    assert pipeline.flush(house).manifest.tables[PAIRS].quarantined_rows == 2
    # What is set aside already stays so and is followed on; a new one stops its table by its name.
    database.execute("UPDATE docs SET due = '2024-01-01', price = 1 WHERE id = 7")
    assert pipeline.flush(house).manifest.tables[DOCS].quarantined_rows == 0
    before = pipeline.head()
    database.execute("UPDATE docs SET price = 'NaN' WHERE id = 3")
    stopped = pipeline.flush(house).manifest.tables[DOCS]
    assert re.search(r"public\.docs\.price, transaction \d+ at", stopped.reason)
    assert (stopped.state, stopped.snapshot_id) == ("stale", before.tables[DOCS].snapshot_id)


@pytest.mark.long
def test_26_a_round_that_is_repeated_sets_nothing_aside_twice(pipeline, database, monkeypatch):
    chain = pipeline.house._chain
    publish = chain.publish
    broken: list[Manifest] = []

    def fail_once(manifest, head):
        if manifest.epoch > head.epoch and not broken:
            broken.append(manifest)
            raise OSError(28, "No space left on device")
        publish(manifest, head)

    monkeypatch.setattr(chain, "publish", fail_once)
    database.execute(
        "UPDATE docs SET price = 'NaN' WHERE id < 4",
        "UPDATE docs SET price = 1, due = '2024-01-01' WHERE id = 7",
        "INSERT INTO bag VALUES (5, 'infinity'), (5, 'infinity')",
    )
    before = pipeline.head()
    with pytest.raises(OSError, match="No space"):
        pipeline.flush()
    # Nobody sees what the broken round has set aside.
    assert pipeline.head() == before
    assert broken[0].tables[DOCS].quarantined_rows == 3
    check(pipeline)
    # A writer that takes over goes on from what is published, and removes what nobody names.
    again = pipeline.house = pipeline.lakehouse(on_unrepresentable_value=POLICY)
    database.execute("UPDATE docs SET due = 'infinity' WHERE id = 1")
    check(pipeline)
    again._writer.kept.expire(again._writer.head, 0.0)
    named = {
        str(pipeline.lake / table.path / file)
        for manifest in open_chain(pipeline.lake).links()
        for table in manifest.tables.values()
        for file in table.quarantine_files
    }
    found = {str(file) for table in folders(pipeline.lake) for file in table.glob("quarantine/*")}
    assert found == named | {str(checksums.sums_of(Path(file))) for file in named}


@pytest.mark.long
def test_26_a_table_that_gets_a_column_keeps_what_is_set_aside(pipeline, database, monkeypatch):
    monkeypatch.setitem(FIT, DOCS, f"{FIT[DOCS]} AND coalesce(isfinite(more), true)")
    database.execute(
        "ALTER TABLE docs ADD more date", "UPDATE docs SET more = 'infinity' WHERE id = 2"
    )
    check(pipeline)
    database.execute(
        "UPDATE docs SET more = '2024-01-01' WHERE id = 2",
        "UPDATE docs SET price = 1, due = '2024-01-01' WHERE id = 7",
    )
    assert check(pipeline).manifest.tables[DOCS].quarantined_rows == 0


def test_26_rows_are_listed_skipped_and_tried_again(pipeline, database, tmp_path):
    config = tmp_path / "tuskline.toml"
    config.write_text(
        f"""
        [log]
        data_dir = "log"
        [[log_server]]
        listen = "127.0.0.1:7401"
        data_dir = "log-server"
        [[source]]
        name = "{STREAM}"
        dsn = "{database.dsn}"
        [lake]
        uri = "{pipeline.lake}"
        [lake.on_unrepresentable_value]
        default = "fail"
        "{DOCS}" = "quarantine"
        """
    )

    def tuskline(*arguments):
        command = [sys.executable, "-m", "walsender_bridge.cli.app", "quarantine", *arguments]
        found = subprocess.run(
            [*command, "--json", "-c", str(config)], capture_output=True, text=True, check=False
        )
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    database.execute("UPDATE docs SET grid = '{{1},{2}}', due = 'infinity' WHERE id = 3")
    head = pipeline.flush().manifest
    copied, streamed = tuskline("list", "public.docs")["quarantine"]
    assert copied["key"] == {"id": "7"}
    assert (copied["offset"], copied["version"], copied["state"]) == (0, 0, "waiting")
    assert [(c["column"], c["value"]) for c in copied["columns"]] == [
        ("price", "NaN"),
        ("due", "infinity"),
    ]
    assert copied["values"]["body"] == "copied unrepresentable"
    assert "is not in decimal128(10, 2)" in copied["columns"][0]["reason"]
    assert streamed["key"] == {"id": "3"}
    assert streamed["values"]["body"] == "c" * 4000
    assert streamed["stream"] == STREAM
    assert streamed["xid"] > 0
    assert 0 < streamed["version"] <= head.epoch
    assert 0 < streamed["offset"] < head.streams[STREAM].offset
    assert [c["reason"] for c in streamed["columns"]][1] == "an array of more than one dimension"
    # Given up by name: counted as such, no longer waiting, and still followed.
    tuskline("skip", DOCS, copied["row"])
    pipeline.house.run_once()
    version = pipeline.head().tables[DOCS]
    assert (version.quarantined_rows, version.skipped_rows) == (2, 1)
    rows = {r["row"]: r["state"] for r in tuskline("list", DOCS)["quarantine"]}
    assert rows == {copied["row"]: "skipped", streamed["row"]: "waiting"}
    request = requests.ask(open_chain(pipeline.lake), requests.SKIP, [DOCS], ["nothing"])
    pipeline.house.run_once()
    with pytest.raises(LakeError, match="no such quarantined row: nothing"):
        requests.wait(open_chain(pipeline.lake), request, timeout=5)
    # Tried again: they do not fit, and nothing changes.
    tuskline("retry", DOCS)
    check(pipeline)
    version = pipeline.head().tables[DOCS]
    assert (version.quarantined_rows, version.skipped_rows, version.retry_quarantined) == (
        2,
        1,
        False,
    )
    # What has been mended at the source needs no command, skipped or not.
    database.execute(
        "UPDATE docs SET price = 1, due = '2024-01-01', grid = NULL WHERE id IN (3, 7)"
    )
    assert check(pipeline).manifest.tables[DOCS].quarantined_rows == 0
    assert tuskline("list", DOCS) == {"quarantine": []}


def test_26_what_fits_by_now_is_in_the_table_after_a_retry(pipeline, database):
    """As after an upgrade: rows were set aside whose text this version holds."""
    database.execute("UPDATE docs SET due = 'infinity', grid = '{5}' WHERE id = 4")
    pipeline.flush()
    version = pipeline.head().tables[DOCS]
    for file in version.quarantine_files:
        # By an older version's file, in which these dates did not fit.
        path = pipeline.lake / version.path / file
        table = pq.read_table(path)
        at = table.schema.get_field_index("unfit due")
        old = pa.array(["2024-07-01"] * len(table), pa.string())
        checksums.remove(path)
        pq.write_table(table.set_column(at, table.schema.field(at), old), path)
    requests.ask(open_chain(pipeline.lake), requests.RETRY, [DOCS])
    pipeline.house.run_once()
    rows = {row.id: row for row in pipeline.flush()["docs"].collect()}
    assert str(rows[4].due) == "2024-07-01"
    assert rows[4].grid == [5]
    # The other one still has a price that does not fit.
    assert 7 not in rows
    head = pipeline.head().tables[DOCS]
    assert (head.quarantined_rows, head.rows) == (1, len(rows))
    database.execute(
        "UPDATE docs SET due = '2024-01-01' WHERE id IN (4, 7)", "DELETE FROM docs WHERE id = 4"
    )
    check(pipeline)
