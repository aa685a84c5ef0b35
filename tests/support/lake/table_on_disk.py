"""One table on a disk, written by the functions that the executors run, without Spark and without Iceberg."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyroaring import BitMap64

from spark_consumers.lake.epoch.complete import Completed, run_complete, run_index
from spark_consumers.lake.epoch.draft import Draft
from spark_consumers.lake.epoch.removal import Located, run_removal
from spark_consumers.lake.epoch.stage import Staged
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.position_deletes import read_removed
from spark_consumers.lake.format.table_format import FileInfo, Vector
from spark_consumers.lake.index.run_format import Run


class TableOnDisk:
    """Its data files, vectors and index, as the snapshots and links of a lake would name them; `lacks`: why an epoch was not applied."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, FileInfo] = {}
        self.vectors: dict[str, Vector] = {}
        self.runs: tuple[Run, ...] = ()
        self.count = 0
        self.lacks = ""

    def apply(
        self,
        target: Target,
        staged: Staged,
        scratch: str,
        *,
        small_files: int = 8,
        located: Sequence[Located] = (),
    ) -> list[Completed]:
        """What an epoch does with a table. `located`: what its parts have found that they remove."""
        if not staged.changes_table:
            return []
        draft = Draft(target, staged, 1, self.runs)
        draft.locate(located)
        draft.found(run_removal(draft.removal(scratch, small_files)))
        assert not draft.damage
        self.lacks = draft.removed.lacks
        if self.lacks:
            return []
        for task in draft.completing():
            draft.completed(run_complete(task))
        last = draft.indexing()
        if last is not None:
            draft.indexed(run_index(last))
        dropped = sum(each.dropped for each in draft.done)
        self.count = 0 if staged.truncated else self.count
        self.count += staged.added + draft.removed.absent - dropped
        if staged.truncated:
            self.files, self.vectors = {}, {}
        for vector in draft.removed.replaced:
            assert self.vectors.pop(vector.file) == vector
        for file in draft.removed.gone:
            del self.files[file.name]
        for vector in draft.removed.vectors:
            assert vector.file not in self.vectors, "no data file has two vectors"
            assert vector.file in self.files
            self.vectors[vector.file] = vector
        self.files |= {f"data/{Path(file.path).name}": file for file in draft.rows}
        assert self.vectors.keys() <= self.files.keys()
        assert draft.runs is not None
        self.runs = draft.runs
        return draft.done

    def rows(self, schema: pa.Schema) -> pa.Table:
        """All living rows."""
        parts = [schema.empty_table()]
        for name, file in self.files.items():
            removed = BitMap64()
            if name in self.vectors:
                removed = read_removed(self.folder, self.vectors[name])
            alive = pa.array([i for i in range(file.rows) if i not in removed], pa.int64())
            parts.append(pq.read_table(file.path).take(alive).cast(schema))
        return pa.concat_tables(parts)
