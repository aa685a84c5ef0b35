"""Whether what a server shows is on a quorum: the gate that `tuskline wait --quorum` and `/readyz` stand before.

After a crash PostgreSQL shows commits that were still waiting for the quorum: recovery replays whatever its own
disk had. So a service that must not show what could yet be lost waits here before it opens to its clients.

Why one LSN is enough, on every major: a connection is only taken once recovery has ended, and what recovery (or a
promotion) made visible lies before its end. `pg_current_wal_flush_lsn()`, asked on that connection, is at or behind
that end. When the proposer has told *this very server* (pg_stat_replication) that a quorum has everything up to
there, all that recovery showed is on the quorum. Later commits wait for it by themselves. Nothing depends on
control files, times of starts, or a file that an earlier proposer left: a server that crashes takes its walsenders
and this connection with it, so the next look begins with a new connection and a new LSN.

The gate is passed once for each connection; a quorum that is lost afterwards shows as commits that wait.
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
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.standby_names import StandbyNames
from walsender_bridge.provisioning.quorum import ConfiguredQuorum, crowded, facts, session

#: Seconds between two looks.
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class QuorumGateState:
    """`wanted`: what the quorum must have. `reached`: what it has, as far as this server was told. LSNs, or None.

    `required`: whether commits wait for the quorum, `waiting`: how many do now, `proposers`: how many there are to
    answer them. `reason`: why the gate is closed; empty: it is open. `crowded`: who else can answer; empty: nobody.
    """

    wanted: int | None
    reached: int | None
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
    """The gate of one connection, which must not outlive it. `connection` may be anybody's to the quorum's server."""

    def __init__(self, connection: psycopg.Connection[Any], quorum: ConfiguredQuorum) -> None:
        self._connection = connection
        self._quorum = quorum
        self._wanted: int | None = None
        self._passed = False

    def poll(self) -> QuorumGateState:
        """Where it stands. Raises `PrivilegeError` when this role may not see what the proposer reports."""
        found = facts(self._connection, self._quorum)
        if not found["may_see"]:
            role = found["role"]["name"]
            raise PrivilegeError(
                f"role {role} may not see what the proposer has reported",
                where=self._quorum.where,
                repair=f"GRANT pg_read_all_stats TO {role}, or `tuskline init --admin user=...`",
            )
        required = StandbyNames.parse(found["names"]).needs(self._quorum.name)
        if found["in_recovery"]:
            return QuorumGateState(
                None, None, required, 0, 0, "the server is a standby, or still recovers"
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
    """Wait until the gate is open, at most `timeout` seconds; a server that is away or recovers is waited for.

    Raises `DeadlineError` with the reason, and what another try would not mend.
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
            repair="see `tuskline status`, and docs/quorum-lost.md when the quorum does not come back",
        )
    time.sleep(_POLL_SECONDS)
