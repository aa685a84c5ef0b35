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
    if seen is not None and seen.report:
        active.add_metric([], float(bool(seen.report["active"])))
        for each in seen.report["standbys"]:
            if each["ready"] is not None:
                ready.add_metric([each["standby"]], float(each["ready"]))
        for each in seen.report["slots"]:
            names = [each["standby"], each["slot"]]
            state.add_metric([*names, each["state"]], 1)
            for family, key in ((lag, "lag_bytes"), (age, "age")):
                add_known(family, names, each[key])
    yield from (active, ready, state, lag, age)
