"""A failover where VCL is the start of a segment, as on an idle primary with archive_timeout, and after a base backup."""

import pytest

from tests.support.failover_stack import FailoverStack
from tests.support.quorum_stack import NAME, insert, load_server, numbers
from tests.support.servers import MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import current_lsn, run
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.quorum.failover.plan import FailoverStep
from walsender_bridge.quorum.safekeeper.storage import position_file
from walsender_bridge.quorum.safekeeper.storage.position_file import StoragePosition
from walsender_bridge.runtime.folder import FolderDisk

SEGMENT = 16 << 20


@pytest.fixture
def primary(make_server: MakeServer) -> LocalServer:
    return load_server(make_server, wal_level="replica")


def idle_at_a_boundary(stack: FailoverStack, primary: LocalServer) -> int:
    """Have the primary end its segment, and all safekeepers and the standby have all of it; the LSN."""
    (standby,) = stack.standbys
    for _ in range(20):
        run(primary, "CHECKPOINT")
        run(primary, "SELECT pg_switch_wal()")
        lsn = current_lsn(primary)
        stack.caught_up(standby)
        wait_for(
            lambda: all(each.flush_lsn >= lsn for each in stack.greetings(primary)),  # noqa: B023
            30,
            "the safekeepers have it",
        )
        if lsn % SEGMENT == 0 and current_lsn(primary) == lsn:
            return lsn
    raise AssertionError("the server never was idle at a boundary")


def begins_anew(stack: FailoverStack, number: int, lsn: int) -> None:
    """Have a safekeeper that does not run hold no WAL below `lsn`, where its log ends: as after a full resync there."""
    held = stack.segments(number)
    assert held, "there is something to remove"
    wal = stack.data(number) / "wal"
    for name in held:
        (wal / name).unlink()
    position_file.save(FolderDisk(wal), StoragePosition(lsn, lsn, exact=True))


def test_16_a_failover_where_vcl_ends_a_segment_compares_the_segment_before(stack, primary):
    (standby,) = stack.standbys
    for name in stack.names:  # they keep nothing for the sake of readers, as by default
        stack.options.pop(name)
        stack.kill(name)
        stack.start(name)
    wait_for(stack.is_sync, 60, "the quorum is there again")
    insert(primary, 1)
    lsn = idle_at_a_boundary(stack, primary)
    primary.kill()
    stack.kill("proposer")
    steps = stack.fail_over(standby)
    assert {FailoverStep.ELECT, FailoverStep.COMPARE, FailoverStep.DONE} <= set(steps)
    assert numbers(standby) == {1}
    assert current_lsn(standby) >= lsn


@pytest.mark.long
def test_16_a_safekeeper_without_the_segment_is_passed_over_for_one_that_has_it(stack, primary):
    (standby,) = stack.standbys
    stack.serve(1)
    insert(primary, 1)
    lsn = idle_at_a_boundary(stack, primary)
    primary.kill()
    stack.kill("proposer")
    stack.kill("safekeeper-0")
    begins_anew(stack, 0, lsn)
    stack.start("safekeeper-0")
    wait_for(lambda: len(stack.greetings(standby)) == 3, 30, "it is back")
    assert stack.fail_over(standby)[-1] == FailoverStep.DONE
    assert numbers(standby) == {1}


@pytest.mark.long
def test_16_a_failover_where_no_safekeeper_holds_wal_below_vcl_is_no_dead_end(stack, primary):
    (standby,) = stack.standbys
    insert(primary, 1)
    lsn = idle_at_a_boundary(stack, primary)
    primary.kill()
    for name in ("proposer", *stack.names):
        stack.kill(name)
    for number in range(3):
        begins_anew(stack, number, lsn)
    stack.start(*stack.names)
    wait_for(lambda: len(stack.greetings(standby)) == 3, 30, "they are back")
    assert stack.fail_over(standby)[-1] == FailoverStep.DONE
    assert numbers(standby) == {1}
    stack.switch_to(standby)
    insert(standby, 2)


def test_16_a_promoted_server_that_has_removed_the_segment_before_vcl_is_attached(stack, primary):
    """The safekeepers keep it, for `keep_bytes`; its own checkpoint after the promotion removes it."""
    (standby,) = stack.standbys
    insert(primary, 1)
    idle_at_a_boundary(stack, primary)
    primary.kill()
    stack.kill("proposer")
    run(
        standby,
        f"ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 ({NAME})'",
        "SELECT pg_reload_conf()",
        "SELECT pg_promote()",
    )
    wait_for(lambda: not run(standby, "SELECT pg_is_in_recovery()")[0][0], 30, "it is promoted")
    for _ in range(2):
        run(standby, "CHECKPOINT")
    stack.switch_to(standby)
    assert numbers(standby) == {1}
