"""A row that no walsender can send, in a transaction in progress and after its commit (the lake's part: tests/spark)."""

import psycopg
import pytest

from tests.support.capture_stack import CaptureProcess, ChangeLog, make_tables, wal_end
from tests.support.servers import MAJORS_IN_TURN, MakeServer
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause

#: Eight bytes of text for each byte of the value; 136 MB, of which WAL has one hundredth.
TOO_LARGE = (
    f"INSERT INTO orders SELECT 1, '', {' || '.join(['b'] * 13)}"
    " FROM (SELECT 0::bit(83886080)::varbit) AS t (b)"
)
WORDS = "too large as text"


@pytest.fixture
def server(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    """A server that sends transactions in progress early, if it can."""
    major = request.param
    settings = {"fsync": "off"} | ({"logical_decoding_work_mem": "64kB"} if major >= 13 else {})
    server = make_server(major, **settings)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
        connection.execute("ALTER TABLE orders ADD bits varbit")
    return server


@pytest.mark.timeout(180)
@pytest.mark.parametrize("server", MAJORS_IN_TURN, indirect=True, ids="pg{}".format)
def test_a_row_too_large_to_send_ends_the_capture_once_it_has_committed(
    log: ChangeLog, server: LocalServer, capture: CaptureProcess
) -> None:
    with (
        psycopg.connect(server.dsn()) as large,
        psycopg.connect(server.dsn(), autocommit=True) as small,
    ):
        large.execute(TOO_LARGE.encode())
        large.execute("INSERT INTO orders SELECT g, '' FROM generate_series(1000, 5000) AS g")
        if server.installation.major >= 14:
            wait_for(lambda: WORDS in capture.output.read_text(), 60, "the row is met")
        # It may yet be rolled back, and others go on.
        before = wal_end(small)
        small.execute("INSERT INTO orders VALUES (2, 'small')")
        wait_for(lambda: log.committed_lsn() > before, 60, "the log has it")
        large.commit()
    assert capture.wait(60) == Cause.UNSUPPORTED_VALUE
    told = capture.status()
    assert told["state"] == "stopped"
    assert told["error"]["code"] == "UNSUPPORTED_VALUE"
    assert WORDS in told["error"]["what"]
    capture.start()
    assert capture.wait(60) == Cause.UNSUPPORTED_VALUE, "WAL does not change"
