"""Rows that do not fit, folded: at every cut the table and what is set aside are what a plain model says."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.decode.entries import ChangeBatch, decode_entries
from spark_consumers.decode.types import from_text
from spark_consumers.lake.epoch import quarantine
from spark_consumers.lake.epoch.quarantined_rows import rows_of, skip
from spark_consumers.lake.epoch.removal import Located
from spark_consumers.lake.epoch.stage import (
    ComposeTask,
    PendingTable,
    Staged,
    run_compose,
)
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.table_format import ROW_ID
from spark_consumers.lake.manifest.table_version import TableVersion
from tests.support.change_entries import UNCHANGED, Table, cut, delete, insert, transactions, update
from tests.support.lake.divided_folds import located_in_parts
from tests.support.lake.table_on_disk import TableOnDisk
from tests.support.pgoutput_messages import truncate
from walsender_bridge.errors import CorruptError

DATE = 1082
#: A date as key and two of them as values: `infinity` does not fit.
KEYED = Table(1, "t", (("k", DATE, -1), ("a", DATE, -1), ("b", DATE, -1)))
BAG = Table(1, "t", KEYED.columns, identity="f")
DATES = ["2024-01-01", "2024-01-02", "2024-01-03", "infinity", "-infinity"]
COLUMNS = pa.schema([(name, pa.date32()) for name in ("k", "a", "b")])
Row = tuple[str | None, ...]


class Model:
    """A table in PostgreSQL: changes are drawn that fit its state, and sent as a server would send them."""

    def __init__(self, data: st.DataObject, table: Table) -> None:
        self.data, self.table = data, table
        self.rows: list[Row] = []

    def _value(self) -> str | None:
        return self.data.draw(st.sampled_from([*DATES, None]))

    def step(self) -> bytes:
        keyed = self.table is KEYED
        taken = {row[0] for row in self.rows}
        free = [d for d in DATES if d not in taken] if keyed else DATES
        kinds = "I" * 3 * bool(free) + "UUUUDD" * bool(self.rows) + "T"
        kind = self.data.draw(st.sampled_from(kinds))
        if kind == "T":
            self.rows = []
            return truncate(1)
        if kind in "UD":
            at = self.data.draw(st.integers(0, len(self.rows) - 1))
            old = self.rows.pop(at)
            whole = (old, b"O") if not keyed else ((old[0], None, None), b"K")
            if kind == "D":
                return delete(self.table, *whole)
            sent: list[Any] = [old[0], self._value(), self._value()]
            moved = keyed and bool(free) and self.data.draw(st.booleans())
            if moved or not keyed:
                sent[0] = self.data.draw(st.sampled_from(free))
            new = list(sent)
            if keyed:
                for i in (1, 2):
                    if self.data.draw(st.booleans()):
                        sent[i], new[i] = UNCHANGED, old[i]
            self.rows.insert(at, tuple(new))
            return update(self.table, sent, *(whole if moved or not keyed else ()))
        row = (self.data.draw(st.sampled_from(free)), self._value(), self._value())
        self.rows.append(row)
        return insert(self.table, row)


class Lake:
    """One table and its quarantined rows on a disk, written by the pipeline's own functions, without Spark."""

    def __init__(self, folder: Path, table: Table, *, hidden: bool = False) -> None:
        self.folder, self.table = folder, table
        self.key = ("k",) if table is KEYED else ()
        #: With the column that an earlier version gave to a table without a key.
        self.files_schema = COLUMNS.append(pa.field(ROW_ID, pa.string())) if hidden else COLUMNS
        self.rows = self.files_schema.empty_table()
        self.disk = TableOnDisk(folder / "t")
        self.version = TableVersion("t", "", 1, "", self.key, (), 0, 0, 0, 1)
        self.epoch = 0
        #: In how many parts an epoch is composed.
        self.parts = 1

    def target(self) -> Target:
        return Target(
            name="shop.public.t",
            relation="public.t",
            prefix=f"{self.folder}/t/data/{self.epoch:020d}-t1-a1",
            columns=COLUMNS,
            file_schema=self.files_schema,
            key=self.key,
            start_lsn=0,
            relation_id=1,
            quarantines=True,
            quarantine_files=tuple(
                f"{self.folder}/t/{file}" for file in self.version.quarantine_files
            ),
            retry_quarantined=self.version.retry_quarantined,
        )

    def apply(self, ranges: list[list[ChangeBatch]]) -> None:
        """One epoch, folded in these ranges."""
        self.epoch += 1
        target = self.target()
        scratch = f"{self.folder}/scratch-{self.epoch}"
        folds = [
            PendingTable(target, batches=list(batches)).fold() for batches in ranges if batches
        ]
        if not folds:
            return
        staged, located = located_in_parts(target, folds, scratch, self.parts, self.disk.runs)
        assert len(located) == 0 or self.parts > 1
        self._publish(target, staged, scratch, located)

    def retry(self) -> None:
        self.epoch += 1
        target = self.target()
        scratch = f"{self.folder}/scratch-{self.epoch}"
        task = ComposeTask(target, (), scratch, 0)
        self._publish(target, run_compose(task), scratch, [])

    def _publish(
        self, target: Target, staged: Staged, scratch: str, located: list[Located]
    ) -> None:
        count = (0 if staged.truncated else len(self.rows)) + staged.added
        files = 1 if self.epoch % 2 else 8
        completed = self.disk.apply(target, staged, scratch, small_files=files, located=located)
        self.rows = self.disk.rows(self.files_schema)
        assert len(self.rows) == count
        self.version = quarantine.with_quarantined(
            self.version, [*staged.quarantined, *(done.quarantined for done in completed)]
        )

    def found(self) -> tuple[Counter[Row], Counter[Row]]:
        """The table's rows and the quarantined ones, as texts."""
        names = COLUMNS.names
        table = Counter(
            tuple(None if v is None else str(v) for v in row.values())
            for row in self.rows.select(names).to_pylist()
        )
        aside = Counter(
            tuple(row.values[n] for n in names)
            for row in rows_of(self.folder, "shop.public.t", self.version)
        )
        return table, aside


def fits(row: Row) -> bool:
    return not any(value is not None and value.endswith("infinity") for value in row)


def batches_of(table: Table, groups: list[list[bytes]]) -> list[list[ChangeBatch]]:
    """Each group of changes decoded on its own, as the ranges of an epoch are."""
    found = []
    for number, group in enumerate(groups):
        log = cut(list(transactions([[m] for m in group], 0x1000 * (number + 1))), [table])
        keep = {"public.t"}
        found.append(list(decode_entries(log.entries, log.schemas, keep_unrepresentable=keep)))
    return found


@pytest.mark.parametrize(
    ("table", "hidden"),
    [(KEYED, False), (BAG, False), (BAG, True)],
    ids=["keyed", "bag", "bag of an earlier version"],
)
@settings(max_examples=40)
@given(data=st.data())
def test_the_table_and_what_is_set_aside_are_the_source(
    tmp_path_factory: pytest.TempPathFactory, table: Table, hidden: bool, data: st.DataObject
) -> None:
    model = Model(data, table)
    lake = Lake(tmp_path_factory.mktemp("lake"), table, hidden=hidden)
    for _ in range(data.draw(st.integers(1, 4))):
        if bool(lake.version.quarantine_files) and data.draw(st.booleans()):
            lake.retry()
        lake.parts = data.draw(st.integers(1, 3))
        counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        groups = [[model.step() for _ in range(count)] for count in counts]
        lake.apply(batches_of(table, groups))
        rows, aside = lake.found()
        assert rows == Counter(row for row in model.rows if fits(row))
        assert aside == Counter(row for row in model.rows if not fits(row))
        assert lake.version.quarantined_rows == aside.total()


def test_an_unsent_value_goes_with_its_row_into_quarantine_and_back(tmp_path: Path) -> None:
    lake = Lake(tmp_path, KEYED)
    key, kept = "2024-01-01", "2024-01-02"
    lake.apply(batches_of(KEYED, [[insert(KEYED, (key, None, kept))]]))
    # Only the table has `b`, and the row leaves it.
    lake.apply(batches_of(KEYED, [[update(KEYED, (key, "infinity", UNCHANGED))]]))
    assert lake.found() == (Counter(), Counter([(key, "infinity", kept)]))
    # Only the quarantine has it now; and what does not fit may be what is not sent.
    lake.apply(batches_of(KEYED, [[update(KEYED, (key, UNCHANGED, UNCHANGED))]]))
    assert lake.found() == (Counter(), Counter([(key, "infinity", kept)]))
    # And the same beside another row that does not fit, for which the range is folded wide.
    other = ("2024-01-03", "infinity", None)
    changes = [insert(KEYED, other), update(KEYED, (key, UNCHANGED, UNCHANGED))]
    lake.apply(batches_of(KEYED, [changes]))
    assert lake.found() == (Counter(), Counter([(key, "infinity", kept), other]))
    lake.apply(batches_of(KEYED, [[update(KEYED, (key, None, UNCHANGED))]]))
    assert lake.found() == (Counter([(key, None, kept)]), Counter([other]))


def test_a_row_that_is_given_up_is_followed_on(tmp_path: Path) -> None:
    lake = Lake(tmp_path, KEYED)
    rows = [("2024-01-01", "infinity", None), ("infinity", None, None)]
    lake.apply(batches_of(KEYED, [[insert(KEYED, row) for row in rows]]))
    by_key = {row.values["k"]: row for row in rows_of(tmp_path, "shop.public.t", lake.version)}
    first, second = by_key["2024-01-01"], by_key["infinity"]
    assert skip(tmp_path, "shop.public.t", lake.version, {first.id, "x"}, 1) == (
        lake.version,
        {"x"},
    )
    lake.version, missing = skip(tmp_path, "shop.public.t", lake.version, {first.id}, 1)
    assert not missing
    assert (lake.version.quarantined_rows, lake.version.skipped_rows) == (2, 1)
    found = {row.id: row.skipped for row in rows_of(tmp_path, "shop.public.t", lake.version)}
    assert found == {first.id: True, second.id: False}
    # Another value that does not fit is another loss, which nobody has accepted.
    lake.apply(batches_of(KEYED, [[update(KEYED, ("2024-01-01", "-infinity", None))]]))
    assert lake.version.skipped_rows == 0
    lake.apply(batches_of(KEYED, [[update(KEYED, ("2024-01-01", "2024-01-01", UNCHANGED))]]))
    assert lake.found()[0] == Counter([("2024-01-01", "2024-01-01", None)])
    assert lake.version.quarantined_rows == 1


def test_a_change_of_a_quarantined_row_that_was_never_set_aside_is_damage(tmp_path: Path) -> None:
    for number, (table, change) in enumerate(
        [
            (KEYED, delete(KEYED, ("infinity", None, None))),
            (BAG, delete(BAG, ("2024-01-01", "infinity", None), b"O")),
        ]
    ):
        with pytest.raises(CorruptError, match=r"shop\.public\.t: a(n unrepresentable)? row"):
            Lake(tmp_path / str(number), table).apply(batches_of(table, [[change]]))


def test_values_are_converted_apart_and_damage_is_still_an_error() -> None:
    from functools import partial

    from spark_consumers.decode.types import apart, column_type
    from spark_consumers.decode.unrepresentable import UnrepresentableValueError

    kind = column_type(DATE, -1)
    convert = partial(from_text, kind=kind)
    texts = ["2024-01-01", "infinity", None, "10000-01-01", "2024-01-02"]
    values, raw = apart(pa.array(texts), kind.arrow, convert)
    assert [v and str(v) for v in values.to_pylist()] == [
        "2024-01-01",
        None,
        None,
        None,
        "2024-01-02",
    ]
    assert raw is not None
    assert raw.to_pylist() == [None, "infinity", None, "10000-01-01", None]
    with pytest.raises(UnrepresentableValueError) as caught:
        apart(pa.array([*texts, "no date"]), kind.arrow, convert)
    assert caught.value.malformed
    assert caught.value.index == 5
    text = column_type(25, -1)
    bad = pa.array([b"good", b"\xff\xfe"], pa.binary())
    raw_text = pa.StringArray.from_buffers(2, *bad.buffers()[1:])
    values, raw = apart(raw_text, text.arrow, partial(from_text, kind=text))
    assert values.to_pylist() == ["good", None]
    assert raw is not None
    assert raw.to_pylist() == [None, "\\xff\\xfe"]


def test_too_many_rows_are_no_exceptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from walsender_bridge.errors import UnsupportedValueError

    monkeypatch.setattr(quarantine, "MAX_ROWS", 2)
    rows = [insert(BAG, (day, "infinity", None)) for day in DATES[:3]]
    for parts in (1, 3):
        lake = Lake(tmp_path / str(parts), BAG)
        lake.parts = parts
        with pytest.raises(UnsupportedValueError, match="at most 2 can be quarantined"):
            lake.apply(batches_of(BAG, [rows]))
