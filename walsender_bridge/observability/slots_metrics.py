"""Slot copies as metric families of `/metrics`. docs/metrics.md lists them; a test compares the two."""

from collections.abc import Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from walsender_bridge.observability.slots_view import SlotsView


def families(seen: SlotsView | None) -> Iterator[Metric]:
    """All families; without `[slots]` none has a sample."""
    active = _gauge("slots_active", "1 while this controller keeps the copies.")
    ready = _gauge("slots_ready", "1 when the candidate may be promoted.", "standby")
    state = _gauge("slot_copy_state", "1 for the state it is in.", "standby", "slot", "state")
    lag = _gauge("slot_copy_lag_bytes", "WAL behind the slot.", "standby", "slot")
    age = _gauge("slot_copy_ready_age_seconds", "Since it was last ready.", "standby", "slot")
    if seen is not None and seen.told:
        active.add_metric([], float(bool(seen.told["active"])))
        for each in seen.told["standbys"]:
            if each["ready"] is not None:
                ready.add_metric([each["standby"]], float(each["ready"]))
        for each in seen.told["slots"]:
            names = [each["standby"], each["slot"]]
            state.add_metric([*names, each["state"]], 1)
            for family, key in ((lag, "lag_bytes"), (age, "age")):
                if each[key] is not None:
                    family.add_metric(names, each[key])
    yield from (active, ready, state, lag, age)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"tuskline_{name}", text, labels=labels)
