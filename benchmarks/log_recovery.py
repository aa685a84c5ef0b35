"""`log-recovery`: opening a replica after many empty commits, and with many entries, against one that keeps every context.

The peer is what Varlog's proposal replaces: a store with a record for each commit context, empty or not, which a restart scans
backwards for the newest one that is not empty. Both sides are LMDB, on the same disk, and get the same commits; both are
opened in a process of their own, whose imports are not counted. After that, both must know the same commit.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lmdb

from benchmarks.report import Report, Round, load
from tests.support.log_entries import SCHEMAS, EntryMaker
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.host import HostedReplica

NAME = "log-recovery"
#: Entries of one append, and of one commit.
_TOGETHER = 1000
#: Bytes of a row, for entries of about 1 KB.
_ROW = 900
_CONTEXT = struct.Struct(">QQQQ")
_MAP_BYTES = 16 << 30


def add_options(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own options."""
    parser.add_argument("--empty-commits", type=int, default=36_000)
    parser.add_argument("--entries", type=int, default=1_000_000)


def run(options: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Both histories, one after the other."""
    report = Report(NAME)
    report.peers.append({"name": "every context kept (LMDB)", "version": str(lmdb.version())})
    works = {
        "empty_commits": (_TOGETHER, max(int(options.empty_commits * options.scale), 1)),
        "million_entries": (max(int(options.entries * options.scale), _TOGETHER), 0),
    }
    for work, (entries, empty) in works.items():
        say(f"{work}: writing {entries} entries and {empty} empty commits")
        with tempfile.TemporaryDirectory(prefix="tuskline-bench-") as folder:
            own, peer = Path(folder) / "own", Path(folder) / "peer"
            _write(own, peer, entries, empty)
            for number in range(options.rounds):
                found = {
                    side: _opened(side, place) for side, place in (("own", own), ("peer", peer))
                }
                for side, (seconds, cpu, context) in found.items():
                    more = {"open_ms": seconds * 1000}
                    report.add(Round(side, work, entries, seconds, cpu, context, load(), more))
                    say(f"{work} {number + 1}/{options.rounds} {side}: {seconds * 1000:.1f} ms")
        own_ms, peer_ms = (report.median(side, work, "open_ms") for side in ("own", "peer"))
        report.ratios[f"open_ms_{work}"] = round(own_ms, 2)
        report.ratio(f"vs_all_contexts_{work}", own_ms, peer_ms)
    return report


# -- the histories ----------------------------------------------------------------------------------


def _write(own: Path, peer: Path, entries: int, empty: int) -> None:
    """The same history for both: commits of entries, and then empty ones."""
    replica, make = HostedReplica(own), EntryMaker()
    replica.create("s", "log")
    session, _ = replica.open_writer(1)
    with lmdb.open(str(peer), map_size=_MAP_BYTES, max_dbs=2) as store:
        version, end = 0, 1
        for _ in range(entries // _TOGETHER):
            data = [make.whole(size=_ROW) for _ in range(_TOGETHER)]
            replica.append(session, data, [*SCHEMAS.values()], None, 2**63)
            version += 1
            context = CommitContext(version, end, end, _TOGETHER)
            replica.commit([IssuedCommit(context)], version)
            _keep(store, [context], end, data)
            end = context.end
        contexts = [CommitContext(version + n, end, end, 0) for n in range(1, empty + 1)]
        replica.commit([IssuedCommit(each) for each in contexts], version)
        for first in range(0, len(contexts), _TOGETHER):
            _keep(store, contexts[first : first + _TOGETHER], end, [])
    replica.close()


def _keep(
    store: lmdb.Environment, contexts: list[CommitContext], start: int, data: list[bytes]
) -> None:
    entries, kept = store.open_db(b"entries"), store.open_db(b"contexts")
    with store.begin(write=True) as transaction:
        for offset, entry in enumerate(data, start):
            transaction.put(offset.to_bytes(8, "big"), entry, db=entries, append=True)
        for c in contexts:
            value = _CONTEXT.pack(c.version, c.local_offset, c.global_offset, c.length)
            transaction.put(c.version.to_bytes(8, "big"), value, db=kept, append=True)


# -- opening, each in its own process ---------------------------------------------------------------


def _opened(side: str, place: Path) -> tuple[float, float, list[int]]:
    """Wall and CPU seconds of opening, and the version and the end that it found."""
    command = [sys.executable, "-m", "benchmarks.log_recovery", side, str(place)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, cpu, context = json.loads(done.stdout.splitlines()[-1])
    return seconds, cpu, context


def _open_own(place: Path) -> list[int]:
    replica = HostedReplica(place)
    replica.recover()
    status = replica.status()
    return [status.version, status.committed_end]


def _open_peer(place: Path) -> list[int]:
    """Scan the contexts from the newest one back to one that is not empty; then its last entry has to be there."""
    with lmdb.open(str(place), map_size=_MAP_BYTES, max_dbs=2, create=False) as store:
        entries, kept = store.open_db(b"entries"), store.open_db(b"contexts")
        with store.begin() as transaction:
            newest = 0
            for _, value in transaction.cursor(db=kept).iterprev():
                version, start, _, length = _CONTEXT.unpack(value)
                newest = newest or version
                if length:
                    last = start + length - 1
                    assert transaction.get(last.to_bytes(8, "big"), db=entries) is not None
                    return [newest, start + length]
    return [newest, 1]


def _main(side: str, place: str) -> None:
    began, cpu = time.perf_counter(), time.process_time()
    found = {"own": _open_own, "peer": _open_peer}[side](Path(place))
    print(json.dumps([time.perf_counter() - began, time.process_time() - cpu, found]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
