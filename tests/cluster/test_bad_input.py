"""Whatever is wrong is a named error with its repair and its own exit code, in bounded time.

Each case through the real command line, as JSON where the command has it.
"""

import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from tests.support.attached import Attached
from tests.support.capture_stack import CaptureProcess, ChangeLog, make_tables
from tests.support.servers import Database, MakeServer
from tests.support.small_disk import mounted
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import Cause

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


# -- the source -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """What a case may use: a folder, a database with the two tables, servers of its own."""

    folder: Path
    shop: Database
    make_server: MakeServer

    @property
    def role(self) -> str:
        return f"weak_{self.shop.name}"

    @property
    def section(self) -> dict[str, object]:
        """A source that is as it should be."""
        return {"dsn": self.shop.dsn, "tables": TABLES}


Section = Mapping[str, object]
State = Callable[[Place], AbstractContextManager[Section]]


@dataclass(frozen=True)
class Case:
    """What is wrong (`state` makes it, and gives the source's section), and what these commands have to say."""

    cause: Cause
    word: str
    repair: str
    state: State
    commands: tuple[str, ...] = ("init", "doctor", "up")


def dsn(**parameters: str | int) -> State:
    """The database's DSN, with these parameters wrong."""

    @contextmanager
    def state(place: Place) -> Iterator[Section]:
        name = str(parameters.get("dbname", place.shop.name))
        others = {key: value for key, value in parameters.items() if key != "dbname"}
        yield {**place.section, "dsn": place.shop.server.dsn(name, **others)}

    return state


def unread(text: str) -> State:
    """A connection string that libpq does not read."""
    return lambda _: nullcontext({"dsn": text})


def tables(name: str) -> State:
    """Another table than there is."""
    return lambda place: nullcontext({**place.section, "tables": [name]})


@contextmanager
def weak_role(place: Place) -> Iterator[Section]:
    place.shop.execute(f"CREATE ROLE {place.role} LOGIN PASSWORD '{SECRET}'")
    try:
        weak = place.shop.server.dsn(place.shop.name, user=place.role, password=SECRET)
        yield {**place.section, "dsn": weak}
    finally:
        place.shop.execute(f"DROP ROLE {place.role}")


@contextmanager
def mute(place: Place) -> Iterator[Section]:
    """Somebody listens, and never answers."""
    del place
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        yield {"dsn": f"host=127.0.0.1 port={port} dbname=x user=x connect_timeout=2"}


@contextmanager
def wal_level_replica(place: Place) -> Iterator[Section]:
    server = place.make_server(fsync="off", wal_level="replica")
    server.start()
    yield {"dsn": server.dsn()}


@contextmanager
def slot_of_another_database(place: Place) -> Iterator[Section]:
    name = place.shop.name
    with psycopg.connect(place.shop.server.dsn(), autocommit=True) as other:
        other.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
        try:
            yield {**place.section, "slot": name}
        finally:
            other.execute("SELECT pg_drop_replication_slot(%s)", [name])


@contextmanager
def slot_of_another_plugin(place: Place) -> Iterator[Section]:
    if not Path("/usr/lib/postgresql/15/lib/test_decoding.so").exists():
        pytest.skip("no PostgreSQL 15 with test_decoding on this machine")
    server = place.make_server(15, fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
        connection.execute(
            "SELECT pg_create_logical_replication_slot('tuskline_shop', 'test_decoding')"
        )
    yield {**place.section, "dsn": server.dsn()}


@contextmanager
def publication_gone(place: Place) -> Iterator[Section]:
    """And the slot is there."""
    tuskline = Attached(place.folder, {"shop": place.section})
    tuskline.json("init")
    place.shop.execute("DROP PUBLICATION tuskline_shop")
    yield place.section
    tuskline.json("detach")


@contextmanager
def no_identity(place: Place) -> Iterator[Section]:
    place.shop.execute("CREATE TABLE bare (id int)", "INSERT INTO bare VALUES (1)")
    yield {**place.section, "tables": ["public.bare"]}
    # It was refused before it could break the application's UPDATEs.
    place.shop.execute("UPDATE bare SET id = 2")


TRY, TAKE_BACK = ("init", "doctor"), ("init", "doctor", "detach")
FOREIGN_SLOT = (Cause.SLOT, "not a permanent pgoutput slot", "another slot name")
UNREAD = (Cause.CONFIG, "invalid DSN", "postgresql://")
CASES = {
    "nobody listens": Case(
        Cause.CONNECTION, "refused", "check that the server is running", dsn(port=1), TRY
    ),
    "no such host": Case(
        Cause.CONNECTION,
        "no-such-host.invalid",
        "host and port",
        dsn(host="no-such-host.invalid"),
        TRY,
    ),
    "never answers": Case(
        Cause.CONNECTION, "timeout", "server is running", mute, ("init", "detach")
    ),
    "no such user": Case(
        Cause.AUTHENTICATION,
        "password",
        ".pgpass",
        dsn(user="nobody_here", password=SECRET),
        TRY,
    ),
    "wrong password": Case(Cause.AUTHENTICATION, "password", ".pgpass", dsn(password=SECRET), TRY),
    "no such database": Case(
        Cause.CONFIG, "no such database", "dbname", dsn(dbname="not_here"), TRY
    ),
    "may not make it": Case(Cause.PRIVILEGE, "permission denied", "--admin", weak_role, ("init",)),
    "may not replicate": Case(
        Cause.PRIVILEGE, "REPLICATION attribute", "REPLICATION", weak_role, ("doctor",)
    ),
    "nonsense": Case(*UNREAD, unread("nonsense"), TAKE_BACK),
    "misspelt parameter": Case(*UNREAD, unread(f"host=x pasword={SECRET}"), TAKE_BACK),
    "broken URI": Case(*UNREAD, unread(f"postgresql://u:{SECRET}@[x/"), TAKE_BACK),
    "wal_level replica": Case(
        Cause.SERVER_SETTING, "wal_level is replica", "wal_level = logical", wal_level_replica
    ),
    "slot of another database": Case(*FOREIGN_SLOT, slot_of_another_database),
    "slot of another plugin": Case(*FOREIGN_SLOT, slot_of_another_plugin),
    "publication gone": Case(
        Cause.PUBLICATION,
        "'tuskline_shop' was dropped",
        "tuskline reattach shop",
        publication_gone,
        TRY,
    ),
    "no replica identity": Case(
        Cause.PUBLICATION,
        "replica identity",
        "ALTER TABLE public.bare REPLICA IDENTITY FULL",
        no_identity,
    ),
    "no such table": Case(
        Cause.CONFIG, "public.ordres", "schema.table", tables("public.ordres"), ("init", "up")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_source_that_cannot_be_used(
    tmp_path: Path, shop: Database, make_server: MakeServer, name: str
) -> None:
    case = CASES[name]
    with case.state(Place(tmp_path, shop, make_server)) as section:
        tuskline = Attached(tmp_path, {"shop": section})
        for command in case.commands:
            check(tuskline, command, cause=case.cause, word=case.word, repair=case.repair)


def test_a_slot_that_is_in_use_is_not_taken_back(tmp_path: Path, shop: Database) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": TABLES}})
    with ChangeLog(tmp_path) as log, CaptureProcess(tmp_path, log, shop.dsn, *TABLES) as capture:
        wait_for(capture.streams, 30, "capture streams")
        check(tuskline, "detach", cause=Cause.SLOT, word="active", repair="tuskline down")
        assert capture.stop() == 0
    tuskline.json("detach")


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
        (full, "the disk is full", "free disk space"),
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
        check(tuskline, "lake", "run", cause=Cause.LAKE, word=word, repair=repair)
        done = tuskline.run("doctor")
        assert word in done.stdout
        # It has just said so, and is started again and again: the others run.
        told = tuskline.json("status", code=Cause.UNAVAILABLE)["problems"]
        (lake,) = [each for each in told if each.startswith("lake: ")]
        assert word in lake
        assert repair in lake


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
