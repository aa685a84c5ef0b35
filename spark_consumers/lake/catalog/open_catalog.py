"""The catalog of a lake's tables: the folder, or the REST catalog that the lake's record names (`lake_catalog.RECORD`)."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.manifest.chain import Chain
from spark_consumers.lake.store.place import location_of, remove_tree
from spark_consumers.spark.lake_catalog import CREDENTIAL, RECORD, TOKEN, LakeCatalog
from walsender_bridge.errors import LakeError, NotSupportedError

if TYPE_CHECKING:
    # Not imported where lakes are in folders: its library is of an extra.
    from spark_consumers.lake.catalog.rest_catalog import RestCatalog
    from spark_consumers.lake.catalog.rest_http import RestOptions


def recorded(chain: Chain) -> LakeCatalog | None:
    """The REST catalog that has the lake's tables; None if they are in its folder. Raises `CorruptError`."""
    try:
        content = chain.store.read(RECORD)
    except FileNotFoundError:
        return None
    return LakeCatalog.parse(content, chain.store.where(RECORD))


def for_writing(chain: Chain, wanted: LakeCatalog | None) -> "FolderCatalog | RestCatalog":
    """The catalog for the lake's driver, which is configured as `wanted`; a lake without tables is put there.

    Raises `LakeError` if the lake's tables are elsewhere, and what `RestCatalog.opened` raises.
    """
    found = recorded(chain)
    if found is None and wanted is not None:
        head = chain.head()
        if head is not None and list(head.versions):
            raise _elsewhere(chain, "the tables of this lake are in its folder, not in a catalog")
        chain.store.create(RECORD, wanted.dump())
        found = recorded(chain)
    if wanted is None:
        if found is not None:
            raise _elsewhere(chain, f"the tables of this lake are in the catalog at {found.uri}")
        return FolderCatalog(chain.root)
    assert found is not None
    if not found.is_same_place(wanted):
        raise _elsewhere(
            chain,
            f"the tables of this lake are in the namespace {'.'.join(found.namespace)!r} of the warehouse {found.warehouse!r}",
        )
    if found != wanted:
        # The server has another address, or other certificates.
        chain.store.replace(RECORD, wanted.dump())
    return probed(chain, wanted)


def probed(chain: Chain, wanted: LakeCatalog) -> "RestCatalog":
    """The catalog, after it has shown what it can do. Raises `NotSupportedError` for one that cannot have a lake."""
    from spark_consumers.lake.catalog.rest_catalog import PROBE, RestCatalog

    root = location_of(chain.root)
    found = RestCatalog.opened(options(wanted), prefix=wanted.namespace, root=root)
    # What the server has written of the table that it was asked for.
    for folder in chain.root.glob(f"_tuskline/catalog/{PROBE}*"):
        remove_tree(folder)
    if not found.supports_branches:
        raise NotSupportedError(
            "the catalog does not keep a table's branches, or its earlier snapshots",
            where=wanted.uri,
            repair="use a catalog that does, or omit [lake.catalog]: the lake then keeps its tables' metadata itself",
        )
    return found


def for_reading(chain: Chain) -> "RestCatalog | None":
    """The catalog for those who only read tables; None: they are opened by their folders."""
    found = recorded(chain)
    if found is None:
        return None
    from spark_consumers.lake.catalog.rest_catalog import RestCatalog

    return RestCatalog.for_reading(options(found), found.namespace, location_of(chain.root))


def options(found: LakeCatalog) -> "RestOptions":
    """How requests reach the catalog. What the environment has goes before a token's file, which another machine may lack."""
    from spark_consumers.lake.catalog.rest_http import RestOptions

    from_environment = os.environ.get(TOKEN) or os.environ.get(CREDENTIAL)
    file = Path(found.token_file) if found.token_file and not from_environment else None
    return RestOptions(
        found.uri,
        warehouse=found.warehouse,
        oauth2_uri=found.oauth2_uri,
        scope=found.scope,
        token_file=file,
        ca=Path(found.ca) if found.ca else None,
        allow_http=found.allow_http,
    )


def is_guarded(found: LakeCatalog) -> bool:
    """Whether requests of this process have a token."""
    return bool(found.token_file or os.environ.get(TOKEN) or os.environ.get(CREDENTIAL))


def _elsewhere(chain: Chain, what: str) -> LakeError:
    return LakeError(
        what,
        where=chain.store.location,
        repair="restore the former [lake.catalog], or specify another folder for a new lake",
    )
