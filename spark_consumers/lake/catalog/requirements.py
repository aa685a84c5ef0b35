"""Whether the requirements of a commit hold of a table's metadata (Iceberg REST specification, TableRequirement). Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from spark_consumers.lake.catalog.table_catalog import Requirement
from walsender_bridge.errors import NotSupportedError

#: Requirements that one member of the metadata has this value, by their type.
_MEMBERS = {
    "assert-table-uuid": ("uuid", "table-uuid"),
    "assert-last-assigned-field-id": ("last-assigned-field-id", "last-column-id"),
    "assert-current-schema-id": ("current-schema-id", "current-schema-id"),
    "assert-last-assigned-partition-id": ("last-assigned-partition-id", "last-partition-id"),
    "assert-default-spec-id": ("default-spec-id", "default-spec-id"),
    "assert-default-sort-order-id": ("default-sort-order-id", "default-sort-order-id"),
}


def unmet(metadata: Mapping[str, Any], requirements: Iterable[Requirement]) -> Requirement | None:
    """The first requirement that the metadata does not meet; None if it meets all.

    Raises `NotSupportedError` for a kind that is not known: it must not be taken for met.
    """
    return next((each for each in requirements if not _holds(metadata, each)), None)


def _holds(metadata: Mapping[str, Any], required: Requirement) -> bool:
    kind = required["type"]
    if kind == "assert-ref-snapshot-id":
        ref = metadata.get("refs", {}).get(required["ref"])
        return bool(required["snapshot-id"] == (ref and ref["snapshot-id"]))
    if kind not in _MEMBERS:
        raise NotSupportedError(f"a commit requires {kind}, which is not known")
    wanted, member = _MEMBERS[kind]
    return bool(required[wanted] == metadata.get(member))
