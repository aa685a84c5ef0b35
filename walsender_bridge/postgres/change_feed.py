"""How the change feed of a table is named, as the configuration says it. Pure.

A feed is in the schema of its table. Its name is a template in which `{table}` stands for the table's.
"""

import re
from typing import Final

from walsender_bridge.postgres.protocol.relation_name import relation_name, split_relation

_TABLE: Final = "{table}"
#: What `feed = true` means.
DEFAULT: Final = "{table}_changes"
#: What is around the table's name: the name of a folder and of a table in any engine's SQL.
_AROUND: Final = re.compile(r"[A-Za-z0-9_]*")


def parse_feed(given: bool | str) -> str:
    """The template that a section gives; empty: its tables have no feed. Raises `ValueError` for an invalid one."""
    if isinstance(given, bool):
        return DEFAULT if given else ""
    around = given.split(_TABLE)
    if len(around) != 2 or not any(around) or not all(map(_AROUND.fullmatch, around)):
        raise ValueError(
            f"feed: {given!r:.80} is not a name of feeds: write true, or letters, digits and underscores around"
            f' {_TABLE}, as in "{DEFAULT}"'
        )
    return given


def feed_name(template: str, table: str) -> str:
    """The name of the feed of a table, both `stream.schema.table`."""
    stream, _, relation = table.partition(".")
    schema, name = split_relation(relation)
    return f"{stream}.{relation_name(schema, template.replace(_TABLE, name))}"
