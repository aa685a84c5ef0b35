"""Slot copies as metric families of `/metrics`. docs/metrics.md lists them; a test compares the two."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from walsender_bridge.observability.metric_family import add_known, gauge
from walsender_bridge.observability.slots_view import SlotsView


def families(seen: SlotsView | None) -> Iterator[Metric]:
    """All families; without `[slots]` none has a sample."""
    active = gauge(
        "slots_active", "1 while this controller of slot copies is the active one, otherwise 0."
    )
    ready = gauge("slots_ready", "1 if the candidate may be promoted, otherwise 0.", "standby")
    state = gauge(
        "slot_copy_state", "1 for the current state of the copy.", "standby", "slot", "state"
    )
    lag = gauge(
        "slot_copy_lag_bytes", "Bytes of WAL between the slot and its copy.", "standby", "slot"
    )
    age = gauge(
        "slot_copy_ready_age_seconds",
        "Seconds since the copy was last proven ready.",
        "standby",
        "slot",
    )
    if seen is not None and seen.report is not None:
        active.add_metric([], float(bool(seen.report.active)))
        for each in seen.report.standbys:
            if each.ready is not None:
                ready.add_metric([each.standby], float(each.ready))
        for copy in seen.report.slots:
            names = [copy.standby, copy.slot]
            state.add_metric([*names, copy.state], 1)
            add_known(lag, names, copy.lag_bytes)
            add_known(age, names, copy.age)
    yield from (active, ready, state, lag, age)
