"""Which rule of pg_hba.conf decides, and what is not guessed."""

import pytest

from walsender_bridge.doctor.host_based import decides

ALL = ["all"]
V4, V4_MASK = "10.7.3.0", "255.255.255.0"


def rule(
    kind: str = "host",
    databases: list[str] = ALL,
    roles: list[str] = ALL,
    address: str | None = V4,
    mask: str | None = V4_MASK,
    method: str = "scram-sha-256",
    error: str | None = None,
    client: str | None = "10.7.3.7/32",
) -> tuple[object, ...]:
    return (1, kind, databases, roles, address, mask, method, error, client)


@pytest.mark.parametrize(
    ("rules", "physical", "verdict"),
    [
        ([rule()], False, "allowed"),
        # A word for physical walsenders, which no name of a database and no `all` means.
        ([rule()], True, "refused"),
        ([rule(databases=["replication"])], True, "allowed"),
        ([rule(databases=["replication"])], False, "refused"),
        ([rule(method="reject"), rule()], False, "refused"),
        ([rule(roles=["bob"], method="reject"), rule()], False, "allowed"),
        ([rule(roles=["+staff"])], False, "allowed"),
        ([rule(roles=["+others"])], False, "refused"),
        ([rule(address="10.7.4.0")], False, "refused"),
        ([rule(address="all", mask=None)], False, "allowed"),
        ([rule(address="db.example.com", mask=None)], False, "unknown"),
        ([rule(kind="hostssl"), rule()], False, "unknown"),
        ([rule(databases=["other"]), rule(error="wrong")], False, "refused"),
        ([rule(databases=["sameuser"])], False, "refused"),
        ([rule(kind="local", address=None, mask=None)], False, "refused"),
        ([rule(kind="local", address=None, mask=None, client=None)], False, "allowed"),
        ([rule(address="fe80::1", mask="ffff::", client="::1/128")], False, "refused"),
        ([rule(address="fe80::", mask="ffff::", client="fe80::7/128")], False, "allowed"),
    ],
)
def test_the_first_rule_that_fits_decides(
    rules: list[tuple[object, ...]], physical: bool, verdict: str
) -> None:
    database = "replication" if physical else "shop"
    assert decides(rules, database, "tuskline", ["staff"], physical=physical) == verdict
