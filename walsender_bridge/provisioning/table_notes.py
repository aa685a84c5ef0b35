"""Notes of `status` on a source's tables that need a role with more privileges: one sentence each, with its SQL."""

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from walsender_bridge.capture import publication
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.postgres.table_patterns import Choice, Chosen
from walsender_bridge.provisioning.fixes import fix, publish
from walsender_bridge.provisioning.init import copied, wanted_tables

#: Names shown.
_SHOWN = 5


def notes(connection: psycopg.Connection[Any], source: CaptureSource) -> tuple[str, ...]:
    """The notes; none before there is a publication. `connection`: of the source's role."""
    found = publication.facts(connection, source)
    if found is None:
        return ()
    chosen = publication.survey(connection, source)
    tables = wanted_tables(connection, copied(chosen), connection.info.user)
    version = connection.info.server_version
    return tuple(_of(source, connection.info.user, version, found, chosen, tables))


def _of(
    source: CaptureSource,
    role: str,
    version: int,
    found: dict[str, Any],
    chosen: Chosen,
    tables: Sequence[dict[str, Any]],
) -> Iterator[str]:
    is_kept = publication.is_kept(found, Choice.of(source.tables))
    waiting = [t for t in chosen.fit if is_kept and not t.published]
    # Tables that the role may add itself are added by capture at its next poll.
    addable = [table.name for table in waiting if not (found["owned"] and table.owned)]
    if addable:
        grants = _grants([t for t in tables if t["root"] in addable], role)
        added = publish(version, source.publication, [], addable).replace("\n", " ")
        yield (
            f"source {source.name}: {_named(addable)} could be published, and role {role} does not own the table and the"
            f" publication; tuskline init --admin user=..., or {' '.join([added, *grants])}"
        )
    apart = {table.name for table in waiting}
    unread = [
        t for t in tables if t["root"] not in apart and not (t["readable"] and t["reachable"])
    ]
    if unread:
        yield (
            f"source {source.name}: role {role} may not read {_named([t['full_name'] for t in unread])}, which cannot be"
            f" copied; tuskline init --admin user=..., or {' '.join(_grants(unread, role))}"
        )
    left_out = [each.table.name for each in chosen.left_out if not each.table.published]
    if is_kept and left_out:
        yield (
            f"source {source.name}: {_named(left_out)} left out; `tuskline doctor` shows the reason and the repair"
        )


def _grants(tables: Sequence[dict[str, Any]], role: str) -> list[str]:
    schemas = sorted({table["schema"] for table in tables if not table["reachable"]})
    return [
        *(fix("provisioning/roles_schema", name=schema, role=role) for schema in schemas),
        *(
            fix("provisioning/roles_table", relation=table["full_name"], role=role).splitlines()[-1]
            for table in tables
            if not table["readable"]
        ),
    ]


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
