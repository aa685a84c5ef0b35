"""Whatever is wrong is a named error with its repair and its own exit code, in bounded time.

Each case through the real command line, as JSON where the command has it.
"""

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from tests.support.attached import Attached
from tests.support.capture_stack import CaptureProcess, ChangeLog, make_tables
from tests.support.servers import Database, MakeServer, Servers
from tests.support.small_disk import mounted
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause
from walsender_bridge.local_server import free_port

SECRET = "planted-secret-b4d0"
TABLES = ("public.orders", "public.audit")
#: Seconds in which any of these commands has to give its answer, on a busy machine.
BOUND = 60.0


def check(
    tuskline: Attached, *command: str, cause: Cause, word: str, repair: str, env: object = None
) -> None:
    """The command ends with the cause, and says what is wrong and how it is repaired, as JSON."""
    given = env if isinstance(env, dict) else {}
    # Parts that run have no result, and so no --json.
    plain = command[-1] in {"run", "up", "metrics"}
    done = tuskline.run(*command, *([] if plain else ["--json"]), env=given, seconds=BOUND)
    assert done.returncode == cause, (done.returncode, done.stdout, done.stderr)
    assert SECRET not in done.stdout + done.stderr
    if plain:
        assert word in done.stderr, done.stderr
        assert repair in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
        return
    if command[0] == "doctor":
        findings = json.loads(done.stdout)["findings"]
        error = next(each for each in findings if each["severity"] == "error")
        assert error["cause"] == cause.name
    else:
        error = json.loads(done.stderr)["error"]
        assert error["code"] == cause.name
    assert word in f"{error['where']}: {error['what']}", error
    assert repair in error["repair"], error


@dataclass(frozen=True)
class Case:
    """What of the DSN is wrong, and what has to be said."""

    cause: Cause
    word: str
    repair: str
    parameters: dict[str, str | int]
    prepare: str = ""


def role(shop: Database) -> str:
    return f"weak_{shop.name}"


CASES = {
    "nobody listens": Case(Cause.CONNECTION, "refused", "see that the server runs", {"port": 1}),
    "no such user": Case(
        Cause.AUTHENTICATION, "password", ".pgpass", {"user": "nobody_here", "password": SECRET}
    ),
    "wrong password": Case(Cause.AUTHENTICATION, "password", ".pgpass", {"password": SECRET}),
    "no such database": Case(Cause.CONFIG, "no such database", "dbname", {"dbname": "not_here"}),
    "no such host": Case(
        Cause.CONNECTION, "no-such-host.invalid", "host and port", {"host": "no-such-host.invalid"}
    ),
    "may not replicate": Case(
        Cause.PRIVILEGE,
        "REPLICATION attribute",
        "--admin",
        {"user": "{role}", "password": SECRET},
        "CREATE ROLE {role} LOGIN PASSWORD '" + SECRET + "'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_source_that_cannot_be_used(tmp_path: Path, shop: Database, name: str) -> None:
    case = CASES[name]
    if case.prepare:
        shop.execute(case.prepare.format(role=role(shop)))
    try:
        parameters = {
            key: value.format(role=role(shop)) if isinstance(value, str) else value
            for key, value in case.parameters.items()
        }
        dbname = str(parameters.pop("dbname", shop.name))
        dsn = shop.server.dsn(dbname, **parameters)
        tuskline = Attached(tmp_path, {"shop": {"dsn": dsn, "tables": TABLES}})
        word = case.word if name != "may not replicate" else "permission denied"
        check(tuskline, "init", cause=case.cause, word=word, repair=case.repair)
        repair = case.repair if name != "may not replicate" else "REPLICATION"
        check(tuskline, "doctor", cause=case.cause, word=case.word, repair=repair)
    finally:
        shop.execute(f"DROP ROLE IF EXISTS {role(shop)}")


@pytest.mark.parametrize(
    "dsn", ["nonsense", f"host=x pasword={SECRET}", f"postgresql://u:{SECRET}@[x/"]
)
def test_a_connection_string_that_libpq_does_not_read(tmp_path: Path, dsn: str) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": dsn}})
    for command in ("init", "doctor", "detach"):
        check(tuskline, command, cause=Cause.CONFIG, word="libpq", repair="postgresql://")


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        dsn = f"host=127.0.0.1 port={mute.getsockname()[1]} dbname=x user=x connect_timeout=2"
        tuskline = Attached(tmp_path, {"shop": {"dsn": dsn}})
        for command in ("init", "detach"):
            check(tuskline, command, cause=Cause.CONNECTION, word="timeout", repair="server runs")


def test_wal_level_replica(tmp_path: Path, make_server: MakeServer) -> None:
    server = make_server(fsync="off", wal_level="replica")
    server.start()
    tuskline = Attached(tmp_path, {"shop": {"dsn": server.dsn()}})
    for command in ("init", "doctor", "up"):
        check(
            tuskline,
            command,
            cause=Cause.SERVER_SETTING,
            word="wal_level is replica",
            repair="wal_level = logical",
        )


def test_slots_that_cannot_be_used(tmp_path: Path, shop: Database, pg_servers: Servers) -> None:
    section = {"dsn": shop.dsn, "tables": TABLES}
    tuskline = Attached(tmp_path, {"shop": section})
    with psycopg.connect(shop.server.dsn(), autocommit=True) as other:
        # Of another database.
        other.execute(f"SELECT pg_create_logical_replication_slot('{shop.name}', 'pgoutput')")
        try:
            tuskline = Attached(tmp_path, {"shop": {**section, "slot": shop.name}})
            for command in ("init", "doctor", "up"):
                check(
                    tuskline,
                    command,
                    cause=Cause.SLOT,
                    word="not a lasting pgoutput slot",
                    repair="another slot name",
                )
        finally:
            other.execute(f"SELECT pg_drop_replication_slot('{shop.name}')")
    # In use.
    with ChangeLog(tmp_path) as log, CaptureProcess(tmp_path, log, shop.dsn, *TABLES) as capture:
        wait_for(capture.streams, 30, "capture streams")
        tuskline = Attached(tmp_path, {"shop": section})
        check(tuskline, "detach", cause=Cause.SLOT, word="active", repair="tuskline down")
        assert capture.stop() == 0
    tuskline.json("detach")


def test_a_slot_of_another_plugin(tmp_path: Path, make_server: MakeServer) -> None:
    if not Path("/usr/lib/postgresql/15/lib/test_decoding.so").exists():
        pytest.skip("no PostgreSQL 15 with test_decoding on this machine")
    server = make_server(15, fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
        connection.execute(
            "SELECT pg_create_logical_replication_slot('tuskline_shop', 'test_decoding')"
        )
    tuskline = Attached(tmp_path, {"shop": {"dsn": server.dsn(), "tables": TABLES}})
    for command in ("init", "doctor", "up"):
        check(
            tuskline,
            command,
            cause=Cause.SLOT,
            word="not a lasting pgoutput slot",
            repair="another slot name",
        )


def test_the_publication_is_missing_though_the_slot_is_there(
    tmp_path: Path, shop: Database
) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": TABLES}})
    tuskline.json("init")
    shop.execute("DROP PUBLICATION tuskline_shop")
    for command in ("doctor", "up"):
        check(
            tuskline,
            command,
            cause=Cause.PUBLICATION,
            word="tuskline_shop is gone",
            repair="make it again",
        )
    tuskline.json("detach")


def test_a_table_without_replica_identity(tmp_path: Path, shop: Database) -> None:
    shop.execute("CREATE TABLE bare (id int)", "INSERT INTO bare VALUES (1)")
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": ["public.bare"]}})
    for command in ("init", "doctor", "up"):
        check(
            tuskline,
            command,
            cause=Cause.PUBLICATION,
            word="replica identity",
            repair="ALTER TABLE public.bare REPLICA IDENTITY FULL",
        )
    # It was refused before it could break the application's UPDATEs.
    shop.execute("UPDATE bare SET id = 2")


def test_tables_that_are_not_there(tmp_path: Path, shop: Database) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": ["public.ordres"]}})
    for command in ("init", "up"):
        check(tuskline, command, cause=Cause.CONFIG, word="public.ordres", repair="schema.table")


# -- the lake's folder ----------------------------------------------------------------------------------


@contextmanager
def somebody_elses(folder: Path) -> Iterator[None]:
    (folder / "report.csv").write_text("precious")
    yield
    assert [path.name for path in folder.iterdir()] == ["report.csv"]


def read_only(folder: Path) -> "Iterator[None]":
    return mounted(folder, "-o", "ro,size=1m")  # type: ignore[return-value]


def full(folder: Path) -> "Iterator[None]":
    return mounted(folder, "-o", "size=1m")  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("state", "word", "repair"),
    [
        (somebody_elses, "is not empty and holds no lake", "new or empty folder"),
        (read_only, "read-only", "mount it for writing"),
        (full, "the disk is full", "make room"),
    ],
)
def test_a_lake_that_cannot_be_written(
    tmp_path: Path, state: Callable[[Path], object], word: str, repair: str
) -> None:
    # No server is asked before the folder is.
    dsn = f"host=127.0.0.1 port={free_port()} dbname=x"
    tuskline = Attached(tmp_path, {"shop": {"dsn": dsn}}, lake=True)
    tuskline.lake.mkdir()
    with state(tuskline.lake):  # type: ignore[attr-defined]
        for command in (("up",), ("lake", "run")):
            check(tuskline, *command, cause=Cause.LAKE, word=word, repair=repair)
        done = tuskline.run("doctor")
        assert word in done.stdout


# -- the configuration ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("data_dir", "data_dri", "data_dir"),
        ("[lake]", "[leak]", "lake"),
        ("epoch_interval", "epoch_intervall", "epoch_interval"),
        ("[metrics]", "[metric]", "metrics"),
        ("[log]", '[logs]\nfromat = "json"\n[log]', "format"),
        ("dsn =", "dns =", "dsn"),
    ],
)
def test_a_misspelt_key_is_told_with_the_nearest(
    tmp_path: Path, old: str, new: str, word: str
) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": f"password={SECRET}"}}, lake=True, metrics=True)
    text = tuskline.config.read_text()
    assert old in text
    tuskline.config.write_text(text.replace(old, new, 1))
    check(tuskline, "init", cause=Cause.CONFIG, word="unknown key", repair=f"did you mean '{word}'")


@pytest.mark.parametrize(
    ("flag", "cause", "word"),
    [
        ("lake.epoch_intervall=5", Cause.CONFIG, "unknown key"),
        ("lake.epoch_interval=soon", Cause.CONFIG, "lake.epoch_interval"),
        ("source.shpo.slot=x", Cause.USAGE, "'shpo'"),
        ("lake", Cause.USAGE, "KEY=VALUE"),
    ],
)
def test_a_wrong_flag(tmp_path: Path, flag: str, cause: Cause, word: str) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": ""}}, lake=True)
    check(tuskline, "--set", flag, "status", cause=cause, word=word, repair="")


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": "nonsense"}}, lake=True, metrics=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        there = f"127.0.0.1:{free_port()}"
        check(
            tuskline,
            "--set",
            f"metrics.listen={here}",
            "metrics",
            env={"TUSKLINE_METRICS__LISTEN": there},
            cause=Cause.CONFIG,
            word=here,
            repair="choose another [metrics] listen",
        )
        check(
            tuskline,
            "metrics",
            env={"TUSKLINE_METRICS__LISTEN": here},
            cause=Cause.CONFIG,
            word=here,
            repair="choose another [metrics] listen",
        )
