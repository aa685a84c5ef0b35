"""The folder of a new Iceberg table of the lake."""

import uuid

from spark_consumers.lake.catalog.links import link_of
from spark_consumers.lake.manifest.takeover import folder_of


def new_folder(stream: str, schema: str, table: str, term: int) -> str:
    """A folder below the lake that no other table ever has, so nothing is in its way.

    Names that are no plain folder names are written with `%`.
    """
    return folder_of(link_of(stream, schema, table), term, uuid.uuid4().hex[:12])
