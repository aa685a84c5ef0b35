"""A log that is large: it is trimmed, and its disk is back."""

import contextlib
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.child import start_child
from tests.support.log_entries import SCHEMAS, EntryMaker
from tests.support.repositories import answers
from tests.support.sizes import need_disk, scaled
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient, ReplicaClient
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import TrimmedError

STREAM = "shop"
#: Entries that are sent before their acknowledgements are awaited.
AHEAD = 16


def used(folder: Path) -> int:
    """Bytes on the disk."""
    return sum(each.stat().st_blocks * 512 for each in folder.rglob("*") if each.is_file())


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_34_ten_gigabytes_are_trimmed_and_their_disk_is_back(tmp_path: Path) -> None:
    """Within 1 GB, although a reader stalls in the middle."""
    megabytes = scaled(10_000)
    need_disk(tmp_path, megabytes * 1.2)
    listen, folder = f"127.0.0.1:{free_port()}", tmp_path / "log-server"
    process = start_child(
        "walsender_bridge.change_log.log_server",
        ReplicaServerSettings(folder, listen),
        log=tmp_path / "log",
    )
    repository = RepositoryServer(
        tmp_path / "repository", f"127.0.0.1:{free_port()}", log_servers=[listen], retention=1.0
    )
    repository.start()
    try:
        with LogClient(repository.address) as log, ReplicaClient(listen) as replica:
            log.register_consumer("slow", None, 1800.0)
            wait_for(partial(answers, partial(log.create_stream, STREAM)), 30, "the stream")
            make, began = EntryMaker(), time.monotonic()
            with contextlib.closing(log.open_writer(STREAM)) as writer:
                for number in range(megabytes):
                    schemas = list(SCHEMAS.values()) if number == 0 else []
                    writer.send([make.whole(size=1 << 20)], schemas=schemas)
                    if number >= AHEAD:
                        assert writer.next_ack(60) is not None
                for _ in range(min(AHEAD, megabytes)):
                    assert writer.next_ack(60) is not None
                log.barrier({STREAM: make.end_lsn}, 120)
                written, full = time.monotonic() - began, used(folder)
                stalled = replica.read(STREAM, 1, megabytes)
                assert next(stalled).offset == 1
                log.drop_consumer("slow")
                began = time.monotonic()
                wait_for(lambda: used(folder) < 1 << 30, 300, "the disk is back")
                trimmed, left = time.monotonic() - began, used(folder)
                with pytest.raises(TrimmedError):
                    list(stalled)
                writer.send([make.whole(size=1 << 20)])
                assert writer.next_ack(60) is not None
    finally:
        repository.stop()
        process.kill()
        process.wait()
    print(
        f"{megabytes} MB written in {written:.0f} s, {full >> 20} MiB on disk; {left >> 20} MiB"
        f" {trimmed:.1f} s after they were no longer needed"
    )
    assert full > megabytes * 0.9e6
