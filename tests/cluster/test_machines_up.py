"""A machine of each kind: `tuskline up` starts the processes of that kind, and its commands do not ask for what is elsewhere."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.support.machines import Machine
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port, free_ports
from walsender_bridge.errors import Cause

PROCESSES = {
    "log-server": {"log-server", "log-server/replicas"},
    "safekeepers": {"log-server", "log-server/safekeeper-1", "log-server/wal-server-1"},
    "repository": {"bridge"},
    "bridge": {"bridge", "bridge/capture-shop", "bridge/proposer"},
    "lake": {"lake", "maintain"},
}


def files() -> dict[str, str]:
    """A file for each kind, of one installation whose server never answers."""
    log, log_server, server, safekeeper = (free_port() for _ in range(4))
    wal = free_ports(1).start
    source = f'[[source]]\nname = "shop"\ndsn = "host=127.0.0.1 port={server} dbname=shop user=x"\n'
    asked = f'[log]\nlisten = "127.0.0.1:{log}"\n'
    return {
        "log-server": f'[[log_server]]\nlisten = "127.0.0.1:{log_server}"\ndata_dir = "replicas"\n',
        "safekeepers": f'[safekeepers]\nlocal = 1\ndata_dir = "wal"\nlisten = "127.0.0.1:{safekeeper}"\n'
        f'wal_listen = "127.0.0.1:{wal}"\n',
        "repository": f'{asked}data_dir = "log"\n[[log_server]]\nlisten = "127.0.0.1:{log_server}"\n',
        "bridge": f'{asked}{source}[safekeepers]\naddresses = ["127.0.0.1:{safekeeper}"]\n',
        "lake": f'{asked}{source}[lake]\nuri = "lake"\n',
    }


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    found = {}
    with ExitStack() as stack:
        for kind, text in files().items():
            section = f'[machine]\ndata_dir = "state"\nparts = ["{kind}"]\n'
            found[kind] = Machine(tmp_path / kind, section + text)
            stack.callback(found[kind].close)
        yield found


@pytest.mark.timeout(300)
def test_each_kind_starts_its_own_processes_and_no_others(machines: dict[str, Machine]) -> None:
    for kind, each in machines.items():
        each.up()
        # A capture, a proposer or a driver whose server does not answer is started again and again.
        wait_for(partial(each.runs, PROCESSES[kind]), 60, f"{kind} runs")
        if kind == "lake":
            each.kill()  # before Spark has started
    for kind in ("log-server", "safekeepers"):
        done = machines[kind].run("status")
        assert (done.returncode, done.stderr) == (0, "")
    assert machines["safekeepers"].run("doctor").returncode == 0
    refused = machines["log-server"].run("bridge", "run")
    assert refused.returncode == Cause.CONFIG
    assert "on another machine" in refused.stderr
    assert machines["safekeepers"].run("down").returncode == 0
    assert machines["safekeepers"].processes() == set()
