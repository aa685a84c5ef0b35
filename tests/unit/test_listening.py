"""Why a service cannot listen, and what is to be done about it."""

import socket

import pytest

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import listening


@pytest.mark.parametrize(
    ("address", "repair"),
    [
        # Of a network that no machine is in.
        ("192.0.2.1:7400", "this machine has no such address"),
        ("no-such-host.invalid:7400", "correct the host"),
    ],
)
def test_a_host_that_is_not_this_machine_s_is_no_other_program_s_fault(
    address: str, repair: str
) -> None:
    with pytest.raises(ConfigError, match="cannot listen") as caught:
        listening.check(address)
    assert repair in caught.value.repair
    assert "stop the program" not in caught.value.repair


def test_a_port_in_use_is_another_program_s() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        with pytest.raises(ConfigError, match="in use") as caught:
            listening.check(f"127.0.0.1:{other.getsockname()[1]}")
        assert "stop the program that listens there" in caught.value.repair


def test_a_port_for_root_alone_has_a_repair_of_its_own() -> None:
    error = PermissionError(13, "Permission denied")
    assert "above 1023" in listening.refused("127.0.0.1:80", error).repair
