"""What the event trigger on a source has recorded of a schema change (sql/ddl/install.sql). Pure.

A `TableRecord` is one row of the published table `tuskline.ddl`: what the columns of a table are after one ALTER TABLE. It is in the
log where the command was, between the rows of the same transaction, so a record holds from its place on: for what comes behind it in
its entry, and in later entries.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from spark_consumers.decode.entries import ChangeBatch
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.pgoutput import INSERT

#: The table of the records, as the log names it.
DDL_TABLE: Final = "tuskline.ddl"


@dataclass(frozen=True, slots=True)
class RecordedColumn:
    """A column: its number, name (None: it is dropped), type OID, modifier, and row version (xmin).

    `is_written`: the transaction of the record has written its row. `is_filled`: rows may have values that no change has carried.
    `missing`: the value that all rows have which are older than a new column, as PostgreSQL writes it; None: it is not known.
    """

    number: int
    name: str | None
    kind: int
    typmod: int
    version: str
    is_written: bool
    is_filled: bool
    is_generated: bool
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A table after a schema change. `offset` and `sequence`: where in the log; `file`, `natts`: as in `Shape`.

    `name`: the table's, without its schema. `query`: what the client has sent, if it was one ALTER TABLE; otherwise empty.
    """

    relation: int
    offset: int
    sequence: int
    commit_lsn: Lsn
    file: int
    natts: int
    columns: tuple[RecordedColumn, ...]
    name: str = ""
    query: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Where in the log it is."""
        return self.offset, self.sequence


def records_in(batch: ChangeBatch) -> Iterator[TableRecord]:
    """The records among changes of `DDL_TABLE`.

    A row that this version's trigger has not written is none: what it was to tell is found missing (`expected`), and its table is
    copied again.
    """
    names = [column.name for column in batch.relation.columns]
    for row in np.flatnonzero(batch.ops == INSERT).tolist():
        values = {
            name: column[row].as_py() for name, column in zip(names, batch.columns, strict=True)
        }
        try:
            record = json.loads(values["description"])
            found = TableRecord(
                int(values["relation"]),
                int(batch.offset[row]),
                int(batch.sequence[row]),
                int(batch.commit_lsn[row]),
                int(record["file"]),
                int(record["natts"]),
                tuple(RecordedColumn(*column) for column in record["columns"]),
                str(record["name"]),
                str(record["query"]),
            )
        except (KeyError, TypeError, ValueError):
            continue
        yield found
