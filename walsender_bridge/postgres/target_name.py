"""The schema and name that a source's table is to have in the lake, as configured by table patterns. Pure.

The name is a template, in which `{schema}` and `{table}` stand for the table's own: `{schema}.{table}_copy`. Without a dot
the schema stays.
"""

import re
from typing import Final

from walsender_bridge.postgres.protocol.relation_name import relation_name, split_relation
from walsender_bridge.postgres.table_patterns import Pattern

_SCHEMA: Final = "{schema}"
_TABLE: Final = "{table}"
#: What is around these: the name of a folder and of a table in any engine's SQL.
_AROUND: Final = re.compile(r"[A-Za-z0-9_]*")
#: Characters of a part without the table's own name, and around that: a name of 63 bytes may have three times as many in a folder's name,
#: which ends at 255, behind what is added for a feed and a copy.
_LONGEST: Final = 63
_LONGEST_AROUND: Final = 30


def parse_name(given: str, pattern: Pattern) -> str:
    """The template that a section for these tables gives, `schema.table`; empty: they keep their names. Raises `ValueError` for an invalid one.

    A pattern that matches several schemas or tables needs a template that tells them apart.
    """
    if not given:
        return ""
    schema, dot, table = given.rpartition(".")
    schema = schema if dot else _SCHEMA
    if not _is_part(schema, _SCHEMA) or not _is_part(table, _TABLE):
        raise ValueError(
            f"name: {given!r:.80} is not a name of tables in the lake: write table or schema.table, of letters, digits and"
            f" underscores, with {_SCHEMA} and {_TABLE} for the table's own"
        )
    for part, stands in ((schema, _SCHEMA), (table, _TABLE)):
        most = _LONGEST_AROUND if stands in part else _LONGEST
        if len(part.replace(stands, "")) > most:
            raise ValueError(
                f"name: {given!r:.80} is too long: write at most {_LONGEST} characters each, or {_LONGEST_AROUND} around a placeholder"
            )
    if pattern.exact is None:
        for part, regular, stands in (
            ("schemas", pattern.schema, _SCHEMA),
            ("tables", pattern.table, _TABLE),
        ):
            template = schema if stands == _SCHEMA else table
            if ".*" in regular and stands not in template:
                raise ValueError(
                    f"name: {given!r:.80} is one name, and the pattern {pattern.text!r} matches several {part}: write {stands} in it,"
                    f' as in "{_example(stands)}"'
                )
    return f"{schema}.{table}"


def _is_part(text: str, stands: str) -> bool:
    around = text.split(stands)
    return bool(text) and len(around) <= 2 and all(map(_AROUND.fullmatch, around))


def _example(stands: str) -> str:
    return "{schema}_copy.{table}" if stands == _SCHEMA else "sales.{table}"


def target_name(template: str, name: str) -> str:
    """The name in the lake of a table, both `stream.schema.table`."""
    stream, _, relation = name.partition(".")
    own_schema, own_table = split_relation(relation)
    schema, table = template.split(".")
    # Not one after the other: a name may have the other's placeholder in it.
    made = relation_name(schema.replace(_SCHEMA, own_schema), table.replace(_TABLE, own_table))
    return f"{stream}.{made}"
