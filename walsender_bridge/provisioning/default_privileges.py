"""Statements that would let a source's role read tables and partitions created later. They are suggested, never executed.

Each grants more than the tables followed: all tables of all databases, or every table that an owner creates in a schema.
"""

import psycopg

from walsender_bridge.capture import publication
from walsender_bridge.capture import source as capture
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.own_schema.login import login_of
from walsender_bridge.postgres.table_patterns import Choice
from walsender_bridge.provisioning.fixes import fix
from walsender_bridge.provisioning.init import as_admin
from walsender_bridge.runtime.sql import load

#: Owners listed.
_OWNERS = 10


def offered(source: CaptureSource, admin: str | None = None) -> list[str]:
    """The statements: the first alone, or all the others together; none if they are unnecessary or no new table can match.

    `admin` as for `init`.
    """
    role = login_of(source.dsn).user
    with capture.connect(as_admin(source, admin)) as connection:
        if not _grows(connection, source):
            return []
        names = {"publication": source.publication, "role": role}
        rows = connection.execute(load("provisioning/new_tables").encode(), names).fetchall()
    read_all = [fix("fix/read_all", role=role)] if any(has_group for *_, has_group in rows) else []
    each = [
        fix("fix/default_select", owner=owner, schema=schema, role=role)
        for owner, schema, _ in rows[:_OWNERS]
    ]
    return [*read_all, *each]


def _grows(connection: psycopg.Connection[tuple[object, ...]], source: CaptureSource) -> bool:
    if Choice.of(source.tables).follows:
        return True
    return any(table.kind == "p" for table in publication.survey(connection, source).wanted)
