"""The safekeepers as metric families of `/metrics`. docs/metrics.md lists them; a test compares the two."""

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from walsender_bridge.observability.quorum_view import QuorumView, SafekeeperView
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.safekeeper.status import WRITE_SECONDS

_STATES = ("streaming", "catching up", "silent", "joining", "rebuild", "away", "full")


def families(seen: QuorumView | None) -> Iterator[Metric]:
    """All families; without safekeepers none has a sample."""
    yield from _proposer(seen)
    yield from _safekeepers(seen.safekeepers if seen is not None else ())


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tuskline_{name}", text, labels=labels)


def _proposer(seen: QuorumView | None) -> Iterator[Metric]:
    quorum = _gauge("quorum_up", "1 while a majority follows the proposer: commits return.")
    term = _gauge("quorum_term", "The proposer's term.")
    epoch = _gauge("quorum_election_epoch", "Election epoch that the proposer writes.")
    lsn = _gauge("quorum_lsn_bytes", "How far the quorum is, as bytes of WAL.", "position")
    queue = _gauge("quorum_queue_bytes", "WAL in the proposer's memory.")
    generation = _gauge("quorum_generation", "Of the membership in force.")
    families = (quorum, term, epoch, lsn, queue, generation)
    if seen is not None and seen.proposer_here:
        told = seen.proposer
        quorum.add_metric([], float(seen.quorum))
        if "term" in told:
            term.add_metric([], told["term"])
            epoch.add_metric([], told["election_epoch"])
            queue.add_metric([], told["queue_bytes"])
            generation.add_metric([], told["membership"]["generation"])
            for position in ("restart", "commit", "end"):
                lsn.add_metric([position], parse_lsn(told[f"{position}_lsn"]))
    yield from families


def _safekeepers(seen: tuple[SafekeeperView, ...]) -> Iterator[Metric]:
    label = "safekeeper"
    state = _gauge("safekeeper_state", "1 for the state it is in.", label, "state")
    lag = _gauge("safekeeper_lag_bytes", "WAL that the proposer has and it has not.", label)
    term = _gauge("safekeeper_term", "Of the proposer that it voted for.", label)
    epoch = _gauge("safekeeper_election_epoch", "Last election epoch in its history.", label)
    lsn = _gauge("safekeeper_lsn_bytes", "How far it is, as bytes of WAL.", label, "position")
    wal = _gauge("safekeeper_wal_bytes", "Its segments on disk.", label)
    free = _gauge("safekeeper_free_bytes", "Free on its file system.", label)
    older = _gauge(
        "safekeeper_catch_up_bytes",
        "WAL that it still lacks and is to receive from another safekeeper.",
        label,
    )
    readers = _gauge("safekeeper_readers", "Clients that stream WAL from it.", label)
    slots = _gauge("safekeeper_slots", "Replication slots on it.", label)
    removed = CounterMetricFamily(
        "tuskline_safekeeper_removed_segments",
        "Old segments that were removed or recycled.",
        labels=[label],
    )
    writes = HistogramMetricFamily(
        "tuskline_safekeeper_write_seconds", "Durable writes of WAL.", labels=[label]
    )
    for each in seen:
        name = [each.address]
        for known in dict.fromkeys((*_STATES, each.state)):
            state.add_metric([each.address, known], float(known == each.state))
        _add(lag, name, each.told.get("lag_bytes"))
        _add(older, name, each.catch_up_bytes)
        if not each.own:
            _add(lsn, [each.address, "flush"], _lsn(each.flush_lsn))
            continue
        own = each.own
        for family, key in ((term, "term"), (epoch, "election_epoch"), (wal, "wal_bytes")):
            family.add_metric(name, own[key])
        _add(free, name, own["free_bytes"])
        for position in ("begin", "restart", "commit", "flush"):
            lsn.add_metric([each.address, position], parse_lsn(own[f"{position}_lsn"]))
        readers.add_metric(name, own["readers"])
        _add(slots, name, len(each.server["slots"]) if each.server else None)
        removed.add_metric(name, own["removed_segments"])
        buckets = [
            *zip(map(str, WRITE_SECONDS), own["writes"]["buckets"], strict=True),
            ("+Inf", own["writes"]["count"]),
        ]
        writes.add_metric(name, buckets=buckets, sum_value=own["writes"]["seconds"])
    yield from (state, lag, older, term, epoch, lsn, wal, free, readers, slots, removed, writes)


def _lsn(text: str | None) -> int | None:
    return None if text is None else parse_lsn(text)


def _add(family: GaugeMetricFamily, labels: list[str], value: Any) -> None:
    """What is not known is left out: a number would be taken for one."""
    if value is not None:
        family.add_metric(labels, value)
