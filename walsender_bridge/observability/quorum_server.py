"""The quorum as the server shows it, for `status`, `top` and `/readyz`: whether commits wait for it, and its gate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from walsender_bridge.config import Config
from walsender_bridge.errors import PrivilegeError
from walsender_bridge.provisioning import release_record
from walsender_bridge.provisioning.configured import needed_quorum
from walsender_bridge.provisioning.quorum_gate import QuorumGate, QuorumGateState


@dataclass(frozen=True, slots=True)
class ServerQuorum:
    """`required`: whether commits wait for the quorum; None: unknown. `problems`: as sentences."""

    required: bool | None
    problems: tuple[str, ...]


class QuorumServer:
    """Keeps the gate of a connection; a new connection, after a crash of the server, gets a new gate."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._gate: tuple[psycopg.Connection[Any], QuorumGate] | None = None

    def observe(self, connection: psycopg.Connection[Any]) -> ServerQuorum:
        """The quorum now. `connection` is to its source."""
        if self._gate is None or self._gate[0] is not connection:
            self._gate = connection, QuorumGate(connection, needed_quorum(self._settings))
        released = release_record.in_force(self._settings.data_dir)
        found = [f"{released.summary()}; run tuskline quorum require"] if released else []
        try:
            state = self._gate[1].poll()
        except PrivilegeError as error:
            return ServerQuorum(None, (*found, f"{error.what}; {error.repair}"))
        found += _problems(state, released=released is not None)
        return ServerQuorum(state.required, tuple(found))


def _problems(state: QuorumGateState, *, released: bool) -> Iterator[str]:
    if state.required and not state.proposers:
        yield (
            "commits hang: they wait for the quorum, and no proposer is attached to the server;"
            " run tuskline up if the bridge is not running"
        )
    elif state.proposers > 1:
        yield (
            f"{state.proposers} proposers stream from the server, and each can acknowledge for its own quorum;"
            " stop all but one (an old connection of the same proposer ends after wal_sender_timeout)"
        )
    elif not state.required and not released:
        yield "commits do not wait for the quorum, or other standbys can acknowledge instead; run tuskline quorum require"
    if state.required and state.crowded:
        yield f"commits may return without a quorum: {state.crowded}; run tuskline doctor"
    if state.reason:
        yield f"the server shows transactions that are not on a quorum yet: {state.reason}"
