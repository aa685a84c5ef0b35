"""The SQL that a finding prints: texts of `sql/`, with names filled in and quoted. Nothing is executed."""

from psycopg import sql

from walsender_bridge.sql import load


def fix(text: str, **names: str | int | list[str]) -> str:
    """The statements of `sql/<text>.sql` with names filled in: `a.b` is a table, a list several of them."""
    filled = {key: _composed(key, value) for key, value in names.items()}
    return sql.SQL(load(text)).format(**filled).as_string(None).strip()


def _composed(key: str, value: str | int | list[str]) -> sql.Composable:
    if isinstance(value, int) or key.endswith("value"):
        return sql.Literal(value)
    if isinstance(value, list):
        return sql.SQL(", ").join(sql.Identifier(*name.split(".", 1)) for name in value)
    if key in {"relation", "table"}:
        return sql.Identifier(*value.split(".", 1))
    return sql.Identifier(value)
