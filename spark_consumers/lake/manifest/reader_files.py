"""What readers write for themselves: `<lake>/_tuskline/live/<reader>-...`, folders with the folds of a large live read.

A reader removes its own. Housekeeping removes those of readers whose record (`reader_leases`) is gone: a reader has its record before
it has a folder, so the folders are listed before the records.
"""

import uuid
from collections.abc import Callable, Collection

from spark_consumers.lake.store.lake_store import STATE
from spark_consumers.lake.store.place import Place, remove_tree

_FOLDER = f"{STATE}/live"


def new_folder(root: Place, reader: str) -> Place:
    """A folder for this reader (`ReaderLease.reader`), in the lake in `root`; it is not made here."""
    return root / _FOLDER / f"{reader}-{uuid.uuid4().hex[:12]}"


def remove_dead(root: Place, living: Callable[[], Collection[str]]) -> None:
    """Remove the folders of readers that are not among the `living` ones."""
    found: list[Place] = [*(root / _FOLDER).glob("*")]
    if not found:
        return
    readers = living()
    for folder in found:
        if folder.name.partition("-")[0] not in readers:
            remove_tree(folder)
