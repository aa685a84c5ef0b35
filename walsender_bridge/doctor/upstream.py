"""The upstream of a failover candidate: the primary itself, as its copies require, another standby, or a safekeeper.

Queried at the address that its WAL receiver shows, with the account of the primary's DSN.
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
#: In place of a server's facts.
SAFEKEEPER: Final = "safekeeper"

Upstream = dict[str, Any] | str | None


def ask(primary_dsn: str, standby: dict[str, Any]) -> Upstream:
    """The standby's upstream: a server's facts, `SAFEKEEPER`, or None if it is unknown."""
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
    """The finding about the upstream. `slot`: the candidate's physical slot; `system_id`: the primary's, if known."""
    address = f"{standby['receiver_host']}:{standby['receiver_port']}"
    if standby["receiver_status"] is None:
        return  # it does not stream, which the finding of its slot reports
    if upstream is None:
        yield Finding(
            CHECK,
            where,
            f"its upstream is unknown: no server answers this account at {address}",
            Severity.WARNING,
            repair="let the account of [slots] dsn connect there: a copy is ready only once that server is known to be the primary",
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
        f"it streams from {what}, {address}: no physical slot on the primary retains what its copies need",
        Severity.ERROR,
        repair=f"set primary_conninfo to the primary itself, and primary_slot_name = '{slot}'; or remove it from [slots]",
        cause=Cause.SLOT,
        prevents=False,
    )
