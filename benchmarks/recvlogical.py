"""The peer `pg_recvlogical`: PostgreSQL's own reader of a logical slot, to /dev/null."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from benchmarks.workload import PUBLICATION, Workload
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.protocol.pgoutput import RELATION, TYPE

_OPTIONS = ("proto_version=1", f'publication_names="{PUBLICATION}"')


def version(work: Workload) -> str:
    """The version of the program that comes with the server."""
    return work.server.installation.version


def start(work: Workload, slot: str, output: str) -> "subprocess.Popen[bytes]":
    """Read the slot to the end of the load into `output`, then end."""
    options = [argument for option in _OPTIONS for argument in ("-o", option)]
    return subprocess.Popen(
        [
            work.server.installation.tool("pg_recvlogical"),
            *("-d", work.dsn, "-S", slot, "--start", "--no-loop", "-f", output),
            *("-E", format_lsn(work.end_lsn), *options),
        ],
        stdout=subprocess.DEVNULL,
    )


def differs(path: Path, payloads: Iterable[bytes]) -> str | None:
    """Where its output in `path` differs, byte for byte, from the log's payloads; None if it does not.

    It ends each message with a newline. Relation and Type messages are not in payloads: skipped here.
    """
    data = memoryview(path.read_bytes())
    at = count = 0
    for payload in payloads:
        place = 0
        while place < len(payload):
            size = int.from_bytes(payload[place : place + 4], "little")
            while data[at] in (RELATION, TYPE):
                at = _behind(data, at)
            if (
                data[at : at + size] != payload[place + 4 : place + 4 + size]
                or data[at + size] != 10
            ):
                return f"message {count} of the log is not what pg_recvlogical has at byte {at}"
            at += size + 1
            place += 4 + size
            count += 1
    if at != len(data):
        return f"pg_recvlogical has {len(data) - at} bytes more than the log"
    return None


def _behind(data: memoryview, at: int) -> int:
    """Where the message behind this Relation or Type message starts."""

    def string(start: int) -> int:
        while data[start]:
            start += 1
        return start + 1

    place = string(string(at + 5))
    if data[at] == RELATION:
        columns = int.from_bytes(data[place + 1 : place + 3], "big")
        place += 3
        for _ in range(columns):
            place = string(place + 1) + 8
    return place + 1
