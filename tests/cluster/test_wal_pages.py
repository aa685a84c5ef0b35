"""The WAL of real servers: every record is found where pg_waldump finds it."""

import bisect
import re
import subprocess

import psycopg
import pytest

from tests.support.servers import majors
from walsender_bridge.errors import LocalServerError
from walsender_bridge.postgres.protocol import wal_page
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.postgres.protocol.wal_page import PAGE_BYTES, WalFormat
from walsender_bridge.postgres.protocol.wal_record import RecordScan, aligned

_LINE = re.compile(
    r"rmgr: (\S+) .*?tx: +(\d+), lsn: ([0-9A-F]+/[0-9A-F]+), prev ([0-9A-F]+/[0-9A-F]+)"
)


def insert_lsn(connection) -> int:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
    return parse_lsn(row[0])


def filled(server) -> tuple[int, int]:
    """Write many kinds of records, long ones too, over three segments; where WAL begins and ends."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        start = insert_lsn(connection)
        connection.execute("CREATE TABLE t (n int PRIMARY KEY, x text)")
        connection.execute(
            "INSERT INTO t SELECT n, repeat('x', n % 900) FROM generate_series(1, 20000) n"
        )
        connection.execute("SELECT pg_switch_wal()")
        connection.execute("UPDATE t SET x = x || 'y' WHERE n % 2 = 0")
        # A record over many pages: a message of 300 kB.
        connection.execute("SELECT pg_logical_emit_message(true, 'p', repeat('m', 300000))")
        connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")
        connection.execute("DELETE FROM t WHERE n < 300")
        end = insert_lsn(connection)
    return start, end


@pytest.mark.parametrize("major", majors())
def test_records_are_where_pg_waldump_finds_them(make_server, major):
    keep = {"wal_keep_segments": "64"} if major < 13 else {"wal_keep_size": "1GB"}
    server = make_server(major, **keep)
    server.start()
    start, end = filled(server)
    server.stop("fast")
    folder = server.data_dir / "pg_wal"
    first = next(p for p in sorted(folder.iterdir()) if len(p.name) == 24)
    header = wal_page.identify(first.read_bytes()[:PAGE_BYTES])
    assert header.major == major
    assert header.system_id
    assert header.segment_bytes
    expected = WalFormat(header.major, header.system_id, header.segment_bytes)
    size = expected.segment_bytes
    files = {}

    def page(lsn):
        name = wal_page.segment_name(1, lsn, size)
        if name not in files:
            path = folder / name
            files[name] = path.read_bytes() if path.exists() else b""
        at = lsn % size
        return files[name][at : at + PAGE_BYTES]

    known = RecordScan(page, header.lsn, expected, stop=end)
    records = {record.start: record for record in known}
    assert known.ran_out
    walk = RecordScan(page, known.end, expected, previous=known.previous)
    records |= {record.start: record for record in walk}
    assert walk.end > end
    assert not walk.ran_out  # the server's next segments are recycled or zeroed, never ours to read
    assert max(record.length for record in records.values()) > 300_000
    assert any(record.is_switch for record in records.values())
    ends = [record.end for record in records.values()]
    switches = {record.end: record.start for record in records.values() if record.is_switch}
    for position in range(start, walk.end, 239_119):
        expected_end = ends[bisect.bisect_right(ends, position) - 1]
        switch = switches.get(wal_page.segment_start(position, size) + size)
        if switch is not None and switch + 24 <= position:
            expected_end = switch + 24
        assert aligned(page, position, expected, oldest=header.lsn) == expected_end
    try:
        waldump = server.installation.tool("pg_waldump")
    except LocalServerError:
        pytest.skip(f"PostgreSQL {major} has no pg_waldump here")
    dumped = subprocess.run([waldump, first], capture_output=True, text=True, check=False).stdout
    lines = [match.groups() for line in dumped.splitlines() if (match := _LINE.match(line))]
    assert len(lines) > 1000
    for _, xid, lsn, previous in lines:
        record = records[parse_lsn(lsn)]
        assert (record.xid, record.previous) == (int(xid), parse_lsn(previous))
    seen = {parse_lsn(lsn) for _, _, lsn, _ in lines}
    last = max(seen)
    assert seen == {lsn for lsn in records if lsn <= last}
