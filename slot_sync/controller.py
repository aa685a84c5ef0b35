"""The controller of slot copies: it serves all candidates concurrently, and none waits for another.

Each candidate has a thread, connections and limits of its own, so a candidate or a slot that hangs delays no other. All
poll at the same moments, so that one query of the primary serves all (`probe/shared.py`). Of several controllers of one
primary one acts; the others only probe, and log which one is active.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from slot_sync.copier import SlotCopier
from slot_sync.plan import SlotSyncPlan
from slot_sync.probe.shared import SharedProbe
from slot_sync.report import SlotReport, SlotRound
from walsender_bridge.errors import InvariantError, RunningError, TusklineError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.closing import Closing

#: Rounds of `once`: a slot under constant writes always has another action pending.
_ROUNDS: Final = 10
#: Seconds that a thread is given to end.
_ENDING: Final = 2.0

_log = logs.logger()


def probe(plan: SlotSyncPlan) -> SlotReport:
    """Report the state of all candidates. Changes nothing; reads the controller's records."""

    def one(copier: SlotCopier) -> SlotRound:
        with copier:
            return copier.probe(began)

    began = time.monotonic()
    with SharedProbe(plan.primary_dsn) as primary:
        copiers = [SlotCopier(each, plan, primary) for each in plan.candidates]
        with ThreadPoolExecutor(max_workers=len(copiers)) as threads:
            rounds = [*threads.map(one, copiers)]
    return SlotReport({each.candidate: each for each in rounds})


class Controller(Closing):
    """Maintains the plan's copies."""

    def __init__(self, plan: SlotSyncPlan) -> None:
        self._plan = plan
        self._primary = SharedProbe(plan.primary_dsn, wants_turn=True)
        self._copiers = [SlotCopier(each, plan, self._primary) for each in plan.candidates]
        self._began = time.monotonic()
        self._active = False
        self._answers = False
        self._logged: str | None = None
        self._rounds: dict[str, SlotRound] = {}

    def close(self) -> None:
        """Close the connections, and let another controller become active."""
        for copier in self._copiers:
            copier.close()
        self._primary.close()

    def once(self, seconds: float) -> SlotReport:
        """Carry out what can be done now, for about `seconds` at most; returns the state after that.

        Raises `RunningError` if another controller stays active that long, `ConfigError` if the record cannot be written.
        """
        began = time.monotonic()
        deadline = began + seconds
        self._await_turn(deadline)

        def one(copier: SlotCopier) -> SlotRound:
            since = began
            for _ in range(_ROUNDS):
                found, begun = copier.round(since, act=self._active)
                if not begun or not copier.settle(max(0.0, deadline - time.monotonic())):
                    return found
                since = time.monotonic()
            return copier.probe(since)

        with ThreadPoolExecutor(max_workers=len(self._copiers)) as threads:
            rounds = [*threads.map(one, self._copiers)]
        return SlotReport({each.candidate: each for each in rounds}, active=self._active)

    def watch(self, stop: threading.Event, report: Callable[[SlotReport], None]) -> None:
        """Maintain the copies until `stop` is set; calls `report` at each poll with their state."""
        threads = [
            threading.Thread(target=self._keep, args=(copier, stop), daemon=True)
            for copier in self._copiers
        ]
        self._began = time.monotonic()
        self._take_turn(self._began)
        for thread in threads:
            thread.start()
        while (moment := self._next_moment(stop)) is not None:
            self._take_turn(moment)
            report(SlotReport(dict(self._rounds), active=self._active))
        for thread in threads:
            thread.join(_ENDING)

    def _keep(self, copier: SlotCopier, stop: threading.Event) -> None:
        moment: float | None = self._began
        while moment is not None:
            try:
                found, _ = copier.round(moment, act=self._active)
                self._rounds[found.candidate] = found
            except InvariantError as error:
                # This candidate is not touched any more; its report ages.
                _log.error(
                    "slot copies are no longer maintained",
                    standby=copier.candidate.name,
                    **error.to_wire(),
                )
                return
            except TusklineError as error:
                _log.error(
                    "slot copies are not maintained",
                    standby=copier.candidate.name,
                    **error.to_wire(),
                )
            except Exception:
                # A bug here must not stop maintenance of this candidate; its report ages meanwhile.
                _log.exception("slot copies are not maintained", standby=copier.candidate.name)
            moment = self._next_moment(stop)

    def _next_moment(self, stop: threading.Event) -> float | None:
        """Wait for the next poll, which all threads share, and return its moment; None: `stop` is set."""
        poll = self._plan.poll
        moment = self._began + ((time.monotonic() - self._began) // poll + 1) * poll
        while (left := moment - time.monotonic()) > 0:
            if stop.wait(left):
                return None
        return moment

    def _await_turn(self, deadline: float) -> None:
        """Become the active controller. If the primary does not answer, no lock can be taken and nothing can be done."""
        self._take_turn(time.monotonic())
        while not self._active and self._answers:
            if time.monotonic() > deadline:
                raise RunningError(
                    "another controller is active",
                    where=self._primary.where,
                    repair="leave the copies to it, or stop it; `tuskline slots status` only reports",
                )
            time.sleep(0.05)
            self._take_turn(time.monotonic())

    def _take_turn(self, moment: float) -> None:
        try:
            self._primary.since(moment)
        except TusklineError:
            self._answers = self._active = False
        else:
            self._answers, self._active = True, self._primary.has_turn
        if self._active:
            turn = "this controller is active"
        elif self._answers:
            turn = "another controller is active; this one stands by"
        else:
            turn = "the primary does not answer"
        if turn != self._logged:
            _log.info(turn, primary=self._primary.where)
        self._logged = turn
