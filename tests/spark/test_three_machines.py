"""docs/three-machines.md as it is written, on three machines: network namespaces, or else three addresses of loopback."""

import os
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
from tests.support.etcd import PROGRAM, needs_etcd
from tests.support.machines import Machine, namespaces, namespaces_missing
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer, free_ports

PAGE = Path(__file__).parents[2] / "docs" / "three-machines.md"
NAMES = ("one", "two", "three")
#: What `up` runs on each, by the page's own table, besides what the active bridge runs.
_SERVERS = {"log-server/replicas", "log-server/safekeeper-1", "log-server/wal-server-1"}
_HERE = {"log-server", "bridge", "metrics", *_SERVERS}
PROCESSES = (_HERE, _HERE, {*_HERE, "lake", "maintain"})
ACTIVE = {"bridge/capture-shop", "bridge/proposer"}


def blocks(language: str) -> list[str]:
    """The page's code blocks of a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind == language]


def placed(text: str, folder: Path, name: str, addresses: list[str], ports: range) -> str:
    """A text of the page, with the places of this test."""
    for number, address in enumerate(addresses, 1):
        text = text.replace(f"10.0.0.{number}", address)
    for number, port in enumerate((7400, 7401, 7410, 7420, 2379, 2380)):
        text = text.replace(f":{port}", f":{ports[number]}")
    for place in (
        "/var/lib/tuskline",
        "/srv/lake",
        "/srv/tuskline-authority",
        "/srv/etcd-authority",
    ):
        text = text.replace(place, f"{folder}{place}")
    for place, own in PLACES.items():
        text = text.replace(place, f"{folder}/{own}/{name}".rstrip("/"))
    return text.replace("/var/lib/etcd", f"{folder}/etcd-{name}")


#: Where the page's certificates are, and where this test has them.
PLACES = {
    "/srv/issued-etcd": "issued-etcd",
    "/srv/issued": "issued",
    "/etc/tuskline/tls": "issued",
    "/etc/tuskline/etcd": "issued-etcd",
    "/etc/etcd": "issued-etcd",
}


class Three:
    """The machines, with the page's certificates, cluster of etcd and configurations, and the server."""

    def __init__(
        self, folder: Path, places: list[tuple[str, list[str]]], server: LocalServer, host: str
    ) -> None:
        self.folder, self.server = folder, server
        self.lake = f"{folder}/srv/lake"
        addresses, ports = [address for address, _ in places], free_ports(7)
        (issue,) = [each for each in blocks("") if "certs issue" in each]
        (folder / "srv").mkdir()
        for line in placed(issue, folder, "", addresses, ports).splitlines():
            # Whatever its machine's address is, on loopback a member is reached from 127.0.0.1.
            told = [
                *shlex.split(line)[1:],
                *(["--host", "127.0.0.1"] * ("etcd" in line and "issue" in line)),
            ]
            subprocess.run([*CLI, *told], check=True, capture_output=True)
        self.etcd = Etcd(
            folder,
            [
                (inside, self._etcd(name, number, addresses, ports))
                for number, (name, (_, inside)) in enumerate(zip(NAMES, places, strict=True))
            ],
        )
        self.machines = []
        for name, written, (_, inside) in zip(NAMES, blocks("toml"), places, strict=True):
            text = placed(written, folder, name, addresses, ports)
            text = text.replace(f"{folder}/var/lib", f"{folder}/{name}/var/lib")
            text = re.sub('dsn = ".*"', f'dsn = "{server.dsn("shop", host=host)}"', text)
            text = text.replace("[lake]", "[lake]\nepoch_interval = 0.5")
            listen = f'[metrics]\nlisten = "{addresses[NAMES.index(name)]}:{ports[6]}"'
            self.machines.append(Machine(folder / name, text.replace("[metrics]", listen), inside))

    def _etcd(self, name: str, number: int, addresses: list[str], ports: range) -> dict[str, str]:
        """The environment of a machine's etcd: the page has that of the first."""
        (text,) = blocks("ini")
        found = dict(line.split("=", 1) for line in text.splitlines())
        for key in found.keys() - {"ETCD_INITIAL_CLUSTER"}:
            found[key] = found[key].replace("10.0.0.1", f"10.0.0.{number + 1}")
        found["ETCD_NAME"] = name
        return {
            key: placed(value, self.folder, name, addresses, ports) for key, value in found.items()
        }

    def active(self) -> int:
        """The number of the machine with the active bridge."""

        def found() -> list[int]:
            return [n for n in (0, 1) if self.machines[n].processes() >= ACTIVE]

        (number,) = wait_for(found, 90, "a bridge is active")
        return int(number)

    def start(self, number: int) -> None:
        self.etcd.start(number)
        self.machines[number].up()

    def kill(self, number: int) -> None:
        self.machines[number].kill()
        self.etcd.kill(number)

    def wait_until_well(self) -> None:
        """Nothing is amiss on the machine of the active bridge, which sees all."""
        amiss = [""]

        def well() -> bool:
            seen = self.machines[self.active()].json("status")
            amiss[:] = seen["problems"] + seen["degraded"]
            return not amiss

        try:
            wait_for(well, 120, "all is well")
        except AssertionError as error:
            raise AssertionError(f"{error}: {amiss}\n{self.logs()}") from None

    def wait_until_all_run(self) -> None:
        """On each machine, the processes of its parts, and no other."""
        active = self.active()
        for number, (machine, own) in enumerate(zip(self.machines, PROCESSES, strict=True)):
            expected = own | ACTIVE if number == active else own
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
        server = make_server(
            15, fsync="off", listen_addresses=f"127.0.0.1,{host}", wal_sender_timeout="10s"
        )
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
        stack.callback(found.etcd.close)
        for number, each in enumerate(found.machines):
            stack.callback(each.close)
            found.etcd.start(number)
        yield found


@needs_etcd
@pytest.mark.long
@pytest.mark.timeout(900)
def test_three_machines_go_on_without_one_and_are_whole_when_it_is_back(three: Three) -> None:
    """First without that of the active bridge, with its member of etcd and its repository; then without the third, with the lake."""
    one = three.machines[0]
    done = one.run("init")
    assert done.returncode == 0, done.stderr
    for each in three.machines:
        each.up()
    three.write(1, 100)
    three.active()
    wait_for(lambda: one.run("quorum", "require").returncode == 0, 90, "a quorum has answered")
    three.wait_until_well()
    assert three.flushed() == 100
    three.wait_until_all_run()
    first = three.active()
    other = three.machines[1 - first]
    three.kill(first)
    three.write(101, 200)  # COMMIT returns once the other bridge's proposer has been elected
    assert three.active() == 1 - first
    assert three.flushed() == 200
    seen = wait_for(lambda: (s := other.json("status"))["degraded"] and s, 60, "it is named")
    assert "log: stream shop has 2 of 3 replicas in sync" in seen["degraded"]
    assert any(each.startswith("etcd: the member does not answer") for each in seen["degraded"])
    assert any("safekeeper" in each and "away" in each for each in seen["problems"])
    three.start(first)
    three.wait_until_well()
    three.wait_until_all_run()
    three.write(201, 300)
    assert three.flushed() == 300
    assert other.run("log", "verify").returncode == 0
    for each in three.machines:
        wait_for(partial(is_well, each), 90, "all is well on each")
    three.kill(2)
    three.write(301, 400)
    three.start(2)
    assert three.flushed() == 400
    for each in three.machines:
        assert each.run("down").returncode == 0


def is_well(machine: Machine) -> bool:
    """Whether `status` there finds nothing amiss; a busy machine may have elected another bridge just now."""
    return machine.run("status").returncode == 0


class Etcd:
    """A member of etcd on each machine: the command that enters it, and etcd's environment there."""

    def __init__(self, folder: Path, members: list[tuple[list[str], dict[str, str]]]) -> None:
        self._folder = folder
        self._members = members
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int) -> None:
        inside, environment = self._members[number]
        Path(environment["ETCD_DATA_DIR"]).parent.mkdir(exist_ok=True)
        with (self._folder / f"etcd-{number}.log").open("ab") as log:
            self._running[number] = subprocess.Popen(
                [*inside, str(PROGRAM)],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self, number: int) -> None:
        process = self._running.pop(number)
        process.kill()
        process.wait()

    def close(self) -> None:
        for number in [*self._running]:
            self.kill(number)
