"""Every file of a lake compared with its checksums, without Spark.

Invariants. Nothing is changed. A lake that is written to meanwhile causes no error: a file's checksums are removed
before the file, so checksums without their file mean a loss, and a file that disappeared with its checksums was
removed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from spark_consumers.lakehouse import checksums
from spark_consumers.lakehouse.iceberg_files import local
from spark_consumers.lakehouse.manifest import Chain, Manifest
from walsender_bridge.errors import CorruptError, TusklineError

#: Which file (relative to the lake), how many of how many.
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Found:
    """What was read. `unsealed`: files without checksums, which an older version wrote."""

    links: int = 0
    files: int = 0
    bytes: int = 0
    unsealed: int = 0
    errors: list[TusklineError] = field(default_factory=list)


def verify(chain: Chain, progress: Progress) -> Found:
    """Read everything. Raises `LakeError` if there is no lake; what is damaged is in the result."""
    found = Found()
    chain.identity()
    newest: Manifest | None = None
    for number in chain.numbers():
        try:
            manifest = chain.at_link(number)
        except TusklineError as error:
            found.errors.append(error)
            continue
        if manifest is not None:
            newest = manifest
            found.links += 1
    if newest is not None:
        found.errors += _lost_snapshots(chain.root, newest)
    files = sorted(_files(chain.root))
    for done, file in enumerate(files):
        progress(str(file.relative_to(chain.root)), done, len(files))
        _verify_file(file, found)
    return found


def _files(root: Path) -> Iterator[Path]:
    """The files of all tables, and those that checksums say were there."""
    for folder in ("metadata", "data", "unfit"):
        for file in root.glob(f"tables/*/*/*/{folder}/*"):
            sealed = checksums.file_of(file)
            if sealed is not None and not sealed.exists():
                yield sealed
            elif not file.name.startswith(".") and file.name != "version-hint.text":
                yield file


def _verify_file(file: Path, found: Found) -> None:
    try:
        sealed = checksums.check(file)
        found.files += 1
        found.bytes += file.stat().st_size
        found.unsealed += not sealed
    except CorruptError as error:
        if file.exists() or checksums.sums_of(file).exists():
            found.errors.append(error)
    except FileNotFoundError:
        return
    except OSError as error:
        found.errors.append(
            CorruptError(f"the file cannot be read: {error.strerror}", where=str(file))
        )


def _lost_snapshots(root: Path, manifest: Manifest) -> Iterator[TusklineError]:
    """Tables of the newest epoch whose own metadata does not have the snapshot."""
    for table in manifest.versions:
        folder = root / table.path / "metadata"
        numbers = [
            int(file.name[1:].partition(".")[0]) for file in folder.glob("v[0-9]*.metadata.json")
        ]
        if not numbers:
            yield CorruptError("the table has no metadata", where=str(root / table.path))
            continue
        newest = folder / f"v{max(numbers)}.metadata.json"
        try:
            snapshots = {s["snapshot-id"]: s for s in json.loads(newest.read_bytes())["snapshots"]}
            lists = local(snapshots[table.snapshot_id]["manifest-list"])
        except (ValueError, KeyError, TypeError):
            where = str(newest)
            yield CorruptError(
                f"snapshot {table.snapshot_id} is not in the table's metadata", where=where
            )
            continue
        if not lists.exists():
            yield CorruptError("the manifest list is missing", where=str(lists))
