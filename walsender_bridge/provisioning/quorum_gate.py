"""The quorum gate: whether everything that a server shows is on a quorum, for `tuskline wait --quorum` and `/readyz`.

After a crash PostgreSQL shows commits that were still waiting for the quorum: recovery replays all WAL on its own
disk. So a service that must not show transactions that could still be lost waits here before it accepts clients.

Why one LSN is enough, on every major: connections are accepted only once recovery has ended, and everything that recovery
(or a promotion) made visible lies before its end. `pg_current_wal_flush_lsn()`, queried on that connection, is at or beyond
that end. Once the proposer has reported to *this server* (pg_stat_replication) that a quorum has everything up to
there, all that recovery made visible is on the quorum. Later commits wait for it by themselves. Nothing depends on
control files, start times, or a file left by an earlier proposer: a server crash ends its walsenders
and this connection, so the next poll starts with a new connection and a new LSN.

The gate is passed once for each connection; a quorum that is lost afterwards shows as waiting commits.
"""

import time
from dataclasses import dataclass
from typing import Any

import psycopg

from walsender_bridge.errors import (
    ConnectionFailedError,
    DeadlineError,
    PrivilegeError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.standby_names import StandbyNames
from walsender_bridge.provisioning.quorum import ConfiguredQuorum, crowded, facts, session

#: Seconds between two polls.
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class QuorumGateState:
    """`wanted`: the LSN that the quorum must have. `reached`: the LSN reported to this server. Both can be None.

    `required`: whether commits wait for the quorum, `waiting`: how many are waiting, `proposers`: how many are
    attached. `reason`: why the gate is closed; empty if open. `crowded`: other standbys that can acknowledge; empty if none.
    """

    wanted: Lsn | None
    reached: Lsn | None
    required: bool
    waiting: int
    proposers: int
    reason: str = ""
    crowded: str = ""

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "ready": not self.reason,
            "wanted_lsn": None if self.wanted is None else format_lsn(self.wanted),
            "quorum_lsn": None if self.reached is None else format_lsn(self.reached),
            "required": self.required,
            "waiting_commits": self.waiting,
            "reason": self.reason,
        }


class QuorumGate:
    """The gate of one connection, which must not outlive it. `connection` can be of any role on the quorum's server."""

    def __init__(self, connection: psycopg.Connection[Any], quorum: ConfiguredQuorum) -> None:
        self._connection = connection
        self._quorum = quorum
        self._wanted: Lsn | None = None
        self._passed = False

    def poll(self) -> QuorumGateState:
        """Poll the gate. Raises `PrivilegeError` if this role may not see the position that the proposer reports."""
        found = facts(self._connection, self._quorum)
        if not found["may_see"]:
            role = found["role"]["name"]
            raise PrivilegeError(
                f"role {role} is not allowed to see the position reported by the proposer",
                where=self._quorum.where,
                repair=f"run GRANT pg_read_all_stats TO {role}, or `tuskline init --admin user=...`",
            )
        required = StandbyNames.parse(found["names"]).needs(self._quorum.name)
        if found["in_recovery"]:
            return QuorumGateState(
                None, None, required, 0, 0, "the server is a standby, or still in recovery"
            )
        if self._wanted is None:
            self._wanted = found["flush_lsn"]
        reached, wanted = found["quorum_lsn"], self._wanted
        assert wanted is not None
        self._passed = self._passed or (reached or 0) >= wanted
        reason = ""
        if not self._passed and not found["senders"]:
            reason = "no proposer is attached to the server"
        elif not self._passed:
            held = "nothing yet" if not reached else format_lsn(reached)
            reason = f"a quorum has {held} of the WAL, which reaches {format_lsn(wanted)}"
        return QuorumGateState(
            wanted, reached, required, found["waiting"], found["senders"], reason, crowded(found)
        )


def wait_ready(
    quorum: ConfiguredQuorum, timeout: float, admin: str | None = None
) -> QuorumGateState:
    """Wait until the gate is open, at most `timeout` seconds, including while the server is down or in recovery.

    Raises `DeadlineError` with the reason, and errors that a retry cannot resolve.
    """
    deadline = time.monotonic() + timeout
    reason = ""
    while True:
        try:
            with session(quorum, admin) as connection:
                gate = QuorumGate(connection, quorum)
                while True:
                    state = gate.poll()
                    if not state.reason:
                        return state
                    reason = state.reason
                    _pause(deadline, timeout, reason, quorum)
        except (ConnectionFailedError, UnavailableError) as error:
            reason = error.what
        _pause(deadline, timeout, reason, quorum)


def _pause(deadline: float, timeout: float, reason: str, quorum: ConfiguredQuorum) -> None:
    if time.monotonic() + _POLL_SECONDS > deadline:
        raise DeadlineError(
            f"not ready in {timeout:g} s: {reason}",
            where=quorum.where,
            repair="see `tuskline status`, and docs/quorum-lost.md if the quorum does not return",
        )
    time.sleep(_POLL_SECONDS)
