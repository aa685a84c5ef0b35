"""What `status` and `/readyz` say of the quorum, from what the server says."""

from typing import Any

import pytest

from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.errors import PrivilegeError
from walsender_bridge.provisioning import quorum_gate
from walsender_bridge.provisioning.quorum import ConfiguredQuorum
from walsender_bridge.provisioning.quorum_gate import QuorumGate

#: The facts are told without a connection.
NOBODY: Any = None
QUORUM = ConfiguredQuorum(CaptureSource("shop", "host=db dbname=x", "s", "p"), "q", "slot")


class Told:
    """A server that says one thing after another."""

    def __init__(self, monkeypatch):
        self.now = {
            "names": "FIRST 1 (q)",
            "may_see": True,
            "in_recovery": False,
            "flush_lsn": 100,
            "quorum_lsn": None,
            "senders": 0,
            "crowded": [],
            "waiting": 0,
            "role": {"name": "r"},
        }
        monkeypatch.setattr(quorum_gate, "facts", lambda *_: self.now)


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch)


def test_18_the_gate_opens_when_the_quorum_has_what_was_there_when_it_was_first_asked(told):
    gate = QuorumGate(NOBODY, QUORUM)
    assert "no proposer" in gate.poll().reason
    told.now |= {"senders": 1, "flush_lsn": 200}
    assert "nothing yet" in gate.poll().reason
    told.now |= {"quorum_lsn": 99}
    assert "0/63" in gate.poll().reason
    told.now |= {"quorum_lsn": 100}
    state = gate.poll()
    assert (state.reason, state.wanted, state.required) == ("", 100, True)
    # Passed once: a proposer that restarts has reported nothing yet, and later commits wait by themselves.
    told.now |= {"quorum_lsn": None, "senders": 0}
    assert not gate.poll().reason
    # A crash ends the connection, and with it the gate.
    assert QuorumGate(NOBODY, QUORUM).poll().reason


def test_2_standbys_of_one_name_beside_the_quorum_are_told(told):
    told.now |= {"names": "FIRST 2 (q, near)", "crowded": [{"name": "near", "walsenders": 2}]}
    state = QuorumGate(NOBODY, QUORUM).poll()
    assert state.required
    assert "2 walsenders are named 'near'" in state.crowded


def test_18_a_standby_has_no_gate_to_pass(told):
    told.now |= {"in_recovery": True, "flush_lsn": None}
    assert "standby" in QuorumGate(NOBODY, QUORUM).poll().reason


def test_18_who_may_not_see_is_told_so_and_not_that_all_is_well(told):
    told.now |= {"may_see": False, "quorum_lsn": 100}
    with pytest.raises(PrivilegeError, match="not allowed to see"):
        QuorumGate(NOBODY, QUORUM).poll()
