"""The controller of slot copies: every candidate side by side, none waiting for another.

Each candidate has a thread, connections and limits of its own, so a candidate or a slot that hangs delays no other. They
look at the same moments, so that one look at the primary serves all (`shared_look`). Of several controllers of one
primary one acts; the others look, and say whose turn it is.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from slot_sync.copier import SlotCopier
from slot_sync.plan import SlotSyncPlan
from slot_sync.probe.shared import SharedProbe
from slot_sync.report import SlotReport, SlotRound
from walsender_bridge.errors import InvariantError, RunningError, TusklineError
from walsender_bridge.runtime.closing import Closing

#: Rounds of `once`: a slot that is written to all the time has always something to be done.
_ROUNDS: Final = 10
#: Seconds that a thread has to end.
_ENDING: Final = 2.0

_log = structlog.get_logger(__name__)


def look(plan: SlotSyncPlan) -> SlotReport:
    """How all candidates stand now. Nothing is changed; what the controller wrote down is read."""

    def one(copier: SlotCopier) -> SlotRound:
        with copier:
            return copier.look(began)

    began = time.monotonic()
    with SharedProbe(plan.primary_dsn) as primary:
        copiers = [SlotCopier(each, plan, primary) for each in plan.candidates]
        with ThreadPoolExecutor(max_workers=len(copiers)) as threads:
            rounds = [*threads.map(one, copiers)]
    return SlotReport({each.candidate: each for each in rounds})


class Controller(Closing):
    """Keeps the plan's copies."""

    def __init__(self, plan: SlotSyncPlan) -> None:
        self._plan = plan
        self._primary = SharedProbe(plan.primary_dsn, wants_turn=True)
        self._copiers = [SlotCopier(each, plan, self._primary) for each in plan.candidates]
        self._began = time.monotonic()
        self._active = False
        self._answers = False
        self._said: str | None = None
        self._rounds: dict[str, SlotRound] = {}

    def close(self) -> None:
        """End the connections, and leave the turn to others."""
        for copier in self._copiers:
            copier.close()
        self._primary.close()

    def once(self, seconds: float) -> SlotReport:
        """Do what can be done now, and how it stands after that; about `seconds` at most.

        Raises `RunningError` when it is not our turn in that time, `ConfigError` when nothing can be recorded.
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
            return copier.look(since)

        with ThreadPoolExecutor(max_workers=len(self._copiers)) as threads:
            rounds = [*threads.map(one, self._copiers)]
        return SlotReport({each.candidate: each for each in rounds}, active=self._active)

    def watch(self, stop: threading.Event, tell: Callable[[SlotReport], None]) -> None:
        """Keep the copies until `stop` is set; `tell` is called at each poll with how they stand."""
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
            tell(SlotReport(dict(self._rounds), active=self._active))
        for thread in threads:
            thread.join(_ENDING)

    def _keep(self, copier: SlotCopier, stop: threading.Event) -> None:
        moment: float | None = self._began
        while moment is not None:
            try:
                found, _ = copier.round(moment, act=self._active)
                self._rounds[found.candidate] = found
            except InvariantError as error:
                # Nothing of this candidate is touched any more; its report grows old.
                _log.error(
                    "copies are not kept any more", standby=copier.candidate.name, **error.to_wire()
                )
                return
            except TusklineError as error:
                _log.error("copies are not kept", standby=copier.candidate.name, **error.to_wire())
            except Exception:
                # One fault of ours must not end the care for this candidate; its report grows old meanwhile.
                _log.exception("copies are not kept", standby=copier.candidate.name)
            moment = self._next_moment(stop)

    def _next_moment(self, stop: threading.Event) -> float | None:
        """Wait for the next of the moments at which everybody looks, and which it is; None: it is to end."""
        poll = self._plan.poll
        moment = self._began + ((time.monotonic() - self._began) // poll + 1) * poll
        while (left := moment - time.monotonic()) > 0:
            if stop.wait(left):
                return None
        return moment

    def _await_turn(self, deadline: float) -> None:
        """Take the turn. A primary that does not answer has none to give, and nothing is to be done then."""
        self._take_turn(time.monotonic())
        while not self._active and self._answers:
            if time.monotonic() > deadline:
                raise RunningError(
                    "another controller keeps the copies",
                    where=self._primary.where,
                    repair="leave it to that one, or end it; `tuskline slots status` only looks",
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
            whose = "this controller keeps the copies"
        elif self._answers:
            whose = "another controller keeps the copies; this one waits for its turn"
        else:
            whose = "the primary does not answer"
        if whose != self._said:
            _log.info(whose, primary=self._primary.where)
        self._said = whose
