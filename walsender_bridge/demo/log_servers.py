"""The demo's log servers: wipes the disk of one during the load, and compares all replicas at the end."""

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from walsender_bridge.change_log.client import LogClient, ReplicaClient, StreamCut
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import DeadlineError, TusklineError

#: Seconds within which every log server has to be in sync after the load.
_SYNC_SECONDS = 120.0


class DemoLogServers:
    """`count` log servers, which run on this machine with their data in `directory`."""

    def __init__(self, directory: Path, count: int) -> None:
        self.folders = [directory / f"log-server{number or ''}" for number in range(count)]
        self._listens = [f"127.0.0.1:{free_port()}" for _ in range(count)]

    def sections(self) -> list[str]:
        """The sections `[[log_server]]`."""
        lines: list[str] = []
        for folder, listen in zip(self.folders, self._listens, strict=True):
            lines += ["[[log_server]]", f'data_dir = "{folder.name}"', f'listen = "{listen}"', ""]
        return lines

    @contextmanager
    def wiped(self) -> Iterator[None]:
        """Remove the data of the last log server; the block ends its process, and what that writes until then is lost, too."""
        lost = self.folders[-1].with_suffix(".lost")
        self.folders[-1].rename(lost)
        yield
        shutil.rmtree(lost)

    def settle(self, log_address: str) -> dict[str, Any]:
        """Wait until all replicas have what is committed, and compare them byte for byte. Raises `DeadlineError`."""
        if len(self.folders) == 1:
            return {}
        with LogClient(log_address) as log:
            cuts = list(log.status().streams.values())
        compared, equal = 0, True
        for cut in cuts:
            digests = {self._digest(listen, cut) for listen in self._listens}
            compared += cut.end_offset - cut.low_offset
            equal &= len(digests) == 1
        return {
            "log_servers": len(self._listens),
            "replicas_equal": equal,
            "entries_compared": compared,
        }

    def _digest(self, listen: str, cut: StreamCut) -> str:
        """The digest of a replica's entries below the cut, with their offsets and versions."""
        deadline = time.monotonic() + _SYNC_SECONDS
        while True:
            with suppress(TusklineError), ReplicaClient(listen) as replica:
                status = replica.stream_status(cut.stream)
                if status.committed_end >= cut.end_offset and status.low_offset <= cut.low_offset:
                    return _digest(replica, cut)
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"the log server at {listen} does not have all entries below {cut.end_offset}",
                    where=f"stream {cut.stream}",
                    repair="see log-server.log and bridge.log",
                )
            time.sleep(0.2)


def _digest(replica: ReplicaClient, cut: StreamCut) -> str:
    found = hashlib.sha256()
    for entry in replica.read(cut.stream, cut.low_offset, cut.end_offset):
        found.update(f"{entry.offset} {entry.version} {entry.global_offset} ".encode())
        found.update(entry.data)
    return found.hexdigest()
