"""Spark's own filters on `format("tuskline")`, as far as they spare reading.

Filters on the stream, the relation and the version decide which parts of the log are read at all. Spark
applies every filter again, so reading a part in vain costs only time; only parts that cannot contain a matching row
are skipped.

It is off by default (option `pruneByFilters`). Spark 4.1 keeps the plan of one query's filters with the
DataFrame, and uses it again for a query of the same DataFrame that has no filter: rows would be missing. With the
option, load a DataFrame for each query.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"


def asked() -> bool:
    """Whether Spark makes a reader in order to give it filters.

    It does so, in a separate worker process, only with `spark.sql.python.filterPushdown.enabled`.
    Without that setting a reader that has `pushFilters` at all fails every batch read.
    """
    return _WORKER in sys.modules


@dataclass(frozen=True, slots=True)
class Pruning:
    """What has to be read: `None` for a set means all; versions are inclusive."""

    streams: frozenset[str] | None = None
    relations: frozenset[str] | None = None
    first_version: int = 0
    last_version: int | None = None

    def with_filters(self, filters: Iterable[Filter], *, table: bool) -> "Pruning":
        """The pruning that these filters allow, all of which hold. `table`: the rows are those of mode=table."""
        found = self
        for each in filters:
            found = found._with(each, "_version" if table else "version", table)
        return found

    def _with(self, given: Filter, version: str, table: bool) -> "Pruning":
        match given:
            case EqualTo((name,), value) | EqualNullSafe((name,), value):
                values: tuple[object, ...] = (value,)
            case In((name,), value):
                values = tuple(value)
            case GreaterThan((name,), int(value)) if name == version:
                return self._between(value + 1, None)
            case GreaterThanOrEqual((name,), int(value)) if name == version:
                return self._between(value, None)
            case LessThan((name,), int(value)) if name == version:
                return self._between(0, value - 1)
            case LessThanOrEqual((name,), int(value)) if name == version:
                return self._between(0, value)
            case _:
                return self
        texts = frozenset(v for v in values if isinstance(v, str))
        numbers = [v for v in values if isinstance(v, int)]
        if name == version:
            return self._between(min(numbers, default=0), max(numbers, default=0))
        if name == "relation" and not table:
            return replace(self, relations=_both(self.relations, texts))
        if name == "stream" and not table:
            return replace(self, streams=_both(self.streams, texts))
        return self

    def _between(self, first: int, last: int | None) -> "Pruning":
        lasts = [each for each in (self.last_version, last) if each is not None]
        first = max(self.first_version, first)
        return replace(self, first_version=first, last_version=min(lasts, default=None))


def _both(one: frozenset[str] | None, other: frozenset[str]) -> frozenset[str]:
    return other if one is None else one & other
