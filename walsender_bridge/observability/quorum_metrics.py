"""The safekeepers as metric families of `/metrics`. docs/metrics.md lists them; a test compares the two."""

from collections.abc import Iterator

from prometheus_client.metrics_core import (
    HistogramMetricFamily,
    Metric,
)

from walsender_bridge.observability.metric_family import add_known, counter, gauge
from walsender_bridge.observability.quorum_view import QuorumView, SafekeeperView
from walsender_bridge.postgres.protocol.lsn import Lsn, parse_lsn
from walsender_bridge.quorum.safekeeper.status_record import WRITE_SECONDS

_STATES = ("streaming", "catching up", "silent", "joining", "rebuild", "away", "full")


def families(seen: QuorumView | None) -> Iterator[Metric]:
    """All families; without safekeepers none has a sample."""
    yield from _proposer(seen)
    yield from _safekeepers(seen.safekeepers if seen is not None else ())


def _proposer(seen: QuorumView | None) -> Iterator[Metric]:
    quorum = gauge(
        "quorum_up",
        "1 while a majority of the safekeepers follows the proposer; 0: commits that wait for the quorum hang.",
    )
    term = gauge("quorum_term", "Term of the proposer.")
    epoch = gauge("quorum_election_epoch", "Election epoch that the proposer writes.")
    lsn = gauge("quorum_lsn_bytes", "WAL position of the quorum, in bytes.", "position")
    queue = gauge("quorum_queue_bytes", "Bytes of WAL in the proposer's memory.")
    generation = gauge("quorum_generation", "Generation of the current membership.")
    configured = gauge(
        "quorum_membership_as_configured",
        "1 if the members are the configured safekeepers, otherwise 0.",
    )
    families = (quorum, term, epoch, lsn, queue, generation, configured)
    if seen is not None and seen.proposer_here:
        quorum.add_metric([], float(seen.quorum))
        session = seen.session
        if session is not None:
            term.add_metric([], session.term)
            epoch.add_metric([], session.election_epoch)
            queue.add_metric([], session.queue_bytes)
            generation.add_metric([], session.membership.generation)
            configured.add_metric([], float(not session.membership.unlike))
            for position, text in (
                ("restart", session.restart_lsn),
                ("commit", session.commit_lsn),
                ("end", session.end_lsn),
            ):
                lsn.add_metric([position], parse_lsn(text))
    yield from families


def _safekeepers(seen: tuple[SafekeeperView, ...]) -> Iterator[Metric]:
    label = "safekeeper"
    state = gauge("safekeeper_state", "1 for the current state of the safekeeper.", label, "state")
    lag = gauge(
        "safekeeper_lag_bytes", "Bytes of the proposer's WAL that the safekeeper lacks.", label
    )
    term = gauge("safekeeper_term", "Term of the proposer that the safekeeper voted for.", label)
    epoch = gauge(
        "safekeeper_election_epoch", "Last election epoch of the safekeeper's log.", label
    )
    lsn = gauge(
        "safekeeper_lsn_bytes", "WAL position of the safekeeper, in bytes.", label, "position"
    )
    wal = gauge("safekeeper_wal_bytes", "Bytes of the safekeeper's segments on disk.", label)
    free = gauge("safekeeper_free_bytes", "Bytes free on the safekeeper's file system.", label)
    catch_up = gauge("safekeeper_catch_up_bytes", "Bytes of older WAL still to be received.", label)
    readers = gauge("safekeeper_readers", "Clients that stream WAL from the safekeeper.", label)
    slots = gauge("safekeeper_slots", "Replication slots on the safekeeper.", label)
    removed = counter(
        "safekeeper_removed_segments",
        "Old segments that the safekeeper removed or recycled.",
        label,
    )
    writes = HistogramMetricFamily(
        "tuskline_safekeeper_write_seconds",
        "Duration of durable writes of WAL in seconds.",
        labels=[label],
    )
    for each in seen:
        name = [each.address]
        for known in dict.fromkeys((*_STATES, each.state)):
            state.add_metric([each.address, known], float(known == each.state))
        add_known(lag, name, each.lag_bytes)
        add_known(catch_up, name, each.catch_up_bytes)
        own = each.own
        if own is None:
            add_known(lsn, [each.address, "flush"], _lsn(each.flush_lsn))
            continue
        for family, value in ((term, own.term), (epoch, own.election_epoch), (wal, own.wal_bytes)):
            family.add_metric(name, value)
        add_known(free, name, own.free_bytes)
        for position, text in (
            ("begin", own.begin_lsn),
            ("restart", own.restart_lsn),
            ("commit", own.commit_lsn),
            ("flush", own.flush_lsn),
        ):
            lsn.add_metric([each.address, position], parse_lsn(text))
        readers.add_metric(name, own.readers)
        add_known(slots, name, None if each.server is None else len(each.server.slots))
        removed.add_metric(name, own.removed_segments)
        buckets = [
            *zip(map(str, WRITE_SECONDS), own.writes.buckets, strict=True),
            ("+Inf", own.writes.count),
        ]
        writes.add_metric(name, buckets=buckets, sum_value=own.writes.seconds)
    yield from (state, lag, catch_up, term, epoch, lsn, wal, free, readers, slots, removed, writes)


def _lsn(text: str | None) -> Lsn | None:
    return None if text is None else parse_lsn(text)
