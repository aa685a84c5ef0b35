"""What each role may send to a safekeeper: the whole table, written out a second time."""

from typing import get_args

import pytest

from walsender_bridge.errors import PrivilegeError
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.safekeeper import authorization
from walsender_bridge.runtime.certificate_holder import Role, identity, of_certificate

#: p: proposer, o: operator, s: safekeeper, m: monitor.
TABLE = {
    m.ProposerGreeting: "posm",
    m.Vote: "po",
    m.Resume: "po",
    m.Elected: "po",
    m.Append: "po",
    m.Fetch: "po",
    m.CatchUpWal: "po",
    m.Configure: "po",
}
LETTERS = {
    Role.PROPOSER: "p",
    Role.OPERATOR: "o",
    Role.SAFEKEEPER: "s",
    Role.MONITOR: "m",
}


def test_the_table_has_every_message():
    assert set(TABLE) == set(get_args(m.ToSafekeeper))


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("kind", TABLE)
def test_a_role_may_send_what_the_table_says_and_nothing_else(role, kind):
    message = object.__new__(kind)
    holder = identity("someone", [role])
    if LETTERS.get(role, " ") in TABLE[kind]:
        authorization.check(holder, message)
        return
    with pytest.raises(PrivilegeError, match=f"does not allow {kind.__name__}") as caught:
        authorization.check(holder, message)
    assert "proposer" in caught.value.repair


@pytest.mark.parametrize(
    "names",
    [
        (),
        (("DNS", "tuskline:proposer?name=a&streams=*"),),
        (("DNS", "localhost"), ("URI", "tuskline:proposer?name=a&streams=*")),
        (("URI", "tuskline:superuser?name=a&streams=*"),),
    ],
)
def test_a_holder_is_the_first_name_and_a_uri(names):
    with pytest.raises(PrivilegeError):
        of_certificate({"subjectAltName": names})
