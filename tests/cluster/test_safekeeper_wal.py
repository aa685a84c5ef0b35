"""The WAL of a real server through a safekeeper's storage: the same files, which PostgreSQL's own tools read."""

import random
import re
import subprocess

import psycopg
import pytest

from tests.support.servers import majors
from walsender_bridge.errors import LocalServerError
from walsender_bridge.postgres.protocol import wal_page
from walsender_bridge.postgres.protocol.lsn import format_lsn, parse_lsn
from walsender_bridge.postgres.protocol.wal_page import WalFormat
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.runtime.folder import FolderDisk


@pytest.mark.parametrize("major", majors())
def test_7_segments_are_the_primarys_own_and_pg_waldump_reads_them(
    make_server, tmp_path, seed, major
):
    rng = random.Random(seed)
    keep = {"wal_keep_segments": "64"} if major < 13 else {"wal_keep_size": "1GB"}
    server = make_server(major, **keep)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE t AS SELECT n, repeat('x', 90) FROM generate_series(1, 150000) n"
        )
        connection.execute("SELECT pg_switch_wal()")
        connection.execute("DELETE FROM t WHERE n < 5000")
    server.stop("fast")
    paths = sorted(p for p in (server.data_dir / "pg_wal").iterdir() if len(p.name) == 24)
    header = wal_page.identify(paths[0].read_bytes()[:8192])
    wal = b"".join(path.read_bytes() for path in paths)
    assert header.system_id
    assert header.segment_bytes
    wal_format = WalFormat(major, header.system_id, header.segment_bytes)

    folder = tmp_path / "wal"
    storage = WalStorage(FolderDisk(folder), wal_format, StorageLimits(free_bytes=0))
    storage.open()
    storage.reset(header.lsn)
    size = wal_format.segment_bytes
    target = header.lsn + 2 * size + 120_000
    while storage.write_lsn < target:
        at = storage.write_lsn - header.lsn
        length = min(rng.choice([100, 8192, 131_072]), target - storage.write_lsn)
        storage.write(storage.write_lsn, wal[at : at + length], 1)
        if rng.random() < 0.3:
            storage.flush()
    storage.flush()
    # The process dies here; a new one finds the end.
    again = WalStorage(FolderDisk(folder), wal_format, StorageLimits(free_bytes=0))
    again.open()
    assert again.align(target) <= again.flush_lsn <= target + 7
    for number, path in enumerate(paths[:2]):
        assert (folder / path.name).read_bytes() == wal[number * size : (number + 1) * size]
    partial = folder / f"{paths[2].name}.partial"
    length = again.flush_lsn - header.lsn - 2 * size
    assert partial.read_bytes()[:length] == paths[2].read_bytes()[:length]
    try:
        waldump = server.installation.tool("pg_waldump")
    except LocalServerError:
        return
    # As a DBA would: the current segment under its plain name.
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in folder.iterdir():
        if path.name.startswith("0"):
            (plain / path.name.removesuffix(".partial")).write_bytes(path.read_bytes())
    start = format_lsn(again.align(header.lsn + 2 * size + 8192))
    command = [waldump, "-p", plain, "-s", start]
    dumped = subprocess.run(command, capture_output=True, text=True, check=False)
    # It reads to the last whole record, and finds no other behind it.
    where = parse_lsn(re.findall(r"[0-9A-F]+/[0-9A-F]+", dumped.stderr)[-1])
    assert again.align(target) <= where <= again.align(target) + 40, dumped.stderr
    assert len(dumped.stdout.splitlines()) > 100
