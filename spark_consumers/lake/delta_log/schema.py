"""The schema of a Delta table from that of its Iceberg table. Pure.

Delta finds the columns of a data file by their Parquet field ids (column mapping by `id`), which are Iceberg's. So a column that is
renamed, dropped or moved needs no other files. Each column also has a *physical name*: the key of its
statistics, and its name in all data files (`file_names`), by which readers find it that do not go by ids.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from spark_consumers.lake.format.file_names import first_names, has_others

#: Delta's types by Iceberg's. There are no others in a lake's tables (docs/types.md); decimals and lists are built.
_TYPES: Final = {
    "boolean": "boolean",
    "int": "integer",
    "long": "long",
    "float": "float",
    "double": "double",
    "string": "string",
    "binary": "binary",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
}
_MODE, _MAX_ID = "delta.columnMapping.mode", "delta.columnMapping.maxColumnId"
_WIDENING = "delta.enableTypeWidening"
#: The value that a column has in data files that are older than it. A column default of Delta's is for writers only.
_INITIAL: Final = "initial-default"
#: No other program implements it, so none that keeps to Delta's protocol writes to the table or removes its files (VACUUM).
WRITER_FEATURE: Final = "tuskline"

#: A schema in Iceberg's JSON.
Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeltaSchema:
    """What a Delta log says of a table's columns: the actions `metaData` (without its id and time) and `protocol`.

    `physical`: the physical name and Iceberg's type of each column that has statistics, by its field id.
    """

    schema_string: str
    configuration: Mapping[str, str]
    features: tuple[str, ...]
    physical: Mapping[int, tuple[str, str]]

    @property
    def protocol(self) -> dict[str, Any]:
        """The action `protocol`."""
        return {
            "minReaderVersion": 3,
            "minWriterVersion": 7,
            "readerFeatures": list(self.features),
            "writerFeatures": [*self.features, WRITER_FEATURE],
        }


def delta_schema(schema: Schema, history: Iterable[Schema]) -> DeltaSchema:
    """The Delta schema of a snapshot with this schema. `history`: all schemas of the table, among them this one."""
    earlier = sorted(
        (each for each in history if each["schema-id"] <= schema["schema-id"]),
        key=lambda each: each["schema-id"],
    )
    names, types = first_names(earlier), _types_of(earlier)
    fields = []
    widened = False
    top = 0
    for field in schema["fields"]:
        number = field["id"]
        changes = _changes(types.get(number, ()))
        widened = widened or bool(changes)
        top = max(top, number)
        metadata: dict[str, Any] = {
            "delta.columnMapping.id": number,
            "delta.columnMapping.physicalName": names[number],
        }
        if changes:
            metadata["delta.typeChanges"] = changes
        fields.append(
            {
                "name": field["name"],
                "type": delta_type(field["type"]),
                "nullable": True,
                "metadata": metadata,
            }
        )
    configuration = {_MODE: "id", _MAX_ID: str(max([top, *names]))}
    features = ["columnMapping", "deletionVectors", "timestampNtz"]
    if widened:
        configuration[_WIDENING] = "true"
        features.append("typeWidening")
    return DeltaSchema(
        json.dumps({"type": "struct", "fields": fields}),
        configuration,
        tuple(features),
        {
            field["id"]: (names[field["id"]], field["type"])
            for field in schema["fields"]
            if isinstance(field["type"], str)
        },
    )


def refusal(schema: Schema, history: Sequence[Schema], *, has_first_names: bool) -> str:
    """Why a table with this schema cannot be a Delta table; empty if it can. `history`: see `delta_schema`.

    `has_first_names`: columns are known to have their first names in all data files. Then each column has its physical name in
    each file, so readers that go by names find what those find that go by ids.
    """
    if not has_first_names and has_others(history):
        return "an earlier version of Tuskline has renamed a column, which some readers of Delta would not find in all files"
    for field in schema["fields"]:
        if field.get(_INITIAL) is not None:
            return f"its column {field['name']!r} has a default for rows that are older, which Delta cannot read"
    return ""


def delta_type(kind: Any) -> Any:
    """Delta's type of an Iceberg type."""
    if isinstance(kind, dict):
        element = delta_type(kind["element"])
        return {"type": "array", "elementType": element, "containsNull": True}
    if kind.startswith("decimal("):
        return kind.replace(" ", "")
    return _TYPES[kind]


def _types_of(history: Sequence[Schema]) -> dict[int, list[str]]:
    """The types that each column has had, in order."""
    found: dict[int, list[str]] = {}
    for schema in history:
        for field in schema["fields"]:
            if isinstance(field["type"], str):
                kind = delta_type(field["type"])
                there = found.setdefault(field["id"], [])
                if kind not in there:
                    there.append(kind)
    return found


def _changes(types: Sequence[str]) -> list[dict[str, str]]:
    return [{"fromType": before, "toType": after} for before, after in itertools.pairwise(types)]
