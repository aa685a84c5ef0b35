"""Which part of a table a copy reads next, and from when on a snapshot is too old to read from.

PostgreSQL removes no row version that an open snapshot might see, in any table of the database. So no snapshot is read from
for much longer than `SNAPSHOT_SECONDS`, whatever there is to copy: the next table, or the next *chunk* of a large one, gets a
new one. A chunk is a range of the first column of the key (`tables.chunks` says why that is exact); it is also what a
copy that was interrupted does not read again. A table is read as a whole from one snapshot

- if it is not much larger than a chunk;
- if it has no key, or one that begins with another type than an integer or `uuid`: its changes cannot be told apart by chunks;
- if no index begins with that column: each range would read the whole table. (The key's first column is the one that the table
  has first, and not the index: `PRIMARY KEY (tenant, id)`.)
- if one key has more rows than a chunk (`PRIMARY KEY (tenant, id)`), which one task would read all by itself;
- if its rows are not in the order of the key by and large: ranges of the key would be scattered over all of its blocks.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from spark_consumers.decode.types import UUID
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.tables.chunks import CHUNKED_BY
from spark_consumers.lake.tables.shape import Shape, changed, followed
from spark_consumers.snapshot.exported import (
    PublishedTable,
    RelationBlocks,
    have_index,
    relations_of,
    samples,
)
from spark_consumers.snapshot.key_ranges import (
    KeyRange,
    Sample,
    chunk_end,
    is_clustered,
    most_of_one_key,
    pieces,
)
from walsender_bridge.postgres.client.bounded_query import BoundedConnection

#: After which no other table, and no other chunk, is read from a snapshot.
SNAPSHOT_SECONDS: Final = 600.0


#: By which part of its size a relation may have grown or shrunk since its sample.
_GROWTH: Final = 0.1


class KnownSamples:
    """The samples that earlier chunks of a copy were planned with.

    A sample reads blocks all over the relation, and only sizes depend on it: it is as good for the next chunk, unless the relation
    has another size by then.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], Sample] = {}

    def of(
        self,
        connection: BoundedConnection,
        relations: Sequence[RelationBlocks],
        column: str,
        *,
        piece: int,
        is_uuid: bool,
    ) -> list[Sample]:
        """A sample of each of these relations, as `exported.samples`."""
        new = [each for each in relations if not self._is_known(each, column)]
        for sample in samples(connection, new, column, piece=piece, is_uuid=is_uuid):
            self._known[sample.oid, column] = sample
        return [
            replace(
                self._known[each.oid, column], relation=(each.schema, each.name), size=_size(each)
            )
            for each in relations
        ]

    def _is_known(self, relation: RelationBlocks, column: str) -> bool:
        known = self._known.get((relation.oid, column))
        return known is not None and abs(_size(relation) - known.size) <= _GROWTH * known.size


def _size(relation: RelationBlocks) -> int:
    return relation.blocks * relation.block_size


@dataclass(frozen=True)
class NextChunk:
    """The ranges of the next chunk, and its end (None: nothing is left behind it)."""

    end: int | None
    ranges: tuple[KeyRange, ...]


def next_chunk(
    connection: BoundedConnection,
    table: PublishedTable,
    partial: TableVersion | None,
    *,
    size: int,
    piece: int,
    known: KnownSamples,
) -> NextChunk | None:
    """What is to be read next, about `size` bytes in pieces of `piece`; None: the whole table. `partial`: what there is.

    `connection`: one that sees the snapshot. `known`: by earlier chunks.
    """
    column = table.key[0] if table.key else None
    kinds = {c.name: c.type_oid for c in table.columns}
    if column is None or kinds[column] not in CHUNKED_BY:
        return None
    relations = relations_of(connection, table)
    if partial is None and (
        sum(map(_size, relations)) <= size or not have_index(connection, relations, column)
    ):
        return None
    is_uuid = kinds[column] == UUID
    found = known.of(connection, relations, column, piece=piece, is_uuid=is_uuid)
    begin = partial.chunks[-1][0] if partial is not None else None
    end = chunk_end(found, begin, size)
    if partial is None and (
        end is None or not is_clustered(found, piece) or most_of_one_key(found) > size
    ):
        return None
    return NextChunk(end, tuple(pieces(found, column, begin, end, piece, is_uuid=is_uuid)))


def continued(
    partial: TableVersion, now: TableVersion, shape: Shape, empty: Collection[int]
) -> TableVersion | str:
    """What there is of a copy as it continues from another snapshot; or why it has to begin again instead.

    `now`: a copy that begins with that snapshot, in which the table has this `shape`. `empty`: see `Publication`. Each chunk is
    compared with the one before, and has the shape of its own snapshot: of a partition that has come since the first chunk, and
    goes before the catalog is looked at again, rows may be in this one.
    """
    before = Shape.load(partial.shape)
    reason = _differs(partial, now) or changed(before, shape, empty)
    if reason is not None:
        return reason
    return replace(partial, shape=followed(before, shape, now.start_lsn).dump())


def _differs(partial: TableVersion, now: TableVersion) -> str | None:
    if (partial.system_id, partial.timeline) != (now.system_id, now.timeline):
        return "the source has failed over, or is another server, since its copy began"
    if partial.relation_id != now.relation_id:
        return "the table was dropped, and another one created with its name"
    if partial.rules != now.rules:
        return "its masked columns, its mode or its row filter have changed since its copy began"
    if (partial.layout, partial.key) != (now.layout, now.key):
        return "its columns or its key have changed since its copy began"
    return None
