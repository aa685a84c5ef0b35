"""Masks as the decoder applies them, which keys are taken, and which tables are copied again for another mask."""

import hmac
from dataclasses import replace
from hashlib import sha256

import pyarrow as pa
import pytest

from spark_consumers.decode import masking
from spark_consumers.decode.entries import decode_entries
from spark_consumers.lake.epoch.packed import PackedTable, TaskTables
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import (
    LEFT,
    LIVE,
    PAUSED,
    STALE,
    StreamPosition,
    TableVersion,
)
from spark_consumers.lake.mask_key import VARIABLE, mask_key
from spark_consumers.lake.tables.reconfigured import MASKS as REASON
from spark_consumers.lake.tables.reconfigured import reconfigured
from spark_consumers.lake.tables.schema_match import mismatch
from tests.support import pgoutput_messages as pm
from tests.support.change_entries import UNCHANGED, Table, cut, delete, insert, update
from walsender_bridge.errors import ConfigError
from walsender_bridge.postgres.column_masks import parse_masks
from walsender_bridge.postgres.protocol.pgoutput import Column
from walsender_bridge.postgres.table_layout import RowRules

INT, TEXT, DATE = 23, 25, 1082
KEY = b"k" * 32
PEOPLE = Table(
    1, "people", (("id", INT, -1), ("email", TEXT, -1), ("ssn", INT, -1), ("born", DATE, -1)), "d"
)
MASKS = parse_masks({"email": "hash", "ssn": "drop", "born": {"constant": "2000-01-01"}})


def hashed(text):
    return hmac.new(KEY, text.encode(), sha256).hexdigest()


def decoded(table, *changes, masks=MASKS, key=KEY):
    log = cut([pm.begin(90, 7), *changes, pm.commit(90, 100)], [table])
    known = masking.opened(masking.recorded(masks, key), key)
    (batch,) = decode_entries(log.entries, log.schemas, masking=lambda _: known)
    return batch


def test_values_are_masked_where_they_are_decoded():
    batch = decoded(
        PEOPLE,
        insert(PEOPLE, ["1", "a@b", "55", "infinity"]),
        update(PEOPLE, ["1", UNCHANGED, "55", UNCHANGED], ["1", "a@b", "55", None], b"O"),
        update(PEOPLE, ["1", UNCHANGED, UNCHANGED, None]),
        delete(PEOPLE, ["1", None, None, None]),
    )
    assert [column.name for column in batch.relation.columns] == ["id", "email", "born"]
    assert batch.columns[1].to_pylist() == [hashed("a@b"), hashed("a@b"), None, None]
    assert [str(day) for day in batch.columns[2].to_pylist()] == ["2000-01-01"] * 3 + ["None"]
    assert batch.unchanged is not None
    assert batch.unchanged.tolist() == [
        [False, False, False],
        [False, False, False],
        [False, True, False],
        [False, False, False],
    ]
    assert batch.old_columns is not None
    assert batch.old_columns[1].to_pylist() == [None, hashed("a@b"), None, None]
    assert batch.sent.columns[2].name == "ssn"


def test_changes_that_the_masks_do_not_fit_have_no_values():
    renamed = Table(1, "people", (("id", INT, -1), ("mail", TEXT, -1)), "d")
    cases = [
        (renamed, MASKS, "it has no column 'born'"),
        (renamed, parse_masks({"id": "drop"}), "'id' of its key can only be masked by a hash"),
        (renamed, parse_masks({"id": {"constant": "1"}}), "can only be masked by a hash"),
        (renamed, parse_masks({"mail": "drop", "id": "hash"}), ""),
    ]
    for table, masks, reason in cases:
        batch = decoded(table, insert(table, ["1", "a@b"]), masks=masks)
        assert reason in batch.unmaskable
        if reason:
            assert all(column.null_count == 1 for column in batch.columns)
            assert mismatch(batch, pa.schema([]), None, (), 1) == batch.unmaskable
        else:
            assert batch.columns[0].to_pylist() == [hashed("1")]


def test_another_table_under_a_masked_tables_name_is_not_decoded():
    schema = pa.schema([("id", pa.string())])
    masks = masking.recorded(parse_masks({"id": "hash"}), KEY)
    target = Target("s.public.people", "public.people", "p", schema, schema, ("id",), 0, 1)
    target = replace(target, masking=masking.opened(masks, KEY))
    tables = TaskTables([PackedTable.of(target, ((), 0))], "stage")
    relation = decoded(PEOPLE, insert(PEOPLE, ["1", "a", "5", None])).sent
    assert tables.masking(relation) == target.masking
    assert isinstance(tables.masking(replace(relation, oid=2)), str)


def test_without_the_key_of_the_table_nothing_is_hashed():
    masks = masking.recorded(MASKS, KEY)
    assert masking.opened(masks, KEY) == masking.Masking(masks, KEY)
    assert masking.opened(masks, b"") == "its columns are hashed with a key that is not given here"
    assert masking.opened(masks, b"x" * 32) == "its columns are hashed with another key"
    dropping = parse_masks({"ssn": "drop"})
    assert masking.opened(dropping, b"") == masking.Masking(dropping)
    assert KEY.decode() not in repr(masking.opened(masks, KEY))


@pytest.mark.parametrize(("kind", "text"), [(DATE, "infinity"), (INT, "many"), (INT, "3000000000")])
def test_a_constant_is_a_value_of_its_column(kind, text):
    masks = parse_masks({"c": {"constant": text}})
    found = masking.misfit([Column("c", kind, -1, is_key=False)], (), masks)
    assert found is not None
    assert "the constant for its column 'c' cannot be used" in found


def test_a_key_is_read_from_a_file_of_its_account_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert mask_key() == b""
    monkeypatch.setenv(VARIABLE, "e" * 32)
    assert mask_key() == b"e" * 32
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("f" * 40 + "\n")
    assert mask_key(file) == b"f" * 40
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="accessible to other accounts"):
        mask_key(file)
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="fewer than 32"):
        mask_key(file)


def test_tables_of_other_masks_are_copied_again():
    table = TableVersion("p", "iceberg", 1, "", ("id",), (), 0, 0, 0, 1)
    masks = masking.recorded(MASKS, KEY)
    head = Manifest("l", 1, 5, 4, 1, 0.0, streams={"s": StreamPosition(1, 9, 9, 9)})
    tables = {
        "s.a.same": replace(table, masks=masks),
        "s.a.live": table,
        "s.a.paused": replace(table, state=PAUSED),
        "s.a.left": replace(table, state=LEFT),
        "s.a.copied": replace(table, state=STALE, resync="why", reason="why"),
        "s.a.rekeyed": replace(table, masks=masking.recorded(MASKS, b"x" * 32)),
    }
    copies = {"s.a.copied": replace(table, masks=masks), "s.a.live": table}
    head = replace(head, tables=tables, copies=copies)
    found, others = reconfigured(head, lambda _: RowRules(masks), holds=False)
    assert sorted(others) == ["s.a.live", "s.a.paused", "s.a.rekeyed"]
    assert {name: one.state for name, one in found.tables.items()} == {
        "s.a.same": LIVE,
        "s.a.live": STALE,
        "s.a.paused": PAUSED,
        "s.a.left": LEFT,
        "s.a.copied": STALE,
        "s.a.rekeyed": STALE,
    }
    assert found.tables["s.a.paused"].resync == found.tables["s.a.live"].resync == REASON
    assert set(found.copies) == {"s.a.copied"}
    assert reconfigured(found, lambda _: RowRules(masks), holds=False)[0] == found
