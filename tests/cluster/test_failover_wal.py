"""What a failover does to WAL: tails that are overwritten, records cut in the middle, copies, readers."""

import os
import shutil
import signal
import threading
from functools import partial

import psycopg
import pytest

from tests.support.quorum_stack import in_background, insert, load_server, numbers
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import Receivers, current_lsn, replayed, run
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import DivergedError
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.postgres.protocol.wal_page import segment_name
from walsender_bridge.quorum.failover.plan import FailoverStep
from walsender_bridge.quorum.failover.run import FailoverRun

SEGMENT = 16 << 20


@pytest.fixture
def primary(make_server: MakeServer) -> LocalServer:
    return load_server(make_server, wal_level="replica", wal_keep_size="1GB")


def test_6_a_tail_without_a_quorum_is_overwritten_after_an_election(stack, primary) -> None:
    (standby,) = stack.standbys
    insert(primary, 1)
    stack.caught_up(standby)
    standby.stop()
    vcl = current_lsn(primary)
    stack.kill("safekeeper-0")
    stack.kill("safekeeper-1")
    in_background(primary, 2)
    # R3 and R4 are on S3 alone.
    wait_for(lambda: current_lsn(primary) > vcl, 20, "it is written")
    third = partial(stack.greetings, primary)
    wait_for(lambda: third()[-1].flush_lsn > vcl, 30, "the minority has it")
    stack.kill("safekeeper-2")
    primary.kill()
    stack.kill("proposer")
    stack.start("safekeeper-0", "safekeeper-1")
    standby.start()
    wait_for(lambda: len(stack.greetings(standby)) == 2, 30, "two safekeepers are there")
    stack.fail_over(standby)
    assert numbers(standby) == {1}
    stack.switch_to(standby)
    insert(standby, 3)
    stack.start("safekeeper-2")
    stack.kill("safekeeper-0")
    insert(standby, 4)  # S3 acknowledges what stands where its tail was
    run(standby, "SELECT pg_switch_wal()")
    insert(standby, 5)
    name = segment_name(2, vcl, SEGMENT)
    own = (standby.data_dir / "pg_wal" / name).read_bytes()
    for number in (1, 2):
        wait_for(lambda: name in stack.segments(number), 30, "the segment is complete")  # noqa: B023
        assert stack.segments(number)[name] == own


def test_30_a_quorum_acknowledges_half_a_record_and_the_promotion_is_before_it(
    stack, primary
) -> None:
    (standby,) = stack.standbys
    insert(primary, 1)
    begin = current_lsn(primary)
    wal = primary.data_dir / "pg_wal"
    before = {path.name for path in wal.iterdir()}
    writer = psycopg.connect(primary.dsn(), autocommit=True)
    pid = writer.info.backend_pid
    emit = "SELECT pg_logical_emit_message(false, 'half', repeat('x', 80000000))"

    def execute() -> None:
        try:
            writer.execute(emit)
        except psycopg.Error:
            return

    thread = threading.Thread(target=execute, daemon=True)
    thread.start()
    # When the next segment is there, the one before is flushed, in the middle of the record.
    wait_for(
        lambda: len({p.name for p in wal.iterdir() if len(p.name) == 24} - before) >= 1,
        20,
        "a segment is full",
    )
    os.kill(pid, signal.SIGSTOP)
    boundary = begin - begin % SEGMENT + SEGMENT
    wait_for(
        lambda: parse_lsn(stack.status()["commit_lsn"]) >= boundary, 30, "a quorum has half of it"
    )
    assert parse_lsn(stack.status()["commit_lsn"]) < begin + 80_000_000
    primary.kill()
    writer.close()
    stack.kill("proposer")
    assert stack.fail_over(standby)[-1] == FailoverStep.DONE
    switch = int(
        run(
            standby,
            "SELECT pg_wal_lsn_diff(lsn, '0/0') FROM (SELECT"
            " split_part(pg_read_file('pg_wal/00000002.history'), E'\\t', 2)::pg_lsn lsn) h",
        )[0][0]
    )
    assert begin <= switch < boundary
    stack.switch_to(standby)
    insert(standby, 2)
    assert numbers(standby) == {1, 2}
    # It is behind the switch, in a new timeline, everywhere.
    lsn = current_lsn(standby)
    wait_for(
        lambda: all(each.flush_lsn >= lsn for each in stack.greetings(standby)), 30, "all have it"
    )
    assert {each.timeline for each in stack.greetings(standby)} == {2}


def test_17_a_copy_that_went_its_own_way_is_refused(stack, primary) -> None:
    insert(primary, 1)
    primary.stop()
    place = primary.folder.with_name("copy")
    copy = LocalServer(primary.installation, primary._account, place, primary._password)
    primary._account.make_folder(place, 0o755)
    primary._account.run(["cp", "-Rp", primary.data_dir, copy.data_dir])
    stack.standbys.append(copy)
    primary.start()
    wait_for(stack.is_sync, 30, "the proposer is back")
    insert(primary, 2)
    stack.kill("proposer")
    with (copy.data_dir / "postgresql.auto.conf").open("a") as conf:
        conf.write("synchronous_standby_names = ''\n")
    copy.start()
    run(copy, "INSERT INTO load SELECT generate_series(100, 3000)")
    assert current_lsn(copy) > current_lsn(primary)
    # As a primary: everything fits but the bytes.
    stack.server = copy
    stack.start("proposer")
    assert stack.processes.pop("proposer").wait(timeout=30) == DivergedError.cause, stack.logs()
    assert "other WAL at the same position" in stack.log("proposer").read_text()
    # As a standby that is to be promoted.
    copy.stop()
    (copy.data_dir / "standby.signal").touch()
    copy.start()
    primary.kill()
    with pytest.raises(DivergedError, match="differs from the safekeepers' WAL"):
        FailoverRun(stack.settings(copy)).run()
    primary.start()
    stack.server = primary
    assert stack.abort()
    stack.start("proposer")
    wait_for(stack.is_sync, 30, "the primary goes on")
    insert(primary, 3)
    shutil.rmtree(copy.folder, ignore_errors=True)


def test_13_readers_of_a_safekeeper_follow_the_new_timeline(
    stack, primary, tmp_path, receive: Receivers
) -> None:
    (standby,) = stack.standbys
    insert(primary, 1)
    direct = stack.standby(stack.upstream)
    cascading = stack.standby(direct.dsn())
    receiver = receive(primary, stack.wal_servers[0].dsn(), tmp_path / "received", "--synchronous")
    insert(primary, 2)
    wait_for(lambda: numbers(cascading) == {1, 2}, 30, "it is on the cascading standby")
    primary.kill()
    stack.kill("proposer")
    stack.fail_over(standby)
    stack.switch_to(standby)
    insert(standby, 3)
    for reader in (direct, cascading):
        wait_for(lambda: numbers(reader) == {1, 2, 3}, 40, "the standby has followed")  # noqa: B023
        reached = replayed(reader)
        assert reached <= max(each.commit_lsn for each in stack.greetings(standby))
    run(standby, "SELECT pg_switch_wal()")
    insert(standby, 4)
    # This one may be behind those that the commit waited for.
    wait_for(
        lambda: max(stack.segments(0), default="").startswith("00000002"), 20, "it is complete"
    )
    name = max(stack.segments(0))
    wait_for((receiver.folder / name).exists, 40, "pg_receivewal has followed")
    assert (receiver.folder / name).read_bytes() == stack.segments(0)[name]
