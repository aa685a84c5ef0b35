"""What doctor says of the server that a failover candidate streams from."""

import pytest

from walsender_bridge.doctor import upstream
from walsender_bridge.doctor.finding import Severity

STANDBY = {"receiver_host": "far", "receiver_port": 5433, "receiver_status": "streaming"}
PRIMARY = {"system_id": "7", "in_recovery": False}


def told(found, standby=STANDBY, system_id="7"):
    return [*upstream.evaluate(standby, found, "standby_a", system_id, "db")]


def test_35_the_primary_is_right_and_its_address_is_said():
    (finding,) = told(PRIMARY)
    assert (finding.severity, "far:5433" in finding.what) == (Severity.OK, True)
    assert told(PRIMARY, system_id=None)[0].severity is Severity.OK


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (upstream.SAFEKEEPER, "a safekeeper, far:5433"),
        ({**PRIMARY, "in_recovery": True}, "another standby, far:5433"),
        ({**PRIMARY, "system_id": "8"}, "another cluster, far:5433"),
    ],
)
def test_35_anything_else_is_refused_by_name(found, words):
    (finding,) = told(found)
    assert (finding.severity, finding.prevents) == (Severity.ERROR, False)
    assert words in finding.what
    assert "standby_a" in finding.repair


def test_35_what_nobody_can_tell_is_a_doubt_and_who_streams_from_nobody_is_none():
    assert told(None)[0].severity is Severity.WARNING
    nobody = {"receiver_host": None, "receiver_port": None, "receiver_status": None}
    assert told(None, nobody) == []
    assert upstream.ask("host=nowhere.invalid", nobody) is None
