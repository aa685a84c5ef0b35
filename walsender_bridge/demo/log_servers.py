"""The demo's log servers: wipes the disk of one during the load, and compares all replicas at the end."""

import hashlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

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
        #: The address of the log server that has lost its disk; empty: none has.
        self._wiped = ""
        #: The result of the comparison, as a sentence; empty: nothing was compared.
        self.verdict = ""

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
        self._wiped = self._listens[-1]

    def settle(self, log_address: str) -> dict[str, Any]:
        """Wait until all replicas have what is committed, and compare them byte for byte. Raises `DeadlineError`."""
        if len(self.folders) == 1:
            return {}
        with LogClient(log_address) as log:
            cuts = list(log.status().streams.values())
        compared = size = 0
        equal = True
        for cut in cuts:
            digests = {self._digest(listen, cut) for listen in self._listens}
            compared += cut.end_offset - cut.low_offset
            size += max(each.size for each in digests)
            equal &= len(digests) == 1
        self.verdict = (
            f"{compared} committed entries ({size:,} bytes) of {len(self._listens)} log servers compared, byte for byte:"
            f" {'equal' if equal else 'they differ'}"
        )
        if self._wiped:
            self.verdict += f"; the one at {self._wiped} had lost its disk during the load"
        return {
            "log_servers": len(self._listens),
            "wiped_log_server": self._wiped or None,
            "replicas_equal": equal,
            "entries_compared": compared,
            "entry_bytes_compared": size,
        }

    def _digest(self, listen: str, cut: StreamCut) -> "_Digest":
        """Of a replica's entries below the cut, with their offsets and versions."""
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


class _Digest(NamedTuple):
    """Of entries: a hash, and their bytes."""

    sha256: str
    size: int


def _digest(replica: ReplicaClient, cut: StreamCut) -> _Digest:
    found, size = hashlib.sha256(), 0
    for entry in replica.read(cut.stream, cut.low_offset, cut.end_offset):
        found.update(f"{entry.offset} {entry.version} {entry.global_offset} ".encode())
        found.update(entry.data)
        size += len(entry.data)
    return _Digest(found.hexdigest(), size)
