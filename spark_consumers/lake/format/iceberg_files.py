"""The metadata files of an Iceberg table in a folder, numbered in sequence; each is created by one writer."""

import contextlib
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.iceberg_refs import PINS, Ref, with_pins
from spark_consumers.lake.store.exclusive import create_exclusively

#: Metadata files that are kept behind the newest: far more than a reader can be behind while it opens one.
_KEPT_METADATA = 100


def link(path: str, number: int, content: str) -> bool:
    """Make `content` the metadata of version `number`, exclusively; False if that is not the next one."""
    folder = Path(path) / "metadata"
    file = metadata_file(folder, number)
    if not create_exclusively(file, content.encode()):
        return False
    if number > 1 and not metadata_file(folder, number - 1).exists():
        # We slept until the version before was removed, and perhaps this number too: the table has gone
        # on far beyond it. Nobody has read ours, for it follows nothing.
        file.unlink()
        return False
    checksums.seal(file)
    _hint(folder, number)
    if not file.exists():
        # We slept until our version was removed, and readers would look for it.
        _hint(folder, max(versions_in(folder), default=number))
    _remove_old(folder, number - _KEPT_METADATA)
    return True


def _hint(folder: Path, number: int) -> None:
    """Write the hint where readers begin. It only saves them a listing, since they look for greater numbers, too."""
    hint = folder / f".hint-{number}-{os.getpid()}"
    hint.write_text(str(number))
    # A takeover may have removed it, and has written its own.
    with contextlib.suppress(FileNotFoundError):
        hint.replace(folder / "version-hint.text")


def metadata_file(folder: Path, version: int) -> Path:
    """The metadata file of that version, in a table's metadata folder."""
    return folder / f"v{version}.metadata.json"


def versions_in(folder: Path) -> list[int]:
    """The versions of the metadata files in a table's metadata folder, ascending.

    Not of compressed ones (v4.gz.metadata.json), which another writer may have left.
    """
    names = [file.name for file in folder.glob("v*.metadata.json")]
    versions = [name.removeprefix("v").removesuffix(".metadata.json") for name in names]
    return sorted(int(each) for each in versions if each.isdecimal())


def newest_metadata(table: Path) -> Path | None:
    """The metadata file that Iceberg opens of the table in a folder, which may be a compressed one; None without any."""
    files = [
        file
        for file in (table / "metadata").glob("v*.metadata.json")
        if file.name.removeprefix("v").partition(".")[0].isdecimal()
    ]
    return max(files, key=version_of, default=None)


def version_of(metadata: Path) -> int:
    """The version of a metadata file, also of a compressed one."""
    return int(metadata.name.removeprefix("v").partition(".")[0])


def is_newest(metadata: Path) -> bool:
    """Whether this is the newest metadata file of its table."""
    return metadata.exists() and not following(metadata).exists()


def following(metadata: Path) -> Path:
    """The metadata file of the next version."""
    return metadata_file(metadata.parent, version_of(metadata) + 1)


def refs_in(path: str) -> dict[str, Ref]:
    """The branches and tags of the table in a folder, by its newest metadata that is JSON; none if it has none."""
    folder = Path(path, "metadata")
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


def snapshots_in(metadata: Path) -> list[int]:
    """The ids of the snapshots in a metadata file, of which there may be thousands: each would be a call of the JVM."""
    content = metadata.read_bytes()
    if metadata.name.endswith(".gz.metadata.json"):
        content = gzip.decompress(content)
    return [snapshot["snapshot-id"] for snapshot in json.loads(content).get("snapshots", ())]


def local(location: str) -> Path:
    """The path that Iceberg's location means, whose names may have any character: nothing in it is encoded."""
    if not location.startswith("file:"):
        return Path(location)
    place = location.removeprefix("file:")
    return Path("/", place[2:].partition("/")[2]) if place.startswith("//") else Path(place)


def _remove_old(folder: Path, number: int) -> None:
    """Remove the metadata files up to this version, the oldest first: so none stays behind a gap."""
    old = []
    while (file := metadata_file(folder, number)).exists():
        old.append(file)
        number -= 1
    for file in reversed(old):
        checksums.remove(file)


def prepared(metadata: Path) -> frozenset[str]:
    """Files that look as if they were prepared for a commit after `metadata`: newer, by the file system's clock.

    What a clock that was set back hides stays as garbage. None of them is removed by its time alone.
    """
    try:
        moment = metadata.stat().st_mtime_ns
    except FileNotFoundError:
        return frozenset()
    found = set()
    for pattern in ("*.avro", ".*.tmp", ".hint-*"):
        for file in metadata.parent.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime_ns > moment:
                    found.add(str(file))
    return frozenset(found)
