"""Files of a table that nothing names any more: which they may be, and the steps that remove them.

A writer that is killed between the commit that forgets files and their removal leaves them behind for good, because no
metadata names them; so do tasks and commits that never came to an end. After a takeover each table is swept once, in
two steps of housekeeping: the first lists what earlier writers may have left (`may_be_left`), the second removes what
the table's metadata does not name (`sweep`). The time between them is a grace period for commits of others.

Why nothing is removed that is needed, whenever this writer is suspended:

- A data file has its writer's term in its name. Writers of lower terms commit nothing any more, and a newer writer's
  files have a higher term: what metadata does not name once they are fenced is never named.
- Iceberg's own files have no term. They are listed *before* the branch of this writer is looked for. A newer writer
  prepares files only after the takeover that drops the branch: if the branch is there, none of the listed files is a
  newer writer's. What it builds on is named by the metadata that is read after that.
- Nor is any of them this writer's: listed is what was there before its takeover, by the clock of the file system or the store
  alone. In a bucket a commit that this writer has given up may arrive later, and is then its own: its files are named by
  nothing until then. What an earlier writer prepares after that goes with the next takeover.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from spark_consumers.lake.format import checksums
from spark_consumers.lake.manifest import takeover
from spark_consumers.lake.manifest.takeover import Effect
from spark_consumers.lake.store.place import Place
from walsender_bridge.errors import FencedError

DATA, METADATA = "data", "metadata"


def may_be_left(folder: str, name: str, term: int) -> bool:
    """Whether a file of this name, in `DATA` or `METADATA` of a table, may be an earlier writer's. `term` is ours."""
    if folder == DATA:
        # Without a term it is a user's, or of an older version.
        return 0 < takeover.term_of(name) < term
    draft = name.startswith(".") and name.endswith(".tmp")
    return name.endswith(".avro") or draft or name.startswith(".hint-")


def listed(table: Place, term: int, taken_at: int) -> frozenset[str]:
    """The files in a table's folder that may be left, and files that have only their checksums left.

    `taken_at`: when the link of our takeover was written, in nanoseconds, by the clock that the files' times are of.
    """
    found = set()
    for folder in (DATA, METADATA):
        with contextlib.suppress(FileNotFoundError):
            for file in (table / folder).iterdir():
                sealed = checksums.file_of(file)
                if sealed is None:
                    if may_be_left(folder, file.name, term) and (
                        folder == DATA or _is_before(file, taken_at)
                    ):
                        found.add(str(file))
                elif not sealed.exists() and may_be_left(folder, sealed.name, term):
                    found.add(str(sealed))
    return frozenset(found)


def _is_before(file: Place, moment: int) -> bool:
    try:
        return file.stat().st_mtime_ns < moment
    except FileNotFoundError:
        return False


def sweep(
    listed: frozenset[str], is_ours: Callable[[Any], bool], where: str
) -> Generator[Effect, Any, int]:
    """Remove those of the listed files that the table does not need; how many.

    `is_ours`: whether our branch is in the table's metadata. Raises `FencedError` if it is not.
    """
    if not listed:
        return 0
    if not is_ours((yield takeover.ReadTable())):
        raise FencedError(
            "another writer has taken the table over",
            where=where,
            repair="no action is needed: the newer writer continues",
        )
    needed: frozenset[str] = yield takeover.ReadNamed(listed)
    for file in sorted(listed - needed):
        yield takeover.RemovePrepared(file)
    return len(listed - needed)
