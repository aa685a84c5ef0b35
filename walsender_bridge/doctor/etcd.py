"""Checks of the cluster of `[etcd]`."""

from collections.abc import Iterator

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.observability.etcd_view import EtcdView


def examine(seen: EtcdView) -> Iterator[Finding]:
    """What is wrong with it, as `status` names it; that a majority answers, and how full it is."""
    if seen.cluster.error is None:
        places = ", ".join(each.endpoint for each in seen.cluster.answering)
        yield Finding("etcd", places, seen.summary)
    for fault in seen.faults:
        error = fault.error
        yield Finding(
            "etcd",
            error.where or "[etcd]",
            error.what,
            Severity.ERROR if fault.fatal else Severity.WARNING,
            repair=error.repair,
            cause=error.cause,
            prevents=False,
        )
