"""Where the processes of an installation listen, as the kernel says, so that none is forgotten."""

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.runtime import processes

_LISTEN = "0A"


@dataclass(frozen=True)
class ListeningSocket:
    """`pid`: of the process that listens on `host` and `port`."""

    pid: int
    host: str
    port: int


def listeners(pid: int) -> list[ListeningSocket]:
    """Those of a process and of all that it has started, by port."""
    places = {inode: (host, port) for inode, host, port in _listening()}
    found = [
        ListeningSocket(each, *places[inode])
        for each in processes.family(pid)
        for inode in _sockets(each)
        if inode in places
    ]
    return sorted(set(found), key=lambda each: each.port)


def of_process(pid: int, name: str) -> int:
    """A number in `/proc/PID/status`, like `Threads`, or `VmRSS` in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(f"{name}:"))
    return int(line.split()[1])


def _sockets(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(path.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _listening() -> Iterator[tuple[int, str, int]]:
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                host, port = fields[1].split(":")
                words = [int(host[n : n + 8], 16) for n in range(0, len(host), 8)]
                packed = struct.pack(f"={len(words)}I", *words)
                name = socket.inet_ntop(family, packed).removeprefix("::ffff:")
                yield int(fields[9]), name, int(port, 16)
