"""Tables as a task gets them: packed, since it gets every table that its range may have changes of, and opens the few that have.

A table is packed again only when something about it has changed, so what an epoch costs does not grow with the tables that
follow. Runs without Spark.
"""

import pickle
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from spark_consumers.decode.masking import NOTHING, Masking
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.index.run_format import Run
from walsender_bridge.postgres.protocol.pgoutput import Relation

#: The row index of a table (None: it has to be built), and how many small files the table may have.
Index = tuple[tuple[Run, ...] | None, int]


@dataclass(frozen=True)
class PackedTable:
    """One table. `relation`: its name at the source; `oid`: its OID, by which the log has its changes. `content`: its target and index, pickled.

    The target's `prefix` lacks the stage of the epoch, which the task has.
    """

    name: str
    relation: str
    oid: int
    quarantines: bool
    content: bytes

    @classmethod
    def of(cls, target: Target, index: Index) -> "PackedTable":
        """The table of this target, whose prefix lacks the stage, with this index."""
        return cls(
            target.name,
            target.relation,
            target.relation_id,
            target.quarantines,
            pickle.dumps((target, index), pickle.HIGHEST_PROTOCOL),
        )

    def open(self, stage: str) -> tuple[Target, Index]:
        """The target of an epoch with this stage, and the index."""
        target, index = pickle.loads(self.content)  # noqa: S301  # our driver has pickled it
        feed = target.feed and replace(target.feed, prefix=f"{target.feed.prefix}{stage}")
        return replace(target, prefix=f"{target.prefix}{stage}", feed=feed), index


class TaskTables:
    """The tables of one task, each opened when it is first asked for."""

    def __init__(self, packed: Sequence[PackedTable], stage: str) -> None:
        self._stage = stage
        self._packed = {table.name: table for table in packed}
        self._names: dict[str, list[str]] = defaultdict(list)
        self._oids: dict[int, list[str]] = defaultdict(list)
        for table in packed:
            self._names[table.relation].append(table.name)
            self._oids[table.oid].append(table.name)
        self._open: dict[str, tuple[Target, Index]] = {}

    @property
    def relations(self) -> Collection[str]:
        """What the log has of these tables, by name or OID: changes under the name of one may show that it is another table by now."""
        return {*self._names, *map(str, self._oids)}

    def keeping_unrepresentable(self) -> set[str]:
        """The OIDs, as text, of the tables of which unrepresentable values are kept, to be quarantined."""
        return {str(table.oid) for table in self._packed.values() if table.quarantines}

    def of(self, relation: Relation) -> list[Target]:
        """The tables that changes of this relation concern.

        A relation whose OID is a table's is that table, whatever its name was. Another one may have come in the place of the table that
        had its name.
        """
        return self.of_oid(relation.oid) or [
            self[name] for name in self._names.get(relation.full_name, ())
        ]

    def of_oid(self, oid: int) -> list[Target]:
        """The tables with this OID."""
        return [self[name] for name in self._oids.get(oid, ())]

    def masking(self, relation: Relation) -> Masking | str:
        """How this relation of the log is masked, or why its values must not be decoded."""
        targets = self.of(relation)
        own = next((target for target in targets if target.relation_id == relation.oid), None)
        if own is not None:
            return own.masking
        if any(target.masking != NOTHING for target in targets):
            # It has the name of a masked table: whatever it is, it is not that table's rows.
            return "it is another table than the one whose columns are masked"
        return NOTHING

    def __getitem__(self, name: str) -> Target:
        """The target of the table with this name."""
        return self._opened(name)[0]

    def index(self, name: str) -> Index:
        """The index of the table with this name."""
        return self._opened(name)[1]

    def _opened(self, name: str) -> tuple[Target, Index]:
        if name not in self._open:
            self._open[name] = self._packed[name].open(self._stage)
        return self._open[name]
