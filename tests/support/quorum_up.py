"""`tuskline up` with safekeepers on this machine: its configuration, and how its quorum is."""

import json
from pathlib import Path
from typing import Any

from tests.support.attached import Attached
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import LocalServer, free_ports
from walsender_bridge.errors import Cause
from walsender_bridge.observability import quorum_view
from walsender_bridge.runtime.supervisor import read_states


def hosting(
    folder: Path, server: LocalServer, count: int, *, lake: bool = False, **more: Any
) -> Attached:
    """A configuration with so many hosted safekeepers around `server`. `more`: keys of `[safekeepers]`."""
    first = free_ports(2 * count).start
    section = {
        "local": count,
        "listen": f"127.0.0.1:{first}",
        "wal_listen": f"127.0.0.1:{first + count}",
        "keep_bytes": 1 << 30,
        **({"addresses": [f"127.0.0.1:{first}"]} if count == 1 else {}),
        **more,
    }
    source = {"dsn": server.dsn(), "tables": ["public.load"]}
    return Attached(folder, {"shop": source}, lake=lake, metrics=True, safekeepers=section)


def quorum(tuskline: Attached) -> dict[str, Any]:
    done = tuskline.run("safekeeper", "status", "--json")
    assert done.returncode in {0, Cause.UNAVAILABLE}, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert bool(found["problems"]) == bool(done.returncode)
    return found


def follows(tuskline: Attached) -> bool:
    seen = quorum_view.observe(load_config(tuskline.config))
    return seen is not None and seen.proposer_here and seen.problems == []


def up(tuskline: Attached) -> None:
    """Everything runs, and commits wait for the quorum."""
    tuskline.json("init")
    tuskline.up()
    wait_for(lambda: follows(tuskline), 60, "a quorum follows")
    assert tuskline.json("quorum", "require")["changed"] is True


def pids(tuskline: Attached, supervisor: str) -> dict[str, Any]:
    """The process of each child; None: it is not running."""
    children = read_states(tuskline.run_dir, supervisor).children
    return {name: child.pid for name, child in children.items()}
