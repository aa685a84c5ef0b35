"""The quorum as the server shows it, for `status`, `top` and `/readyz`: whether commits wait for it, and its gate."""

from collections.abc import Iterator
from typing import Any

import psycopg

from walsender_bridge.config import Config
from walsender_bridge.errors import PrivilegeError
from walsender_bridge.provisioning import release_record
from walsender_bridge.provisioning.configured import needed_quorum
from walsender_bridge.provisioning.quorum_gate import QuorumGate


class QuorumServer:
    """Keeps the gate of a connection; a new connection, after a crash of the server, gets a new gate."""

    def __init__(self, settings: Config) -> None:
        self._settings = settings
        self._gate: tuple[psycopg.Connection[Any], QuorumGate] | None = None

    def problems(self, connection: psycopg.Connection[Any]) -> list[str]:
        """The problems, as sentences. `connection` is to the quorum's source."""
        if self._gate is None or self._gate[0] is not connection:
            self._gate = connection, QuorumGate(connection, needed_quorum(self._settings))
        return [*self._problems(self._gate[1])]

    def _problems(self, gate: QuorumGate) -> Iterator[str]:
        released = release_record.in_force(self._settings.data_dir)
        if released is not None:
            yield f"{released.summary()}; run tuskline quorum require"
        try:
            state = gate.poll()
        except PrivilegeError as error:
            yield f"{error.what}; {error.repair}"
            return
        if state.required and not state.proposers:
            yield "commits hang: they wait for the quorum, and no proposer is attached; run tuskline up"
        elif state.proposers > 1:
            yield (
                f"{state.proposers} proposers stream from the server, and each can acknowledge for its own quorum;"
                " stop all but one (an old connection of the same proposer ends after wal_sender_timeout)"
            )
        elif not state.required and released is None:
            yield "commits do not wait for the quorum, or other standbys can acknowledge instead; run tuskline quorum require"
        if state.required and state.crowded:
            yield f"commits may return without a quorum: {state.crowded}; run tuskline doctor"
        if state.reason:
            yield f"the server shows transactions that are not on a quorum yet: {state.reason}"
