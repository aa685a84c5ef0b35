"""The path that a lake belongs at: `<lake>/_tuskline/root.json`, made with the lake or by its next takeover.

Iceberg's metadata names files by absolute paths. A lake that is opened at another path is either moved, and its tables
name files that are not there, or a copy, and they name the files of the original: a driver at the copy would remove
those. So a lake is opened at its own path only, under whatever name that has: a link to it, or a second mount.

A lake of an earlier version has no record; its tables' metadata says where they were made.
"""

import json
from pathlib import Path
from urllib.parse import urlsplit

from spark_consumers.lake.manifest.sealed_json import dump, load, unreadable
from spark_consumers.lake.store.lake_store import STATE, LakeStore
from spark_consumers.lake.store.local_store import LocalStore
from walsender_bridge.errors import CorruptError, LakeError

_FILE = f"{STATE}/root.json"


def resolved(root: Path) -> Path:
    """The lake's own path, if `root` is another name of the same folder; `root` itself for every other."""
    store = LocalStore(root)
    try:
        home = home_of(store)
    except CorruptError:
        return root
    return Path(home) if home is not None and store.is_at(home) else root


def check(store: LakeStore) -> None:
    """Raise `LakeError` if this lake belongs at another path, `CorruptError` for a record that is damaged."""
    home = home_of(store)
    if home is not None and home != store.location and not store.is_at(home):
        raise LakeError(
            f"this lake belongs at {home}: its tables name their files by that path",
            where=store.location,
            repair=f"move it back, or mount it at {home}, or make {home} a symbolic link to it;"
            " a copy is a backup, to be restored to that path",
        )


def record(store: LakeStore) -> None:
    """Note that the lake belongs here, unless that is known. Raises `LakeError` if it is known by another name."""
    check(store)
    if not store.exists(_FILE):
        store.create(_FILE, dump({"root": home_of(store) or store.location}))
    home = home_of(store)
    if home != store.location:
        raise LakeError(
            f"this lake was created meanwhile at {home}, another name of this folder",
            where=store.location,
            repair="start `tuskline lake run` again",
        )


def home_of(store: LakeStore) -> str | None:
    """Where the lake in this store belongs; None if nothing says so. Raises `CorruptError`."""
    where = store.where(_FILE)
    try:
        root = load(store, _FILE)["root"]
        if not isinstance(root, str):
            raise TypeError("root is not a path")
        return root
    except (FileNotFoundError, NotADirectoryError):
        return _of_tables(store.folder) if store.folder is not None else None
    except OSError as error:
        raise unreadable(where, error) from None
    except (CorruptError, KeyError, TypeError) as error:
        what = error.what if isinstance(error, CorruptError) else f"lacks {error}"
        repair = "remove it: the lake's driver recreates it when it starts"
        raise CorruptError(what, where=where, repair=repair) from None


def _of_tables(root: Path) -> str | None:
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
            home = str(path).removesuffix(f"/{table.relative_to(root)}")
            if home != path:
                return home
            break
    return None
