"""The Iceberg tables that an epoch makes itself, for views and feeds. Copies make theirs in `copy.bootstrap`."""

from collections.abc import Mapping

import pyarrow as pa

from spark_consumers.lake.format.table_format import TableFormat
from spark_consumers.lake.manifest.chain import Chain, Manifest, TableVersion
from spark_consumers.lake.policy import copies_on_write, deletes_by_position
from spark_consumers.lake.tables.new_folder import new_folder
from spark_consumers.lake.tables.schema_change import schema_hash
from walsender_bridge.postgres.protocol.relation_name import split_relation


class NewTables:
    """Makes tables for one term of a writer, and removes those of attempts that did not become epochs."""

    def __init__(
        self, chain: Chain, tables: TableFormat, term: int, deletes: Mapping[str, str]
    ) -> None:
        self._chain = chain
        self._format = tables
        self._term = term
        self._deletes = deletes
        #: Folders that an attempt has made, which no link may name.
        self._made: list[str] = []

    def create(self, full: str, columns: pa.Schema, *, relation_id: int = 0) -> TableVersion:
        """A new table of this full name (`stream.schema.name`), without a snapshot."""
        stream, _, relation = full.partition(".")
        path = new_folder(stream, *split_relation(relation), self._term)
        for_others = copies_on_write(self._deletes, full) or deletes_by_position(
            self._deletes, full
        )
        self._made.append(path)
        self._format.create(self._folder(path), columns, vectors=not for_others)
        return TableVersion(
            path=path,
            format=self._format.name,
            snapshot_id=0,
            schema_hash=schema_hash(columns, ()),
            key=(),
            text_columns=(),
            start_lsn=0,
            offset=0,
            rows=0,
            relation_id=relation_id,
        )

    def remove_unnamed(self, head: Manifest) -> None:
        """Remove the folders that earlier attempts have made, and no link names."""
        if self._made and self._chain.has(head.link + 1):
            # An attempt whose outcome was not known has been published: `head` does not say what is named.
            return
        named = {table.path for table in head.versions}
        while self._made:
            path = self._made.pop()
            if path not in named:
                self._format.drop(self._folder(path))

    def _folder(self, path: str) -> str:
        return str(self._chain.root / path)
