"""Fifteen ways in which an installation gets sick, what has to be said of each, and the hint followed to the letter.

Each state begins in health and ends in it. `cause` and `hint` are words that a person has to find in every place of
`places`: what `status` says (as text and in JSON), /readyz, `doctor`, and the first line of the log that is a warning or
worse since it happened. `follow` does what the hint says, and no more.
"""

import json
import socket
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass, field

from spark_consumers.lake.manifest.table_version import LEFT
from tests.support import old_files
from tests.support.attached import Attached
from tests.support.servers import DEFAULT
from tests.support.shop import SLOT, TABLES, Shop, copied, free_slot, make_databases, sql
from tests.support.small_disk import fill
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer, by_major
from walsender_bridge.errors import Cause

EVERYWHERE = ("status", "status --json", "readyz", "doctor", "log")


@dataclass
class Sick:
    """One installation while it is in a state."""

    shop: Shop
    #: Where its log was as long as when the state began.
    logged: int = 0
    #: What is undone at the end, whatever happens.
    undo: ExitStack = field(default_factory=ExitStack)
    #: What a command that was refused said, for states that a command meets.
    refused: str = ""

    @property
    def tuskline(self) -> Attached:
        return self.shop.tuskline

    @property
    def server(self) -> LocalServer:
        return self.shop.server

    def first_line(self, levels: Collection[str]) -> str:
        """The first line of the log since then that has one of the levels."""
        with self.tuskline.output.open(errors="replace") as file:
            file.seek(self.logged)
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if record.get("level") in levels:
                    return " ".join(" ".join(map(str, record.values())).split())
        return ""

    def said(self, place: str, state: "State") -> str:
        """What a person reads there, in one line; empty while nothing is wrong."""
        match place:
            case "status":
                return self.shop.problems()
            case "status --json":
                done = self.tuskline.run("status", "--json")
                record = json.loads(done.stdout.splitlines()[-1])
                assert (done.returncode == 0) == record["healthy"]
                return " ".join(record["problems"])
            case "readyz":
                return self.shop.unready()
            case "doctor":
                return self.shop.doctor()
            case "log":
                return self.first_line(state.levels)
            case "command":
                return self.refused
        raise AssertionError(place)


@dataclass(frozen=True)
class State:
    happens: Callable[[Sick], None]
    cause: str
    hint: str
    follow: Callable[[Sick], None]
    places: tuple[str, ...] = EVERYWHERE
    #: The levels of its first line in the log: where the test ends connections, or the parts, that is warned of.
    levels: frozenset[str] = frozenset({"warning", "error"})


def run(sick: Sick, *words: str) -> None:
    done = sick.tuskline.run(*words, seconds=200)
    assert done.returncode == 0, done.stderr + sick.tuskline.logs()


def again(sick: Sick) -> None:
    """As `tuskline down`, and `up`."""
    assert sick.tuskline.stop_up() == 0
    sick.tuskline.up()


# -- tables -----------------------------------------------------------------------------------------------

ORDERS = TABLES["shop"]
REATTACH = "tuskline reattach"


def not_copied(sick: Sick) -> None:
    sql(
        sick.server,
        "shop",
        "CREATE TABLE prices (id int PRIMARY KEY, price numeric(10,2))",
        "INSERT INTO prices VALUES (1, 1), (2, 'NaN')",
    )
    run(sick, "init")


def corrected(sick: Sick) -> None:
    """The value is changed at the source; the copy is tried again by itself."""
    sql(sick.server, "shop", "UPDATE prices SET price = 2 WHERE id = 2")


def paused(sick: Sick) -> None:
    run(sick, "table", "pause", ORDERS, "--wait")


def resumed(sick: Sick) -> None:
    run(sick, "table", "resume", ORDERS, "--wait")


def suspended(sick: Sick) -> None:
    sql(
        sick.server,
        "shop",
        "CREATE TABLE bonds (id int PRIMARY KEY, price numeric(10,2))",
        "INSERT INTO bonds VALUES (1, 1)",
    )
    run(sick, "init")
    wait_for(lambda: "shop.public.bonds" in sick.shop.head().readable, 120, "the table is there")
    sql(sick.server, "shop", "INSERT INTO bonds VALUES (2, 'NaN')")


def copied_again(sick: Sick) -> None:
    sql(sick.server, "shop", "UPDATE bonds SET price = 2 WHERE id = 2")
    run(sick, "table", "resync", "shop.public.bonds", "--wait")


# -- parts, a server, a disk -------------------------------------------------------------------------------


def configure_lake(sick: Sick, name: str) -> None:
    """The configuration names this folder, beside the one that it has named."""
    lake = sick.tuskline.lake
    text = sick.tuskline.config.read_text()
    sick.tuskline.lake = lake.with_name(name)
    sick.tuskline.config.write_text(text.replace(f'/{lake.name}"', f'/{name}"'))
    again(sick)


def foreign_folder(sick: Sick) -> None:
    """The configuration names a folder with somebody's files for the lake."""
    files = sick.tuskline.lake.with_name("files")
    files.mkdir()
    (files / "letter.txt").write_text("somebody's own")
    configure_lake(sick, files.name)


def new_folder(sick: Sick) -> None:
    configure_lake(sick, "second")


def server_stopped(sick: Sick) -> None:
    sick.server.stop("fast")


def server_started(sick: Sick) -> None:
    sick.server.start()


def full_disk(sick: Sick) -> None:
    ballast = sick.tuskline.lake / "tables" / "ballast"
    sick.undo.callback(ballast.unlink)
    fill(ballast)
    sick.shop.change()


def made_room(sick: Sick) -> None:
    sick.undo.close()


# -- slot, publication, history, log -----------------------------------------------------------------------


def slot_dropped(sick: Sick) -> None:
    free_slot(sick.shop)
    sick.shop.change()


def unpublished(sick: Sick) -> None:
    sql(sick.server, "shop", f"DROP PUBLICATION {SLOT}")
    sick.shop.change()


def restored(sick: Sick) -> None:
    """The server's files of before the last changes, which the log has."""
    sick.server.stop("fast")
    old = old_files.keep(sick.server)
    sick.server.start()
    sick.shop.flush()
    sick.server.stop("fast")
    old_files.bring_back(sick.server, old)
    sick.server.start()


def other_server(sick: Sick) -> None:
    """Another cluster, with tables of the same names, where the DSN points to."""
    folder = sick.server.folder.resolve()
    # Not a copy of the clusters that tests share, which all have one identifier.
    other = LocalServer.create(
        by_major()[DEFAULT],
        folder.with_name("another"),
        settings={"fsync": "off"},
        auth="trust",
        template_cache=folder.with_name("another-template"),
    )
    sick.shop.servers.append(other)
    with other:
        make_databases(other)
    sick.server.stop("fast")
    other.port = sick.server.port
    sick.shop.server = other
    other.start()
    sick.shop.change()


def detached(sick: Sick) -> None:
    assert sick.tuskline.stop_up() == 0
    run(sick, "detach", "--source", "shop")
    sick.shop.change()
    # Nor is a slot made that would hide what is missing.
    assert REATTACH in sick.tuskline.error_plain("init", code=Cause.SLOT)
    sick.tuskline.up()


def log_removed(sick: Sick) -> None:
    """As docs/log-lost.md says it."""
    assert sick.tuskline.stop_up() == 0
    old = sick.tuskline.directory / "old"
    old.mkdir()
    log, log_server = sick.tuskline.directory / "log", sick.tuskline.directory / "log-server"
    for path in [
        *log.glob("repository.sqlite*"),
        log_server / "log-server.json",
        log_server / "streams",
    ]:
        path.rename(old / path.name)
    sick.shop.change()
    sick.tuskline.up()


def reattached(sick: Sick) -> None:
    before = sick.shop.head()
    run(sick, "reattach", "shop")
    sick.shop.flush()
    after = sick.shop.head()
    assert copied(before, after) == {
        name
        for name, table in after.tables.items()
        if name.startswith("shop.") and table.state != LEFT
    }


def all_reattached(sick: Sick) -> None:
    run(sick, "reattach")


# -- a command that is refused -----------------------------------------------------------------------------


def second_up(sick: Sick) -> None:
    sick.refused = sick.tuskline.error_plain("up", code=Cause.RUNNING)


def downed(sick: Sick) -> None:
    process, sick.tuskline.process = sick.tuskline.process, None
    assert process is not None
    run(sick, "down")
    assert process.wait(60) == 0
    sick.tuskline.up()


def port_taken(sick: Sick) -> None:
    assert sick.tuskline.stop_up() == 0
    port = int(sick.tuskline.log_listen.rpartition(":")[2])
    sick.undo.enter_context(socket.create_server(("127.0.0.1", port)))
    sick.refused = sick.tuskline.error_plain("up", code=Cause.CONFIG)


def port_free(sick: Sick) -> None:
    sick.undo.close()
    sick.tuskline.up()


def file_for_folder(sick: Sick) -> None:
    assert sick.tuskline.stop_up() == 0
    log_server = sick.tuskline.directory / "log-server"
    aside = log_server.rename(log_server.with_name("aside"))
    log_server.write_text("a file")

    def back() -> None:
        log_server.unlink()
        aside.rename(log_server)

    sick.undo.callback(back)
    sick.refused = sick.tuskline.error_plain("up", code=Cause.CONFIG)


ERRORS = frozenset({"error"})
STATES = {
    "a part restarts": State(
        foreign_folder,
        "is not empty and holds no lake",
        "specify a new or empty folder for the lake",
        new_folder,
        levels=ERRORS,
    ),
    "a failed copy": State(not_copied, "public.prices", "quarantine", corrected),
    "a paused table": State(
        # What somebody has asked for is no warning in the log.
        *(paused, "is paused", f"tuskline table resume {ORDERS}", resumed, EVERYWHERE[:-1]),
    ),
    "a suspended table": State(
        suspended, "public.bonds.price", "tuskline table resync shop.public.bonds", copied_again
    ),
    "no connection": State(
        server_stopped, "connection", "check that the server is running", server_started
    ),
    "a full disk": State(full_disk, "full", "free disk space", made_room),
    "a lost slot": State(slot_dropped, "the slot is gone", REATTACH, reattached, levels=ERRORS),
    "no publication": State(unpublished, "publication 'tuskline_shop' ", REATTACH, reattached),
    "a restored server": State(restored, "restored", REATTACH, all_reattached, levels=ERRORS),
    "another server": State(
        other_server,
        "the log was written from the cluster",
        REATTACH,
        all_reattached,
        levels=ERRORS,
    ),
    "detach and init": State(detached, "the slot is gone", REATTACH, reattached, levels=ERRORS),
    "a removed log": State(
        log_removed, "this lake belongs to", REATTACH, all_reattached, levels=ERRORS
    ),
    "a second up": State(
        second_up, "`tuskline up` is already running", "tuskline down", downed, ("command",)
    ),
    "a taken port": State(
        port_taken,
        "cannot listen: Address already in use",
        "stop the program that listens there",
        port_free,
        ("command", "doctor"),
    ),
    "a file for a folder": State(
        file_for_folder, "is not a folder", "name", port_free, ("command", "doctor")
    ),
}
