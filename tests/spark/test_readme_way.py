"""The README's way, command by command, from `doctor` to `detach`, on a server with passwords: what each command says."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import pytest

from spark_consumers import read
from tests.support.attached import difference, server_state
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.demo.local_server.server import LocalServer
from walsender_bridge.errors import Cause

README = Path(__file__).parents[2] / "README.md"
GOLDEN = Path(__file__).parent / "golden" / "readme_way.txt"
SECRET = "planted-secret-77d0"
#: The commands that may fail at their place, and with what.
FAILS = {"doctor": Cause.PRIVILEGE}

#: A line of the golden text that only this major says.
ONLY = re.compile(r"\[(\d+)\] (.*)")
#: What differs each time, and what stands for it. In order.
VOLATILE = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
    (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "TIME"),
    (r"127\.0\.0\.1:\d+", "HOST"),
    (r"[0-9A-F]+/[0-9A-F]+(?![\w/])", "LSN"),
    (r"\b\d+(\.\d+)? (k|K|M|G)B\b", "SIZE"),
    (r".*disk space: .*\n", ""),
    (r"PostgreSQL \d.*", "PostgreSQL VERSION"),
    # How long a flush takes, and so what it waits for.
    (r"waiting for .*\n?", ""),
    # What Java and Spark say when they start.
    (
        r"(?m)^(WARNING: Using incubator|Using Spark's default|Setting default log|To adjust logging|\S+ \S+ WARN ).*\n?",
        "",
    ),
    # An epoch that is under way at this moment.
    (r"writing: .*\n", ""),
    (r"(?<![\w.])\d+(\.\d+)?(?![\w.])", "N"),
    (r"-{2,}", "-"),
    (r"[ \t]+", " "),
    (r" ?\n ?", "\n"),
    # Whether the lake is behind at this moment.
    (
        r"stream \| holder .*\n[-+]+\nshop \| consumer lake-UUID .*",
        "no consumers or replicas that hold back trimming",
    ),
)


def readme_block(language: str, containing: str) -> str:
    """The text of the README's code block with these words in it."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    (found,) = [text for kind, text in blocks if kind == language and containing in text]
    return str(found)


def commands() -> list[list[str]]:
    """The commands of the README's list, without their comments."""
    lines = readme_block("", "tuskline detach").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("tuskline ")]


def plain(text: str, folder: Path) -> str:
    """The text with what differs each time replaced."""
    text = text.replace(str(folder), "FOLDER")
    for pattern, instead in VOLATILE:
        text = re.sub(pattern, instead, text)
    return text.strip()


def golden(major: int) -> list[str]:
    """What the commands say on this major."""
    lines = []
    for line in GOLDEN.read_text().splitlines():
        found = ONLY.fullmatch(line)
        if found is None or int(found[1]) == major:
            lines.append(line if found is None else found[2])
    return lines


@dataclass
class Machine:
    """A folder with the README's tuskline.toml, and an account whose passwords are in a passfile."""

    folder: Path
    server: LocalServer
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        files = {
            "pg_service.conf": f"[shop]\nhost=127.0.0.1\nport={self.server.port}\ndbname=shop\nuser=tuskline\n",
            "pgpass": f"*:*:*:tuskline:{SECRET}\n*:*:*:postgres:{self.password}\n",
            "tuskline.toml": self.configuration(),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o600)
        self.env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PG")},
            "PGSERVICEFILE": str(self.folder / "pg_service.conf"),
            "PGPASSFILE": str(self.folder / "pgpass"),
        }

    @property
    def password(self) -> str:
        return str(psycopg.conninfo.conninfo_to_dict(self.server.dsn())["password"])

    def configuration(self) -> str:
        """The README's, with folders and ports of this machine."""
        text = readme_block("toml", "[[source]]")
        for place in ("/var/lib/tuskline", "/srv"):
            text = text.replace(place, str(self.folder))
        for port in (7400, 7401):
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free_port()}")
        return text

    def run(self, command: list[str]) -> None:
        """One command, as a person types it, and what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "walsender_bridge.cli.app", *command[1:]],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        words = [word for word in command[1:] if not word.startswith("-") and "=" not in word]
        said = plain(done.stdout, self.folder), plain(done.stderr, self.folder)
        assert done.returncode == FAILS.get(words[0], 0), (command, done.stdout, done.stderr)
        self.said += [f"$ {shlex.join(command)}", *filter(None, said), ""]


@pytest.fixture(params=[15, pytest.param(18, marks=pytest.mark.long)], ids="pg{}".format)
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, make_server: MakeServer
) -> Iterator[Machine]:
    server = make_server(major=request.param, fsync="off")
    server.start()
    made = Machine(tmp_path, server)
    yield made
    # If a command before `down` has failed.
    down = [sys.executable, "-m", "walsender_bridge.cli.app", "down"]
    subprocess.run(down, cwd=tmp_path, env=made.env, capture_output=True, timeout=120, check=False)


@pytest.mark.timeout(600)
def test_each_command_of_the_readme_says_what_it_is_to_say(machine: Machine, spark) -> None:
    with psycopg.connect(machine.server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE shop")
    with psycopg.connect(machine.server.dsn("shop"), autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY, status text)")
        connection.execute("INSERT INTO orders SELECT g, 'new' FROM generate_series(1, 100) AS g")
        connection.execute("CREATE TABLE tmp_import (id int PRIMARY KEY)")
        connection.execute("CREATE TABLE bare (id int)")
    before = server_state(machine.server.dsn("shop"))
    for command in commands():
        machine.run(command)
        if command[1] == "flush":
            tables = read(spark, str(machine.folder / "lake"))
            assert sorted(tables.tables) == ["shop.public.orders"]
            counts = tables["public.orders"].groupBy("status").count().collect()
            assert [tuple(row) for row in counts] == [("new", 100)]
            shown = machine.folder / "lake/_tuskline/maintenance.json"
            wait_for(shown.exists, 60, "the maintainer has looked at the tables")
    assert difference(before, server_state(machine.server.dsn("shop"))) == []
    said = "\n".join(machine.said)
    assert SECRET not in said
    assert machine.password not in said
    (machine.folder / "said.txt").write_text(said)
    assert said.splitlines() == golden(machine.server.installation.major), (
        f"see {machine.folder}/said.txt"
    )
