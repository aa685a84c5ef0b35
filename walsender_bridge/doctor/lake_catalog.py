"""Checks of the REST catalog that has the lake's tables: whether it answers, and what it can do."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.server import failed
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.observability.lake_chain import lake_chain, rest_catalog

if TYPE_CHECKING:
    from walsender_bridge.config import Config, LakeSection

_CHECK: Final = "catalog of the lake"


def of_catalog(settings: "Config") -> Iterator[Finding]:
    """What keeps the lake from being in its catalog, and what engines do not get from it.

    A table is created there and dropped again: servers do not tell what they can do.
    """
    lake = settings.lake
    if lake is None or "lake" not in settings.parts or lake.catalog.type == "folder":
        return
    from spark_consumers.lake.catalog import open_catalog

    wanted = rest_catalog(lake)
    assert wanted is not None
    try:
        found = open_catalog.probed(lake_chain(lake), wanted)
        if (trouble := found.trouble()) is not None:
            yield Finding(
                _CHECK,
                lake.catalog.uri,
                trouble.what,
                Severity.WARNING,
                repair="check the catalog's load: an epoch makes several requests for each table that it changes",
            )
        yield from _of_versions(lake, v3=found.supports_v3)
        if not found.supports_multi_table:
            yield Finding(
                _CHECK,
                lake.catalog.uri,
                "the catalog does not reliably commit several tables at once: other engines may see parts of an epoch for a moment",
                Severity.WARNING,
                repair="use a catalog whose transactions/commit is atomic (docs/rest-catalog.md)",
            )
    except TusklineError as error:
        yield failed(_CHECK, error.where or lake.catalog.uri, error)


def _of_versions(lake: "LakeSection", *, v3: bool) -> Iterator[Finding]:
    if v3:
        return
    vectors = sorted(name for name, how in lake.deletes.items() if how == "vectors")
    if vectors:
        yield Finding(
            _CHECK,
            lake.catalog.uri,
            "the catalog does not support version 3 of Iceberg's format, and thus no deletion vectors: "
            + ", ".join(vectors),
            Severity.ERROR,
            repair='set "copy-on-write" for them in [lake.deletes], or use another catalog',
            cause=Cause.CONFIG,
        )
        return
    yield Finding(
        _CHECK,
        lake.catalog.uri,
        "the catalog does not support version 3 of Iceberg's format: rows are removed by rewriting data files",
        Severity.WARNING,
        repair="use a catalog with version 3 where tables are large and change everywhere",
    )
