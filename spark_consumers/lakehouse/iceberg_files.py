"""The metadata files of an Iceberg table in a folder: one after the other, each made by one writer."""

import contextlib
import os
from pathlib import Path
from urllib.parse import urlsplit

from spark_consumers.lakehouse.exclusive import create_exclusively

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
    # The hint only saves readers a listing: they look for greater numbers behind it.
    hint = folder / f".hint-{number}-{os.getpid()}"
    hint.write_text(str(number))
    hint.replace(folder / "version-hint.text")
    _remove_old(folder, number - _KEPT_METADATA)
    return True


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
        file.unlink(missing_ok=True)


def remove_unlinked(metadata: Path) -> None:
    """Remove what was prepared for a commit that never came: it is newer than the metadata before ours."""
    with contextlib.suppress(FileNotFoundError):
        moment = metadata.stat().st_mtime_ns
        for pattern in ("*.avro", ".v*.tmp", ".hint-*"):
            for file in metadata.parent.glob(pattern):
                with contextlib.suppress(FileNotFoundError):
                    if file.stat().st_mtime_ns > moment:
                        file.unlink()
