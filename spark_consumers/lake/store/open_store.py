"""The store of a lake by its address: a path, `file://`, or `s3://bucket/prefix`."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from spark_consumers.lake.store.lake_store import LakeStore, StoreOptions
from spark_consumers.lake.store.local_store import LocalStore
from walsender_bridge.errors import NotSupportedError


def open_store(lake: str | Path, options: StoreOptions) -> LakeStore:
    """The lake's store; nothing is read. Raises `NotSupportedError`, and `UsageError` for a URL without a prefix."""
    if urlsplit(os.fspath(lake)).scheme != "s3":
        return LocalStore(local_root(lake))
    # Not imported where lakes are in folders.
    from spark_consumers.lake.store.object_store import ObjectStore

    return ObjectStore.at(str(lake), options)


def local_root(lake: str | Path) -> Path:
    """The lake's folder. Raises `NotSupportedError` for a lake that is in none, and so cannot have tables yet."""
    text = os.fspath(lake)
    parts = urlsplit(text)
    if len(parts.scheme) <= 1:
        return Path(text).absolute()
    if parts.scheme == "file" and parts.netloc in {"", "localhost"}:
        return Path(parts.path)
    raise NotSupportedError(
        f"a lake on {parts.scheme}:// is not supported by this version",
        where=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}",
        repair="use a folder on a local disk",
    )
