"""Of several bridges, one is active: its election in etcd, and what runs here as it goes.

Each bridge tries to hold one key of etcd with a lease (`leader_lease.py`), and the one that holds it is active.

**Nothing that is stored depends on who is active.** Two bridges that both believed it would harm neither log nor WAL: a
slot has one walsender, a stream has one writer, whose term fences the earlier ones, and a quorum follows the proposer that was
elected last. But they would displace each other, so COMMIT and the log would halt. Hence only the active one tries:

- `active`: captures and proposer run.
- `unsure`: it was active, and etcd has not confirmed that for the time of a lease. The captures end, so that whoever is
  active now finds the slots unused; they could commit nothing, since the repositories need etcd too. The proposer goes on, since COMMIT
  may wait for it: one that is active elsewhere displaces it.
- `standing by`: another bridge is active, or none is known to be. Neither runs. Also from the start on while etcd does not answer.

An active bridge also gives way if its captures have not reached the log for some time, and a bridge that stands by does reach it
(`bridge_reach.py`, `leadership.py`).
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from walsender_bridge.change_log.repository.etcd import EtcdSettings
from walsender_bridge.change_log.repository.leader_lease import Leader, bridge_key, try_to_lead
from walsender_bridge.cli.bridge_reach import LogReach
from walsender_bridge.errors import TusklineError
from walsender_bridge.observability.bridge_view import (
    ACTIVE,
    STANDING_BY,
    UNSURE,
    BridgeState,
    BridgeStatus,
    status_path,
)
from walsender_bridge.runtime import logs, status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.supervisor import Child, Supervisor

#: Looks at who is active, in the time of a lease.
_LOOKS: Final = 10

_log = logs.logger()


class BridgeElection:
    """See the module. `name`: what others call this bridge. `changed` is called, by a thread, after each change of `state`."""

    def __init__(
        self,
        cluster: EtcdSettings,
        name: str,
        run_dir: Path,
        changed: Callable[[], object],
        reach: LogReach,
    ) -> None:
        self._cluster = cluster
        self._reach = reach
        self._name = name
        self._status = status_path(run_dir)
        self._changed = changed
        self._said: BridgeStatus | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)
        self.state: BridgeState = STANDING_BY

    def start(self) -> None:
        """Try to become the active one from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Let another bridge become active at once. To be called once nothing of this one runs."""
        self._stopping.set()
        self._thread.join()
        with suppress(OSError):
            self._status.unlink()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                key = bridge_key(self._cluster)
                found = try_to_lead(self._cluster, self._name, key, self._reach.reaches)
                if isinstance(found, Leader):
                    self._lead(found)
                    continue
                self._become(STANDING_BY, found)
            except TusklineError as error:
                self._become_unsure(error)
            except Exception as error:
                _log.exception("election failed", error=str(error))
                self._become_unsure(TusklineError(f"election failed: {error}"))
            self._stopping.wait(self._cluster.lease / _LOOKS)

    def _lead(self, leader: Leader) -> None:
        self._become(ACTIVE, self._name)
        self._reach.begin()
        while not self._stopping.is_set() and not leader.lost.wait(0.1):
            leader.hindered = self._reach.is_cut_off()
        if leader.lost.is_set():
            self._become(UNSURE)
        leader.resign()

    def _become_unsure(self, error: TusklineError) -> None:
        self._become(STANDING_BY if self.state == STANDING_BY else UNSURE, error=error)

    def _become(
        self, state: BridgeState, active_at: str = "", *, error: TusklineError | None = None
    ) -> None:
        record = None if error is None else ErrorRecord.of(error)
        said = BridgeStatus(state=state, active_at=active_at, error=record)
        if said == self._said:
            return
        _log.info("bridge", state=state, active=active_at, error=record and record.what)
        status_file.write(self._status, said)
        self._said, before, self.state = said, self.state, state
        if state != before:
            self._changed()


async def run_elected(
    cluster: EtcdSettings,
    name: str,
    children: Mapping[BridgeState, Sequence[Child]],
    run_dir: Path,
    stop: asyncio.Event,
    ended: Callable[[], object],
    reach: LogReach,
) -> None:
    """Run the children of the state that the bridge is in, until `stop`. `ended` is called while none of them runs."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    election = BridgeElection(
        cluster, name, run_dir, lambda: loop.call_soon_threadsafe(changed.set), reach
    )
    election.start()
    try:
        while not stop.is_set():
            changed.clear()
            ended()
            await _run_until((stop, changed), children[election.state], run_dir)
    finally:
        await asyncio.to_thread(election.stop)


async def _run_until(
    events: Sequence[asyncio.Event], children: Sequence[Child], run_dir: Path
) -> None:
    """Run the children until one of the events."""
    over = asyncio.Event()
    running = asyncio.create_task(Supervisor("bridge", children, run_dir=run_dir).run(over))
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([running, *waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        over.set()
        await running
