"""Which actions each role has, against the table that is written out in `tests/support/role_table.py`."""

import pytest

from tests.support.role_table import ACTIONS, ROLES, TABLE
from walsender_bridge.change_log import authorization
from walsender_bridge.change_log.authorization import ALLOWED, APPEND, READ, SYNC
from walsender_bridge.errors import ConfigError, PrivilegeError
from walsender_bridge.runtime import certificate_holder
from walsender_bridge.runtime.certificate_holder import ALL_STREAMS, Identity, Role


def _holder(*roles, streams=("*",)):
    return certificate_holder.identity("someone", roles, streams)


def _may(holder, action, *streams):
    try:
        authorization.check(holder, action, streams)
    except PrivilegeError:
        return False
    return True


def test_the_table_names_every_action_of_both_services():
    assert set(TABLE) == ACTIONS | {READ, APPEND, SYNC}
    assert set().union(*ALLOWED.values()) == set(TABLE)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("action", TABLE)
def test_a_role_may_do_what_the_table_says_and_nothing_else(action, role):
    expected = role in {ROLES[letter] for letter in TABLE[action] if letter != " "}
    assert _may(_holder(role), action) == expected
    assert _may(_holder(role), action, "shop") == expected


@pytest.mark.parametrize("action", ["append", "commit", "trim", "seal", "unseal", "cut_tail"])
@pytest.mark.parametrize("role", [Role.READER, Role.MONITOR, Role.LAKE, Role.LOG_SERVER])
def test_who_may_read_may_not_change_the_log(role, action):
    with pytest.raises(PrivilegeError, match=rf"'someone' \({role}\) does not allow '{action}'"):
        authorization.check(_holder(role), action, ["shop"])


@pytest.mark.parametrize("role", sorted(set(Role) - {Role.LOG_SERVER}))
def test_only_a_log_server_sends_a_replica_to_another(role):
    assert not _may(_holder(role), SYNC, "shop")
    assert _may(_holder(Role.LOG_SERVER), SYNC, "shop")


def test_a_reader_holds_leases_of_its_own_name_alone():
    reader = certificate_holder.identity("reports", ["reader"])
    for name in ("reports", "reports-2"):
        authorization.check_consumer(reader, name)
    for name in ("lake", "", "report", "reports2", "reports/2", "lake-reports"):
        with pytest.raises(PrivilegeError, match="does not allow the lease") as caught:
            authorization.check_consumer(reader, name)
        assert "reports-..." in caught.value.repair
    authorization.check_consumer(
        certificate_holder.identity("reports", ["lake"]), "reports of others"
    )
    authorization.check_consumer(certificate_holder.identity("me", ["reader", "operator"]), "lake")


@pytest.mark.parametrize("role", [Role.LAKE, Role.OPERATOR])
def test_a_holder_of_named_streams_moves_no_lease_of_another(role):
    """A lease holds all streams: moved ahead, it would have those trimmed that are not the holder's."""
    few = certificate_holder.identity("reports", [role], ["shop"])
    authorization.check_consumer(few, "reports-2")
    with pytest.raises(PrivilegeError, match="does not allow the lease"):
        authorization.check_consumer(few, "warehouse")


def test_an_unknown_action_is_nobodys():
    for action in ("", "drop", "status ", "APPEND"):
        assert not _may(_holder(*Role), action)


def test_a_holder_of_named_streams_has_no_others():
    reader = _holder("reader", streams=("a", "b"))
    assert _may(reader, READ, "a")
    assert _may(reader, "barrier", "a", "b")
    assert _may(reader, "status")
    assert not _may(reader, READ, "c")
    assert not _may(reader, "barrier", "a", "c")
    assert not _may(reader, READ, "*")
    assert not _may(_holder("lake", streams=("a",)), "raise_version", ALL_STREAMS)
    assert _may(_holder("lake"), "raise_version", ALL_STREAMS)
    with pytest.raises(PrivilegeError, match="on stream 'c'") as caught:
        authorization.check(reader, READ, ["c"])
    assert "--stream" in caught.value.repair


def test_several_roles_add_up():
    both = _holder("repository", "writer")
    assert _may(both, "commit", "a")
    assert _may(both, APPEND, "a")
    assert not _may(both, READ, "a")


def test_an_error_names_a_role_that_may():
    with pytest.raises(PrivilegeError) as caught:
        authorization.check(_holder("monitor"), READ, ["a"])
    assert caught.value.repair == "use a certificate with the role reader or lake or operator"


@pytest.mark.parametrize(
    "holder",
    [
        Identity("spark", frozenset({Role.READER}), frozenset({"a", "b_2"})),
        Identity("bridge.1-x_y", frozenset({Role.REPOSITORY, Role.WRITER}), frozenset({"*"})),
        Identity("log-server", frozenset({Role.LOG_SERVER}), frozenset({"*"})),
    ],
)
def test_an_identity_is_read_as_it_was_written(holder):
    assert certificate_holder.parse(holder.uri().encode()) == holder


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"localhost",
        b"operator",
        b"spiffe://tuskline/role/operator",
        b"tuskline:",
        b"tuskline:operator",
        b"tuskline:operator?name=x",
        b"tuskline:operator?streams=*",
        b"tuskline:operator?name=x&streams=",
        b"tuskline:operator?name=&streams=*",
        b"tuskline:root?name=x&streams=*",
        b"tuskline:?name=x&streams=*",
        b"tuskline:reader+?name=x&streams=*",
        b"tuskline:reader?name=x&streams=a&streams=*",
        b"tuskline:reader?name=x&streams=a&more=*",
        b"tuskline:reader?name=x&streams=a,..%2Fb",
        b"tuskline:reader?name=x;streams=*",
        b"TUSKLINE:operator?name=x&streams=*",
        b" tuskline:operator?name=x&streams=*",
        b"tuskline:op\xffrator?name=x&streams=*",
        "tuskline:reader?name=ü&streams=*".encode(),
        b"tuskline:reader?name=x&streams=" + b"a," * 100_000,
    ],
)
def test_a_name_that_is_no_identity_is_refused(name):
    with pytest.raises(PrivilegeError) as caught:
        certificate_holder.parse(name)
    assert "tuskline certs issue" in caught.value.repair
    assert len(str(caught.value)) < 500


def test_an_invalid_role_or_stream_is_refused_before_it_is_issued():
    with pytest.raises(PrivilegeError, match="unknown role 'root'"):
        _holder("root")
    with pytest.raises(ConfigError, match="invalid stream name"):
        _holder("reader", streams=("a,*",))
