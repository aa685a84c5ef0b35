"""What a Delta log says of a table: its commits, and which of them are removed."""

import json
import shutil
import struct
from types import SimpleNamespace

import pytest
from pyroaring import BitMap64

from spark_consumers.lake.delta_log import delta_tables
from spark_consumers.lake.delta_log.actions import (
    LogState,
    Shown,
    WantedFile,
    new_vectors,
    next_commit,
    shown_in,
)
from spark_consumers.lake.delta_log.delta_tables import DeltaTables, setting_names
from spark_consumers.lake.delta_log.inline_vectors import descriptor, z85
from spark_consumers.lake.delta_log.log import (
    REFUSAL,
    Cleaning,
    DeltaLog,
    Listing,
    cleaning,
    refusal_of,
    refusal_record,
)
from spark_consumers.lake.delta_log.read import version_of
from spark_consumers.lake.delta_log.schema import WRITER_FEATURE, delta_schema, refusal
from spark_consumers.lake.delta_log.snapshot import ReadManifests, statistics
from spark_consumers.lake.format.checksums import seal, sums_of
from spark_consumers.lake.format.puffin import encode
from tests.support import avro_file
from walsender_bridge.errors import CorruptError, LakeError, NotSupportedError


def schema(number, *fields):
    """Iceberg's JSON, from (id, name, type)."""
    described = [
        {"id": i, "name": name, "required": False, "type": kind} for i, name, kind in fields
    ]
    return {"type": "struct", "schema-id": number, "fields": described}


FIRST = schema(0, (1, "id", "int"), (2, "name", "string"))
DELTA = delta_schema(FIRST, [FIRST])


def of(made, member):
    fields = json.loads(made.schema_string)["fields"]
    return {field["name"]: field["metadata"].get(f"delta.{member}") for field in fields}


def commit(state, shown, *wanted, made=DELTA):
    vectors = {f.vector: descriptor(encode(BitMap64([0])), 1) for f in new_vectors(state, wanted)}
    actions = next_commit(state, shown, made, "uuid", wanted, vectors, 1000)
    return actions, state.after(state.version + 1, actions) if actions else state


def kinds(actions):
    return [next(iter(action)) for action in actions]


A, B = WantedFile("data/a.parquet", 10, "{}"), WantedFile("data/b c%.parquet", 11, "{}")
A_LESS = WantedFile("data/a.parquet", 10, "{}", "data/v.puffin")


def test_a_commit_has_what_differs_from_the_one_before():
    actions, state = commit(LogState(), Shown(5, 50, 500, 1), A, B)
    assert kinds(actions) == ["commitInfo", "txn", "protocol", "metaData", "add", "add"]
    assert set(state.adds) == {"data/a.parquet", "data/b%20c%25.parquet"}
    actions, state = commit(state, Shown(6, 60, 600, 1), A_LESS)
    assert kinds(actions) == ["commitInfo", "txn", "remove", "remove", "add"]
    assert actions[-1]["add"]["deletionVector"]["cardinality"] == 1
    assert state.shown == Shown(6, 60, 600, 1)
    actions, state = commit(state, Shown(7, 70, 700, 1), A_LESS, B)
    assert kinds(actions) == ["commitInfo", "txn", "add"]
    assert state.version == 2


def test_rows_that_are_only_moved_are_no_change_of_data():
    _, state = commit(LogState(), Shown(5, 50, 500, 1), A)
    actions, _ = commit(state, Shown(6, 50, 600, 1), B)
    assert [next(iter(a.values()))["dataChange"] for a in actions[2:]] == [False, False]
    actions, _ = commit(state, Shown(6, 51, 600, 1), B)
    assert [next(iter(a.values()))["dataChange"] for a in actions[2:]] == [True, True]


@pytest.mark.parametrize(
    ("shown", "is_made"),
    [
        (Shown(5, 50, 500, 2), False),  # the same link
        (Shown(4, 40, 400, 2), False),  # an older one, of a writer that was suspended
        (Shown(9, 90, 900, 1), False),  # of a writer of a lower term, which is fenced
        (Shown(6, 60, 500, 2), False),  # the table has not changed
        (Shown(6, 60, 600, 2), True),
        (Shown(5, 50, 600, 3), True),  # the link was lost, and is another writer's now
    ],
)
def test_13_a_log_never_goes_back(shown, is_made):
    _, state = commit(LogState(), Shown(5, 50, 500, 2), A)
    actions, _ = commit(state, shown, B)
    assert bool(actions) is is_made


def test_another_program_s_commit_is_none_of_ours():
    with pytest.raises(ValueError, match="another program's"):
        shown_in({"operation": "DELETE", "operationParameters": {}})


def test_14_columns_keep_their_physical_names_whatever_they_are_called_later():
    renamed = schema(1, (1, "id", "int"), (2, "title", "string"))
    again = schema(2, (2, "title", "string"), (1, "id", "int"), (3, "Name", "long"))
    made = delta_schema(again, [again, renamed, FIRST])
    assert of(made, "columnMapping.physicalName") == {"title": "name", "id": "id", "Name": "Name-3"}
    assert of(made, "columnMapping.id") == {"title": 2, "id": 1, "Name": 3}
    # What is added later has no part in it.
    assert delta_schema(renamed, [FIRST, renamed, again]) == delta_schema(renamed, [FIRST, renamed])


def test_14_a_wider_type_is_recorded_and_needs_its_feature():
    wide = schema(1, (1, "id", "long"), (2, "name", "string"))
    wider = schema(2, (1, "id", "long"), (2, "name", "string"), (3, "n", "decimal(9, 2)"))
    last = schema(3, (1, "id", "long"), (2, "name", "string"), (3, "n", "decimal(11, 2)"))
    made = delta_schema(last, [FIRST, wide, wider, last])
    assert of(made, "typeChanges") == {
        "id": [{"fromType": "integer", "toType": "long"}],
        "name": None,
        "n": [{"fromType": "decimal(9,2)", "toType": "decimal(11,2)"}],
    }
    assert "typeWidening" in made.features
    assert "typeWidening" not in DELTA.features


def test_no_other_program_may_write():
    assert DELTA.protocol["writerFeatures"] == [*DELTA.protocol["readerFeatures"], WRITER_FEATURE]


def test_14_a_column_with_a_default_for_older_rows_is_refused_by_name():
    older = schema(0, (1, "id", "int"), (2, "n", "int"))
    older["fields"][1]["initial-default"] = 0
    assert "'n' has a default" in refusal(older, [older], has_first_names=True)
    assert not refusal(FIRST, [FIRST], has_first_names=True)


@pytest.mark.parametrize("length", range(9))
def test_z85_is_that_of_its_specification(length):
    hello = bytes.fromhex("864FD26FB559F75B")
    assert z85(hello) == "HelloWorld"
    padded = hello[:length] + bytes(-length % 4)
    words = [int.from_bytes(padded[i : i + 4], "big") for i in range(0, len(padded), 4)]
    found = z85(hello[:length])
    alphabet = (
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
    )
    read = [0] * len(words)
    for place, letter in enumerate(found):
        read[place // 5] = read[place // 5] * 85 + alphabet.index(letter)
    assert read == words


def test_statistics_leave_out_what_delta_cannot_have():
    physical = {
        1: ("i", "int"),
        2: ("t", "timestamptz"),
        3: ("d", "date"),
        4: ("n", "decimal(38, 2)"),
        5: ("f", "double"),
        6: ("big", "decimal(38, 2)"),
        7: ("s", "string"),
    }
    low = {
        1: struct.pack("<i", -5),
        2: struct.pack("<q", -1),
        3: struct.pack("<i", -719_162),
        4: (-12345).to_bytes(2, "big", signed=True),
        5: struct.pack("<d", 1.0),
        6: (10**30).to_bytes(13, "big"),
        7: b"\xc3",
    }
    high = {**low, 1: struct.pack("<i", 7), 3: struct.pack("<i", 2**31 - 1)}
    made = statistics(4, {1: 2}, low, high, physical)
    assert made == {
        "numRecords": 4,
        "minValues": {"i": -5, "t": "1969-12-31T23:59:59.999Z", "n": -123.45},
        "maxValues": {"i": 7, "t": "1969-12-31T23:59:59.999Z", "n": -123.45},
        "nullCount": {"i": 2},
    }


# -- files --------------------------------------------------------------------------------------------


def written(folder, count, *, checkpoint=()):
    log, state = DeltaLog(folder), LogState()
    for number in range(count):
        file = WantedFile(f"data/{number}.parquet", number, "{}")
        shown = Shown(10 * number, 100 * number, 1000 * number, 1)
        actions, state = commit(state, shown, A_LESS, file)
        assert log.commit(number, actions)
        assert not log.commit(number, actions)
        if number in checkpoint:
            log.write_checkpoint(state)
    return log, state


def facts(state):
    """A state without what a checkpoint does not have in the same form."""
    adds = {p: {**a, "dataChange": True, "partitionValues": {}} for p, a in state.adds.items()}
    for add in adds.values():
        for name in ("tags", "deletionVector"):
            add[name] = {k: v for k, v in (add.get(name) or {}).items() if v is not None}
    return state.version, state.shown, json.loads(state.metadata["schemaString"]), adds


def test_a_log_is_read_from_its_newest_checkpoint(tmp_path):
    log, state = written(tmp_path, 9, checkpoint={3, 6})
    assert facts(log.state()) == facts(state)
    log.remove(range(6), [3])
    assert facts(log.state()) == facts(state)
    assert log.listing() == Listing((6, 7, 8), (6,))
    next_one, _ = commit(log.state(), Shown(90, 900, 9000, 1), A_LESS)
    assert kinds(next_one) == ["commitInfo", "txn", "remove"], "nothing else has changed"


def test_33_a_commit_without_the_one_before_is_not_written(tmp_path):
    log, state = written(tmp_path, 4)
    log.remove(range(4), [])
    actions, _ = commit(state, Shown(90, 900, 9000, 1), A_LESS)
    with pytest.raises(CorruptError, match="missing"):
        log.commit(4, actions)
    assert log.listing().newest == -1


def test_33_a_log_whose_newest_commit_was_lost_does_not_go_back(tmp_path):
    log, _ = written(tmp_path, 4, checkpoint={3})
    log.remove([3], [])
    with pytest.raises(CorruptError, match="missing"):
        log.state()


def test_33_a_damaged_byte_of_a_commit_is_an_error(tmp_path):
    log, _ = written(tmp_path, 3)
    file = log.commit_file(1)
    assert sums_of(file).exists()
    content = bytearray(file.read_bytes())
    content[content.index(b"data/1.parquet")] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError, match="checksum mismatch"):
        log.state()


@pytest.mark.parametrize("damaged", ["list.avro", "manifest.avro"])
def test_33_a_damaged_byte_of_what_a_commit_reads_is_an_error(tmp_path, damaged):
    data = {"file_path": "string", "file_size_in_bytes": "long", "record_count": "long"}
    entry = {"status": "int", "sequence_number": "long", "data_file": avro_file.record("f", data)}
    file = {"file_path": str(tmp_path / "t/data/a.parquet"), "file_size_in_bytes": 9}
    entries = [{"status": 1, "sequence_number": 1, "data_file": {**file, "record_count": 3}}]
    avro_file.write(tmp_path / "manifest.avro", entry, entries)
    listed = {"manifest_path": str(tmp_path / "manifest.avro"), "sequence_number": 1}
    avro_file.write(
        tmp_path / "list.avro", {"manifest_path": "string", "sequence_number": "long"}, [listed]
    )
    for name in ("list.avro", "manifest.avro"):
        seal(tmp_path / name)

    def wanted():
        return ReadManifests().wanted(tmp_path / "list.avro", {}, "t")

    assert [each.size for each in wanted()[0].values()] == [9]
    content = bytearray((tmp_path / damaged).read_bytes())
    content[-20] ^= 1
    (tmp_path / damaged).write_bytes(content)
    with pytest.raises(CorruptError, match="checksum mismatch"):
        wanted()


@pytest.mark.parametrize(
    ("commits", "checkpoints", "kept", "decided"),
    [
        # Too few for a checkpoint.
        (range(9), (), {5, 6, 7, 8}, None),
        (range(12), (), {10, 11}, Cleaning((10,), tuple(range(10)), ())),
        (range(12), (10,), {10, 11}, Cleaning((), tuple(range(10)), ())),
        # Nothing that is kept shows the newest version yet.
        (range(11), (), set(), Cleaning((10,), tuple(range(10)), ())),
        # A pin far behind, and checkpoints that nothing begins with any more.
        (
            range(30),
            (5, 25),
            {0, 7, 28},
            Cleaning((7, 28), (*range(1, 7), *range(8, 28)), (5, 25)),
        ),
    ],
)
def test_10_versions_of_expired_epochs_are_removed(commits, checkpoints, kept, decided):
    there = Listing(tuple(commits), checkpoints)
    found = cleaning(there, kept, 10)
    assert found == decided


@pytest.mark.parametrize("kept", [{0, 7, 28}, {29}, {3, 4, 5}, {1, 29}])
def test_10_each_version_that_is_kept_is_read_after_cleaning(tmp_path, kept):
    log, _ = written(tmp_path, 30, checkpoint={5, 25})
    before = {version: facts(log.state(version)) for version in {*kept, 29}}
    decided = cleaning(log.listing(), kept, 10)
    assert decided is not None
    for version in decided.new_checkpoints:
        log.write_checkpoint(log.state(version))
    log.remove(decided.commits, decided.checkpoints)
    assert len(log.listing().commits) == len(before)
    assert {version: facts(log.state(version)) for version in before} == before


def test_5_10_an_overtaken_writer_removes_no_version_of_the_later_one_s(tmp_path):
    (tmp_path / "t").mkdir()
    log, _ = written(tmp_path / "t", 25)
    chain = SimpleNamespace(root=tmp_path, store=None, links=lambda: ())
    tables = DeltaTables(chain, None)  # type: ignore[arg-type]
    tables.remember(SimpleNamespace(at_sources={}, readable={}, term=1, link=150))  # type: ignore[arg-type]
    tables.clean("t", {14_000, 15_000})
    assert log.listing().commits == tuple(range(14, 25))


def link(term, number, **snapshots):
    """A link of the chain with these tables, each of which has its path for a name."""
    tables = {
        path: SimpleNamespace(path=path, snapshot_id=snapshot)
        for path, snapshot in snapshots.items()
    }
    return SimpleNamespace(at_sources={}, readable=tables, term=term, link=number, epoch=number)


def tables_of(folder, *links):
    """The Delta logs of a lake in this folder whose chain has these links. Their tables have no data files."""
    store = SimpleNamespace(replace=lambda *_, **__: None)
    found = SimpleNamespace(
        schema=FIRST, schemas=[FIRST], has_first_names=True, uuid="u", manifest_list=None
    )
    tables = SimpleNamespace(snapshot_record=lambda *_: found)
    for each in links:
        for path in each.readable:
            (folder / path).mkdir(exist_ok=True)
    chain = SimpleNamespace(
        root=folder, store=store, links=lambda: links, newest=lambda n: list(links[::-1][:n])
    )
    return DeltaTables(chain, tables)  # type: ignore[arg-type]


def snapshots_in(table):
    log = DeltaLog(table)
    return [log.shown(version).snapshot for version in log.listing().commits]


@pytest.fixture
def no_files(monkeypatch):
    monkeypatch.setattr(ReadManifests, "wanted", lambda *_: ({}, {}))


@pytest.mark.usefixtures("no_files")
def test_31_links_that_were_given_up_are_shown_no_longer(tmp_path):
    """A log that is further than the chain shows the chain's newest link again, by the next term, though its table has not changed."""

    def written_by(*links):
        tables_of(tmp_path, *links).show()
        return snapshots_in(tmp_path / "t")

    assert written_by(link(1, 5, t=50), link(1, 6, t=60)) == [50, 60]
    # Link 6 is lost. The next writer's first link has its number.
    assert written_by(link(1, 5, t=50), link(2, 6, t=50)) == [50, 60, 50]
    assert written_by(link(1, 5, t=50), link(2, 6, t=50), link(3, 7, t=50)) == [50, 60, 50]


@pytest.mark.usefixtures("no_files")
def test_5_22_a_copy_that_was_replaced_gets_the_commits_that_it_lacks(tmp_path, monkeypatch):
    """By the next writer, and by one that could not write them when it copied the table again."""
    tables_of(tmp_path, link(1, 5, t=50), link(1, 6, t=60), link(1, 7, again=70)).show()
    assert (snapshots_in(tmp_path / "t"), snapshots_in(tmp_path / "again")) == ([50, 60], [70])

    (tmp_path / "other").mkdir()
    tables = tables_of(tmp_path, link(2, 8, u=80))
    tables.show()
    tables.remember(link(2, 9, u=90))
    with monkeypatch.context() as patch:
        patch.setattr(DeltaLog, "commit", lambda *_: 1 / 0)
        tables.show()
    tables.remember(link(2, 10, other=100))
    tables._retry_at.clear()
    tables.show()
    assert snapshots_in(tmp_path / "u") == [80, 90]
    # Then it is forgotten; and so is one that expires before it could be written.
    assert set(tables._at) == set(tables._states) == set(tables._shown) == {"other"}
    tables.remember(link(2, 11, other=110))
    tables.remember(link(2, 12))
    tables.clean("other", ())
    assert (tables._pending, tables._at) == ({}, {})
    tables.show()
    assert snapshots_in(tmp_path / "other") == [100]


@pytest.mark.usefixtures("no_files")
def test_33_a_log_that_is_removed_is_noticed_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(delta_tables, "_LOOK_AT", 2)
    names = ("t1", "t2", "t3")
    tables = tables_of(tmp_path, *(link(1, n, **dict.fromkeys(names, 10 * n)) for n in (5, 6, 7)))
    tables.show()
    for name in names:
        shutil.rmtree(tmp_path / name / "_delta_log")
    # Not before its time.
    tables.show()
    assert not any(snapshots_in(tmp_path / name) for name in names)
    for there in (2, 3):
        tables._look_at = 0
        tables.show()
        found = [snapshots_in(tmp_path / name) for name in names]
        assert found.count([50, 60, 70]) == there
    assert tables._failed == {}


def test_28_a_view_or_feed_has_no_section_of_the_table_whose_name_it_has():
    """Each is matched by a name that is its own: not by that of a table which is shown under another one."""
    at_sources = {
        "shop.sales.orders": "shop.public.orders",
        "shop.public.items": "shop.public.items",
    }
    readable = dict.fromkeys([*at_sources, "shop.public.orders", "shop.public.counted"])
    manifest = SimpleNamespace(at_sources=at_sources, readable=readable)
    assert setting_names(manifest) == {  # type: ignore[arg-type]
        "shop.sales.orders": "shop.public.orders",
        "shop.public.items": "shop.public.items",
        "shop.public.orders": None,
        "shop.public.counted": "shop.public.counted",
    }


def test_an_empty_record_of_a_refusal_is_none(tmp_path):
    (tmp_path / REFUSAL).write_bytes(b"")
    assert refusal_of(tmp_path) is None


def test_2_a_reader_finds_the_version_of_its_link(tmp_path, monkeypatch):
    log, _ = written(tmp_path, 9)
    for version in range(9):
        for link in (10 * version, 10 * version + 9):
            assert version_of(str(tmp_path), (1, link), 1000 * version) == version
    log.remove(range(3), ())
    monkeypatch.setattr("spark_consumers.lake.delta_log.read._PATIENCE", 0)
    for link, snapshot in [(29, 2000), (100, 9999)]:
        with pytest.raises(LakeError, match="does not show snapshot"):
            version_of(str(tmp_path), (1, link), snapshot)
    with pytest.raises(LakeError, match="no Delta log"):
        version_of(str(tmp_path / "other"), (1, 1), 1)
    # A table that cannot be shown any more says why; earlier epochs can be read.
    (tmp_path / REFUSAL).write_bytes(refusal_record(9999, "its column 'n' has a default"))
    # Nobody waits for what is known.
    monkeypatch.setattr("spark_consumers.lake.delta_log.read._PATIENCE", 3600)
    with pytest.raises(NotSupportedError, match="has a default"):
        version_of(str(tmp_path), (1, 100), 9999)
    assert version_of(str(tmp_path), (1, 80), 8000) == 8
