"""Masked columns: nothing of an unmasked value is in any file of the lake, and the rest is what PostgreSQL has."""

import hmac
import json
import zlib
from base64 import b64encode
from collections import Counter
from datetime import date
from hashlib import sha256
from typing import Any

import pyarrow.parquet as pq
import pytest
from psycopg import sql

from spark_consumers import read
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.epoch.quarantined_rows import rows_of
from spark_consumers.lake.manifest.table_version import LEFT, STALE
from spark_consumers.lake.views.definition import ViewDefinition
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.feed_check import changes_of
from tests.support.lake_pipeline import Pipeline
from tests.support.pinned import connect_pinned
from tests.support.waiting import wait_for
from walsender_bridge.errors import ConfigError, LakeError
from walsender_bridge.postgres.column_masks import parse_masks
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern
from walsender_bridge.runtime.sql import load

KEY = b"0123456789abcdef0123456789abcdef"
#: Whatever is to be masked has this in it, or the number. No setting of Spark has the word: one may tell what is secret.
SECRET, NUMBER = "hushed", 77_077_077
TABLES = (
    "CREATE TABLE people (id int PRIMARY KEY, email text, ssn bigint, bio text, born date, note text, due date)",
    "ALTER TABLE people ALTER bio SET STORAGE EXTERNAL, ALTER note SET STORAGE EXTERNAL",
    f"""INSERT INTO people SELECT g, 'hushed' || g, {NUMBER}, repeat('hushed' || g, 900), 'infinity', repeat('n' || g, 900),
    CASE g WHEN 8 THEN 'infinity' ELSE date '2024-01-01' END FROM generate_series(1, 9) g""",
    "INSERT INTO people VALUES (10)",
    "CREATE TABLE logins (email text, n int, at numeric(9, 2), PRIMARY KEY (email, n))",
    "INSERT INTO logins SELECT 'hushed' || g, 1, g FROM generate_series(1, 9) g",
    "CREATE TABLE bag (email text, a int, f float8, ssn bigint)",
    "ALTER TABLE bag REPLICA IDENTITY FULL",
    f"INSERT INTO bag SELECT 'hushed' || g % 2, g % 2, 1.5, {NUMBER} FROM generate_series(1, 6) g",
)
PUBLISHED = ("public.people", "public.logins", "public.bag")
MASKS: dict[str, dict[str, Any]] = {
    "people": {
        "email": "hash",
        "ssn": "drop",
        "bio": "hash",
        "born": {"constant": "2000-01-01"},
    },
    "logins": {"email": "hash"},
    "bag": {"email": "hash", "f": {"constant": "0"}, "ssn": "drop"},
}
CHANGES = (
    "INSERT INTO people VALUES (11, 'hushed11', 77077077, 'hushed', '-infinity', 'n', '-infinity')",
    # Unchanged TOAST, of a masked column and of another; rows that are quarantined and come back.
    "UPDATE people SET email = 'hushedagain' WHERE id IN (1, 2, 8)",
    "UPDATE people SET bio = repeat('hushed', 900), ssn = 77077077 WHERE id = 3",
    "UPDATE people SET note = 'short', due = 'infinity' WHERE id IN (3, 4)",
    "UPDATE people SET due = '2024-02-02' WHERE id = 8",
    "UPDATE people SET id = id + 100 WHERE id = 5",
    "UPDATE people SET email = NULL, bio = NULL, born = NULL WHERE id = 6",
    "DELETE FROM people WHERE id = 7",
    # The hashed key changes, and is what a row is removed by.
    "UPDATE logins SET email = 'hushedmoved' WHERE email = 'hushed1'",
    "UPDATE logins SET at = 5 WHERE email = 'hushed2'",
    "DELETE FROM logins WHERE email = 'hushed3'",
    "INSERT INTO logins VALUES ('hushed3', 2, 1), ('hushednew', 1, 1)",
    "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 1)",
    "UPDATE bag SET f = 9, ssn = 77077077 WHERE a = 0",
    "INSERT INTO bag VALUES ('hushed1', 1, 7, 77077077), (NULL, NULL, NULL, NULL)",
)


def rule(name, masks):
    return LayoutRule(
        Pattern.parse(f"public.{name}"),
        TableLayout(),
        masks=parse_masks(masks),
        feed="{table}_changes",
    )


RULES = [rule(name, masks) for name, masks in MASKS.items()]


def hashed(text):
    return None if text is None else hmac.new(KEY, text.encode(), sha256).hexdigest()


def masked_rows(database, name):
    """PostgreSQL's rows as the lake is to have them, each value as text."""
    with connect_pinned(database.dsn) as connection:
        names = [
            row[0]
            for row in connection.execute(
                "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                [name],
            )
        ]
        texts = ", ".join(f"{column}::text" for column in names)
        rows = connection.execute(f"SELECT {texts} FROM {name}".encode()).fetchall()
    masks = MASKS[name]
    found = []
    for row in rows:
        value = dict(zip(names, row, strict=True))
        for column, mask in masks.items():
            if mask == "hash":
                value[column] = hashed(value[column])
            elif mask == "drop":
                del value[column]
            else:
                value[column] = mask["constant"]
        found.append(value)
    return found


def as_text(value):
    if isinstance(value, float):
        return f"{value:g}"
    return None if value is None else str(value)


def assert_masked(pipeline, snapshot):
    """Table by table the rows are PostgreSQL's, masked; those that do not fit are beside them."""
    for name in MASKS:
        full = f"{STREAM}.public.{name}"
        expected = masked_rows(pipeline.database, name)
        fit = [row for row in expected if "infinity" not in str(row.get("due"))]
        found = [
            {k: as_text(v) for k, v in row.asDict().items()} for row in snapshot[full].collect()
        ]
        assert sorted(map(repr, found)) == sorted(map(repr, fit)), name
    return snapshot


def contents(lake):
    """Every file of the lake, as its bytes, and as what is compressed in it."""
    for path in lake.rglob("*"):
        if not path.is_file():
            continue
        raw = path.read_bytes()
        yield path, raw
        if raw[:4] == b"PAR1":
            yield path, repr(pq.read_table(path).to_pydict()).encode()
            yield path, repr(pq.ParquetFile(path).metadata.to_dict()).encode()
        for at in range(len(raw) - 2):
            if raw[at : at + 2] in {b"\x1f\x8b", b"\x78\x9c"}:
                try:
                    yield path, zlib.decompressobj(47).decompress(raw[at:])
                except zlib.error:
                    continue


def assert_nothing_leaked(lake, *more):
    secrets = [SECRET.encode(), str(NUMBER).encode(), NUMBER.to_bytes(8, "little")]
    secrets += [KEY, KEY.hex().encode(), *(text.encode() for text in more)]
    # A digest of the text alone can be tried.
    secrets += [sha256(f"hushed{n}".encode()).hexdigest().encode() for n in range(1, 4)]
    for path, content in contents(lake):
        for secret in secrets:
            assert secret not in content, (path, secret)


def shown_in_ui(spark):
    """What Spark's UI, and its event log, say of queries and settings."""
    store = spark._jsparkSession.sharedState().statusStore()
    found = store.executionsList()
    plans = [found.apply(n).physicalPlanDescription() for n in range(found.size())]
    settings = [f"{name}={value}" for name, value in spark.sparkContext.getConf().getAll()]
    return "\n".join([*plans, *settings])


@pytest.fixture
def masked(spark, tmp_path, database):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, PUBLISHED) as pipeline:
        pipeline.house = pipeline.lakehouse(
            layouts=RULES, mask_key=KEY, on_unrepresentable_value={"default": "quarantine"}
        )
        pipeline.wait_for_tables(*MASKS)
        yield pipeline


@pytest.mark.parametrize("ranges", [False, True], ids=["at-once", "in-ranges"])
def test_masked_values_reach_no_file_and_rows_stay_rows(
    masked, database, monkeypatch, ranges, capfd
):
    if ranges:
        monkeypatch.setattr(plan, "RANGE_BYTES", 1)
    monkeypatch.setenv("TUSKLINE_MASK_KEY", KEY.decode())
    assert_masked(masked, masked.flush())
    for change in CHANGES:
        database.execute(change)
        masked.barrier()
        live = read(masked.spark, masked.lake, live=True, log=masked.log.address)
        assert_masked(masked, live)
    snapshot = assert_masked(masked, masked.flush())
    database.execute("TRUNCATE bag", "INSERT INTO bag VALUES ('hushed1', 1, 7, 77077077)")
    assert_masked(masked, masked.flush())
    people = snapshot.manifest.tables[f"{STREAM}.public.people"]
    assert people.quarantined_rows == 3
    aside = [row.to_json() for row in rows_of(masked.lake, "people", people)]
    assert {row["key"]["id"] for row in aside} == {"3", "4", "11"}
    assert SECRET not in json.dumps(aside)
    # Nor do the changes have more than the tables.
    changes = changes_of(snapshot, "people_changes")
    assert {c["email"] for c in changes if c["_op"] == "update" and c["id"] in {1, 2, 8}} >= {
        hashed("hushedagain")
    }
    assert {c["born"] for c in changes if c["_op"] in {"insert", "update"}} == {date(2000, 1, 1)}
    assert not {"ssn"} & set(changes[0])
    unrepresentable = [json.loads(c["_unrepresentable"]) for c in changes if c["_unrepresentable"]]
    assert {"due": "-infinity"} in unrepresentable
    (moved,) = [c for c in changes_of(snapshot, "logins_changes") if c["_op"] == "update_before"]
    assert moved["email"] == hashed("hushed1")
    assert_nothing_leaked(masked.lake)
    shown = shown_in_ui(masked.spark)
    assert "BatchScan" in shown
    for secret in (SECRET, KEY.decode(), b64encode(KEY).decode()[:40]):
        assert secret not in shown
    said = "".join(capfd.readouterr())
    assert SECRET not in said
    assert KEY.decode() not in said


def test_a_live_read_without_the_key_leaves_out_what_it_cannot_hash(masked, database, monkeypatch):
    database.execute("UPDATE people SET email = 'hushedlive' WHERE id = 1")
    masked.barrier()
    for key in ("", "another key, which is long enough too"):
        monkeypatch.setenv("TUSKLINE_MASK_KEY", key)
        found = read(masked.spark, masked.lake, live=True, log=masked.log.address)
        assert found.tables == [f"{STREAM}.public.{name}" for name in ("bag", "logins")]
        with pytest.raises(LakeError, match="its columns are hashed with"):
            found["people"]


def test_a_mask_that_is_set_later_keeps_values_out_from_the_restart_on(spark, tmp_path, database):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, PUBLISHED) as pipeline:
        pipeline.house = pipeline.lakehouse(on_unrepresentable_value={"default": "quarantine"})
        pipeline.wait_for_tables(*MASKS)
        before = pipeline.flush().manifest.tables
        pipeline.house.close()
        database.execute("UPDATE people SET email = 'afterwards' || id, bio = 'afterwards'")
        pipeline.house = pipeline.lakehouse(
            layouts=RULES[:2],
            mask_key=KEY,
            on_unrepresentable_value={"default": "quarantine"},
            failing_table="go_on",
        )
        pipeline.barrier()
        pipeline.house.run_once(force=True)
        states = {name.rpartition(".")[2]: t.state for name, t in pipeline.head().tables.items()}
        assert states["people"] == states["logins"] == STALE

        def copied():
            pipeline.house.run_once(force=True)
            after = pipeline.head().tables
            changed = {n for n, t in after.items() if t.path != before[n].path}
            return changed == {f"{STREAM}.public.people", f"{STREAM}.public.logins"}

        wait_for(copied, 60, "copies with masks")
        rows = {row.email for row in pipeline.flush()["people"].collect()}
        assert rows == {
            row["email"] for row in masked_rows(database, "people") if row["due"] != "infinity"
        }
        written = [path for path, content in contents(pipeline.lake) if b"afterwards" in content]
        assert not written, "between the restart and the copy nothing was written unmasked"


def test_a_view_has_the_columns_of_a_masked_table_that_the_lake_has(spark, tmp_path, database):
    views = (
        ViewDefinition("views.bags", "SELECT * FROM bag"),
        ViewDefinition("views.accounts", "SELECT email, count(*) AS n FROM bag GROUP BY email"),
        ViewDefinition("views.numbers", "SELECT n, at FROM logins WHERE email IS NOT NULL"),
    )
    database.execute(*TABLES)
    rules = [*RULES[:1], rule("logins", {"n": "hash", "email": "hash"}), *RULES[2:]]
    with Pipeline(spark, tmp_path, database, PUBLISHED) as pipeline:
        pipeline.house = pipeline.lakehouse(
            layouts=rules,
            mask_key=KEY,
            on_unrepresentable_value={"default": "quarantine"},
            views=views,
        )
        pipeline.wait_for_tables(*MASKS)
        for change in ("SELECT 1", *(c for c in CHANGES if " bag " in c or " logins " in c)):
            database.execute(change)
            snapshot = pipeline.flush()
            bag = snapshot["bag"]
            assert Counter(snapshot["bags"].collect()) == Counter(bag.collect())
            counts = bag.groupBy("email").count().collect()
            assert Counter(snapshot["accounts"].collect()) == Counter(counts)
            numbers = snapshot["logins"].select("n", "at").collect()
            assert Counter(snapshot["numbers"].collect()) == Counter(numbers)
        assert_nothing_leaked(pipeline.lake)


def test_masks_that_a_table_cannot_have_copy_nothing(spark, tmp_path, database, monkeypatch):
    monkeypatch.delenv("TUSKLINE_MASK_KEY", raising=False)
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, PUBLISHED) as pipeline:
        with pytest.raises(ConfigError, match=r"bio of public.people .* no key is configured"):
            pipeline.lakehouse(layouts=RULES)
        rules = [
            rule("people", {"emial": "drop"}),
            rule("logins", {"email": "drop"}),
            rule("bag", {"f": {"constant": "much"}}),
        ]
        pipeline.house = pipeline.lakehouse(layouts=rules)

        def refused():
            pipeline.house.run_once(force=True)
            return len(pipeline.head().not_copied) == len(rules)

        wait_for(refused, 60, "refused copies")
        reasons = pipeline.head().not_copied
        for name, reason in {
            "people": "it has no column 'emial', which is to be masked",
            "logins": "the column 'email' of its key can only be masked by a hash",
            "bag": "the constant for its column 'f' cannot be used",
        }.items():
            assert f"it is not copied unmasked: {reason}" in reasons[f"{STREAM}.public.{name}"]
        assert not [*pipeline.lake.rglob("*.parquet")]


def test_14_a_renamed_table_is_not_copied_without_the_masks_that_it_had(masked, database):
    old, new = f"{STREAM}.public.people", f"{STREAM}.public.persons"
    assert masked.flush()[old].count()
    database.execute("ALTER TABLE people RENAME TO persons")

    def refused():
        masked.house.run_once(force=True)
        return masked.head().not_copied

    wait_for(refused, 60, "a refusal")
    assert f"it was renamed from {old}, which had masks on bio, born, email, ssn." in refused()[new]
    # A new writer knows it, too.
    masked.house.close()
    masked.house = masked.lakehouse(layouts=RULES, mask_key=KEY)
    database.execute(f"UPDATE persons SET email = '{SECRET}after'")
    masked.barrier()
    for _ in range(5):
        masked.house.run_once(force=True)
    assert masked.head().tables[old].state == LEFT
    assert new not in {**masked.head().tables, **masked.head().copies}
    assert_nothing_leaked(masked.lake)
    masked.house.close()
    masked.house = masked.lakehouse(
        layouts=[*RULES, rule("persons", MASKS["people"])],
        mask_key=KEY,
        on_unrepresentable_value={"default": "quarantine"},
    )
    wait_for(lambda: masked.house.run_once(force=True) or new in masked.head().tables, 60, "a copy")
    assert_nothing_leaked(masked.lake)


def test_14_the_recorded_default_of_a_masked_column_is_masked(masked, database):
    """The server records it; the table is copied, with its masks."""
    database.execute(load("ddl/install"))
    publish = sql.SQL(load("ddl/publish")).format(publication=sql.Identifier(PUBLICATION))
    database.execute(publish.as_string(None))
    masked.flush()
    database.execute(
        "ALTER TABLE people DROP email",
        f"ALTER TABLE people ADD email text DEFAULT '{SECRET}given'",
    )
    masked.flush()
    assert_masked(masked, masked.flush())
    assert_nothing_leaked(masked.lake, sha256(f"{SECRET}given".encode()).hexdigest())


def test_a_masked_column_with_another_name_stops_its_table(masked, database):
    """The renamed column has no mask, so neither its changes nor a copy may show it."""
    database.execute(
        "ALTER TABLE people RENAME email TO mail",
        "UPDATE people SET mail = 'mailsecretvalue' || id",
    )
    masked.barrier()
    for _ in range(3):
        masked.house.run_once(force=True)

    def refused():
        masked.house.run_once(force=True)
        return masked.head().not_copied

    wait_for(refused, 60, "a refused copy")
    assert "it has no column 'email'" in masked.head().not_copied[f"{STREAM}.public.people"]
    assert not [path for path, content in contents(masked.lake) if b"mailsecretvalue" in content]
