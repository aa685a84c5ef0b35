"""The path that a lake belongs at: `<lake>/_tuskline/root.json`, made with the lake or by its next takeover.

Iceberg's metadata names files by absolute paths. A lake that is opened at another path is either moved, and its tables
name files that are not there, or a copy, and they name the files of the original: a driver at the copy would remove
those. So a lake is opened at its own path only, under whatever name that has: a link to it, or a second mount.

A lake of an earlier version has no record; its tables' metadata says where they were made.
"""

import json
from pathlib import Path
from urllib.parse import urlsplit

from spark_consumers.lake.manifest.exclusive import create_exclusively
from spark_consumers.lake.manifest.sealed_json import dump, load, unreadable
from walsender_bridge.errors import CorruptError, LakeError

_FILE = "_tuskline/root.json"


def resolved(root: Path) -> Path:
    """The lake's own path, if `root` is another name of the same folder; `root` itself for every other."""
    try:
        home = home_of(root)
    except CorruptError:
        return root
    return home if home is not None and _is_same(home, root) else root


def check(root: Path) -> None:
    """Raise `LakeError` if this lake belongs at another path, `CorruptError` for a record that is damaged."""
    home = home_of(root)
    if home is not None and home != root and not _is_same(home, root):
        raise LakeError(
            f"this lake belongs at {home}: its tables name their files by that path",
            where=str(root),
            repair=f"move it back, or mount it at {home}, or make {home} a symbolic link to it;"
            " a copy is a backup, to be restored to that path",
        )


def record(root: Path) -> None:
    """Note that the lake belongs here, unless that is known. Raises `LakeError` if it is known by another name."""
    check(root)
    file = root / _FILE
    if not file.exists():
        create_exclusively(file, dump({"root": str(home_of(root) or root)}))
    home = home_of(root)
    if home != root:
        raise LakeError(
            f"this lake was created meanwhile at {home}, another name of this folder",
            where=str(root),
            repair="start `tuskline lake run` again",
        )


def home_of(root: Path) -> Path | None:
    """Where the lake in this folder belongs; None if nothing says so. Raises `CorruptError`."""
    file = root / _FILE
    try:
        return Path(load(file)["root"])
    except (FileNotFoundError, NotADirectoryError):
        return _of_tables(root)
    except OSError as error:
        raise unreadable(file, error) from None
    except (CorruptError, KeyError, TypeError) as error:
        what = error.what if isinstance(error, CorruptError) else f"lacks {error}"
        repair = "remove it: the lake's driver recreates it when it starts"
        raise CorruptError(what, where=str(file), repair=repair) from None


def _of_tables(root: Path) -> Path | None:
    """Where the first table was made that says so: its folder's path there ends as it does here."""
    for table in root.glob("tables/*/*/*"):
        if table.is_symlink():
            continue
        for metadata in table.glob("metadata/v*.metadata.json"):
            try:
                location = json.loads(metadata.read_bytes())["location"]
                path = urlsplit(location).path if location.startswith("file:") else location
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                continue
            home = path.removesuffix(f"/{table.relative_to(root)}")
            if home != path:
                return Path(home)
            break
    return None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
