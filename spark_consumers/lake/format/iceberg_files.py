"""The metadata files of an Iceberg table in a folder, numbered in sequence; each is created by one writer."""

import contextlib
import gzip
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.iceberg_refs import PINS, Ref, with_pins
from spark_consumers.lake.store.place import ObjectPlace, Place, create, place
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.durable import sync_folder

#: Metadata files that are kept behind the newest: far more than a reader can be behind while it opens one.
_KEPT_METADATA = 100
_HINT = "version-hint.text"

log = logs.logger()


class FileIdentity(NamedTuple):
    """What tells a file from another one of its name, and from itself with another content."""

    inode: int
    modified_ns: int
    size: int

    @classmethod
    def of(cls, file: Place) -> "FileIdentity | None":
        """That of a file on a disk; None if it is not there."""
        try:
            there = Path(str(file)).stat()
        except FileNotFoundError:
            return None
        return cls(there.st_ino, there.st_mtime_ns, there.st_size)


def make_folders(table: Place) -> None:
    """Make the folders of a new table, durably, and those that it is in: lake, `tables`, stream, schema. A bucket needs none."""
    if isinstance(table, ObjectPlace):
        return
    for name in ("metadata", "data"):
        (table / name).mkdir(parents=True, exist_ok=True)
    for each in reversed([table, *table.parents[:4]]):
        sync_folder(each)


def link(path: str, number: int, content: bytes) -> bool:
    """Make `content` the metadata of version `number`, exclusively; False if that is not the next one.

    Once it has its name, it is the table's: what is done behind that helps readers and saves space, and does not fail the
    commit. Raises what `create` raises, and if it cannot be told whether the version follows another one.
    """
    folder = place(path) / "metadata"
    file = metadata_file(folder, number)
    if not create(file, content):
        return False
    if number > 1 and not metadata_file(folder, number - 1).exists():
        # We slept until the version before was removed, and perhaps this number too: the table has gone
        # on far beyond it. Nobody has read ours, for it follows nothing.
        file.unlink()
        return False
    with _logged(file, "seal"):
        checksums.seal(file)
    with _logged(file, "hint"):
        _hint(folder, number)
        if not file.exists():
            # We slept until our version was removed, and readers would look for it.
            _hint(folder, max(versions_in(folder), default=number))
    with _logged(file, "removal of old versions"):
        _remove_old(folder, number - _KEPT_METADATA)
    return True


@contextlib.contextmanager
def _logged(file: Place, step: str) -> Iterator[None]:
    """Log that a step behind a commit has failed: a full disk, a store that does not answer."""
    try:
        yield
    except (OSError, TusklineError) as error:
        log.warning("could not complete a commit", file=str(file), step=step, error=str(error))


def _hint(folder: Place, number: int) -> None:
    """Write the hint where readers begin. It only saves them a listing, since they look for greater numbers, too."""
    if isinstance(folder, ObjectPlace):
        (folder / _HINT).replace_by(str(number).encode())
        return
    hint = folder / f".hint-{number}-{os.getpid()}"
    hint.write_text(str(number))
    # A takeover may have removed it, and has written its own.
    with contextlib.suppress(FileNotFoundError):
        hint.replace(folder / _HINT)


def metadata_file(folder: Place, version: int) -> Place:
    """The metadata file of that version, in a table's metadata folder."""
    return folder / f"v{version}.metadata.json"


def versions_in(folder: Place) -> list[int]:
    """The versions of the metadata files in a table's metadata folder, ascending.

    Not of compressed ones (v4.gz.metadata.json), which another writer may have left.
    """
    names = [file.name for file in folder.glob("v*.metadata.json")]
    versions = [name.removeprefix("v").removesuffix(".metadata.json") for name in names]
    return sorted(int(each) for each in versions if each.isdecimal())


def newest_metadata(table: Place) -> Place | None:
    """The metadata file that Iceberg opens of the table in a folder, which may be a compressed one; None without any."""
    if isinstance(table, ObjectPlace) and (found := _hinted(table / "metadata")) is not None:
        return found
    files = [
        file
        for file in (table / "metadata").glob("v*.metadata.json")
        if file.name.removeprefix("v").partition(".")[0].isdecimal()
    ]
    return max(files, key=version_of, default=None)


def manifests_at(location: str) -> list[str]:
    """The manifests and manifest lists of the table at this location, as locations."""
    return [str(file) for file in (place(location) / "metadata").glob("*.avro")]


def _hinted(folder: ObjectPlace) -> ObjectPlace | None:
    """The newest metadata file, from the hint on: a listing would have a thousand names a request. None without a hint that is right."""
    try:
        number = int((folder / _HINT).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    file = folder / f"v{number}.metadata.json"
    if not file.exists():
        return None
    while (after := folder / f"v{number + 1}.metadata.json").exists():
        file, number = after, number + 1
    return file


def version_of(metadata: Place) -> int:
    """The version of a metadata file, also of a compressed one."""
    return int(metadata.name.removeprefix("v").partition(".")[0])


def is_newest(metadata: Place) -> bool:
    """Whether this is the newest metadata file of its table. Without a listing: a table may have ten thousand files."""
    after = following(metadata)
    compressed = after.with_name(f"v{version_of(after)}.gz.metadata.json")
    return metadata.exists() and not after.exists() and not compressed.exists()


def following(metadata: Place) -> Place:
    """The metadata file of the next version."""
    return metadata_file(metadata.parent, version_of(metadata) + 1)


def refs_in(path: str) -> dict[str, Ref]:
    """The branches and tags of the table in a folder, by its newest metadata that is JSON; none if it has none."""
    folder = place(path) / "metadata"
    for version in reversed(versions_in(folder)):
        try:
            return refs_of_record(json.loads(metadata_file(folder, version).read_bytes()))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def refs_of_record(record: Mapping[str, Any]) -> dict[str, Ref]:
    """The branches and tags in a table's metadata. Raises `KeyError` or `TypeError` for what is none."""
    summaries = {s["snapshot-id"]: s["summary"] for s in record.get("snapshots", ())}
    refs = {
        name: Ref.of(
            ref["snapshot-id"],
            summaries.get(ref["snapshot-id"], {}),
            is_branch=ref["type"] == "branch",
        )
        for name, ref in record.get("refs", {}).items()
    }
    return with_pins(refs, record.get("properties", {}).get(PINS))


def snapshots_in(metadata: Place) -> list[int]:
    """The ids of the snapshots in a metadata file, of which there may be thousands: each would be a call of the JVM."""
    content = metadata.read_bytes()
    if metadata.name.endswith(".gz.metadata.json"):
        content = gzip.decompress(content)
    return [snapshot["snapshot-id"] for snapshot in json.loads(content).get("snapshots", ())]


def _remove_old(folder: Place, number: int) -> None:
    """Remove the metadata files up to this version, the oldest first: so none stays behind a gap."""
    old = []
    while (file := metadata_file(folder, number)).exists():
        old.append(file)
        number -= 1
    for file in reversed(old):
        checksums.remove(file)


def prepared(metadata: Place) -> frozenset[str]:
    """Files that look as if they were prepared for a commit after `metadata`: newer, by the file system's clock.

    What a clock that was set back hides stays as garbage. None of them is removed by its time alone. In a bucket, whose times
    are whole seconds, those of the same second are among them.
    """
    try:
        moment = metadata.stat().st_mtime_ns
    except FileNotFoundError:
        return frozenset()
    found = set()
    if isinstance(metadata, ObjectPlace):
        listed = metadata.parent.glob("*.avro")
        return frozenset(str(file) for file in listed if file.stat().st_mtime_ns >= moment)
    for pattern in ("*.avro", ".*.tmp", ".hint-*"):
        for file in metadata.parent.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime_ns > moment:
                    found.add(str(file))
    return frozenset(found)
