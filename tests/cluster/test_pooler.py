"""A DSN that names a connection pooler is refused by name, before a value is read in a form that the session did not ask for."""

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.attached import Attached
from tests.support.pooler import pooler
from walsender_bridge.errors import Cause, ConfigError
from walsender_bridge.postgres.client.replication_connection import ReplicationConnection


@pytest.mark.parametrize(
    ("refuses", "said"),
    [
        (True, "unsupported startup parameter: options"),
        (False, "the session has TimeZone = Asia/Tokyo, although it was started with UTC"),
    ],
    ids=["refuses", "ignores"],
)
def test_a_pooler_is_named_by_the_doctor_and_before_anything_is_captured(
    tmp_path, database, refuses, said
):
    database.execute(
        f"ALTER DATABASE {database.name} SET TimeZone = 'Asia/Tokyo'",
        "CREATE TABLE one (id int PRIMARY KEY)",
    )
    own = conninfo_to_dict(database.dsn)
    with pooler(int(str(own["port"])), refuses=refuses) as port:
        dsn = make_conninfo(database.dsn, host="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=said) as found:
            ReplicationConnection.connect(dsn)
        assert "not those of a connection pooler" in found.value.repair
        tuskline = Attached(tmp_path, {"shop": {"dsn": dsn}})
        told = tuskline.json("doctor", code=Cause.CONFIG)
        errors = [each for each in told["findings"] if each["severity"] == "error"]
        assert any(said in each["what"] for each in errors), errors
        assert all("connection pooler" in each["repair"] for each in errors), errors
    # The server itself is as it should be.
    with ReplicationConnection.connect(database.dsn) as walsender:
        assert walsender.identify().timeline == 1
