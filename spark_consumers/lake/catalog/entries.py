"""The lake as an Iceberg SQL catalog: what the entries of `<lake>/catalog.db` are. Pure (`catalog_file` has the I/O).

An entry gives a table's name the metadata file by which another engine opens it. The namespace is `stream.schema`; names
are PostgreSQL's own, with the same case. The file belongs to one catalog, `tuskline`; entries of other catalogs in
the same file are left alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from walsender_bridge.postgres.protocol.relation_name import split_relation

#: The catalog's name, which an engine has to give.
CATALOG = "tuskline"
#: What `iceberg_type` says of a table.
TABLE = "TABLE"


class Name(NamedTuple):
    """A table's name in the catalog."""

    namespace: str
    table: str

    @classmethod
    def of(cls, name: str) -> "Name":
        """The name of the table `stream.schema.table`."""
        stream, _, relation = name.partition(".")
        schema, table = split_relation(relation)
        return cls(f"{stream}.{schema}", table)


class Entry(NamedTuple):
    """A row of the catalog. `row`: its number in the file; `kind` is `TABLE` in ours."""

    row: int
    name: Name
    location: str | None
    kind: str | None


@dataclass(frozen=True, slots=True)
class CatalogChanges:
    """What makes the catalog right: rows to delete, then `(name, location, previous location)` to insert."""

    delete: tuple[int, ...]
    insert: tuple[tuple[Name, str, str | None], ...]

    def __bool__(self) -> bool:
        return bool(self.delete or self.insert)


def changes(there: Iterable[Entry], wanted: Mapping[Name, str | None]) -> CatalogChanges:
    """What differs between the entries that are there and those that should be.

    `wanted`: the metadata file of each table; None: it cannot be said now, and an entry that is there stays.
    """
    delete: list[int] = []
    right: set[Name] = set()
    previous: dict[Name, str | None] = {}
    for entry in there:
        location = wanted.get(entry.name)
        stays = entry.name in wanted and location in {None, entry.location}
        if stays and entry.kind == TABLE and entry.name not in right:
            right.add(entry.name)
        else:
            delete.append(entry.row)
            previous[entry.name] = entry.location
    insert = [
        (name, location, previous.get(name))
        for name, location in wanted.items()
        if name not in right and location is not None
    ]
    return CatalogChanges(tuple(delete), tuple(insert))
