"""What the epoch under way does, for those who look from outside: other threads read it while the driver's loop is in the epoch."""

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from spark_consumers.lake.status import EpochStatus

if TYPE_CHECKING:
    from pyspark import SparkContext


class EpochProgress:
    """The progress of one writer's epochs, of which one at a time is under way."""

    def __init__(self, context: "SparkContext") -> None:
        self._context = context
        self._lock = threading.Lock()
        self._now: EpochStatus | None = None
        self._group = ""
        #: What had ended when it was asked last, and when it was another number last.
        self._done: tuple[int, int] = (0, 0)
        self._moved_at = 0.0

    def begin(self, epoch: int) -> None:
        """This epoch begins."""
        now = time.time()
        with self._lock:
            self._now = EpochStatus(epoch, "plan", now, now)
            self._moved_at = now

    def step(self, stage: str, *, tables: int = 0, group: str = "") -> None:
        """The next step of the epoch: of so many tables one by one, or in Spark's tasks, as jobs of this group."""
        with self._lock:
            if self._now is not None:
                began = EpochStatus(self._now.epoch, stage, self._now.began_at, time.time())
                self._now, self._group = replace(began, tables=tables), group
                self._moved_at = began.stage_at

    def done(self) -> None:
        """One table more is done in this step."""
        with self._lock:
            if self._now is not None:
                self._now = replace(self._now, tables_done=self._now.tables_done + 1)

    def end(self) -> None:
        """The epoch is published, or has failed."""
        with self._lock:
            self._now = None

    def now(self) -> EpochStatus | None:
        """What the epoch does; None if none is under way."""
        with self._lock:
            now, group = self._now, self._group
        if now is None:
            return None
        if group:
            tasks, done = self._tasks(group)
            now = replace(now, tasks=tasks, tasks_done=done)
        with self._lock:
            if self._done != (now.tasks_done, now.tables_done):
                self._done, self._moved_at = (now.tasks_done, now.tables_done), time.time()
            return replace(now, moved_at=self._moved_at)

    def _tasks(self, group: str) -> tuple[int, int]:
        """Spark's tasks of the newest job of this group, and how many have ended. An earlier step's job is gone on with by a newer one."""
        tracker = self._context.statusTracker()
        job = tracker.getJobInfo(max(tracker.getJobIdsForGroup(group), default=-1))
        stages = [tracker.getStageInfo(each) for each in job.stageIds] if job is not None else []
        known = [each for each in stages if each is not None]
        return sum(each.numTasks for each in known), sum(each.numCompletedTasks for each in known)
