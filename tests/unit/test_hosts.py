"""A DSN of several hosts: which server is meant, and that a session stays on it."""

from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from walsender_bridge.postgres.client.hosts import (
    each_host,
    for_reading,
    primary_dsn,
    same_server,
)


@pytest.mark.parametrize(
    ("dsn", "meant"),
    [
        ("host=a dbname=x", None),
        ("host=a,b dbname=x", "read-write"),
        ("postgresql://u@a:1,b:2/x", "read-write"),
        ("hostaddr=10.0.0.1,10.0.0.2", "read-write"),
        ("host=a,b target_session_attrs=any", "any"),
        ("port=1,2", "read-write"),
    ],
)
def test_of_several_hosts_the_one_is_meant_that_takes_writes(dsn: str, meant: str | None) -> None:
    assert conninfo_to_dict(primary_dsn(dsn)).get("target_session_attrs") == meant


def test_a_read_only_session_asks_for_the_primary() -> None:
    meant = conninfo_to_dict(for_reading(primary_dsn("host=a,b")))
    assert meant["target_session_attrs"] == "primary"
    assert for_reading("host=a") == "host=a"


def test_what_libpq_does_not_read_is_left_for_whoever_connects() -> None:
    assert primary_dsn("host=a,b nonsense") == "host=a,b nonsense"


def test_a_session_stays_on_the_address_of_its_first_connection() -> None:
    def to(host: str, hostaddr: str, port: int) -> Any:
        return SimpleNamespace(info=SimpleNamespace(host=host, hostaddr=hostaddr, port=port))

    dsn = "host=a,b port=1,2 dbname=x user=u target_session_attrs=read-write"
    found = conninfo_to_dict(same_server(dsn, to("b", "10.0.0.2", 2)))
    assert (found["host"], found["hostaddr"], found["port"]) == ("b", "10.0.0.2", "2")
    assert (found["dbname"], found["user"]) == ("x", "u")
    # A socket has no address.
    found = conninfo_to_dict(same_server("host=/run/postgresql", to("/run/postgresql", "", 5432)))
    assert (found["host"], found.get("hostaddr")) == ("/run/postgresql", None)
    found = conninfo_to_dict(
        same_server("hostaddr=10.0.0.1,10.0.0.2", to("10.0.0.2", "10.0.0.2", 5432))
    )
    assert found["hostaddr"] == "10.0.0.2"


def test_each_host_of_a_dsn_is_asked_alone() -> None:
    def at(dsn: str) -> list[tuple[Any, Any]]:
        found = [conninfo_to_dict(each) for each in each_host(dsn)]
        assert all(each["user"] == "u" for each in found)
        return [(each.get("host") or each.get("hostaddr"), each.get("port")) for each in found]

    assert at("host=a,b port=1,2 user=u") == [("a", "1"), ("b", "2")]
    assert at("host=a,b port=1 user=u") == [("a", "1"), ("b", "1")]
    assert at("hostaddr=10.0.0.1,10.0.0.2 user=u") == [("10.0.0.1", None), ("10.0.0.2", None)]
    assert at("host=a user=u") == [("a", None)]
