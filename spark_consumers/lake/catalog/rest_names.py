"""What tables are called in a REST catalog. Pure.

A shown copy is called as its table is in PostgreSQL (`plain_name`), any other as its folder (`own_name`), in characters that all
catalogs take: some take no others, and servers that run on Jetty refuse a path with an encoded `%`. There may be tables in
PostgreSQL whose names a catalog refuses; these are found and written by their own names.
"""

import re
from urllib.parse import quote, unquote

from spark_consumers.lake.catalog.table_catalog import TableId
from spark_consumers.lake.manifest.takeover import name_of

_OTHER = re.compile("[^a-z0-9_]")


def plain_name(table: TableId) -> str:
    """What a copy's table is called in PostgreSQL; a name without a copy's ending stays, but for what is encoded."""
    return unquote(name_of(table.name))


def own_name(table: TableId) -> str:
    """What a copy's table is called while it is not shown. No other copy has its ending."""
    return _OTHER.sub("_", table.name.lower())


def start_of_own_names(table: TableId) -> str:
    """What the own names of all copies of that table begin with; others' may, too."""
    return _OTHER.sub("_", f"{name_of(table.name)}%t".lower())


def is_encoded(name: str) -> bool:
    """Whether a URL does not have the name as it is, so that a server may refuse it."""
    return quote(name, safe="") != name


def copy_at(location: str, root: str) -> TableId | None:
    """The copy whose files are at this location; None if it is none of the lake at `root`."""
    inside = root and location.startswith(f"{root}/tables/")
    return TableId.at(location.rstrip("/")) if inside else None
