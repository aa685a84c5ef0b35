"""Families of `/metrics`, whose names begin with `tuskline_`."""

from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """A gauge; `text` is its help."""
    return GaugeMetricFamily(f"tuskline_{name}", text, labels=labels)


def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    """A counter; `text` is its help."""
    return CounterMetricFamily(f"tuskline_{name}", text, labels=labels)


def add_known(family: GaugeMetricFamily, labels: list[str], value: Any) -> None:
    """Add a sample, unless the value is unknown: any number would be taken for a measurement."""
    if value is not None:
        family.add_metric(labels, value)
