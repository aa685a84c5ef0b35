"""Evaluates a source's commit gate, from the facts of sql/gate/slots.sql: whether each candidate counts."""

from collections.abc import Iterator
from typing import Any

from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.gate.monitor import slots_of
from walsender_bridge.capture.gate.slots import away, itself
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause

CHECK = "commit gate"


def evaluate(facts: dict[str, Any], rule: Rule, where: str) -> Iterator[Finding]:
    """A finding for each candidate, and for a missing privilege of the role."""
    slots = slots_of(facts)
    blocks = rule.on_missing == "block"
    proof = itself(rule.candidates, slots, facts["was"] or "") if rule.members else None
    for name in rule.candidates:
        why = away(name, slots.get(name))
        if proof and name == proof[0]:
            yield Finding(CHECK, where, f"{name} is the current primary: {proof[1]}")
            continue
        if not why:
            yield Finding(CHECK, where, f"a standby streams from slot {name}")
            continue
        yield Finding(
            CHECK,
            where,
            f"{why}; "
            + ("consumers get no new transactions" if blocks else "the gate will not wait for it"),
            # A standby may return at any time: no reason not to start.
            Severity.ERROR if blocks else Severity.WARNING,
            repair=_repair(name, slots.get(name) is None),
            cause=Cause.SLOT,
            prevents=False,
        )
    if rule.members and not any(away(name, slots.get(name)) for name in rule.candidates):
        yield Finding(
            CHECK,
            where,
            "all gate.members stream from this server, so the server itself is not among them",
            Severity.WARNING,
            repair="add the server's own slot to gate.members",
        )
    if not facts["may_see"]:
        yield Finding(
            CHECK,
            where,
            "the role may not see which walsender uses a slot, so no candidate counts",
            Severity.ERROR if blocks else Severity.WARNING,
            repair="run tuskline init --admin user=..., or GRANT pg_read_all_stats to the role",
            cause=Cause.PRIVILEGE,
            prevents=False,
        )


def _repair(name: str, missing: bool) -> str:
    leave = "or remove it from [gate]"
    if missing:
        return f"run SELECT pg_create_physical_replication_slot('{name}'), and on its standby set primary_slot_name = '{name}' and primary_conninfo to this server; {leave}"
    return f"start its standby, with primary_slot_name = '{name}' and primary_conninfo to this server; {leave}"
