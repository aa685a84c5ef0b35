"""Failover without loss, on real servers: what a quorum has acknowledged is on the server that is promoted."""

import contextlib
import threading
from dataclasses import replace

import psycopg
import pytest

from tests.support.failover_stack import FailoverStack
from tests.support.quorum_stack import Load, insert, load_server, numbers, waits
from tests.support.servers import DEFAULT, MAJORS_IN_TURN, MakeServer
from tests.support.waiting import wait_for
from tests.support.wal_server import current_lsn, run
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import DeadlineError, DivergedError, FencedError
from walsender_bridge.quorum.failover.plan import FailoverStep
from walsender_bridge.quorum.failover.run import FailoverRun
from walsender_bridge.runtime.sql import load

ALL = [step for step in FailoverStep if step not in {FailoverStep.RECEIVE, FailoverStep.REPLAY}]


@pytest.fixture
def primary(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    return load_server(make_server, getattr(request, "param", DEFAULT), wal_level="replica")


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_16_a_standby_promoted_at_vcl_has_every_acknowledged_commit(stack, primary):
    (standby,) = stack.standbys
    loads = [Load(primary, 1_000_000 * n) for n in range(4)]
    wait_for(lambda: min(len(load.acknowledged) for load in loads) > 20, 30, "commits return")
    primary.kill()
    acknowledged = set().union(*(load.stop() for load in loads))
    stack.kill("proposer")
    steps = stack.fail_over(standby)
    # Before 13 a standby that runs cannot be told to stream from somebody else.
    told = [step for step in ALL if step != FailoverStep.FOLLOW or primary.installation.major >= 13]
    assert set(told) <= set(steps), steps
    assert acknowledged <= numbers(standby)
    waiting = waits(
        standby, -1
    )  # nothing returns on it without the quorum, from its first moment on
    stack.switch_to(standby)
    waiting.join(20)
    insert(standby, -2)
    assert {-1, -2} <= numbers(standby)
    assert stack.fail_over(standby) == [FailoverStep.DONE]


def follows(stack: FailoverStack, number: int) -> bool:
    """Whether a safekeeper has what the proposer has."""
    told = stack.status()["safekeepers"]
    return any(
        each["address"] == stack.address(number) and each["state"] == "streaming" for each in told
    )


def test_15_29_a_fenced_primary_gets_no_acknowledgement_until_the_failover_is_taken_back(
    stack, primary
):
    (standby,) = stack.standbys
    insert(primary, 1)
    old = stack.processes.pop("proposer")
    assert stack.fail_over_and_die(standby, "failover-after-ELECT") == -9
    assert old.wait(timeout=30) == FencedError.cause  # it was displaced
    waiting = waits(primary, 2)
    stack.start("proposer")
    fenced = stack.processes.pop("proposer")
    assert fenced.wait(timeout=30) == FencedError.cause, stack.logs()
    assert "a failover fenced timeline 1" in stack.log("proposer").read_text()
    assert waiting.is_alive()
    # One that is away now will have its fence when nobody else has.
    stack.kill("safekeeper-2")
    assert stack.abort()
    stack.start("proposer")
    waiting.join(20)
    assert not waiting.is_alive(), stack.logs()
    wait_for(stack.is_sync, 30, "the old primary's proposer leads")
    stack.start("safekeeper-2")
    wait_for(lambda: follows(stack, 2), 30, "who commits without its fence takes that back")
    stack.kill("safekeeper-0")
    insert(primary, 3)
    assert {1, 2, 3} <= numbers(primary)
    assert not stack.abort()


def test_29_after_the_successor_attached_the_old_primary_is_refused_for_good(stack, primary):
    (standby,) = stack.standbys
    insert(primary, 1)
    assert ALL[-1] in stack.fail_over(standby)
    waiting = waits(primary, 2)
    with pytest.raises(DivergedError, match="already follow timeline 2"):
        stack.abort()
    wait_for(lambda: stack.processes["proposer"].poll() is not None, 30, "the old one has ended")
    stack.start("proposer")
    assert stack.processes.pop("proposer").wait(timeout=30) == DivergedError.cause, stack.logs()
    assert waiting.is_alive()
    stack.switch_to(standby)
    insert(standby, 3)
    assert {1, 3} <= numbers(standby)


def test_16_what_a_standby_has_beyond_the_quorum_is_committed_before_it_is_promoted(stack, primary):
    (standby,) = stack.standbys
    insert(primary, 1)
    stack.pause("proposer")
    waits(primary, 2)
    beyond = current_lsn(primary)  # before: the server may write by itself at any time
    stack.caught_up(standby)
    primary.kill()
    stack.kill("proposer")
    assert stack.fail_over_and_die(standby, "failover-after-COMMIT") == -9
    ends = [safekeeper.flush_lsn for safekeeper in stack.greetings(standby)]
    assert sorted(ends)[1] >= beyond
    stack.fail_over(standby)
    assert {1, 2} <= numbers(standby)


def test_16_a_standby_that_is_behind_gets_the_rest_from_a_safekeeper(stack, primary):
    (standby,) = stack.standbys
    insert(primary, 1)
    standby.stop()
    for number in range(2, 30):
        insert(primary, number)
    primary.kill()
    stack.kill("proposer")
    standby.start()
    steps = FailoverRun(stack.settings(standby)).plan()
    assert FailoverStep.RECEIVE in steps
    assert standby_is_untouched(standby)
    assert stack.fail_over(standby)[-1] == FailoverStep.DONE
    assert set(range(1, 30)) <= numbers(standby)


def test_a_standby_that_holds_the_dead_primarys_lock_on_the_record_takes_over(stack, primary):
    """A standby keeps the ACCESS EXCLUSIVE locks of a transaction until its primary ends it, or it is promoted."""
    (standby,) = stack.standbys
    stack.ask("CREATE SCHEMA tuskline")
    stack.ask("CREATE TABLE tuskline.provisioned (kind text, name text)")
    with contextlib.closing(psycopg.connect(primary.dsn())) as locker:
        locker.execute("LOCK TABLE tuskline.provisioned IN ACCESS EXCLUSIVE MODE")
        locker.execute("CREATE TABLE unfinished ()")
        insert(primary, 1)
        stack.caught_up(standby)
        primary.kill()
    stack.kill("proposer")
    assert stack.fail_over(standby)[-1] == FailoverStep.DONE
    assert 1 in numbers(standby)


def test_16_a_safekeeper_that_lags_is_fed_by_another_though_there_is_no_primary(stack, primary):
    (standby,) = stack.standbys
    insert(primary, 1)
    stack.kill("safekeeper-0")  # whose WAL server is the only one
    for number in range(2, 30):
        insert(primary, number)
    stack.caught_up(standby)
    primary.kill()
    stack.kill("proposer")
    stack.start("safekeeper-0")
    wait_for(lambda: stack.listens(0), 20, "it is back")
    assert stack.fail_over(standby)[-1] == FailoverStep.DONE
    assert set(range(1, 30)) <= numbers(standby)


def test_16_a_commit_gate_knows_who_was_promoted_by_the_slot_that_it_had(stack, primary):
    run(primary, "SELECT pg_create_physical_replication_slot('standby_a', true)")
    standby = stack.standby(primary_slot_name="standby_a")
    insert(primary, 1)
    stack.caught_up(standby)
    primary.kill()
    stack.kill("proposer")
    settings = replace(stack.settings(standby), slot="standby_a")
    assert FailoverStep.FOLLOW in FailoverRun(settings).plan()
    quoted = stack.upstream.replace("'", "''")
    # As a run leaves it that dies just before the promotion; no safekeeper has such a slot.
    run(
        standby,
        f"ALTER SYSTEM SET primary_conninfo = '{quoted}'",
        "ALTER SYSTEM SET primary_slot_name = 'standby_a'",
        "SELECT pg_reload_conf()",
    )
    steps = FailoverRun(settings).run()
    assert {FailoverStep.FOLLOW, FailoverStep.DONE} <= set(steps)
    with psycopg.connect(standby.dsn()) as connection:
        names = {"slots": ["standby_a"]}
        row = connection.execute(load("gate/slots").encode(), names).fetchone()
    assert row is not None
    assert (row[0]["was"], row[0]["slots"]) == ("standby_a", {})


class CutError(Exception):
    """What ends a run in the middle of a step."""


@pytest.mark.long
def test_16_a_standby_whose_promotion_was_cut_streams_from_a_safekeeper_after_the_abort(
    stack, primary
):
    run(primary, "SELECT pg_create_physical_replication_slot('standby_a', true)")
    standby = stack.standby(primary_slot_name="standby_a")
    insert(primary, 1)
    stack.caught_up(standby)
    stack.kill("proposer")

    def before() -> None:
        raise CutError

    def after() -> None:
        run(standby, "SELECT pg_promote()")
        raise CutError

    settings = replace(stack.settings(standby), slot="standby_a")
    with pytest.raises(CutError):
        FailoverRun(replace(settings, promote=before)).run()
    assert stack.abort()
    stack.start("proposer")
    wait_for(stack.is_sync, 60, "the old primary's proposer is in office")
    insert(primary, 2)
    wait_for(lambda: 2 in numbers(standby), 30, "the standby still streams")
    primary.kill()
    stack.kill("proposer")
    with pytest.raises(CutError):
        FailoverRun(replace(settings, promote=after)).run()
    # A commit gate is told who was promoted by the run that finds the promoted server.
    assert FailoverRun(settings).run()[-1] == FailoverStep.DONE
    wait_for(
        lambda: run(standby, "SHOW primary_slot_name") == [("standby_a",)], 20, "it names its slot"
    )


def standby_is_untouched(standby: LocalServer) -> bool:
    with psycopg.connect(standby.dsn(), autocommit=True) as connection:
        row = connection.execute(
            "SELECT pg_is_in_recovery(), current_setting('synchronous_standby_names')"
        ).fetchone()
    return row == (True, "")


def test_16_a_standby_promoted_below_vcl_is_refused(stack, primary):
    (standby,) = stack.standbys
    insert(primary, 1)
    stack.caught_up(standby)
    run(standby, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
    wait_for(lambda: not run(standby, "SELECT 1 FROM pg_stat_wal_receiver"), 30, "cut off")
    insert(primary, 2)
    primary.kill()
    stack.kill("proposer")
    run(standby, "SELECT pg_promote()")
    with pytest.raises(DivergedError, match="this server left timeline 1 at"):
        stack.fail_over(standby)
    stack.server = standby
    stack.start("proposer")
    assert stack.processes.pop("proposer").wait(timeout=30) == DivergedError.cause, stack.logs()


def test_16_a_failover_that_is_killed_anywhere_goes_on(stack, primary):
    (standby,) = stack.standbys
    load = Load(primary)
    wait_for(lambda: len(load.acknowledged) > 50, 30, "commits return")
    primary.kill()
    acknowledged = set(load.stop())
    stack.kill("proposer")
    for step in ALL[:-1]:
        assert stack.fail_over_and_die(standby, f"failover-after-{step.name}") == -9, step
    assert stack.fail_over(standby) == [FailoverStep.DONE]
    assert acknowledged <= numbers(standby)


def test_16_a_wal_server_that_is_starting_is_waited_for_and_named_when_it_does_not_come(
    stack, primary
):
    (standby,) = stack.standbys
    insert(primary, 1)
    stack.caught_up(standby)
    primary.kill()
    stack.kill("proposer")
    (server,) = stack.wal_servers
    server.kill()
    with pytest.raises(DeadlineError, match=f"compare .*refused .*{server.port}"):
        FailoverRun(replace(stack.settings(standby), seconds=2)).run()
    starting = threading.Timer(1.0, server.start)
    starting.start()
    assert stack.fail_over(standby)[-1] == FailoverStep.DONE
    starting.join(30)
    assert numbers(standby) == {1}
