"""An old primary comes back after a failover: as it is, or with pg_rewind when it has what the quorum never had."""

import pytest

from tests.support.quorum_stack import insert, load_server, numbers, waits
from tests.support.servers import DEFAULT, MakeServer, majors
from tests.support.waiting import wait_for
from tests.support.wal_server import follow, run
from walsender_bridge.demo.local_server import LocalServer, by_major
from walsender_bridge.demo.local_server.account import server_account
from walsender_bridge.quorum.failover.plan import FailoverStep


@pytest.fixture
def primary(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    major = getattr(request, "param", DEFAULT)
    settings = {"wal_level": "replica"}
    # pg_rewind needs one of checksums and this, from before the failover.
    settings["wal_log_hints"] = "on"
    settings |= {"wal_keep_size": "1GB"} if major >= 13 else {"wal_keep_segments": "64"}
    return load_server(make_server, major, small=False, client=False, **settings)


def rewind(old: LocalServer, source: LocalServer) -> None:
    """As docs/failover.md says."""
    tool = old.installation.tool("pg_rewind")
    if old.installation.major < 13:  # which recovers a server that was not shut down, by itself
        old.start()
        assert run(old, "SHOW synchronous_standby_names") != [("",)]
        old.stop()
    server_account().run([tool, "-D", old.data_dir, f"--source-server={source.dsn()}", "--no-sync"])


#: With a tail in `make test`, everything else in `make test-all`; with a tail where there is a pg_rewind.
RETURNS = [
    pytest.param(
        major,
        tail,
        id=f"pg{major}-{'with a tail' if tail else 'as it is'}",
        marks=[] if tail and major == DEFAULT else [pytest.mark.long],
    )
    for major in majors()
    for tail in (True, False)
    if not tail or (by_major()[major].bin_dir / "pg_rewind").exists()
]


@pytest.mark.parametrize(("primary", "tail"), RETURNS, indirect=["primary"])
def test_16_an_old_primary_comes_back_as_a_standby_of_the_quorum(stack, primary, tail) -> None:
    (standby,) = stack.standbys
    insert(primary, 1)
    stack.caught_up(standby)
    if tail:
        standby.stop()
        stack.kill("proposer")
        waits(primary, 2)
        primary.kill()
        standby.start()
    else:
        primary.stop()
        stack.kill("proposer")
    assert stack.fail_over(standby)[-1] == FailoverStep.DONE
    stack.switch_to(standby)
    insert(standby, 3)
    if tail:
        rewind(primary, standby)
    follow(primary, stack.upstream)
    # What it had set as a primary, or took over from the one that it was rewound to, comes before postgresql.conf.
    (primary.data_dir / "postgresql.auto.conf").write_text("")
    primary.start()
    insert(standby, 4)
    wait_for(lambda: numbers(primary) == {1, 3, 4}, 40, "it follows, and has no 2")
    assert run(primary, "SELECT pg_is_in_recovery()") == [(True,)]
    # It may be the next one: what a safekeeper has served it is the quorum's.
    standby.kill()
    stack.kill("proposer")
    stack.standbys.append(primary)
    assert stack.fail_over(primary)[-1] == FailoverStep.DONE
    stack.switch_to(primary)
    insert(primary, 5)
    assert numbers(primary) == {1, 3, 4, 5}
