"""The updates of a commit, made on a table's metadata (Iceberg REST specification, TableUpdate). Pure.

What a catalog server does with a commit, the folder's catalog does here; the result is what Iceberg's own library makes of
the same updates. Metadata is Iceberg's JSON; what is given is not changed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from spark_consumers.lake.catalog.table_catalog import Update
from walsender_bridge.errors import CorruptError, NotSupportedError

#: The property that is no property of a new table, but the version of its format; and that version otherwise.
VERSION_PROPERTY, _NEW = "format-version", 3
#: Metadata files that are named as earlier ones, unless the table's property says otherwise.
_PREVIOUS = 100
_PREVIOUS_PROPERTY = "write.metadata.previous-versions-max"
#: How version 2 says that there is no current snapshot.
_NO_SNAPSHOT = -1

_Metadata = dict[str, Any]


def created(
    uuid: str, location: str, schema: Mapping[str, Any], properties: Mapping[str, str], now: int
) -> _Metadata:
    """The metadata of a new, empty table without partitions; `now`: milliseconds since 1970."""
    version = int(properties.get(VERSION_PROPERTY, _NEW))
    made: _Metadata = {
        "format-version": version,
        "table-uuid": uuid,
        "location": location,
        "last-sequence-number": 0,
        "last-updated-ms": now,
        "last-column-id": max(_field_ids(schema), default=0),
        "current-schema-id": 0,
        "schemas": [{**schema, "schema-id": 0}],
        "default-spec-id": 0,
        "partition-specs": [{"spec-id": 0, "fields": []}],
        # The number before the first of partition fields.
        "last-partition-id": 999,
        "default-sort-order-id": 0,
        "sort-orders": [{"order-id": 0, "fields": []}],
        "properties": {n: v for n, v in properties.items() if n != VERSION_PROPERTY},
        "current-snapshot-id": _NO_SNAPSHOT if version < _NEW else None,
        "refs": {},
        "snapshots": [],
        "statistics": [],
        "partition-statistics": [],
        "snapshot-log": [],
        "metadata-log": [],
    }
    if version >= _NEW:
        made["next-row-id"] = 0
    return made


def applied(
    metadata: Mapping[str, Any], updates: Iterable[Update], now: int, previous: str
) -> _Metadata:
    """The metadata with these updates, as what follows the metadata file `previous`; `now`: milliseconds since 1970.

    Raises `NotSupportedError` for an update that is not known, and `CorruptError` for one that cannot be of this table.
    """
    made = dict(metadata)
    added: set[int] = set()
    was = _main(made)
    for update in updates:
        action = update["action"]
        if action not in _ACTIONS:
            raise NotSupportedError(f"a commit has the update {action}, which is not known")
        _ACTIONS[action](made, update)
        if action == "add-snapshot":
            added.add(update["snapshot"]["snapshot-id"])
    # A clock that was set back must not make a table older.
    made["last-updated-ms"] = max(now, metadata["last-updated-ms"])
    _log_main(made, was, added)
    _log_previous(made, metadata["last-updated-ms"], previous)
    return made


# -- what each update does --------------------------------------------------------------------------


def _upgrade_format_version(made: _Metadata, update: Update) -> None:
    version = update["format-version"]
    if version < made["format-version"]:
        raise CorruptError(f"its format version {made['format-version']} cannot become {version}")
    if version >= _NEW:
        made.setdefault("next-row-id", 0)
    made["format-version"] = version


def _add_schema(made: _Metadata, update: Update) -> None:
    schema = update["schema"]
    others = [each for each in made["schemas"] if each["schema-id"] != schema["schema-id"]]
    made["schemas"] = [*others, schema]
    made["last-column-id"] = max(made["last-column-id"], *_field_ids(schema))


def _set_current_schema(made: _Metadata, update: Update) -> None:
    number = update["schema-id"]
    # -1: the one that was added last.
    made["current-schema-id"] = made["schemas"][-1]["schema-id"] if number == -1 else number


def _add_spec(made: _Metadata, update: Update) -> None:
    spec = update["spec"]
    others = [each for each in made["partition-specs"] if each["spec-id"] != spec["spec-id"]]
    made["partition-specs"] = [*others, spec]
    numbers = [field["field-id"] for field in spec["fields"]]
    made["last-partition-id"] = max(made["last-partition-id"], *numbers)


def _set_default_spec(made: _Metadata, update: Update) -> None:
    number = update["spec-id"]
    # -1: the one that was added last.
    made["default-spec-id"] = made["partition-specs"][-1]["spec-id"] if number == -1 else number


def _add_sort_order(made: _Metadata, update: Update) -> None:
    order = update["sort-order"]
    others = [each for each in made["sort-orders"] if each["order-id"] != order["order-id"]]
    made["sort-orders"] = [*others, order]


def _set_default_sort_order(made: _Metadata, update: Update) -> None:
    number = update["sort-order-id"]
    last = made["sort-orders"][-1]["order-id"]
    made["default-sort-order-id"] = last if number == -1 else number


def _set_properties(made: _Metadata, update: Update) -> None:
    made["properties"] = {**made.get("properties", {}), **update["updates"]}


def _remove_properties(made: _Metadata, update: Update) -> None:
    gone = set(update["removals"])
    kept = made.get("properties", {}).items()
    made["properties"] = {name: value for name, value in kept if name not in gone}


def _add_snapshot(made: _Metadata, update: Update) -> None:
    snapshot = update["snapshot"]
    if snapshot["sequence-number"] <= made["last-sequence-number"]:
        raise CorruptError(
            f"snapshot {snapshot['snapshot-id']} has sequence number {snapshot['sequence-number']},"
            f" but the table is at {made['last-sequence-number']}"
        )
    if made["format-version"] >= _NEW:
        if snapshot["first-row-id"] < made["next-row-id"]:
            raise CorruptError(
                f"snapshot {snapshot['snapshot-id']} numbers rows from {snapshot['first-row-id']} on,"
                f" but the table is at {made['next-row-id']}"
            )
        made["next-row-id"] += snapshot["added-rows"]
    made["snapshots"] = [*made.get("snapshots", []), snapshot]
    made["last-sequence-number"] = snapshot["sequence-number"]


def _set_snapshot_ref(made: _Metadata, update: Update) -> None:
    name, snapshot = update["ref-name"], update["snapshot-id"]
    if all(each["snapshot-id"] != snapshot for each in made.get("snapshots", [])):
        raise CorruptError(f"{name} cannot be moved to snapshot {snapshot}, which is not there")
    ref = {key: value for key, value in update.items() if key not in {"action", "ref-name"}}
    made["refs"] = {**made.get("refs", {}), name: ref}


def _remove_snapshot_ref(made: _Metadata, update: Update) -> None:
    made["refs"] = {n: r for n, r in made.get("refs", {}).items() if n != update["ref-name"]}


def _remove_snapshots(made: _Metadata, update: Update) -> None:
    gone = set(update["snapshot-ids"])
    for member in ("snapshots", "statistics", "partition-statistics"):
        if member in made:
            made[member] = [each for each in made[member] if each["snapshot-id"] not in gone]
    made["refs"] = {n: r for n, r in made.get("refs", {}).items() if r["snapshot-id"] not in gone}


def _remove_statistics(made: _Metadata, update: Update) -> None:
    _remove_of_snapshot(made, "statistics", update)


def _remove_partition_statistics(made: _Metadata, update: Update) -> None:
    _remove_of_snapshot(made, "partition-statistics", update)


def _remove_of_snapshot(made: _Metadata, member: str, update: Update) -> None:
    gone = update["snapshot-id"]
    made[member] = [each for each in made.get(member, []) if each["snapshot-id"] != gone]


_ACTIONS: Mapping[str, Callable[[_Metadata, Update], None]] = {
    "upgrade-format-version": _upgrade_format_version,
    "add-schema": _add_schema,
    "set-current-schema": _set_current_schema,
    "add-spec": _add_spec,
    "set-default-spec": _set_default_spec,
    "add-sort-order": _add_sort_order,
    "set-default-sort-order": _set_default_sort_order,
    "set-properties": _set_properties,
    "remove-properties": _remove_properties,
    "add-snapshot": _add_snapshot,
    "set-snapshot-ref": _set_snapshot_ref,
    "remove-snapshot-ref": _remove_snapshot_ref,
    "remove-snapshots": _remove_snapshots,
    # Those that users have made expire with their snapshots.
    "remove-statistics": _remove_statistics,
    "remove-partition-statistics": _remove_partition_statistics,
}


# -- what follows from them -------------------------------------------------------------------------


def _main(metadata: Mapping[str, Any]) -> int | None:
    ref = metadata.get("refs", {}).get("main")
    return ref["snapshot-id"] if ref else None


def _log_main(made: _Metadata, was: int | None, added: set[int]) -> None:
    """Keep the current snapshot and the log of current snapshots in step with `main` and with what is there."""
    main = _main(made)
    there = {each["snapshot-id"]: each["timestamp-ms"] for each in made.get("snapshots", [])}
    log: list[dict[str, Any]] = []
    for entry in made.get("snapshot-log", []):
        if entry["snapshot-id"] in there:
            log.append(entry)
        else:
            # What is before a gap would be taken for current for too long.
            log.clear()
    if main is None:
        log.clear()
    elif main != was:
        moment = there[main] if main in added else made["last-updated-ms"]
        log.append({"timestamp-ms": moment, "snapshot-id": main})
    made["snapshot-log"] = log
    none = _NO_SNAPSHOT if made["format-version"] < _NEW else None
    made["current-snapshot-id"] = none if main is None else main


def _log_previous(made: _Metadata, updated: int, previous: str) -> None:
    most = max(1, int(made.get("properties", {}).get(_PREVIOUS_PROPERTY, _PREVIOUS)))
    entry = {"timestamp-ms": updated, "metadata-file": previous}
    made["metadata-log"] = [*made.get("metadata-log", []), entry][-most:]


def _field_ids(kind: Any) -> list[int]:
    """The numbers of all fields of a schema, also of those within."""
    if not isinstance(kind, Mapping):
        return []
    own = [kind[name] for name in ("element-id", "key-id", "value-id") if name in kind]
    inner = [kind[name] for name in ("element", "key", "value") if name in kind]
    for field in kind.get("fields", ()):
        own.append(field["id"])
        inner.append(field["type"])
    return own + [number for each in inner for number in _field_ids(each)]
