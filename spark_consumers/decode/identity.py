"""By which columns a row of a table of the lake is found. Pure, and without Arrow: a manifest's readers import it."""

from typing import Final

from walsender_bridge.postgres.table_layout import HISTORY

VALID_TO_LSN: Final = "_valid_to_lsn"


def identity_of(key: tuple[str, ...], mode: str) -> tuple[str, ...]:
    """The columns that identify a row of the lake's table, with this key at the source: of a history, the version's end as well."""
    return (*key, VALID_TO_LSN) if mode == HISTORY else key
