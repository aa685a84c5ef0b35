"""How the files of a table that follows are written: by the configuration, or as before where the table cannot have that."""

from collections.abc import Mapping, Sequence

from spark_consumers.lake.format.table_format import TableFormat
from spark_consumers.lake.layout.arrangement import Arrangement
from spark_consumers.lake.policy import deletes_by_position
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.table_layout import LayoutRule, layout_of
from walsender_bridge.runtime import logs

#: The last version of Iceberg's format in which removed rows may be in files of positions.
_LAST_WITH_POSITIONS = 2

log = logs.logger()


def arranged(
    tables: TableFormat, name: str, path: str, term: int, rules: Sequence[LayoutRule]
) -> Arrangement:
    """Give the table (`stream.schema.table`, in the folder `path`) the layout that the rules have for it.

    One that it cannot have leaves it as it is: it has followed so far, and no row of it is wrong. The log names it. Raises
    `FencedError`.
    """
    try:
        return tables.arrange(path, term, layout_of(rules, name))
    except NotSupportedError as error:
        log.warning(
            "table keeps its layout, since it cannot have the one in [[lake.tables]]",
            table=name,
            error=error.what,
            repair=error.repair,
        )
        return tables.arrangement(path)


def by_position(tables: TableFormat, deletes: Mapping[str, str], name: str, path: str) -> bool:
    """Whether removed rows of the table go into files of positions; not in version 3 of the format, which has no way back."""
    if not deletes_by_position(deletes, name):
        return False
    if tables.version(path) <= _LAST_WITH_POSITIONS:
        return True
    log.warning(
        "table keeps deletion vectors, since it is in version 3 of Iceberg's format",
        table=name,
        repair=f"copy it again for position deletes: tuskline table resync {name}",
    )
    return False
