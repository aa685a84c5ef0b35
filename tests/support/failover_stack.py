"""A quorum whose safekeepers serve WAL, a standby of its primary, and a failover to it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Self

from psycopg.conninfo import make_conninfo

from tests.support.quorum_stack import NAME, QuorumStack
from tests.support.waiting import wait_for
from tests.support.wal_server import (
    PASSWORD,
    USER,
    WalServerProcess,
    current_lsn,
    make_standby,
    promote,
    replayed,
)
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.quorum.failover.plan import FailoverStep
from walsender_bridge.quorum.failover.run import FailoverRun, FailoverSettings, abort
from walsender_bridge.quorum.proposer.handshake import greet
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.protocol.messages import SafekeeperGreeting

#: Runs a failover in a process of its own, which a test can have killed anywhere.
_SCRIPT = """
import os, sys
from tests.support.failover_stack import settings_of
from walsender_bridge.quorum.failover.run import FailoverRun
dsn, upstream, *ports = sys.argv[1:]
FailoverRun(settings_of(dsn, upstream, [int(port) for port in ports])).run()
"""


def settings_of(dsn: str, upstream: str, ports: list[int]) -> FailoverSettings:
    return FailoverSettings(proposer_settings(dsn, ports), upstream)


def proposer_settings(dsn: str, ports: list[int]) -> ProposerSettings:
    addresses = tuple(("127.0.0.1", port) for port in ports)
    return ProposerSettings(dsn, addresses, NAME, "tuskline_safekeepers")


class FailoverStack(QuorumStack):
    """See the module. `standbys` are stopped and deleted with it."""

    def __init__(self, folder: Path, server: LocalServer, count: int = 3) -> None:
        super().__init__(folder, server, count)
        # Readers without a slot are away for seconds while the timeline changes.
        for name in self.names:
            self.options[name] = {"keep_bytes": 1 << 30}
        self.standbys: list[LocalServer] = []
        self.wal_servers: list[WalServerProcess] = []

    def __exit__(self, *_: object) -> None:
        for standby in self.standbys:
            standby.destroy()
        for server in self.wal_servers:
            server.kill()
        super().__exit__()

    def __enter__(self) -> Self:
        return self

    def serve(self, *numbers: int) -> str:
        """Start these safekeepers' WAL servers, the first one's by default; the connection string of all."""
        for number in numbers or (0,):
            self.wal_servers.append(self.wal_server(number))
            self.wal_servers[-1].start()
        return self.upstream

    @property
    def upstream(self) -> str:
        ports = [str(server.port) for server in self.wal_servers]
        return make_conninfo(
            "",
            host=",".join(["127.0.0.1"] * len(ports)),
            port=",".join(ports),
            user=USER,
            password=PASSWORD,
            application_name="from_quorum",
        )

    def standby(self, upstream: str | None = None, **settings: str) -> LocalServer:
        """A standby of the primary that streams from it, or from `upstream`, and runs."""
        place = self.server.folder.with_name(f"standby-{len(self.standbys)}")
        made = make_standby(
            self.server,
            place,
            upstream or self.server.dsn(application_name="candidate"),
            fsync="off",
            **settings,
        )
        self.standbys.append(made)
        made.start()
        return made

    def caught_up(self, standby: LocalServer) -> None:
        """Wait until it has replayed what the primary has now."""
        lsn = current_lsn(self.server)
        wait_for(lambda: replayed(standby) >= lsn, 30, "the standby has replayed")

    # -- failover -----------------------------------------------------------------------------------

    def settings(self, standby: LocalServer) -> FailoverSettings:
        settings = settings_of(standby.dsn(), self.upstream, self.ports)
        if standby.installation.major < 12:  # SQL cannot do it
            return replace(settings, promote=lambda: promote(standby))
        return settings

    def fail_over(self, standby: LocalServer) -> list[FailoverStep]:
        """To this standby, in this process."""
        return FailoverRun(self.settings(standby)).run()

    def fail_over_and_die(self, standby: LocalServer, place: str) -> int:
        """The same in a process of its own, which is killed at `place`, a fail point; its exit code."""
        with self.log("failover").open("ab") as log:
            done = subprocess.run(
                [
                    *(sys.executable, "-c", _SCRIPT),
                    *(standby.dsn(), self.upstream, *map(str, self.ports)),
                ],
                env={**os.environ, "TUSKLINE_FAIL_POINT": place},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=120,
            )
        return done.returncode

    def greetings(self, server: LocalServer) -> list[SafekeeperGreeting]:
        """What the safekeepers that are there say of themselves; asked for the cluster of `server`."""
        with PrimaryStream.connect(server.dsn()) as asked:
            info = asked.server_info()
        found = [greet("127.0.0.1", port, info) for port in self.ports]
        return [greeting for greeting in found if greeting is not None]

    def abort(self) -> bool:
        """Take it back for the primary."""
        return abort(proposer_settings(self.server.dsn(), self.ports), seconds=30)

    def switch_to(self, server: LocalServer) -> None:
        """The bridge attaches this server from now on."""
        self.server = server
        self.start("proposer")
        wait_for(self.is_sync, 30, f"the proposer is attached: {self.logs()}")
