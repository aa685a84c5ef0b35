"""The metadata files of an Iceberg table in a folder, numbered in sequence; each is created by one writer."""

import contextlib
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

from spark_consumers.lake.format import checksums
from spark_consumers.lake.format.iceberg_refs import Ref
from spark_consumers.lake.manifest.exclusive import create_exclusively

#: Metadata files that are kept behind the newest: far more than a reader can be behind while it opens one.
_KEPT_METADATA = 100


def link(path: str, number: int, content: str) -> bool:
    """Make `content` the metadata of version `number`, exclusively; False if that is not the next one."""
    folder = Path(path) / "metadata"
    file = folder / f"v{number}.metadata.json"
    if not create_exclusively(file, content.encode()):
        return False
    if number > 1 and not (folder / f"v{number - 1}.metadata.json").exists():
        # We slept until the version before was removed, and perhaps this number too: the table has gone
        # on far beyond it. Nobody has read ours, for it follows nothing.
        file.unlink()
        return False
    checksums.seal(file)
    _hint(folder, number)
    if not file.exists():
        # We slept until our version was removed, and readers would look for it.
        _hint(folder, max((version_of(f) for f in folder.glob("v*.metadata.json")), default=number))
    _remove_old(folder, number - _KEPT_METADATA)
    return True


def _hint(folder: Path, number: int) -> None:
    """Write the hint where readers begin. It only saves them a listing, since they look for greater numbers, too."""
    hint = folder / f".hint-{number}-{os.getpid()}"
    hint.write_text(str(number))
    # A takeover may have removed it, and has written its own.
    with contextlib.suppress(FileNotFoundError):
        hint.replace(folder / "version-hint.text")


def version_of(metadata: Path) -> int:
    """The version of a metadata file."""
    return int(metadata.name.removeprefix("v").partition(".")[0])


def following(metadata: Path) -> Path:
    """The metadata file of the next version."""
    return metadata.with_name(f"v{version_of(metadata) + 1}.metadata.json")


def refs_in(path: str) -> dict[str, Ref]:
    """The branches and tags of the table in a folder, by its newest metadata that is JSON; none if it has none."""
    for file in sorted(
        Path(path, "metadata").glob("v*.metadata.json"), key=version_of, reverse=True
    ):
        try:
            record = json.loads(file.read_bytes())
            summaries = {s["snapshot-id"]: s["summary"] for s in record["snapshots"]}
            return {
                name: Ref.of(
                    ref["snapshot-id"],
                    summaries.get(ref["snapshot-id"], {}),
                    is_branch=ref["type"] == "branch",
                )
                for name, ref in record.get("refs", {}).items()
            }
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def local(location: str) -> Path:
    """The path that Iceberg's location means."""
    return Path(urlsplit(location).path if location.startswith("file:") else location)


def _remove_old(folder: Path, number: int) -> None:
    """Remove the metadata files up to this version, the oldest first: so none stays behind a gap."""
    old = []
    while (file := folder / f"v{number}.metadata.json").exists():
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
