"""Who a failover candidate streams from: the primary itself, as its copies need, or another standby, or a safekeeper.

Asked at the address that its WAL receiver shows, with the account of the primary's DSN.
"""

from collections.abc import Iterator
from typing import Any, Final

import psycopg

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.postgres.client.hosts import at_address
from walsender_bridge.postgres.protocol.backend import REPLICATION_ONLY
from walsender_bridge.runtime.sql import load

CHECK: Final = "upstream"
#: Instead of what a server says of itself.
SAFEKEEPER: Final = "safekeeper"

Upstream = dict[str, Any] | str | None


def ask(primary_dsn: str, standby: dict[str, Any]) -> Upstream:
    """What is at the standby's upstream: a server's facts, `SAFEKEEPER`, or None where nobody can tell."""
    host, port = standby["receiver_host"], standby["receiver_port"]
    if not host or not port:
        return None
    conninfo = at_address(primary_dsn, host, port)
    try:
        with BoundedConnection.connect(conninfo, autocommit=True) as connection:
            row = connection.execute(load("slot_sync/upstream").encode()).fetchone()
    except psycopg.Error as error:
        return SAFEKEEPER if REPLICATION_ONLY in str(error) else None
    return None if row is None else dict(row[0])


def evaluate(
    standby: dict[str, Any], upstream: Upstream, slot: str, system_id: str | None, where: str
) -> Iterator[Finding]:
    """The finding about it. `slot`: the candidate's physical slot; `system_id`: the primary's, if it is known."""
    address = f"{standby['receiver_host']}:{standby['receiver_port']}"
    if standby["receiver_status"] is None:
        return  # it streams from nobody, and the slot's own finding says so
    if upstream is None:
        yield Finding(
            CHECK,
            where,
            f"who it streams from is not known: nobody answers this account at {address}",
            Severity.WARNING,
            repair="let the account of [slots] dsn connect there: a copy is ready only when the primary is seen to be there",
        )
        return
    if isinstance(upstream, dict):
        if not upstream["in_recovery"] and system_id in {None, upstream["system_id"]}:
            yield Finding(CHECK, where, f"it streams from the primary, {address}")
            return
        what = "another standby" if upstream["in_recovery"] else "a server of another cluster"
    else:
        what = "a safekeeper"
    yield Finding(
        CHECK,
        where,
        f"it streams from {what}, {address}: no slot of its own on the primary holds what copies there need",
        Severity.ERROR,
        repair=f"point primary_conninfo at the primary itself, with primary_slot_name = '{slot}'; or take it out of [slots]",
        cause=Cause.SLOT,
        prevents=False,
    )
