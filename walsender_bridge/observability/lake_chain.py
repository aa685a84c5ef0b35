"""The configured lake, opened: its chain of manifests, in a folder or in a bucket."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Chain
    from spark_consumers.lake.store.lake_store import StoreOptions
    from walsender_bridge.config import LakeSection


def store_options(lake: "LakeSection") -> "StoreOptions":
    """How the lake's bucket is reached."""
    from spark_consumers.lake.store.lake_store import StoreOptions

    return StoreOptions(lake.endpoint, lake.region, lake.allow_http)


def lake_chain(lake: "LakeSection") -> "Chain":
    """The chain of `[lake]`. Raises `NotSupportedError`, `UsageError`."""
    from spark_consumers.lake.manifest.chain import open_chain

    return open_chain(lake.uri, store_options(lake))
