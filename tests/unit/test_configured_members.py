"""A membership that is not the configured one: refused where it is smaller, told where it differs, unless it was asked for."""

import pytest

from walsender_bridge.errors import ConfigError
from walsender_bridge.quorum.proposer.configured_membership import difference, refuse_smaller
from walsender_bridge.quorum.proposer.member_changes import MemberRequest
from walsender_bridge.quorum.protocol.configuration import Configuration

THREE = [("a", 1), ("b", 2), ("c", 3)]
FOUND = {address: number for number, address in enumerate(THREE, 1)}
OF_THREE = Configuration(1, frozenset({1, 2, 3}), term=5)
OF_TWO = Configuration(3, frozenset({1, 2}), term=5)


def asked_for(*members: int) -> MemberRequest:
    return MemberRequest(1, frozenset(members), (), 0.0)


@pytest.mark.parametrize(
    ("membership", "request_", "refused"),
    [
        (OF_THREE, None, False),
        (OF_TWO, None, True),
        (OF_TWO, asked_for(1, 2), False),
        (OF_TWO, asked_for(1, 3), True),
        # Being changed: what it is to become counts.
        (OF_THREE.joint(frozenset({1, 2})), None, True),
        (OF_THREE.joint(frozenset({1, 2})), asked_for(1, 2), False),
        (OF_TWO.joint(frozenset({1, 2, 3})), None, False),
    ],
)
def test_38_fewer_members_than_configured_have_to_be_asked_for(membership, request_, refused):
    if not refused:
        refuse_smaller(membership, THREE, request_)
        return
    with pytest.raises(ConfigError, match="the quorum has 2 safekeepers, but 3 are configured"):
        refuse_smaller(membership, THREE, request_)


def test_38_a_quorum_of_one_is_named_in_the_singular():
    with pytest.raises(ConfigError, match="the quorum has 1 safekeeper, but 3 are configured"):
        refuse_smaller(Configuration(1, frozenset({1})), THREE, None)


@pytest.mark.parametrize(
    ("membership", "configured", "found", "request_", "told"),
    [
        (OF_THREE, THREE, FOUND, None, ""),
        (OF_THREE, THREE, {}, None, ""),
        (Configuration(), THREE, FOUND, None, ""),
        (OF_TWO, THREE, FOUND, asked_for(1, 2), ""),
        (
            OF_TWO,
            THREE,
            FOUND,
            None,
            "the quorum has 2 safekeepers, but 3 are configured; configured, but not members: c:3",
        ),
        # The same number, and not the same ones.
        (OF_THREE, THREE, {**FOUND, ("c", 3): 9}, None, "configured, but not members: c:3"),
        (
            OF_THREE,
            [*THREE[:2], ("d", 4)],
            FOUND,
            None,
            "members, but not configured: c:3",
        ),
        # Who is about to leave, or to come, is no stranger.
        (OF_THREE.joint(frozenset({1, 2, 4})), THREE, FOUND, None, ""),
    ],
)
def test_38_what_is_other_than_configured_is_told(membership, configured, found, request_, told):
    assert difference(membership, configured, found, request_) == told
