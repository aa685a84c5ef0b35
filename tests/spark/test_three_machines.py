"""docs/three-machines.md as it is written, on three machines: network namespaces, or else three addresses of loopback."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psycopg
import pytest

from spark_consumers.lake.manifest.chain import open_chain
from tests.support.attached import CLI
from tests.support.machines import Machine, namespaces, namespaces_missing
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer, free_ports

PAGE = Path(__file__).parents[2] / "docs" / "three-machines.md"
NAMES = ("one", "two", "three")
#: What `up` runs on each, by the page's own table.
PROCESSES = (
    {
        *("log-server", "bridge", "metrics", "log-server/replicas"),
        *("log-server/safekeeper-1", "log-server/wal-server-1"),
        *("bridge/capture-shop", "bridge/proposer"),
    },
    {
        *("log-server", "metrics", "log-server/replicas"),
        *("log-server/safekeeper-1", "log-server/wal-server-1"),
    },
    {
        *("log-server", "metrics", "lake", "log-server/replicas"),
        *("log-server/safekeeper-1", "log-server/wal-server-1"),
    },
)


def blocks(language: str) -> list[str]:
    """The page's code blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def placed(text: str, folder: Path, name: str, addresses: list[str], ports: range) -> str:
    """A text of the page, with the places of this test."""
    for number, address in enumerate(addresses, 1):
        text = text.replace(f"10.0.0.{number}", address)
    for number, port in enumerate((7400, 7401, 7410, 7420)):
        text = text.replace(f":{port}", f":{ports[number]}")
    for place in ("/var/lib/tuskline", "/srv/lake", "/srv/tuskline-authority"):
        text = text.replace(place, f"{folder}{place}")
    text = text.replace("/srv/issued", f"{folder}/issued")
    return text.replace("/etc/tuskline/tls", f"{folder}/issued/{name}")


class Three:
    """The machines, with the page's certificates and configurations, and the server."""

    def __init__(
        self, folder: Path, places: list[tuple[str, list[str]]], server: LocalServer, host: str
    ) -> None:
        self.folder, self.server = folder, server
        self.lake = f"{folder}/srv/lake"
        addresses, ports = [address for address, _ in places], free_ports(5)
        (issue,) = [each for each in blocks("") if "certs issue" in each]
        (folder / "srv").mkdir()
        for line in placed(issue, folder, "", addresses, ports).splitlines():
            subprocess.run([*CLI, *shlex.split(line)[1:]], check=True, capture_output=True)
        self.machines = []
        for name, written, (_, inside) in zip(NAMES, blocks("toml"), places, strict=True):
            text = placed(written, folder / name, name, addresses, ports)
            text = text.replace(f"{folder}/{name}/issued", f"{folder}/issued")
            text = re.sub('dsn = ".*"', f'dsn = "{server.dsn("shop", host=host)}"', text)
            text = text.replace(f"{folder}/{name}/srv/lake", self.lake)
            text = text.replace("[lake]", "[lake]\nepoch_interval = 0.5")
            listen = f'[metrics]\nlisten = "{addresses[NAMES.index(name)]}:{ports[4]}"'
            self.machines.append(Machine(folder / name, text.replace("[metrics]", listen), inside))

    def wait_until_well(self) -> None:
        """Nothing is amiss on the first machine, which sees all."""
        amiss = [""]

        def well() -> bool:
            seen = self.machines[0].json("status")
            amiss[:] = seen["problems"] + seen["degraded"]
            return not amiss

        try:
            wait_for(well, 120, "all is well")
        except AssertionError as error:
            raise AssertionError(f"{error}: {amiss}\n{self.logs()}") from None

    def wait_until_all_run(self) -> None:
        """On each machine, the processes of its parts, and no other."""
        for machine, expected in zip(self.machines, PROCESSES, strict=True):
            try:
                wait_for(partial(machine.runs, expected), 30, "all run")
            except AssertionError:
                raise AssertionError(f"{machine.processes()}\n{self.logs()}") from None

    def write(self, first: int, last: int) -> None:
        with psycopg.connect(self.server.dsn("shop"), autocommit=True) as connection:
            connection.execute(
                f"INSERT INTO orders SELECT g, 'x' FROM generate_series({first}, {last}) AS g".encode()
            )

    def flushed(self) -> int:
        """The rows that the lake has, once all that is committed can be read."""
        done = self.machines[2].run("flush", "--timeout", "200", seconds=240)
        assert done.returncode == 0, done.stderr + self.logs()
        head = open_chain(self.lake).head()
        assert head is not None
        return head.tables["shop.public.orders"].rows

    def logs(self) -> str:
        return "\n".join(f"--- {each.folder.name}\n{each.logs()}" for each in self.machines)


@pytest.fixture(params=["namespaces", "loopback"])
def three(
    request: pytest.FixtureRequest, tmp_path: Path, make_server: MakeServer
) -> Iterator[Three]:
    with ExitStack() as stack:
        host, places = "127.0.0.1", [(f"127.0.0.{n}", list[str]()) for n in (1, 2, 3)]
        if request.param == "namespaces":
            if missing := namespaces_missing():
                pytest.skip(missing)
            host, places = stack.enter_context(namespaces(3))
        server = make_server(15, fsync="off", listen_addresses=f"127.0.0.1,{host}")
        hba = server.data_dir / "pg_hba.conf"
        more = "".join(
            f"host {what} all {host}/24 scram-sha-256\n" for what in ("all", "replication")
        )
        hba.write_text(hba.read_text() + more)
        server.start()
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE shop")
        with psycopg.connect(server.dsn("shop"), autocommit=True) as connection:
            connection.execute("CREATE TABLE orders (id int PRIMARY KEY, body text)")
        found = Three(tmp_path, places, server, host)
        for each in found.machines:
            stack.callback(each.close)
        yield found


@pytest.mark.long
@pytest.mark.timeout(600)
def test_three_machines_go_on_without_one_and_are_whole_when_it_is_back(three: Three) -> None:
    one, two, lake = three.machines
    done = one.run("init")
    assert done.returncode == 0, done.stderr
    for each in three.machines:
        each.up()
    three.write(1, 100)
    wait_for(lambda: one.run("quorum", "require").returncode == 0, 90, "a quorum has answered")
    three.wait_until_well()
    assert three.flushed() == 100
    three.wait_until_all_run()
    two.kill()
    three.write(101, 200)  # COMMIT returns with two of three safekeepers
    assert three.flushed() == 200
    seen = wait_for(lambda: (s := one.json("status"))["degraded"] and s, 60, "it is named")
    assert "log: stream shop has 2 of 3 replicas in sync" in seen["degraded"]
    assert any("safekeeper" in each and "away" in each for each in seen["problems"])
    two.up()
    three.wait_until_well()
    three.write(201, 300)
    assert three.flushed() == 300
    assert one.run("log", "verify").returncode == 0
    for each in three.machines:
        done = each.run("status")
        assert done.returncode == 0, done.stderr
    assert one.run("down").returncode == 0
    # What is elsewhere is missed by those alone that need it.
    assert two.run("status").returncode == 0
    assert any("log:" in each for each in lake.json("status")["problems"])
    for each in (two, lake):
        assert each.run("down").returncode == 0
