"""Evaluates whether the source's slot continues its stream, as capture does when it starts. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from walsender_bridge.capture.publication import reattach
from walsender_bridge.capture.source import CaptureSource, gone, lost, other_cluster
from walsender_bridge.capture.source import evaluate as fork
from walsender_bridge.capture.stream_record import KnownPosition
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.settings import Facts, own_slot
from walsender_bridge.errors import Cause
from walsender_bridge.postgres.protocol.lsn import Lsn, parse_lsn
from walsender_bridge.postgres.protocol.replication import ServerTimelines, SystemIdentity

CHECK: Final = "stream"
#: The check that finds a server of another cluster.
CLUSTER: Final = "cluster"


@dataclass(frozen=True, slots=True)
class WalsenderIdentity:
    """The server's identity and timelines, from a walsender."""

    identity: SystemIdentity
    history: ServerTimelines


def evaluate(
    facts: Facts,
    known: KnownPosition | None,
    server: WalsenderIdentity | None,
    source: CaptureSource,
    where: str,
) -> Iterator[Finding]:
    """Nothing for a stream without a history. `server`: None if the role cannot replicate."""
    if known is None or not known.log.begun:
        return
    logged, found = known.log.system_id, int(facts["system_id"])
    if logged not in {None, found}:
        error = other_cluster(source, logged, found)
        yield _diverged(CLUSTER, where, error.what, error.repair)
        return
    slot = own_slot(facts, source)
    why, repair = gone(known.log) if slot is None else "", reattach(source)
    if server is not None:
        found_fork = fork(known.log, _confirmed(slot, known), server.identity, server.history)
        why = found_fork.reason if found_fork else ""
        if found_fork is not None and found_fork.former:
            repair = found_fork.repair(f"run {repair}")
    if why:
        what = f"stream {source.name} has diverged: {why}"
        yield _diverged(CHECK, where, what, repair)


def _confirmed(slot: Facts | None, known: KnownPosition) -> Lsn | None:
    """The position to compare; 0 for a slot in use, which advances, and for a lost slot, which is reported as such."""
    if slot is None:
        return None
    if known.behind or slot["active"] or slot["plugin"] != "pgoutput" or lost(slot):
        return 0
    return parse_lsn(slot["confirmed_flush_lsn"])


def _diverged(check: str, where: str, what: str, repair: str) -> Finding:
    return Finding(
        check,
        where,
        what,
        Severity.ERROR,
        repair=repair,
        cause=Cause.DIVERGED,
        # The log is needed for the repair, and other sources continue.
        prevents=False,
    )
