"""The controller of slot copies: every candidate side by side, none waiting for another.

Each candidate has a thread, connections and limits of its own, so a candidate or a slot that hangs delays no other. Of
several controllers of one primary one acts (`turn`); the others look, and say whose turn it is.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from slot_sync.copier import Copier
from slot_sync.plan import Plan
from slot_sync.report import Report, Round
from slot_sync.turn import Turn
from walsender_bridge.closing import Closing
from walsender_bridge.errors import RunningError, TusklineError

#: Rounds of `once`: a slot that is written to all the time has always something to be done.
_ROUNDS: Final = 10
#: Seconds that a thread has to end.
_ENDING: Final = 2.0

_log = structlog.get_logger(__name__)


def look(plan: Plan) -> Report:
    """How all candidates stand now. Nothing is changed; what the controller wrote down is read."""

    def one(copier: Copier) -> Round:
        with copier:
            return copier.look()

    copiers = [Copier(each, plan) for each in plan.candidates]
    with ThreadPoolExecutor(max_workers=len(copiers)) as threads:
        rounds = [*threads.map(one, copiers)]
    return Report({each.candidate: each for each in rounds})


class Controller(Closing):
    """Keeps the plan's copies."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._turn = Turn(plan.primary_dsn)
        self._copiers = [Copier(each, plan) for each in plan.candidates]
        self._active = False
        self._said: str | None = None
        self._rounds: dict[str, Round] = {}

    def close(self) -> None:
        """End the connections, and leave the turn to others."""
        for copier in self._copiers:
            copier.close()
        self._turn.close()

    def once(self, seconds: float) -> Report:
        """Do what can be done now, and how it stands after that; about `seconds` at most.

        Raises `RunningError` when it is not our turn in that time, `ConfigError` when nothing can be recorded.
        """
        deadline = time.monotonic() + seconds
        self._await_turn(deadline)

        def one(copier: Copier) -> Round:
            for _ in range(_ROUNDS):
                found, begun = copier.round(act=self._active)
                if not begun or not copier.settle(max(0.0, deadline - time.monotonic())):
                    return found
            return copier.look()

        with ThreadPoolExecutor(max_workers=len(self._copiers)) as threads:
            rounds = [*threads.map(one, self._copiers)]
        return Report({each.candidate: each for each in rounds}, active=self._active)

    def watch(self, stop: threading.Event, tell: Callable[[Report], None]) -> None:
        """Keep the copies until `stop` is set; `tell` is called at each poll with how they stand."""
        threads = [
            threading.Thread(target=self._keep, args=(copier, stop), daemon=True)
            for copier in self._copiers
        ]
        self._take_turn()
        for thread in threads:
            thread.start()
        while not stop.wait(self._plan.poll):
            self._take_turn()
            tell(Report(dict(self._rounds), active=self._active))
        for thread in threads:
            thread.join(_ENDING)

    def _keep(self, copier: Copier, stop: threading.Event) -> None:
        while True:
            try:
                found, _ = copier.round(act=self._active)
                self._rounds[found.candidate] = found
            except TusklineError as error:
                _log.error("copies are not kept", standby=copier.candidate.name, **error.to_wire())
            except Exception:
                # One fault of ours must not end the care for this candidate; its report grows old meanwhile.
                _log.exception("copies are not kept", standby=copier.candidate.name)
            if stop.wait(self._plan.poll):
                return

    def _await_turn(self, deadline: float) -> None:
        """Take the turn. A primary that does not answer has none to give, and nothing is to be done then."""
        self._take_turn()
        while not self._active and self._turn.error is None:
            if time.monotonic() > deadline:
                raise RunningError(
                    "another controller keeps the copies",
                    where=self._turn.where,
                    repair="leave it to that one, or end it; `tuskline slots status` only looks",
                )
            time.sleep(0.05)
            self._take_turn()

    def _take_turn(self) -> None:
        self._active = self._turn.held()
        if self._active:
            whose = "this controller keeps the copies"
        elif self._turn.error is None:
            whose = "another controller keeps the copies; this one waits for its turn"
        else:
            whose = "the primary does not answer"
        if whose != self._said:
            _log.info(whose, primary=self._turn.where)
        self._said = whose
