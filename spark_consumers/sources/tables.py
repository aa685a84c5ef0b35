"""Which tables the change log has, and which of them a reader means by a name."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from spark_consumers.decode.types import with_base_types
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.entry import schema_hash, split_schema_record
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.errors import SchemaError, UsageError
from walsender_bridge.postgres.protocol.pgoutput import Column, Relation, parse_relation


@dataclass(frozen=True, slots=True)
class WantedTable:
    """A table of a stream, with its newest columns."""

    stream: str
    relation: Relation
    schema_hash: bytes

    @property
    def full_name(self) -> str:
        """`stream.schema.table`."""
        return f"{self.stream}.{self.relation.full_name}"

    def chosen(self, names: Sequence[str] | None) -> list[Column]:
        """The named columns in their order, or all. Raises `SchemaError` for one that is not there."""
        if names is None:
            return list(self.relation.columns)
        by_name = {column.name: column for column in self.relation.columns}
        for name in names:
            if name not in by_name:
                raise SchemaError(
                    f"there is no column {name!r}",
                    where=self.full_name,
                    repair=f"the columns are {', '.join(by_name)}",
                )
        return [by_name[name] for name in names]


def tables_of(address: str) -> list[WantedTable]:
    """The tables of a log: those that have had a change in it. Raises the client's errors."""
    with LogClient(address) as log:
        status = log.status()
    found = []
    for stream, cut in sorted(status.streams.items()):
        with StreamReader.of(cut) as reader:
            found += [
                WantedTable(stream, relation_of(record), schema_hash(record))
                for record in reader.relations()
            ]
    return found


def relation_of(record: bytes) -> Relation:
    """The relation that a schema record describes, its domains as their base types."""
    message, *types = split_schema_record(record)
    return with_base_types(parse_relation(message, tuple(types)))


def newest_hash(reader: StreamReader, name: str) -> bytes | None:
    """The hash of the newest schema of `schema.table`."""
    records = reader.relations()
    found = (schema_hash(r) for r in records if relation_of(r).full_name == name)
    return next(found, None)


def choose_tables(tables: Sequence[WantedTable], names: Sequence[str]) -> list[WantedTable]:
    """The tables with these names, `stream.schema.table` or `schema.table` where that is one.

    Raises `UsageError`.
    """
    chosen = []
    for name in names:
        found = [t for t in tables if name in {t.full_name, t.relation.full_name}]
        if not found:
            known = [n for t in tables for n in (t.full_name, t.relation.full_name)]
            near = difflib.get_close_matches(name, known, n=1)
            raise UsageError(
                f"the log contains no change of table {name!r}",
                where="option tables",
                repair=f"did you mean {near[0]!r}?" if near else "name it schema.table",
            )
        if len(found) > 1:
            raise UsageError(
                f"{name!r} is in the streams {', '.join(t.stream for t in found)}",
                where="option tables",
                repair=f"name it with its stream: {found[0].full_name!r}",
            )
        chosen.append(found[0])
    return chosen
