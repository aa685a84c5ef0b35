"""The configured lake, opened: its chain of manifests, in a folder or in a bucket."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Chain
    from spark_consumers.lake.store.lake_store import StoreOptions
    from spark_consumers.spark.lake_catalog import LakeCatalog
    from walsender_bridge.config import LakeSection


def store_options(lake: "LakeSection") -> "StoreOptions":
    """How the lake's bucket is reached."""
    from spark_consumers.lake.store.lake_store import StoreOptions

    return StoreOptions(lake.endpoint, lake.region, lake.allow_http)


def rest_catalog(lake: "LakeSection") -> "LakeCatalog | None":
    """The REST catalog that has the tables' metadata; None: the lake's folder has it."""
    from spark_consumers.spark.lake_catalog import LakeCatalog

    its = lake.catalog
    if its.type == "folder":
        return None
    return LakeCatalog(
        its.uri,
        warehouse=its.warehouse,
        namespace=tuple(its.namespace.split(".")),
        oauth2_uri=its.oauth2_uri,
        scope=its.scope,
        token_file=str(its.token_file or ""),
        ca=str(its.ca or ""),
        allow_http=its.allow_http,
    )


def lake_chain(lake: "LakeSection") -> "Chain":
    """The chain of `[lake]`. Raises `NotSupportedError`, `UsageError`."""
    from spark_consumers.lake.manifest.chain import open_chain

    return open_chain(lake.uri, store_options(lake))
