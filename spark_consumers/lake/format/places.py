"""Where a table has its files: what a writer makes before the first of them, and removes with the last."""

import shutil
from pathlib import Path

from spark_consumers.lake.format.iceberg_files import local
from walsender_bridge.runtime.durable import sync_folder


def make(path: str) -> None:
    """Make the folders of a new table, durably, and those that it is in: lake, `tables`, stream, schema."""
    folder = Path(path)
    for name in ("metadata", "data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for each in reversed([folder, *folder.parents[:4]]):
        sync_folder(each)


def manifests_at(location: str) -> list[str]:
    """The manifests and manifest lists of the table at this location, as locations."""
    return [str(file) for file in (local(location) / "metadata").glob("*.avro")]


def remove_file(location: str) -> None:
    """Remove the file at this location, a path or a URI, if it is there."""
    local(location).unlink(missing_ok=True)


def remove(path: str) -> None:
    """Remove the folder with all that is in it, if it is there."""
    shutil.rmtree(path, ignore_errors=True)
