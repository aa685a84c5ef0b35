"""The store of a lake by its address: a path, `file://`, or `s3://bucket/prefix`."""

from pathlib import Path
from urllib.parse import urlsplit

from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT, LakeStore, StoreOptions
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.store.place import Place, is_object, options_of, reach
from walsender_bridge.errors import NotSupportedError


def open_store(lake: str | Place, options: StoreOptions) -> LakeStore:
    """The lake's store; nothing is read. Raises `NotSupportedError`, and `UsageError` for a URL without a prefix.

    From then on this process reaches the places below the lake in the same way; without options as before.
    """
    if not is_object(lake):
        return LocalStore(local_root(lake))
    # Not imported where lakes are in folders.
    from spark_consumers.lake.store.object_store import ObjectStore

    if options == FROM_ENVIRONMENT:
        options = options_of(lake)
    store = ObjectStore.at(str(lake), options)
    reach(store.location, options)
    return store


def local_root(lake: str | Place) -> Path:
    """The lake's folder. Raises `NotSupportedError` for a lake that is in none."""
    text = str(lake)
    parts = urlsplit(text)
    if len(parts.scheme) <= 1:
        return Path(text).absolute()
    if parts.scheme == "file" and parts.netloc in {"", "localhost"}:
        return Path(parts.path)
    raise NotSupportedError(
        f"a lake on {parts.scheme}:// is not supported by this version",
        where=f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}",
        repair="use a folder, or s3://bucket/prefix",
    )
