"""The names of a table's columns in its data files. Pure.

Iceberg finds the columns of a data file by their numbers. Some readers of Delta logs (delta-rs, DuckDB) find them by a name, and return
NULL, without an error, in a column that a file has under another one. So a column has one name in all data files, and keeps it when
it is renamed: the name that it was created with.

That this name never changes: the schemas of a table are only added to, and its numbers only grow. So what `first_names` has for a number
follows from the first schema with that number and from smaller numbers, and no later schema has an influence on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

#: The metadata key by which Parquet has the number of a column.
FIELD_ID: Final = "PARQUET:field_id"
#: The metadata key, in the schema of a table, of a column's name in data files, where it is another one.
_FIRST_NAME: Final = b"tuskline.first-name"
#: The metadata key, in a data file, of a column's name in the table when the file was written, where it is another one.
_NAME: Final = b"tuskline.name"

#: A schema in Iceberg's JSON.
Schema = Mapping[str, Any]


def first_names(history: Iterable[Schema]) -> dict[int, str]:
    """The name that each column has in all data files, by its number. `history`: the schemas that the table has had.

    If an earlier column was created with a name that differs at most in case, the number is part of the later one's.
    """
    first: dict[int, str] = {}
    for schema in sorted(history, key=lambda each: int(each["schema-id"])):
        for field in schema["fields"]:
            first.setdefault(field["id"], field["name"])
    taken: set[str] = set()
    found = {}
    for number, created in sorted(first.items()):
        name = created
        # What the number was added to may be an earlier column's name, too.
        while name.casefold() in taken:
            name = f"{name}-{number}"
        found[number] = name
        taken.add(name.casefold())
    return found


def has_others(history: Sequence[Schema]) -> bool:
    """Whether a column has or had a name in the table that is not its name in data files."""
    names = first_names(history)
    return any(
        field["name"] != names[field["id"]] for schema in history for field in schema["fields"]
    )


def with_first_names(schema: pa.Schema, history: Iterable[Schema]) -> pa.Schema:
    """The schema of a table (with numbers), whose columns carry their names in data files, where these are others."""
    names = first_names(history)
    fields = []
    for field in schema:
        name = names[int(field.metadata[FIELD_ID.encode()])]
        own = {} if name == field.name else {_FIRST_NAME: name.encode()}
        fields.append(field.with_metadata({**field.metadata, **own}))
    return pa.schema(fields)


def in_files(schema: pa.Schema) -> pa.Schema:
    """The schema of a data file with the columns of this schema of a table."""
    return pa.schema([_renamed(field, _FIRST_NAME, _NAME) for field in schema])


def in_table(schema: pa.Schema) -> pa.Schema:
    """The schema that `in_files` was given."""
    return pa.schema([_renamed(field, _NAME, _FIRST_NAME) for field in schema])


def _renamed(field: pa.Field, new: bytes, old: bytes) -> pa.Field:
    """The field with the name that its metadata has under `new`, and the name before under `old`."""
    there = dict(field.metadata or {})
    name = there.pop(new, None)
    if name is None:
        return field
    return field.with_name(name.decode()).with_metadata({**there, old: field.name.encode()})
