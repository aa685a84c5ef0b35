"""What `tuskline verify` has found, and how far it is: `<lake>/_tuskline/equality.json`, replaced whole after each step.

A run that is killed continues from it with the chunks that are left. Each chunk is compared exactly once, at the cut of its round, so
what is found does not depend on how often a run is interrupted.
"""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from spark_consumers.lake.store.lake_store import STATE
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import json_model

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Chain

_FILE: Final = f"{STATE}/equality.json"

#: The state of a table's comparison.
PENDING, EQUAL, DIFFERENT, NOT_COMPARED = "pending", "equal", "different", "not compared"
#: A difference whose rows are not named: of a chunk that could not be read again at its cut.
CHUNK: Final = "chunk"


@dataclass(frozen=True, slots=True)
class Difference:
    """A row, or a chunk, that differs. `kind`: as in `sums`, or `chunk`.

    `key`: the key's columns and their texts; of a table without one, the digest; of a chunk, its range. `columns`: those that differ, of a
    row that is on both sides. `source_rows` and `lake_rows`: how many rows there are with this key. `lsn`: the cut, `epoch` the one that
    the lake's rows were read from.
    """

    kind: str
    key: Mapping[str, str]
    columns: tuple[str, ...]
    source_rows: int
    lake_rows: int
    lsn: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TableRecord:
    """How far one table is. `reason`: why it is not compared.

    `relation_id`, `column`, `bounds`, `is_uuid`, `buckets`: how it is divided (`chunks.Chunks`), of the table with this OID.
    `chunks`: how many are compared in all, `done` which are. `rows`: of the source, compared. `beyond`: rows of the source that
    the lake quarantines, and which are not compared. `cuts`: at how many snapshots, `lsn` the last one's. `different_chunks`: the
    chunks with differences; the first `differences` of them are named.
    """

    state: str = PENDING
    reason: str = ""
    relation_id: int = 0
    column: str = ""
    bounds: tuple[int, ...] = ()
    is_uuid: bool = False
    buckets: int = 0
    chunks: int = 0
    done: tuple[int, ...] = ()
    rows: int = 0
    beyond: int = 0
    cuts: int = 0
    lsn: int = 0
    epoch: int = 0
    different_chunks: int = 0
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class EqualityRecord:
    """A run. Times are in seconds since the Unix epoch; `ended_at` is 0 until all tables are done. `names`: the tables, as they were given.

    `sample`: the part of each table's chunks that is compared, chosen by `seed`. `earlier`: the tables' results of the runs before.
    """

    began_at: float = 0.0
    ended_at: float = 0.0
    names: tuple[str, ...] = ()
    sample: float = 1.0
    seed: int = 0
    tables: Mapping[str, TableRecord] = field(default_factory=dict)
    earlier: Mapping[str, TableRecord] = field(default_factory=dict)

    def with_table(self, name: str, table: TableRecord) -> "EqualityRecord":
        """The record with this table."""
        return replace(self, tables={**self.tables, name: table})

    def count(self, state: str) -> int:
        """How many tables are in this state."""
        return sum(table.state == state for table in self.tables.values())

    @property
    def results(self) -> dict[str, TableRecord]:
        """The last result of each table, of whichever run. One that this run has begun has its earlier one, until differences are found."""
        new = {n: t for n, t in self.tables.items() if t.state != PENDING or t.different_chunks}
        return {**self.tables, **self.earlier, **new}

    def after(self, last: "EqualityRecord | None", known: Collection[str]) -> "EqualityRecord":
        """This run with the results of the `last` one and those before it. `known`: the lake's tables; a result of another is dropped."""
        before = last.results if last else {}
        kept = {n: t for n, t in before.items() if n in known}
        # One that was begun and never compared has no result.
        return replace(self, earlier={n: t for n, t in kept.items() if t != TableRecord()})


def read_record(chain: "Chain") -> EqualityRecord | None:
    """The last run's; None without one. It is a report, so a damaged one counts as none."""
    with contextlib.suppress(OSError, TusklineError, ValueError):
        return json_model.decode(EqualityRecord, chain.store.read(_FILE))
    return None


def write_record(chain: "Chain", record: EqualityRecord) -> None:
    """Replace it. Raises the store's errors."""
    chain.store.replace(_FILE, json_model.encode(record))
