"""`doctor` before there is anything: what it shows to an administrator, and that its script is what `init --admin` does."""

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.support.attached import Attached, difference, run_script, server_state
from tests.support.servers import MAJORS_IN_TURN, Database, MakeServer
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.doctor.server import examine
from walsender_bridge.errors import Cause
from walsender_bridge.provisioning.detach import detach
from walsender_bridge.provisioning.init import init

SECRET = "planted-secret-5be1"
ADMIN = "user=postgres"

each_major = pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)


@pytest.fixture
def role(shop: Database) -> Iterator[str]:
    """The name of a role that does not exist; gone again afterwards."""
    name = f"first_{shop.name}"
    yield name
    with shop.connect() as connection:
        found = connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [name]).fetchone()
        if found is not None:
            connection.execute(f"DROP OWNED BY {name}".encode())
            connection.execute(f"DROP ROLE {name}".encode())


def recorded(shop: Database) -> list[tuple[str, ...]]:
    """The record; an OID is another one each time a publication is made, so it is compared here."""
    query = """SELECT m.slot, m.kind, m.name, m.privilege, CASE WHEN m.grantee = p.oid::text THEN 'its OID' ELSE m.grantee END
               FROM tuskline.provisioned AS m LEFT JOIN pg_publication AS p ON m.kind = 'publication oid' AND p.pubname = m.name
               ORDER BY 1, 2, 3, 4"""
    with shop.connect() as connection:
        return connection.execute(query.encode()).fetchall()


def state(shop: Database) -> dict[str, list[str]]:
    """What the server has, without the numbers that differ each time a table is made."""
    found = server_state(shop.dsn)
    return {kind: sorted(re.sub(r"\d{5,}", "N", line) for line in found[kind]) for kind in found}


@each_major
def test_the_script_of_doctor_and_init_without_admin_make_what_init_with_admin_makes(
    tmp_path: Path, shop: Database, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.execute(
        "CREATE SCHEMA sales",
        'CREATE TABLE sales."Odd.Name" (id int PRIMARY KEY)',
        "CREATE TABLE sales.bare (id int)",
        "CREATE TABLE sales.parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE sales.parts_1 PARTITION OF sales.parts FOR VALUES FROM (0) TO (9)",
        f"REVOKE CONNECT ON DATABASE {shop.name} FROM PUBLIC",
    )
    before = server_state(shop.dsn)
    env = {"PGPASSWORD": str(conninfo_to_dict(shop.dsn)["password"])}
    monkeypatch.setenv("PGPASSWORD", env["PGPASSWORD"])
    dsn = shop.server.dsn(shop.name, user=role, password=SECRET)
    source = CaptureSource("shop", dsn, "tuskline_shop", "tuskline_shop")
    init(source, ADMIN)
    wanted, record = state(shop), recorded(shop)
    assert ("tuskline_shop", "publication oid", "tuskline_shop", "", "its OID") in record
    detach(source, ADMIN)
    assert difference(before, server_state(shop.dsn)) == []
    # The role's own DSN says only that it is refused, and what else there is to ask.
    (refused,) = examine(source)
    assert refused.cause is Cause.AUTHENTICATION
    assert "tuskline doctor --admin" in refused.repair
    tuskline = Attached(tmp_path, {"shop": {"dsn": dsn}})
    report = tuskline.json("doctor", "--admin", ADMIN, "--fix-sql", code=Cause.PRIVILEGE, env=env)
    missing = {each["check"] for each in report["findings"] if each["severity"] == "error"}
    assert missing == {"role", "privileges", "publication"}
    assert any("sales.bare" in each["what"] for each in report["findings"])
    assert SECRET not in str(report)
    assert re.search(r"SCRAM-SHA-256\$4096:", report["fix_sql"])
    assert "4096:" not in str(report["findings"]), "the verifier is in the script alone"
    assert difference(before, server_state(shop.dsn)) == [], "doctor has changed something"
    run_script(shop.dsn, report["fix_sql"])
    assert not [each for each in examine(source) if each.severity is Severity.ERROR]
    tuskline.json("init")
    assert difference(wanted, state(shop)) == []
    assert recorded(shop) == record
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute('SELECT FROM sales."Odd.Name", sales.parts_1')
    detach(source, ADMIN)
    assert difference(before, server_state(shop.dsn)) == []


def test_what_a_server_is_not_set_up_for_is_shown_before_there_is_the_role(
    tmp_path: Path, make_server: MakeServer
) -> None:
    server = make_server(wal_level="replica", max_replication_slots="0", fsync="off")
    rules = server.data_dir / "pg_hba.conf"
    server.start()
    rules.write_text("local all all trust\nhost all postgres 127.0.0.1/32 scram-sha-256\n")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    admin = conninfo_to_dict(server.dsn())
    env = {"PGPASSWORD": str(admin["password"])}
    dsn = server.dsn(user="tuskline_first", password=SECRET)
    tuskline = Attached(tmp_path, {"shop": {"dsn": dsn}}, safekeepers={"local": 3})
    report = tuskline.json("doctor", "--admin", ADMIN, code=Cause.AUTHENTICATION, env=env)
    told = {each["check"]: each for each in report["findings"] if each["severity"] == "error"}
    wanted = {"role", "wal_level", "max_replication_slots", "publication", "privileges"}
    assert wanted | {"pg_hba.conf"} <= set(told)
    lines = [e["repair"] for e in report["findings"] if e["check"] == "pg_hba.conf"]
    for database in ("postgres", "replication"):
        line = f"`host {database} tuskline_first 127.0.0.1/32 scram-sha-256`"
        assert any(line in each for each in lines), lines
    assert all(told[check]["fix_sql"] for check in wanted)
