"""Three machines on this one, with a log server each: two of them with a repository and a bridge, all over etcd."""

import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import psycopg

from tests.support.capture_stack import STREAM, ChangeLog
from tests.support.etcd import EtcdCluster
from tests.support.loopbacks import Loopbacks
from tests.support.machines import Machine
from tests.support.waiting import wait_for
from walsender_bridge.capture.status_record import CaptureStatus
from walsender_bridge.change_log.repository.etcd import Etcd, EtcdSettings
from walsender_bridge.change_log.repository.leader_lease import leader_key
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import UnavailableError, UnknownStreamError
from walsender_bridge.observability import bridge_view
from walsender_bridge.observability.bridge_view import ACTIVE, STANDING_BY, BridgeState
from walsender_bridge.runtime import processes, status_file


class SeveralBridges:
    """See the module; what it runs ends with the block.

    `more`: further sections of the third machine, whose parts are `third`. `endpoints`: where each of the two reaches
    etcd, if not at its own addresses. `loopbacks`: of the three, to which everything is published; None: they share this one's.
    """

    def __init__(
        self,
        folder: Path,
        etcd: EtcdCluster,
        dsn: str,
        *,
        third: str = "",
        more: str = "",
        endpoints: Sequence[list[str]] = (),
        loopbacks: Loopbacks | None = None,
    ) -> None:
        endpoints = endpoints or [etcd.endpoints] * 2
        listens = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        repositories = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        inside: list[list[str]] = [[]] * 3
        if loopbacks is not None:
            inside = [loopbacks.inside(number) for number in range(3)]
            for services in (listens, repositories):
                for number, listen in enumerate(services):
                    loopbacks.publish(int(listen.rpartition(":")[2]), number)
        source = f'[[source]]\nname = "{STREAM}"\ndsn = "{dsn}"\ntables = ["public.orders", "public.audit"]\n'
        named = f"repositories = {repositories}\n".replace("'", '"')
        #: For `check_equal`: what it asks of the log.
        self.log = ChangeLog(folder)
        self.log.listen, self.log.log_server_listen = ",".join(repositories), listens[2]
        self.machines = []
        for number, listen in enumerate(repositories):
            servers = "".join(
                _log_server(each, own=at == number) for at, each in enumerate(listens)
            )
            text = (
                '[machine]\ndata_dir = "state"\nparts = ["repository", "bridge", "log-server"]\nelect_bridge = true\n'
                f'[log]\ndata_dir = "log"\nlisten = "{listen}"\nstore = "etcd"\n{named}replica_timeout = 2\n'
                f'[etcd]\nendpoints = {endpoints[number]}\nprefix = "/{folder.name}/"\nlease = 4\n{servers}{source}'
            )
            text = text.replace("'", '"')
            self.machines.append(Machine(folder / f"m{number}", text, inside[number]))
        text = f'[machine]\ndata_dir = "state"\nparts = ["log-server"{third}]\n{_log_server(listens[2], own=True)}'
        if more:
            text += f"[log]\n{named}{source}{more}"
        self.third = Machine(folder / "m2", text, inside[2])

    @classmethod
    @contextmanager
    def running(cls, folder: Path, etcd: EtcdCluster, dsn: str, **options: Any) -> Iterator[Self]:
        """Those that a constructor with these arguments makes, all of them up."""
        found = cls(folder, etcd, dsn, **options)
        with ExitStack() as stack:
            machines = (found.third, *found.machines)
            for each in machines:
                stack.callback(each.close)
            with ThreadPoolExecutor(len(machines)) as pool:
                list(pool.map(Machine.up, machines))
            try:
                yield found
            except BaseException:
                for each in machines:
                    print(f"--- {each.folder.name}\n{each.logs()}")
                raise

    def state(self, number: int) -> BridgeState | None:
        """Of the bridge of this machine, as it reports."""
        seen = bridge_view.observe(load_config(self.machines[number].config))
        return None if seen is None else seen.state

    def active(self, *numbers: int, within: float = 60) -> int:
        """The number of the active one among these, or of both, once its capture streams."""

        def found() -> list[int]:
            return [
                number
                for number in numbers or (0, 1)
                if self.state(number) == ACTIVE and self._streams(number)
            ]

        (number,) = wait_for(found, within, "a bridge is active")
        return int(number)

    def leader(self) -> int:
        """The number of the machine whose repository leads."""
        section = load_config(self.machines[0].config).etcd
        assert section is not None
        its = EtcdSettings.of(section)

        def address() -> str:
            with Etcd(its, 1.0) as client:
                found = client.get(leader_key(its), within=5.0)
            return "" if found is None else str(json.loads(found.value)["address"])

        return self.log.listen.split(",").index(wait_for(address, 60, "a repository leads"))

    def _streams(self, number: int) -> bool:
        settings = load_config(self.machines[number].config)
        seen = status_file.read(settings.capture_status(settings.source[0]), CaptureStatus)
        return seen is not None and seen.state == "streaming" and processes.alive(seen.pid)

    def settled(self) -> int:
        """The number of the active one, once its capture streams and nothing of the other one runs.

        On a busy machine, etcd may answer too late for the lease, and another one is active without anybody's doing.
        """

        def found() -> list[int]:
            return [
                number
                for number in (0, 1)
                if self.state(number) == ACTIVE
                and self._streams(number)
                and self._stands_by(1 - number)
            ]

        (number,) = wait_for(found, 90, "one bridge is active, and the other stands by")
        return int(number)

    def _stands_by(self, number: int) -> bool:
        captures = {e for e in self.machines[number].processes() if e.startswith("bridge/")}
        return self.state(number) == STANDING_BY and not captures

    def signal(self, number: int, signal_: signal.Signals) -> None:
        """Send a signal to all processes of a machine: stopped, it is as good as cut off."""
        for pid in self.machines[number].family():
            os.kill(pid, signal_)

    def goes_on(self, connection: psycopg.Connection[Any]) -> None:
        """A row that is written now is committed in the log."""
        row = connection.execute("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").fetchone()
        assert row is not None
        wait_for(lambda: self._committed() > int(row[0]), 60, "the log goes on")

    def term(self) -> int:
        """Of the stream at the third machine's log server, which may have to be taken into it first."""

        def found() -> int:
            try:
                return self.log.replica_status().term
            except UnknownStreamError:
                return 0

        return int(wait_for(found, 60, "the third machine has the stream"))

    def _committed(self) -> int:
        try:
            return self.log.committed_lsn()
        except UnavailableError:
            return 0


def _log_server(listen: str, *, own: bool) -> str:
    return f'[[log_server]]\nlisten = "{listen}"\n' + 'data_dir = "log-server"\n' * own
