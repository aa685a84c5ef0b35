"""How a table follows schema changes that its source has recorded (`spark_consumers.lake.tables.evolve`)."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from spark_consumers.decode.entries import ChangeBatch
from spark_consumers.decode.types import column_type
from spark_consumers.lake.compaction.decide import Accepted, CurrentFile, decide
from spark_consumers.lake.compaction.offer import NewFile, Offer, OldFile, columns_of
from spark_consumers.lake.format.iceberg_schema import arrow_schema, by_number, iceberg_schema
from spark_consumers.lake.format.iceberg_schema import evolved as evolved_schema
from spark_consumers.lake.format.initial_default import json_of, value_of
from spark_consumers.lake.manifest.table_version import Column, TableVersion
from spark_consumers.lake.tables.evolve import evolve
from spark_consumers.lake.tables.recorded import RecordedColumn, TableRecord, records_in
from spark_consumers.lake.tables.schema_change import Evolution, FullResync
from spark_consumers.lake.tables.schema_match import Layout, by_layout, conformed, mismatch
from spark_consumers.lake.tables.shape import Shape, columns_in
from spark_consumers.lake.tables.widening import has_no_using, is_wider
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.pgoutput import Relation

INT, TEXT, NUMERIC, BIGINT, FLOAT4, FLOAT8 = 23, 25, 1700, 20, 700, 701
#: Numbers 1, 2 and 4; 3 was dropped before the copy.
ID, NAME, AMOUNT = (1, "id", INT, "50"), (2, "name", TEXT, "50"), (4, "amount", NUMERIC, "50")
AMOUNT_TYPMOD = (10 << 16 | 2) + 4


def shape(*columns: tuple[int, str, int, str]) -> Shape:
    columns = columns or (ID, NAME, AMOUNT)
    return Shape(
        oid=7,
        file=100,
        identity=("id",),
        unsent=(),
        columns=columns,
        publication="1 1",
        operations="insert, update, delete, truncate",
        members=("table 1",),
        natts=4,
    )


def table(key: tuple[str, ...] = ("id",), **others: object) -> TableVersion:
    layout: tuple[Column, ...] = (
        ("id", INT, -1),
        ("name", TEXT, -1),
        ("amount", NUMERIC, AMOUNT_TYPMOD),
    )
    made = TableVersion("t", "iceberg", 1, "", key, (), 0, 0, 0, 7, layout=layout, runs=())
    return replace(made, **{"shape": shape().dump(), **others})  # type: ignore[arg-type]


def column(
    number: int,
    name: str | None,
    kind: int,
    version: str = "50",
    *,
    mine: bool = False,
    filled: bool = False,
    typmod: int | None = None,
) -> RecordedColumn:
    modifier = AMOUNT_TYPMOD if kind == NUMERIC else -1
    return RecordedColumn(
        number, name, kind, modifier if typmod is None else typmod, version, mine, filled, False
    )


KEPT = (
    column(1, "id", INT),
    column(2, "name", TEXT),
    column(3, None, 0),
    column(4, "amount", NUMERIC),
)


def record(
    *changed: RecordedColumn, offset: int = 5, natts: int = 4, file: int = 100
) -> TableRecord:
    columns = {one.number: one for one in (*KEPT, *changed)}
    there = tuple(columns[number] for number in sorted(columns))
    return TableRecord(7, offset, 3, 1000, file, natts, there)


def widened(changed: RecordedColumn, query: str) -> TableRecord:
    return replace(record(changed, file=101), name="t", query=query)


RENAMED = column(2, "label", TEXT, "60", mine=True)
DROPPED = column(4, None, 0, "60", mine=True)
ADDED = column(5, "extra", INT, "60", mine=True)


def evolved(*records: TableRecord, of: TableVersion | None = None) -> Evolution:
    found = evolve(of or table(), records)
    assert isinstance(found, Evolution), found
    return found


def test_14_columns_that_are_renamed_dropped_and_added_are_followed_by_their_numbers():
    first = record(RENAMED)
    second = record(replace(RENAMED, is_written=False), DROPPED, offset=6)
    third = record(
        replace(RENAMED, is_written=False),
        replace(DROPPED, is_written=False),
        ADDED,
        offset=7,
        natts=5,
    )
    found = evolved(first, second, third)
    assert [one.columns for one in found.layouts] == [
        (("id", INT, -1), ("name", TEXT, -1), ("amount", NUMERIC, AMOUNT_TYPMOD)),
        (("id", INT, -1), ("label", TEXT, -1), ("amount", NUMERIC, AMOUNT_TYPMOD)),
        (("id", INT, -1), ("label", TEXT, -1)),
        (("id", INT, -1), ("label", TEXT, -1), ("extra", INT, -1)),
    ]
    assert [one.there for one in found.layouts] == [(0, 1, None)] * 3 + [(0, 1, 2)]
    assert found.sources == (0, 1, None)
    assert found.places == {(5, 3), (6, 3), (7, 3)}
    assert found.shape is not None
    assert columns_in(found.shape) == (((1, "id", INT), (2, "label", TEXT), (5, "extra", INT)), 5)
    assert found.steps[-1] == columns_in(found.shape)


def test_14_a_renamed_key_is_the_key_under_its_new_name_and_has_the_old_one_in_earlier_changes():
    found = evolved(record(column(1, "number", INT, "60", mine=True)))
    assert found.key == ("number",)
    names = [name for name, _, _ in found.layouts[-1].columns]
    assert [one.key(names, found.key) for one in found.layouts] == [("id",), ("number",)]


def test_14_two_columns_that_swap_their_names_keep_their_values():
    steps = (
        record(column(2, "x", TEXT, "60", mine=True)),
        record(column(2, "x", TEXT, "60"), column(4, "name", NUMERIC, "61", mine=True), offset=6),
        record(
            column(2, "amount", TEXT, "62", mine=True), column(4, "name", NUMERIC, "61"), offset=7
        ),
    )
    found = evolved(*steps)
    assert [name for name, _, _ in found.layouts[-1].columns] == ["id", "amount", "name"]
    assert found.sources == (0, 1, 2)


def test_14_a_column_that_takes_the_name_of_a_dropped_one_has_none_of_its_values():
    gone = column(2, None, 0, "60", mine=True)
    again = column(5, "name", TEXT, "61", mine=True)
    found = evolved(record(gone), record(replace(gone, is_written=False), again, natts=5, offset=6))
    assert [name for name, _, _ in found.layouts[-1].columns] == ["id", "amount", "name"]
    assert found.sources == (0, 2, None)
    assert found.layouts[0].there == (0, 2, None)


def test_14_rows_without_a_key_have_other_digests_when_a_column_goes():
    bag = table(key=(), shape=replace(shape(), identity=None).dump())
    assert not evolved(record(RENAMED), of=bag).reindexes
    assert not evolved(record(ADDED, natts=5), of=bag).reindexes
    assert evolved(record(DROPPED), of=bag).reindexes


@pytest.mark.parametrize(
    ("records", "word"),
    [
        # The row of the column is another transaction's: nothing has recorded what that did.
        ([record(column(2, "label", TEXT, "60"))], "was not recorded"),
        ([record(column(2, "name", TEXT, "60"))], "was not recorded"),
        ([record(column(4, None, 0, "60"))], "was not recorded"),
        ([record(column(5, "extra", INT, "60"), natts=5)], "was not recorded"),
        ([record(column(5, None, 0, "60", mine=True), natts=5)], "dropped again"),
        ([record(replace(ADDED, is_filled=True), natts=5)], "with a default"),
        # ALTER TYPE with USING, to the same type.
        ([record(column(2, "name", TEXT, "60", mine=True), file=101)], "rewritten"),
        # Hidden from the trigger (event_triggers = off), before a command of the same transaction that is not.
        ([record(RENAMED, file=101)], "rewritten"),
        ([record(ADDED, natts=5, file=101)], "rewritten"),
        (
            [record(column(1, "id", BIGINT, "60", mine=True), file=101)],
            "not known to keep all values",
        ),
        (
            [
                widened(
                    column(1, "id", BIGINT, "60", mine=True),
                    "ALTER TABLE t ALTER id TYPE bigint USING id + 1",
                )
            ],
            "not known",
        ),
        (
            [widened(column(2, "name", INT, "60", mine=True), "ALTER TABLE t ALTER name TYPE int")],
            "another type for name",
        ),
        # Another column of the same command.
        (
            [
                replace(
                    record(
                        column(1, "id", BIGINT, "60", mine=True),
                        column(2, "name", TEXT, "60", mine=True),
                        file=101,
                    ),
                    name="t",
                    query="ALTER TABLE t ALTER id TYPE bigint, ALTER name TYPE text USING upper(name)",
                )
            ],
            "not known",
        ),
        ([record(column(1, None, 0, "60", mine=True))], "lost id, a column of its key"),
        (
            [record(column(4, "amount", NUMERIC, "60", mine=True, typmod=-1))],
            "another type for amount",
        ),
        ([record(column(2, "ID", TEXT, "60", mine=True))], "differ only in case"),
        ([record(column(2, "_file", TEXT, "60", mine=True))], "metadata column"),
        ([replace(record(), columns=KEPT[:3])], "lacks one of them"),
        ([record(column(3, "back", INT, "60", mine=True))], "unknown one"),
    ],
)
def test_14_what_records_do_not_cover_is_copied_again(records, word):
    found = evolve(table(), records)
    assert isinstance(found, FullResync)
    assert word in found.reason


@pytest.mark.parametrize(
    "state",
    [
        {"layout": ()},
        {"shape": ""},
        {"chunks": ((9, 1), (None, 2))},
        {"quarantine_files": ("q",)},
        {"runs": None},
        {"shape": shape(ID, (2, "other", TEXT, "50"), AMOUNT).dump()},
    ],
)
def test_14_a_table_of_which_not_enough_is_known_is_copied_again(state):
    assert isinstance(evolve(table(**state), [record(RENAMED)]), FullResync)


def test_14_a_change_that_only_touches_the_catalog_changes_nothing():
    found = evolved(record(column(2, "name", TEXT, "60", mine=True)))
    assert found.layouts[0].columns == found.layouts[1].columns
    assert found.sources == (0, 1, 2)


def batch(
    names: tuple[str, ...], places: list[tuple[int, int]], columns: list[pa.Array]
) -> ChangeBatch:
    kinds = {"id": INT, "number": INT, "extra": INT}
    described = tuple(
        pgoutput.Column(n, kinds.get(n, TEXT), -1, is_key=n in {"id", "number"}) for n in names
    )
    count = len(places)
    return ChangeBatch(
        relation=Relation(7, "public", "t", "d", described),
        schema_hash=b"",
        ops=np.full(count, ord("U"), np.uint8),
        commit_lsn=np.full(count, 1000, np.uint64),
        xid=np.ones(count, np.uint32),
        commit_time=np.ones(count, np.int64),
        offset=np.array([offset for offset, _ in places], np.uint64),
        version=np.ones(count, np.uint64),
        sequence=np.array([sequence for _, sequence in places], np.uint32),
        columns=columns,
        unchanged=np.array([[False, True]] * count),
        old_columns=None,
        old_kind=np.zeros(count, np.uint8),
    )


def test_14_a_batch_on_both_sides_of_a_change_is_divided_at_its_place():
    layouts = (
        Layout(0, (("id", INT, -1), ("a", TEXT, -1)), -1, (0, None, 1)),
        Layout(5, (("number", INT, -1), ("a", TEXT, -1)), 3, (0, 1, None)),
    )
    places = [(4, 9), (5, 2), (5, 4), (6, 0)]
    whole = batch(("id", "a"), places, [pa.array([1, 2, 3, 4], pa.int32()), pa.array(list("wxyz"))])
    parts = list(by_layout(whole, layouts))
    assert [(layouts.index(layout), part.columns[0].to_pylist()) for layout, part in parts] == [
        (0, [1, 2]),
        (1, [3, 4]),
    ]
    columns = pa.schema([("number", pa.int32()), ("b", pa.string()), ("a", pa.string())])
    # Behind the change, the old names are another table's.
    assert mismatch(parts[0][1], columns, layouts[0], ("number",), 7) is None
    assert mismatch(parts[1][1], columns, layouts[1], ("number",), 7) is not None
    made = conformed(parts[0][1], columns, layouts[0])
    assert [column.to_pylist() for column in made.columns] == [[1, 2], [None, None], ["w", "x"]]
    assert made.unchanged is not None
    assert made.unchanged.tolist() == [[False, False, True]] * 2


def defaulted(text: str | None, kind: int = INT, typmod: int = -1) -> RecordedColumn:
    made = column(5, "extra", kind, "60", mine=True, filled=True, typmod=typmod)
    return replace(made, missing=text)


def test_14_a_default_is_the_value_of_older_rows_and_of_earlier_changes():
    found = evolved(record(defaulted("7"), natts=5))
    assert [d and d.as_py() for d in found.defaults] == [None, None, None, 7]
    columns = pa.schema([("id", pa.int32()), ("a", pa.string()), ("extra", pa.int32())])
    before = Layout(0, (("id", INT, -1), ("a", TEXT, -1)), -1, (0, 1, None), found.defaults[1:])
    made = conformed(
        batch(("id", "a"), [(4, 9)], [pa.array([1], pa.int32()), pa.array(["w"])]), columns, before
    )
    assert [values.to_pylist() for values in made.columns] == [[1], ["w"], [7]]
    # Behind the source's columns, a table that keeps deleted rows has its own.
    marked = columns.append(pa.field("_deleted_lsn", pa.string()))
    made = conformed(
        batch(("id", "a"), [(4, 9)], [pa.array([1], pa.int32()), pa.array(["w"])]), marked, before
    )
    assert [values.to_pylist() for values in made.columns] == [[1], ["w"], [7], [None]]


def test_14_a_default_has_the_value_of_its_own_type_when_the_column_gets_a_wider_one():
    added = defaulted("0.1", FLOAT4)
    wider = replace(
        record(replace(added, kind=FLOAT8, missing=None), offset=6, natts=5, file=101),
        name="t",
        query="ALTER TABLE t ALTER extra TYPE float8",
    )
    found = evolved(record(added, natts=5), wider)
    assert found.defaults[-1] == pa.scalar(float(np.float32(0.1)))


def test_14_a_default_that_iceberg_writes_with_few_digits_is_the_same_number_as_a_double():
    kept = {"id": 2, "name": "r", "required": False, "type": "float", "initial-default": 0.1}
    before = {"type": "struct", "schema-id": 1, "fields": [kept]}
    columns = pa.schema([("r", pa.float64())])
    made, _ = evolved_schema(before, before, columns, {"r": "r"}, 2, ["r"], {})
    assert made["fields"] == [{**kept, "type": "double", "initial-default": float(np.float32(0.1))}]


def test_14_a_default_changes_the_digests_of_a_table_without_a_key():
    bag = table(())
    assert evolved(record(defaulted("7"), natts=5), of=bag).reindexes
    assert not evolved(record(defaulted("7"), natts=5)).reindexes


@pytest.mark.parametrize(
    ("added", "why"),
    [
        (defaulted(None), "that the server does not keep"),
        (defaulted("NaN", FLOAT8), "that Iceberg cannot keep"),
        (defaulted("infinity", 1114), "that Iceberg cannot keep"),
        (defaulted("0044-03-15 BC", 1082), "that Iceberg cannot keep"),
        (defaulted("{1,2}", 1007), "that Iceberg cannot keep"),
    ],
)
def test_14_a_default_that_cannot_be_kept_causes_a_copy(added, why):
    found = evolve(table(), [record(added, natts=5)])
    assert isinstance(found, FullResync)
    assert why in found.reason


def test_14_a_default_reads_as_it_was_written_and_fills_what_a_file_lacks():
    for text, kind, typmod in (
        ("t", 16, -1),
        ("-9223372036854775808", BIGINT, -1),
        ("-32768", 21, -1),
        ("0.1", FLOAT4, -1),
        ("-0", FLOAT8, -1),
        ("5e-324", FLOAT8, -1),
        ("-0.05", NUMERIC, AMOUNT_TYPMOD),
        ('é\\ "{}', TEXT, -1),
        ("", TEXT, -1),
        ("\\x00ff", 17, -1),
        ("0001-01-01", 1082, -1),
        ("9999-12-31 23:59:59.999999", 1114, -1),
        ("2024-02-29 12:00:00+00", 1184, -1),
    ):
        value = value_of(text, column_type(kind, typmod))
        assert value is not None, text
        before = iceberg_schema(pa.schema([("id", pa.int32())]))
        columns = pa.schema([("id", pa.int32()), ("c", value.type)])
        made, _ = evolved_schema(
            before, before, columns, {"id": "id"}, 1, ["id"], {"c": json_of(value)}
        )
        schema = arrow_schema(json.loads(json.dumps(made)))
        rows = by_number(pa.table({"id": pa.array([1, 2], pa.int32())}), schema)
        assert rows.column("c").to_pylist() == [value.as_py()] * 2
        assert str(rows.column("c")[0]) == str(value)
        # An attempt with another value is not taken over.
        other = {**made["fields"][1], "initial-default": "other"}
        left = {**made, "fields": [made["fields"][0], other]}
        again, _ = evolved_schema(
            before, left, columns, {"id": "id"}, 2, ["id", "c"], {"c": json_of(value)}
        )
        assert again["fields"][1] == {**made["fields"][1], "id": 3}


def test_14_wider_types_are_followed_in_place_and_a_wider_key_is_indexed_again():
    key = widened(column(1, "id", BIGINT, "60", mine=True), "ALTER TABLE t ALTER id TYPE bigint")
    found = evolved(key)
    assert found.layouts[-1].columns[0] == ("id", BIGINT, -1)
    assert found.sources == (0, 1, 2)
    assert found.reindexes
    # A rewrite writes the rows of other columns, too: those that had a value for old rows in the catalog.
    both = replace(
        key, columns=(key.columns[0], column(2, "name", TEXT, "60", mine=True), *KEPT[2:])
    )
    assert "rewritten" in str(evolve(table(), [both]))
    given = replace(both.columns[1], is_filled=True)
    both = replace(both, columns=(key.columns[0], given, *KEPT[2:]))
    assert evolved(both).sources == (0, 1, 2)
    longer = (12 << 16 | 2) + 4
    found = evolved(record(column(4, "amount", NUMERIC, "60", mine=True, typmod=longer)))
    assert found.layouts[-1].columns[2] == ("amount", NUMERIC, longer)
    assert not found.reindexes


VARCHAR, INT2, REAL, DOUBLE = 1043, 21, 700, 701


def limit(precision: int, scale: int) -> int:
    return (precision << 16 | scale) + 4


@pytest.mark.parametrize(
    ("before", "after", "wider"),
    [
        ((INT2, -1), (INT, -1), True),
        ((INT2, -1), (BIGINT, -1), True),
        ((INT, -1), (BIGINT, -1), True),
        ((BIGINT, -1), (INT, -1), False),
        ((INT, -1), (NUMERIC, -1), False),
        ((REAL, -1), (DOUBLE, -1), True),
        ((DOUBLE, -1), (REAL, -1), False),
        ((VARCHAR, 14), (VARCHAR, 24), True),
        ((VARCHAR, 24), (VARCHAR, 14), False),
        ((VARCHAR, 24), (VARCHAR, -1), True),
        ((VARCHAR, -1), (VARCHAR, 24), False),
        ((VARCHAR, 24), (TEXT, -1), True),
        ((TEXT, -1), (VARCHAR, 24), False),
        # What is padded to a length is another text.
        ((1042, 14), (TEXT, -1), False),
        ((NUMERIC, limit(10, 2)), (NUMERIC, limit(12, 2)), True),
        ((NUMERIC, limit(10, 2)), (NUMERIC, limit(12, 3)), False),
        ((NUMERIC, limit(10, 2)), (NUMERIC, limit(9, 2)), False),
        ((NUMERIC, limit(10, 2)), (NUMERIC, -1), False),
        ((NUMERIC, -1), (NUMERIC, limit(10, 2)), False),
        # Text in the lake.
        ((NUMERIC, limit(38, 2)), (NUMERIC, limit(40, 2)), False),
    ],
)
def test_14_types_are_wider_where_every_value_stays_as_it_is(before, after, wider):
    assert is_wider(("c", *before), ("c", *after)) is wider


@pytest.mark.parametrize(
    ("query", "known"),
    [
        ("ALTER TABLE t ALTER COLUMN a TYPE bigint", True),
        ("alter table only s.t alter a set data type numeric(12, 2), alter b type text;", True),
        ("ALTER TABLE t ALTER a TYPE bigint USING a + 1", False),
        ("ALTER TABLE t ALTER a TYPE bigint, ALTER b TYPE int USING b * 2", False),
        ("ALTER TABLE t ALTER a TYPE bigint, ADD COLUMN c int", False),
        ("ALTER TABLE t ALTER a DROP NOT NULL", False),
        ("ALTER TABLE t ALTER a TYPE bigint; ALTER TABLE t ALTER b TYPE int USING 1", False),
        ("SELECT alter_it()", False),
        # Within which a trigger of the user's has altered this one.
        ("ALTER TABLE other ALTER a TYPE bigint", False),
        ("ALTER TABLE t ALTER b TYPE bigint", False),
        ('ALTER TABLE T ALTER "a" TYPE bigint', True),
        ('ALTER TABLE "T" ALTER a TYPE bigint', False),
        ("ALTER TABLE (", False),
        ("", False),
    ],
)
def test_14_a_command_is_known_to_keep_values_only_if_all_of_it_is_read(query, known):
    assert has_no_using(query, "t", "a") is known


def test_an_expression_that_is_nested_too_deeply_to_be_read_is_no_error():
    """It would stop all epochs: the record stays in the log."""
    query = "ALTER TABLE t ALTER a TYPE bigint USING " + "(" * 900 + "a" + ")" * 900
    assert not has_no_using(query, "t", "a")


@pytest.mark.parametrize(
    ("columns", "key", "accepted"),
    [
        # One more, another name; one less, another type.
        (((1, "id", 23, "9"), (2, "b", 25, "9"), (3, "c", 23, "9")), ("id",), True),
        (((1, "id", 23, "9"), (2, "b", 25, "9")), (), True),
        # It may have a default, which is in the digests of whole rows.
        (((1, "id", 23, "9"), (2, "b", 25, "9"), (3, "c", 23, "9")), (), False),
        (((1, "id", 23, "9"),), ("id",), False),
        (((1, "id", 20, "9"), (2, "a", 25, "9")), ("id",), False),
    ],
)
def test_an_offer_is_refused_once_its_digests_may_be_others(columns, key, accepted):
    def of(columns):
        there = replace(shape(), columns=columns)
        return table(key, path="tables/t", shape=there.dump(), runs=(("r", 9),), rows=9)

    made = columns_of(of(((1, "id", 23, "5"), (2, "a", 25, "5"))))
    old = (OldFile("a", 9, "", b"", 0, 0),)
    offer = Offer("t1-0a-1", "s.p.t", "tables/t", 1, key, old, (NewFile("c", 9, 99),), "r", 9)
    offer = replace(offer, columns=made)
    assert Offer.from_json(offer.to_json()) == offer
    found = decide(offer, of(columns), 1, {"a": CurrentFile()}, lambda: {"a"})
    assert isinstance(found, Accepted) is accepted


def test_14_a_row_that_the_trigger_has_not_written_is_no_record():
    """It holds nothing back: the lake finds that something is missing, and copies the table again."""
    whole = {
        "name": "t",
        "file": 100,
        "natts": 2,
        "query": "",
        "columns": [[1, "id", INT, -1, "5", False, True, False]],
    }
    texts = [
        json.dumps(whole),
        json.dumps({k: v for k, v in whole.items() if k != "name"}),
        json.dumps({**whole, "columns": [[1]]}),
        "no JSON",
        None,
    ]
    rows = batch(("relation", "description"), [(5, n) for n in range(5)], [])
    rows.columns = [pa.array([7] * 5, pa.int64()), pa.array(texts)]
    rows.ops[:] = ord("I")
    found = list(records_in(rows))
    assert [one.place for one in found] == [(5, 0)]
    assert found[0].relation == 7
    assert found[0].columns == (RecordedColumn(1, "id", INT, -1, "5", False, True, False),)


def test_14_a_column_that_one_command_replaces_by_its_like_is_copied_again():
    gone = column(4, None, 0, "60", mine=True)
    again = column(5, "amount", NUMERIC, "60", mine=True)
    assert "in one command" in str(evolve(table(), [record(gone, again, natts=5)]))
    # Of another name or type, a change in between would not fit.
    assert evolved(record(gone, replace(again, name="sum"), natts=5)).sources == (0, 1, None)
    assert evolved(record(gone, replace(again, kind=INT, typmod=-1), natts=5)).sources[2] is None


def test_14_the_row_version_proves_nothing_in_the_transaction_that_wrote_it():
    renamed = record(RENAMED)
    rewritten = record(RENAMED, offset=5, file=101)
    assert "rewritten" in str(evolve(table(), [renamed, replace(rewritten, sequence=4)]))
    bigint = record(RENAMED, column(1, "id", BIGINT, "60", mine=True), file=101)
    wider = replace(bigint, sequence=4, name="t", query="ALTER TABLE t ALTER id TYPE bigint")
    assert evolved(renamed, wider).layouts[-1].columns[0] == ("id", BIGINT, -1)
    key = record(column(1, "number", INT, "60", mine=True))
    raised = record(column(1, "number", BIGINT, "60", mine=True), file=101)
    assert "not known" in str(evolve(table(), [key, replace(raised, sequence=4)]))
