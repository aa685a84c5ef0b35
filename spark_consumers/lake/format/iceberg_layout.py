"""Layouts of tables through Iceberg's own classes: what a table's metadata says, changes of it, and partitions of files."""

import json
from collections.abc import Mapping
from typing import Any

from spark_consumers.lake.format.file_names import FIELD_ID
from spark_consumers.lake.format.iceberg_schema import arrow_schema
from spark_consumers.lake.layout.arrangement import NO_PARTITION, parsed, partition_text
from spark_consumers.lake.layout.evolution import Changes, Layouts


def layouts_of(iceberg: Any, metadata: Any) -> Layouts:
    """What the metadata of a table says of its layout."""
    columns = arrow_schema(json.loads(iceberg.SchemaParser.toJson(metadata.schema())))
    ids = {field.name: int(field.metadata[FIELD_ID.encode()]) for field in columns}
    return Layouts(
        columns=columns,
        ids=ids,
        specs=[json.loads(iceberg.PartitionSpecParser.toJson(s)) for s in metadata.specs()],
        spec=metadata.defaultSpecId(),
        last_field=metadata.lastAssignedPartitionId(),
        order=json.loads(iceberg.SortOrderParser.toJson(metadata.sortOrder())),
        properties=dict(metadata.properties()),
    )


def layouts_in(metadata: Mapping[str, Any]) -> Layouts:
    """What the JSON of a table's metadata says of its layout."""

    def current(members: str, number: str, default: str) -> Any:
        return next(m for m in metadata[members] if m[number] == metadata[default])

    columns = arrow_schema(current("schemas", "schema-id", "current-schema-id"))
    return Layouts(
        columns=columns,
        ids={f.name: int(f.metadata[FIELD_ID.encode()]) for f in columns},
        specs=metadata["partition-specs"],
        spec=metadata["default-spec-id"],
        last_field=metadata["last-partition-id"],
        order=current("sort-orders", "order-id", "default-sort-order-id"),
        properties=metadata.get("properties", {}),
    )


def changed(jvm: Any, metadata: Any, changes: Changes) -> Any:
    """The metadata with these changes."""
    iceberg, schema = jvm.org.apache.iceberg, metadata.schema()
    builder = iceberg.TableMetadata.buildFrom(metadata)
    if changes.spec is not None:
        spec = iceberg.PartitionSpecParser.fromJson(schema, json.dumps(changes.spec))
        builder.setDefaultPartitionSpec(spec)
    if changes.order is not None:
        order = iceberg.SortOrderParser.fromJson(schema, json.dumps(changes.order))
        builder.setDefaultSortOrder(order)
    if changes.properties:
        properties = jvm.java.util.HashMap()
        for name, value in changes.properties.items():
            properties.put(name, value)
        builder.setProperties(properties)
    if changes.removed:
        removed = jvm.java.util.HashSet()
        for name in changes.removed:
            removed.add(name)
        builder.removeProperties(removed)
    return builder.build()


class Partitions:
    """The partitions of one table's files as Iceberg's objects."""

    def __init__(self, iceberg: Any, table: Any) -> None:
        self._iceberg, self._table = iceberg, table
        self._specs: dict[int, Any] = {}

    def spec(self, partition: str) -> Any:
        """The spec of a partition."""
        number, _ = parsed(partition)
        if number not in self._specs:
            self._specs[number] = self._table.specs().get(number)
        return self._specs[number]

    def placed(self, builder: Any, partition: str) -> Any:
        """The builder of a file, which gets this partition."""
        if partition == NO_PARTITION:
            return builder
        kind = self.spec(partition).partitionType()
        _, values = parsed(partition)
        return builder.withPartition(self._iceberg.SingleValueParser.fromJson(kind, values))

    def names(self, snapshot: int) -> dict[str, str]:
        """The partitions of a snapshot's data files by their locations; none of a table that never had one."""
        if all(spec.isUnpartitioned() for spec in self._table.specs().values()):
            return {}
        found = {}
        files = self._table.newScan().useSnapshot(snapshot).planFiles()
        try:
            tasks = files.iterator()
            while tasks.hasNext():
                file = tasks.next().file()
                spec = self._table.specs().get(file.specId())
                if not spec.isUnpartitioned():
                    text = self._iceberg.SingleValueParser.toJson(
                        spec.partitionType(), file.partition()
                    )
                    values = [(int(number), value) for number, value in json.loads(text).items()]
                    found[str(file.location())] = partition_text(spec.specId(), values)
        finally:
            files.close()
        return found
