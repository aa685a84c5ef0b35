"""A value or a bug in one table is that table's fault: the others of the same range are staged all the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError

from spark_consumers.decode.entries import decode_entries
from spark_consumers.lake.epoch import stage
from spark_consumers.lake.epoch.feed_rows import ABOUT, FeedTarget
from spark_consumers.lake.epoch.packed import PackedTable, TaskTables
from spark_consumers.lake.epoch.stage import ComposeTask, Fed, RangeTask, Staged, run_range
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.layout.arrangement import Arrangement, Field
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.tables import fault as table_fault
from spark_consumers.lake.tables.doubt import each_table
from spark_consumers.lake.tables.fault import TableFault, TableFaultsError
from spark_consumers.lake.tables.schema_match import Layout
from tests.support.change_entries import Entries, Table, cut, insert, transactions
from walsender_bridge.errors import (
    Cause,
    CorruptError,
    DiskFullError,
    FencedError,
    RefusedByCatalogError,
    TusklineError,
    UnsupportedValueError,
)

DATE, INT = 1082, 23
BILLS = Table(1, "bills", (("id", INT, -1), ("due", DATE, -1)))
ORDERS = Table(2, "orders", (("id", INT, -1), ("placed", DATE, -1)))
NAMES = {"bills": "shop.public.bills", "orders": "shop.public.orders"}


def target(folder: Path, table: Table) -> Target:
    types = {INT: pa.int32(), DATE: pa.date32()}
    columns = pa.schema([(name, types[oid]) for name, oid, _ in table.columns])
    return Target(
        name=NAMES[table.name],
        relation=f"public.{table.name}",
        prefix=str(folder / table.name / "data" / "00000000000000000001-t1-a1"),
        columns=columns,
        file_schema=columns,
        key=("id",),
        start_lsn=0,
        relation_id=table.oid,
        layouts=(Layout(0, table.columns),),
    )


def log(*values: tuple[Table, tuple[str, str]]) -> Entries:
    return cut(list(transactions([[insert(t, row)] for t, row in values], 0x1000)), [BILLS, ORDERS])


class Reader:
    """A log server's answers, from entries."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, *_: object, **__: object) -> Any:
        return self.entries.entries

    def schemas(self, digests: list[bytes]) -> dict[bytes, bytes]:
        return {digest: self.entries.schemas(digest) for digest in digests}


def staged(
    folder: Path, entries: Entries, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Staged | TableFault]:
    """What a range with these entries gives, by table."""
    for table in (BILLS, ORDERS):
        (folder / table.name / "data").mkdir(parents=True)
    monkeypatch.setattr(stage, "StreamReader", lambda *_, **__: Reader(entries))
    targets = (target(folder, BILLS), target(folder, ORDERS))
    whole = frozenset(t.name for t in targets)
    tables = tuple(PackedTable.of(target, (None, 8)) for target in targets)
    task = RangeTask("shop", ("",), 0, 99, 0, str(folder), "", tables, whole)
    found: dict[str, Staged | TableFault] = {}
    for one in run_range(task, TaskTables(tables, "")):
        assert isinstance(one, Staged | TableFault)
        found[one.table] = one
    return found


def test_a_value_that_does_not_fit_is_its_tables_fault_and_the_others_are_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = log(
        (BILLS, ("1", "2024-01-01")),
        (ORDERS, ("1", "2024-01-01")),
        (BILLS, ("2", "-infinity")),
        (ORDERS, ("2", "2024-01-02")),
    )
    found = staged(tmp_path, entries, monkeypatch)
    orders, bills = found["shop.public.orders"], found["shop.public.bills"]
    assert isinstance(orders, Staged)
    assert orders.added == 2
    assert isinstance(bills, TableFault)
    assert isinstance(bills.error, UnsupportedValueError)
    assert "public.bills.due" in bills.error.where
    for way in (
        '"shop.public.bills" = "quarantine"',
        "table resume shop.public.bills",
        "table resync shop.public.bills",
    ):
        assert way in bills.error.repair


@pytest.mark.parametrize("place", ["fold", "conformed", "write_fold"])
def test_a_bug_that_one_tables_changes_bring_out_is_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    real = getattr(stage, place)

    def broken(first: Any, *rest: Any) -> Any:
        # `fold` and `conformed` get batches, `write_fold` gets the target.
        batch = first[0] if isinstance(first, list) else first
        name = getattr(batch, "name", None) or batch.relation.full_name
        if name.endswith("bills"):
            raise IndexError("list index out of range")
        return real(first, *rest)

    monkeypatch.setattr(stage, place, broken)
    found = staged(
        tmp_path,
        log((BILLS, ("1", "2024-01-01")), (ORDERS, ("1", "2024-01-01"))),
        monkeypatch,
    )
    assert isinstance(found["shop.public.orders"], Staged)
    fault = found["shop.public.bills"]
    assert isinstance(fault, TableFault)
    assert "IndexError: list index out of range at test_table_fault.py" in fault.error.what
    assert fault.error.cause == Cause.INTERNAL


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left"), MemoryError(), DiskFullError("full"), FencedError("x")]
)
def test_what_every_table_would_meet_is_no_tables_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(stage, "write_fold", failing)
    with pytest.raises(type(error)):
        staged(tmp_path, log((BILLS, ("1", "2024-01-01"))), monkeypatch)
    one = ComposeTask(target(tmp_path, BILLS), (), "", 0)
    if isinstance(error, TusklineError):
        assert table_fault.as_values(failing)(one) == ("error", error.to_wire())
    else:
        with pytest.raises(type(error)):
            table_fault.as_values(failing)(one)


def test_decoding_goes_on_without_a_relation_that_fails() -> None:
    entries = log((BILLS, ("1", "infinity")), (ORDERS, ("1", "2024-01-01")))
    failed: list[str] = []
    batches = decode_entries(
        entries.entries,
        entries.schemas,
        failed=lambda relation, _: failed.append(relation.full_name),
        target_bytes=1,
    )
    assert [batch.relation.full_name for batch in batches] == ["public.orders"]
    assert failed == ["public.bills"]


def test_faults_come_back_from_the_executors_as_what_they_were(tmp_path: Path) -> None:
    def corrupt(_: ComposeTask) -> None:
        raise CorruptError("its bytes are others", where="/lake/t/data/x.parquet", repair="resync")

    one = ComposeTask(target(tmp_path, BILLS), (), "", 0)
    version = TableVersion("t", "iceberg", 1, "", ("id",), (), 5, 1, 10, 7, "live")
    with pytest.raises(TableFaultsError) as raised:
        table_fault.results([table_fault.as_values(corrupt)(one)], {one.target.name: version})
    (error,) = raised.value.by_path().values()
    assert isinstance(error, CorruptError)
    assert table_fault.reason_of(error, "/lake/t") == (
        "its bytes are others (data/x.parquet); resync"
    )


def test_on_the_driver_a_tables_bug_is_its_fault_and_what_its_gateway_says_is_not() -> None:
    def write(_: str, value: str) -> str:
        if value == "bug":
            raise KeyError("c")
        if value == "spark":
            raise Py4JError("java.io.IOException: No space left on device")
        return value

    def run(**values: str) -> list[Any]:
        asked = [(f"s.p.{name}", value) for name, value in values.items()]
        return table_fault.results(each_table(asked, write, lambda *_: 9), tables)

    version = TableVersion("t", "iceberg", 1, "", ("id",), (), 5, 1, 10, 7, "live")
    tables = dict.fromkeys(("s.p.a", "s.p.b"), version)
    assert run(a="fine") == ["fine"]
    with pytest.raises(TableFaultsError) as raised:
        run(a="fine", b="bug")
    assert [fault.table for fault in raised.value.faults] == ["s.p.b"]
    with pytest.raises(Py4JError):
        run(a="fine", b="spark")


@pytest.mark.parametrize("refused", [{"s.p.a"}, {"s.p.a", "s.p.b"}], ids=["one", "all"])
def test_what_a_catalog_refuses_of_one_table_alone_is_that_tables_fault(refused: set[str]) -> None:
    def write(name: str, _: str) -> str:
        if name in refused:
            raise RefusedByCatalogError("400 no such type", where="http://catalog", repair="look")
        return name

    version = TableVersion("t", "iceberg", 1, "", ("id",), (), 5, 1, 10, 7, "live")
    tables = dict.fromkeys(("s.p.a", "s.p.b"), version)
    asked = [(name, "") for name in tables]
    if len(refused) == len(tables):
        with pytest.raises(RefusedByCatalogError):
            each_table(asked, write, lambda *_: 0, pause=lambda _: None)
        return
    with pytest.raises(TableFaultsError) as raised:
        table_fault.results(each_table(asked, write, lambda *_: 1, pause=lambda _: None), tables)
    (fault,) = raised.value.faults
    assert fault.table == "s.p.a"
    assert fault.error.what == "400 no such type"
    assert "tuskline table resume s.p.a" in fault.error.repair


def test_a_table_to_which_nothing_can_be_committed_stops_alone() -> None:
    """Others may have given it a property by which its next metadata file has another name."""

    def do(effect: takeover.Effect) -> Any:
        return None if isinstance(effect, takeover.ReadTable) else False

    where = "/lake/tables/shop/public/bills"
    with pytest.raises(CorruptError, match="gave up after") as found:
        takeover.carry_out(takeover.commit(lambda _: "next", where), do)
    assert found.value.where == where
    fault = table_fault.fault_of(NAMES["bills"], found.value)
    assert fault is not None
    assert "tuskline table resync" in fault.error.repair


def test_a_feed_that_cannot_have_a_change_stops_neither_its_table_nor_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f" / "data").mkdir(parents=True)
    columns = pa.schema([*ABOUT, ("id", pa.int32()), ("due", pa.date32())])
    by_id = Arrangement(fields=(Field(1000, "id", "truncate", 1000),))
    feed = FeedTarget(str(tmp_path / "f" / "data" / "x"), columns, columns, 0, by_id)
    entries = log((BILLS, ("-2147483648", "2024-01-01")), (ORDERS, ("1", "2024-01-01")))
    for table in (BILLS, ORDERS):
        (tmp_path / table.name / "data").mkdir(parents=True)
    monkeypatch.setattr(stage, "StreamReader", lambda *_, **__: Reader(entries))
    targets = (replace(target(tmp_path, BILLS), feed=feed), target(tmp_path, ORDERS))
    tables = tuple(PackedTable.of(target, (None, 8)) for target in targets)
    names = frozenset(NAMES.values())
    task = RangeTask("shop", ("",), 0, 99, 0, str(tmp_path), "", tables, names)
    found = run_range(task, TaskTables(tables, ""))
    assert {one.table for one in found if isinstance(one, Staged)} == names
    (fed,) = [one for one in found if isinstance(one, Fed)]
    assert fed.files == ()
    assert fed.fault is not None
    assert "has no partition" in fed.fault.error.what
