"""The folder of a new Iceberg table of the lake."""

import uuid
from urllib.parse import quote

from spark_consumers.lake.manifest.takeover import folder_of


def new_folder(stream: str, schema: str, table: str, term: int) -> str:
    """A folder below the lake that no other table ever has, so nothing is in its way.

    Names that are no plain folder names are written with `%`.
    """
    return folder_of(link_of(stream, schema, table), term, uuid.uuid4().hex[:12])


def link_of(stream: str, schema: str, table: str) -> str:
    """What the folder of a table is called below the lake, but for what no other copy has; a link of this name leads to it."""
    parts = [quote(part, safe=" $~").replace(".", "%2E") for part in (schema, table)]
    return f"tables/{stream}/{parts[0]}/{parts[1]}"
