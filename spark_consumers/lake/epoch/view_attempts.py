"""The attempts at views' queries: their time is limited, and those that end the process leave a record (`views.patience`).

The record is `<lake>/_tuskline/views/<view>`, written by an attempt that has lasted a while, and removed at its end, however it ends. Only the end
of the process leaves it. It is no promise: one that is lost costs an attempt.
"""

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Final

from pyspark.sql import SparkSession

from spark_consumers.lake.store.lake_store import STATE, LakeStore
from spark_consumers.lake.views import patience
from spark_consumers.lake.views.definition import ViewDefinition
from spark_consumers.lake.views.patience import Failed
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import logs

#: The folder of the records.
_FOLDER: Final = f"{STATE}/views"
#: Seconds after which an attempt has its record.
_LONG: Final = 5.0
#: Seconds that an attempt beside others may take: it leaves no record, since nobody could say which of them had ended the process.
_BESIDE: Final = _LONG
#: Attempts that took less are made beside others the next time.
_BRIEF: Final = 2.0
#: Seconds between two calls that cancel an attempt's jobs: one between two of its jobs is not noticed.
_AGAIN: Final = 1.0

log = logs.logger()


class ViewTimeoutError(Exception):
    """An attempt took longer than its view may."""


class ViewAttempts:
    """The attempts at a lake's views in this process, over all terms of its writer."""

    def __init__(self, spark: SparkSession, store: LakeStore) -> None:
        self._spark = spark
        self._store = store
        self._began = time.monotonic()
        self._failed: dict[str, Failed] = {}
        #: Views whose attempts are brief, and their definitions.
        self._brief: dict[str, ViewDefinition] = {}

    @cached_property
    def _deaths(self) -> dict[str, tuple[str, int]]:
        """What earlier processes have left: the SQL of each view in whose attempts they ended, and how often."""
        found = {}
        for name in self._store.names(_FOLDER):
            with suppress(ValueError, KeyError, TypeError, OSError):
                record = json.loads(self._store.read(f"{_FOLDER}/{name}"))
                found[name] = (str(record["sql"]), int(record["deaths"]))
        return found

    def waiting(self, view: ViewDefinition) -> str | None:
        """Why this view is not tried now; None: it may be."""
        sql, deaths = self._deaths.get(view.name, ("", 0))
        known = self._failed.get(view.name)
        if known is None and sql == view.sql:
            known = patience.ended(deaths, self._began)
        if known is None or time.monotonic() >= known.until:
            return None
        # Its tables may have changed since it failed, so this is not the reason of that failure (`views.plan.FAILED`).
        return f"it is tried again in {known.until - time.monotonic():.0f} s: {known.reason}"

    def failed(self, view: ViewDefinition, reason: str, took: float, *, of_query: bool) -> bool:
        """Note a failure; whether the round goes on without the view."""
        made = patience.failed(
            self._failed.get(view.name), reason, time.monotonic(), took, of_query=of_query
        )
        self._failed[view.name] = made
        return of_query or made.count >= patience.FAILURES

    def is_brief(self, view: ViewDefinition) -> bool:
        """Whether its last attempt took so little time that this one may be made beside others."""
        return self._brief.get(view.name) == view

    def succeeded(self, view: ViewDefinition, took: float) -> None:
        """Forget the view's failures. `took`: seconds of the attempt."""
        if took < _BRIEF:
            self._brief[view.name] = view
        self._failed.pop(view.name, None)
        if self._deaths.pop(view.name, None) is not None:
            self._store.remove(f"{_FOLDER}/{view.name}")

    @contextmanager
    def attempt(self, view: ViewDefinition, *, beside: bool = False) -> Iterator[None]:
        """Run the view's queries. Raises `ViewTimeoutError` if they take longer than the view may; or, `beside` others, than such an attempt may."""
        if not beside:
            self._brief.pop(view.name, None)
        watch = _Watch(self._spark, self._store, view, self._deaths.get(view.name), beside=beside)
        try:
            yield
        except Exception:
            if watch.is_over:
                raise ViewTimeoutError from None
            raise
        finally:
            watch.end()


class _Watch:
    """Watches one attempt, from a thread of its own."""

    def __init__(
        self,
        spark: SparkSession,
        store: LakeStore,
        view: ViewDefinition,
        before: tuple[str, int] | None,
        *,
        beside: bool,
    ) -> None:
        self._context = spark.sparkContext
        self._store, self._view, self._before = store, view, before
        self._beside = beside
        self._tag = f"tuskline-view-{uuid.uuid4().hex}"
        self._done = threading.Event()
        self.is_over = False
        # The context's tags: a session's are known only to the thread that has added them.
        self._context.addJobTag(self._tag)
        self._thread = threading.Thread(target=self._run, name=f"view {view.name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """The attempt has ended."""
        self._done.set()
        self._thread.join()
        self._context.removeJobTag(self._tag)

    def _run(self) -> None:
        limit = self._view.timeout
        if self._done.wait(min(_BESIDE if self._beside else _LONG, limit)):
            return
        if self._beside:
            self._stop()
            return
        with self._recorded():
            if self._done.wait(max(0.0, limit - _LONG)):
                return
            log.warning("view is stopped", view=self._view.name, seconds=limit)
            self._stop()

    def _stop(self) -> None:
        """Cancel the attempt's jobs until it has ended."""
        self.is_over = True
        while not self._done.is_set():
            self._context.cancelJobsWithTag(self._tag)
            self._done.wait(_AGAIN)

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        """The attempt has a record meanwhile."""
        name = f"{_FOLDER}/{self._view.name}"
        sql, deaths = self._before or ("", 0)
        count = deaths + 1 if sql == self._view.sql else 1
        record: dict[str, Any] = {"sql": self._view.sql, "deaths": count}
        # A lake that takes no record now takes no epoch either: the round says so.
        with suppress(OSError, TusklineError):
            self._store.replace(name, json.dumps(record).encode())
        try:
            yield
        finally:
            with suppress(OSError, TusklineError):
                self._store.remove(name)
