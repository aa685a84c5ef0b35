"""Kills processes with SIGKILL, in an order that its seed determines.

Each kind of process is killed `LEAST_ROUNDS` times, and once per minute in a longer run. Of a kind with several processes
(the log server and its replicas, the Spark driver's Python and its JVM, one capture for each source), each is killed in turn.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

LEAST_ROUNDS = 3


def kill(pid: int) -> None:
    """Kill a process, unless it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@dataclass(slots=True)
class Victim:
    """A kind of process. `pids` returns those that live now; `strike` kills one of them; `rounds`: how often, if not as others."""

    kind: str
    pids: Callable[[], Sequence[int]]
    #: Kills it and restarts it, if SIGKILL alone is not enough (PostgreSQL has no supervisor).
    strike: Callable[[], None] | None = None
    rounds: int | None = None
    killed: int = field(default=0)


class Nemesis:
    """Kills each victim in as many rounds as `seconds` has minutes, evenly distributed."""

    def __init__(self, victims: Sequence[Victim], *, seconds: float, seed: int) -> None:
        self.victims = victims
        self._dice = random.Random(seed)
        self.rounds = max(LEAST_ROUNDS, int(seconds // 60))
        self._order = [each for each in victims for _ in range(each.rounds or self.rounds)]
        self._pause = seconds / (len(self._order) + 1)
        #: When which kind was killed, in seconds since the Unix epoch.
        self.strikes: list[tuple[float, str]] = []

    @property
    def kills(self) -> dict[str, int]:
        """How often each kind was killed."""
        return {victim.kind: victim.killed for victim in self.victims}

    async def run(self) -> None:
        """Do all kills. If a victim is down when it is due, wait for it, so that no kill is missed."""
        self._dice.shuffle(self._order)
        for victim in self._order:
            await asyncio.sleep(self._pause * self._dice.uniform(0.6, 1.0))
            await self._kill(victim)

    async def _kill(self, victim: Victim) -> None:
        if victim.strike is not None:
            self._struck(victim)
            await asyncio.to_thread(victim.strike)
            return
        while True:
            alive = victim.pids()
            if alive:
                kill(alive[victim.killed % len(alive)])
                self._struck(victim)
                return
            await asyncio.sleep(0.1)

    def _struck(self, victim: Victim) -> None:
        victim.killed += 1
        self.strikes.append((time.time(), victim.kind))
