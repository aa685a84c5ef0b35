"""A fault of one table: its changes cannot be applied to it, and everything else can continue without it.

That is a value that the lake cannot hold, damage, a change that no server sends, or a bug of ours that this table's
changes bring out. What another table would meet as well (the disk, memory, the log, the catalog, another writer) is not a
table's fault: the round fails by that as a whole, and is tried again. What Iceberg's library raises may be either (`doubt`).
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from spark_consumers.lake.manifest.table_version import TableVersion
from walsender_bridge.errors import (
    CorruptError,
    MalformedMessageError,
    NotSupportedError,
    TusklineError,
    UnsupportedByCatalogError,
    UnsupportedValueError,
    from_wire,
)

_OF_A_TABLE = (CorruptError, MalformedMessageError, NotSupportedError, UnsupportedValueError)
#: Of the machine, not of what was computed. What Spark and its JVM say is not known to be of a table: they have a disk and memory, too.
_OF_THE_MACHINE = (OSError, MemoryError)
_OF_SPARK = ("py4j", "pyspark")


@dataclass(frozen=True)
class TableFault:
    """What is wrong with the table `table` (`stream.schema.table`)."""

    table: str
    error: TusklineError


class TableFaultsError(Exception):
    """Changes of these tables cannot be applied; nothing was written. `tables`: as the epoch would have shown them."""

    def __init__(self, faults: Sequence[TableFault], tables: Mapping[str, TableVersion]) -> None:
        super().__init__(", ".join(sorted({fault.table for fault in faults})))
        self.faults = faults
        self.tables = tables

    @property
    def names(self) -> set[str]:
        """The tables, `stream.schema.table`."""
        return {fault.table for fault in self.faults}

    def by_path(self) -> dict[str, TusklineError]:
        """The first fault of each table, by the table's path."""
        return {self.tables[fault.table].path: fault.error for fault in reversed(self.faults)}


def reason_of(error: TusklineError, folder: str) -> str:
    """Why the table in this folder cannot follow, in one line, with what can be done."""
    place = error.where.removeprefix(f"{folder}/")
    is_file = place != error.where
    is_row = isinstance(error, UnsupportedValueError | MalformedMessageError)
    what = f"{error.what} ({place})" if is_file or is_row else error.what
    return f"{what}; {error.repair}" if error.repair else what


def fault_of(table: str, error: Exception) -> TableFault | None:
    """The error as a fault of this table; None where it is not the table's."""
    if isinstance(error, UnsupportedValueError) and error.where != table:
        # By where it was found: the row. The log has the value, whatever becomes of it at the source.
        ways = (
            f'quarantine such rows ([lake.on_unrepresentable_value] "{table}" = "quarantine", start `lake run` again, '
            f"tuskline table resume {table}); or change the value at the source, and tuskline table resync {table}"
        )
        return TableFault(table, UnsupportedValueError(error.what, where=error.where, repair=ways))
    if isinstance(error, UnsupportedByCatalogError):
        return None
    if isinstance(error, TusklineError):
        return TableFault(table, error) if isinstance(error, _OF_A_TABLE) else None
    package = type(error).__module__.partition(".")[0]
    if isinstance(error, _OF_THE_MACHINE) or package in _OF_SPARK:
        return None
    place = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" at {Path(place[0].filename).name}:{place[0].lineno}" if place else ""
    repair = (
        f"report this bug of Tuskline, with the table's columns; tuskline table resync {table} continues after the "
        "changes that trigger it"
    )
    what = f"{type(error).__name__}: {str(error)[:300]}{at}"
    return TableFault(table, TusklineError(what, where=table, repair=repair))


_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


def as_values(function: Callable[[_Task], _Result]) -> Callable[[_Task], tuple[str, Any]]:
    """Wrap `function` for an executor: our errors and faults are returned as values, since Spark would turn them into text."""

    def run(task: _Task) -> tuple[str, Any]:
        try:
            return "done", function(task)
        except Exception as error:
            target = getattr(task, "target", None)
            fault = None if target is None else fault_of(target.name, error)
            if fault is not None:
                return "fault", (fault.table, fault.error.to_wire())
            if isinstance(error, TusklineError):
                return "error", error.to_wire()
            raise

    return run


def results(returned: Sequence[tuple[str, Any]], tables: Mapping[str, TableVersion]) -> list[Any]:
    """The results that `as_values` returned on the executors, or `doubt.each_table` here.

    Raises the errors that were raised there, faults of tables as `TableFaultsError`.
    """
    errors = [value for kind, value in returned if kind == "error"]
    if errors:
        raise from_wire(errors[0])
    faults = [TableFault(v[0], from_wire(v[1])) for kind, v in returned if kind == "fault"]
    if faults:
        raise TableFaultsError(faults, tables)
    return [value for _, value in returned]
