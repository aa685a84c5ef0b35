"""A relation's name as one text, and back: `schema.table`.

Both names may hold any character, dots and quotation marks too, so joining them with a dot is not enough: `a.b.c` could
be table `b.c` of schema `a`, or table `c` of schema `a.b`. Here a schema that holds a dot or a quotation mark is quoted
as in SQL, `"a.b".c`; every other schema and every table stands as the catalog has it. So each pair of names has one text,
and each text one pair.
"""

import re

_QUOTED = re.compile(r'"((?:[^"]|"")+)"\.(.+)', re.DOTALL)


def relation_name(schema: str, table: str) -> str:
    """The text of schema and table name."""
    if "." in schema or '"' in schema:
        schema = '"' + schema.replace('"', '""') + '"'
    return f"{schema}.{table}"


def split_relation(name: str) -> tuple[str, str]:
    """Schema and table of `relation_name`'s text; a text without a dot has no table, and is of no relation."""
    quoted = _QUOTED.fullmatch(name)
    if quoted is not None:
        return quoted[1].replace('""', '"'), quoted[2]
    schema, _, table = name.partition(".")
    return schema, table
