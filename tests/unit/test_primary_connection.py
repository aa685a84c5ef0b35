"""A primary that takes no session: a lock on a catalog is told from a server that hangs."""

import pytest

from walsender_bridge.errors import (
    AuthenticationError,
    ConnectionFailedError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream

EXPIRED = "connection to server failed: timeout expired"


class Physical:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def identify(self):
        pass


@pytest.mark.parametrize(
    ("what", "physical", "expected"),
    [
        (EXPIRED, None, UnavailableError),
        (EXPIRED, ConnectionFailedError(EXPIRED), ConnectionFailedError),
        # Another kind of connection, which pg_hba.conf may not know: what ends a proposer is not made of that.
        (EXPIRED, AuthenticationError("no pg_hba.conf entry"), ConnectionFailedError),
        ("Connection refused", None, ConnectionFailedError),
    ],
)
def test_only_a_server_that_runs_has_a_locked_catalog(monkeypatch, what, physical, expected):
    asked = []

    def connect(cls, dsn, *, application_name="", replication="database"):
        asked.append((dsn, replication))
        if replication == "database":
            raise ConnectionFailedError(what, where="here")
        if isinstance(physical, TusklineError):
            raise physical
        return Physical()

    monkeypatch.setattr(ReplicationConnection, "connect", classmethod(connect))
    with pytest.raises(expected, match="is locked" if expected is UnavailableError else what):
        PrimaryStream.connect("dbname=shop options='-c geqo=off'")
    first, _ = asked[0]
    assert "-c geqo=off -c lock_timeout=5s" in first
