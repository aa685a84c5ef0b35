"""An Iceberg REST catalog that loses answers, is slow, or has several writers: what a commit did is always known."""

import time
from dataclasses import replace
from urllib.parse import quote

import pytest

from spark_consumers.lake.catalog import read_back, rest_http
from spark_consumers.lake.catalog.rest_catalog import RestCatalog
from spark_consumers.lake.catalog.rest_http import RestOptions
from spark_consumers.lake.catalog.rest_names import own_name
from spark_consumers.lake.catalog.table_catalog import (
    Outcome,
    TableCommit,
    TableId,
    assert_ref,
    remove_ref,
    set_ref,
)
from spark_consumers.lake.store.create import Answer
from spark_consumers.lake.tables.fault import fault_of
from spark_consumers.spark.lake_catalog import CREDENTIAL, TOKEN
from tests.support.lake.table_commits import (
    LINES,
    ORDERS,
    SCHEMA,
    main_of,
    race_of_writers,
    raced,
    snapshots,
    write,
)
from tests.support.rest_catalog import CLIENT, SECRET, VENDED, RestServer
from tests.support.waiting import wait_for
from walsender_bridge.errors import (
    AuthenticationError,
    ConfigError,
    LakeError,
    NotSupportedError,
    UnavailableError,
    UnsupportedByCatalogError,
    UsageError,
)

AFTER = ["500 after", "503 after", "dropped after", "twice"]


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch):
    for name in (TOKEN, CREDENTIAL):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server():
    with RestServer().running() as server:
        yield server


def opened(server, *, outcome=30.0, **more):
    return RestCatalog.opened(server.options(**more), ("shop",), outcome=outcome)


@pytest.fixture
def catalog(server):
    catalog = opened(server)
    for table in (ORDERS, LINES):
        assert catalog.create(table, SCHEMA, {}) is Outcome.WON
    server.requests.clear()
    return catalog


def fenced(there, branch):
    """What a writer requires of a table besides what it changes."""
    ref = there.metadata["refs"].get(branch)
    return assert_ref(branch, ref and ref["snapshot-id"])


def take_over(catalog, table, term):
    """A table whose only branch of a writer is this term's."""
    there = catalog.load(table)
    refs = there.metadata["refs"]
    updates = [remove_ref(name) for name in refs if name.startswith("tuskline_t")]
    updates.append(set_ref(f"tuskline_t{term}", main_of(there), "branch"))
    assert catalog.commit(TableCommit(table, [], updates)) is Outcome.WON


# -- one commit -------------------------------------------------------------------------------------


def test_a_commit_is_made_once_and_seen(catalog, server):
    commit, snapshot = write(ORDERS, catalog.load(ORDERS))
    assert catalog.commit(commit) is Outcome.WON
    assert main_of(catalog.load(ORDERS)) == snapshot
    assert [each.partition(" ")[0] for each in server.requests] == ["GET", "POST", "GET"]


def test_new_tables_have_version_3_where_the_server_has_it(catalog):
    assert catalog.supports_v3
    assert catalog.load(ORDERS).metadata["format-version"] == 3


def test_new_tables_have_version_2_on_a_server_without_version_3():
    with RestServer(v3=False).running() as server:
        catalog = opened(server)
        assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
        assert not catalog.supports_v3
        assert catalog.load(ORDERS).metadata["format-version"] == 2
        with pytest.raises(NotSupportedError, match="does not support version 3"):
            catalog.create(LINES, SCHEMA, {"format-version": "3"})
        # The table that it was tried with is gone.
        assert set(server.tables) == {(*ORDERS.namespace, own_name(ORDERS))}


@pytest.mark.parametrize("ignored", ["assert-table-uuid", "assert-ref-snapshot-id"])
def test_a_server_that_ignores_requirements_is_refused(server, ignored):
    server.ignored = ignored
    with pytest.raises(NotSupportedError, match=rf"does not hold \({ignored}\)"):
        opened(server)
    assert server.tables == {}


@pytest.mark.parametrize("leaves_out", [False, True])
def test_a_server_that_leaves_changes_out_is_asked_for_one_table_at_a_time(server, leaves_out):
    server.leaves_out = leaves_out
    assert opened(server).supports_multi_table is not leaves_out


def test_a_server_that_creates_no_table_is_refused_with_its_reason(server):
    server.faults.extend(["500 before"] * 100)
    wanted = r"does not create tables: status 500 out of order[^$]*write to the location"
    with pytest.raises(UnavailableError, match=wanted):
        opened(server, outcome=0.1)


def test_a_stale_writer_gets_409_and_changes_nothing(catalog, server):
    first, _ = write(ORDERS, catalog.load(ORDERS))
    assert catalog.commit(first) is Outcome.WON
    take_over(catalog, ORDERS, 1)
    there = catalog.load(ORDERS)
    # Suspended with everything ready; its branch is another one's by the time that it goes on.
    stale, _ = write(ORDERS, there, "tuskline_t1")
    shown = TableCommit(
        ORDERS,
        [fenced(there, "main"), fenced(there, "tuskline_t1")],
        [set_ref("main", main_of(there), "branch")],
    )
    take_over(catalog, ORDERS, 2)
    before = catalog.load(ORDERS)
    assert catalog.commit(stale) is Outcome.LOST
    # Also one that would leave the table as it is.
    assert catalog.commit(shown) is Outcome.LOST
    assert catalog.load(ORDERS) == before


@pytest.mark.parametrize("fault", AFTER)
def test_a_commit_whose_answer_was_lost_is_not_lost(catalog, server, fault):
    commit, snapshot = write(ORDERS, catalog.load(ORDERS))
    server.faults.append(fault)
    assert catalog.commit(commit) is Outcome.WON
    assert snapshots(catalog.load(ORDERS)) == [snapshot]


@pytest.mark.parametrize("fault", AFTER)
def test_a_move_whose_answer_was_lost_is_not_lost(catalog, server, fault):
    commit, snapshot = write(ORDERS, catalog.load(ORDERS), "tuskline_t1")
    assert catalog.commit(commit) is Outcome.WON
    server.faults.append(fault)
    move = TableCommit(
        ORDERS,
        [assert_ref("main", None), assert_ref("tuskline_t1", snapshot)],
        [set_ref("main", snapshot, "branch")],
    )
    assert catalog.commit(move) is Outcome.WON
    assert main_of(catalog.load(ORDERS)) == snapshot


@pytest.mark.parametrize("fault", AFTER)
def test_a_creation_whose_answer_was_lost_is_not_lost(catalog, server, fault):
    table = TableId(("shop", "public"), "new")
    server.faults.append(fault)
    assert catalog.create(table, SCHEMA, {}) is Outcome.WON
    assert catalog.create(table, SCHEMA, {}) is Outcome.LOST


def test_a_commit_that_was_not_carried_out_is_sent_again(catalog, server):
    commit, snapshot = write(ORDERS, catalog.load(ORDERS))
    server.faults += ["500 before", "500 before"]
    assert catalog.commit(commit) is Outcome.WON
    assert snapshots(catalog.load(ORDERS)) == [snapshot]


def test_a_commit_that_arrives_late_changes_nothing_twice(catalog, server):
    commit, snapshot = write(ORDERS, catalog.load(ORDERS))
    server.faults.append("delayed")
    assert catalog.commit(commit) is Outcome.WON
    before = catalog.load(ORDERS)
    assert server.arrive() == [409]
    assert catalog.load(ORDERS) == before
    assert snapshots(before) == [snapshot]


def test_a_commit_whose_outcome_nobody_states_is_unknown(server):
    catalog = opened(server, outcome=0.5)
    catalog.create(ORDERS, SCHEMA, {})
    commit, snapshot = write(ORDERS, catalog.load(ORDERS))
    server.faults += ["delayed", *["500 before"] * 20]
    assert catalog.commit(commit) is Outcome.UNKNOWN
    assert server.arrive() == [200]
    assert snapshots(catalog.load(ORDERS)) == [snapshot]


def test_a_commit_to_a_table_that_was_dropped_is_lost(catalog):
    commit, _ = write(ORDERS, catalog.load(ORDERS))
    catalog.drop(ORDERS)
    catalog.drop(ORDERS)
    assert catalog.load(ORDERS) is None
    assert catalog.commit(commit) is Outcome.LOST


def test_a_commit_that_the_server_does_not_understand_is_an_error(catalog, server):
    unknown = {"type": "assert-the-weather"}
    commit, _ = write(ORDERS, catalog.load(ORDERS))
    answer = server.answer
    server.answer = lambda m, p, b, _: (
        (400, {"error": {"message": "?"}}) if m == "POST" else answer(m, p, b)
    )
    with pytest.raises(LakeError, match="400"):
        catalog.commit(replace(commit, requirements=[unknown]))


@pytest.mark.parametrize("status", [405, 406, 501])
def test_an_operation_that_the_server_lacks_is_the_catalogs_fault(catalog, server, status):
    commit, _ = write(ORDERS, catalog.load(ORDERS))
    assert catalog.trouble() is None
    server.faults.append(f"{status} before")
    with pytest.raises(UnsupportedByCatalogError, match=str(status)) as found:
        catalog.commit(commit)
    assert found.value.where == server.uri
    assert fault_of(str(ORDERS), found.value) is None
    assert catalog.trouble() is found.value
    # It may learn it.
    assert catalog.commit(commit) is Outcome.WON


def test_of_writers_that_meet_one_has_the_commit(catalog):
    """100 races of 8 writers that have loaded the same table."""
    for _ in range(100):
        race_of_writers(catalog)


# -- several tables ---------------------------------------------------------------------------------


def both(catalog, parent=None):
    """An epoch of two tables as they are now: the commits, and their snapshots."""
    made = [write(table, catalog.load(table)) for table in (ORDERS, LINES)]
    return [commit for commit, _ in made], [snapshot for _, snapshot in made]


def mains(catalog):
    return [main_of(catalog.load(table)) for table in (ORDERS, LINES)]


@pytest.mark.parametrize("fault", ["", *AFTER, "500 before", "delayed"])
def test_an_epoch_is_in_all_its_tables(catalog, server, fault):
    commits, made = both(catalog)
    server.faults += [fault] if fault else []
    assert catalog.commit_all(commits) is Outcome.WON
    assert mains(catalog) == made
    assert server.arrive() in ([], [409])
    assert [snapshots(catalog.load(table)) for table in (ORDERS, LINES)] == [[s] for s in made]


def test_an_epoch_is_in_no_table_if_one_has_changed(catalog):
    commits, _ = both(catalog)
    other, snapshot = write(LINES, catalog.load(LINES))
    assert catalog.commit(other) is Outcome.WON
    assert catalog.commit_all(commits) is Outcome.LOST
    assert mains(catalog) == [None, snapshot]


def test_of_epochs_that_meet_one_is_in_all_tables(catalog):
    for _ in range(10):
        epochs = [both(catalog) for _ in range(4)]
        named = [(commits, tuple(made)) for commits, made in epochs]
        outcomes = raced(named, catalog.commit_all)
        (won,) = (made for made, how in outcomes.items() if how is Outcome.WON)
        assert mains(catalog) == list(won)


def test_several_tables_need_a_server_with_such_a_commit():
    with RestServer(multi_table=False).running() as server:
        catalog = opened(server)
        for table in (ORDERS, LINES):
            catalog.create(table, SCHEMA, {})
        commits, _ = both(catalog)
        assert not catalog.supports_multi_table
        with pytest.raises(NotSupportedError, match="one table at a time"):
            catalog.commit_all(commits)
        assert mains(catalog) == [None, None]


def test_a_table_is_not_changed_twice_in_one_commit(catalog):
    commit, _ = write(ORDERS, catalog.load(ORDERS))
    with pytest.raises(ValueError, match="twice"):
        catalog.commit_all([commit, commit])


# -- what is read back ------------------------------------------------------------------------------


def test_a_commit_is_known_by_its_snapshot_whatever_came_after_it(catalog):
    first, _ = write(ORDERS, catalog.load(ORDERS))
    assert catalog.commit(first) is Outcome.WON
    assert catalog.commit(write(ORDERS, catalog.load(ORDERS))[0]) is Outcome.WON
    assert read_back.found(first, catalog.load(ORDERS).metadata) is Answer.OWN


def test_a_commit_of_several_tables_is_made_if_one_has_it():
    every = [Answer.NOTHING, Answer.ANOTHERS, Answer.OWN]
    assert read_back.found_of_all(every) is Answer.OWN
    assert read_back.found_of_all(every[:2]) is Answer.ANOTHERS
    assert read_back.found_of_all(every[:1]) is Answer.NOTHING


@pytest.mark.parametrize(
    ("update", "is_there"),
    [
        ({"action": "set-properties", "updates": {"a": "1"}}, True),
        ({"action": "set-properties", "updates": {"a": "2"}}, False),
        ({"action": "remove-properties", "removals": ["b"]}, True),
        ({"action": "remove-properties", "removals": ["a"]}, False),
        ({"action": "add-schema", "schema": SCHEMA}, True),
        ({"action": "add-schema", "schema": {"fields": [{"name": "other"}]}}, False),
        ({"action": "upgrade-format-version", "format-version": 3}, True),
        ({"action": "upgrade-format-version", "format-version": 4}, False),
        ({"action": "remove-snapshots", "snapshot-ids": [6]}, True),
        ({"action": "remove-snapshots", "snapshot-ids": [7]}, False),
        (remove_ref("other"), True),
        (remove_ref("main"), False),
        (set_ref("main", 7, "branch"), True),
        (set_ref("main", 6, "branch"), False),
    ],
)
def test_a_commit_without_snapshots_is_known_by_what_it_makes(update, is_there):
    metadata = {
        "format-version": 3,
        "schemas": [SCHEMA],
        "properties": {"a": "1"},
        "refs": {"main": {"snapshot-id": 7}},
        "snapshots": [{"snapshot-id": 7}],
    }
    found = read_back.found(TableCommit(ORDERS, [], [update]), metadata)
    assert found is (Answer.OWN if is_there else Answer.NOTHING)


# -- access -----------------------------------------------------------------------------------------


def test_a_client_gets_a_token_for_its_secret_and_another_when_it_ends(server, monkeypatch):
    server.guarded = True
    monkeypatch.setenv(CREDENTIAL, f"{CLIENT}:{SECRET}")
    catalog = opened(server)
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
    assert server.requests.count("POST /v1/oauth/tokens") == 1
    server.tokens.clear()
    commit, _ = write(ORDERS, catalog.load(ORDERS))
    assert catalog.commit(commit) is Outcome.WON
    assert server.requests.count("POST /v1/oauth/tokens") == 2


def test_a_token_is_replaced_before_it_ends(server, monkeypatch):
    server.guarded, server.life = True, 10
    monkeypatch.setenv(CREDENTIAL, f"{CLIENT}:{SECRET}")
    opened(server)
    asked = server.requests.count("POST /v1/oauth/tokens")
    assert asked == len(server.requests) - asked


def test_a_wrong_secret_is_an_error_that_does_not_show_it(server, monkeypatch):
    server.guarded = True
    monkeypatch.setenv(CREDENTIAL, f"{CLIENT}:wrong")
    with pytest.raises(AuthenticationError, match="invalid_client") as caught:
        opened(server)
    assert "wrong" not in str(caught.value)


def test_a_token_comes_from_a_file_that_others_cannot_read(server, tmp_path):
    server.guarded = True
    server.tokens.add("of-a-file")
    file = tmp_path / "token"
    file.write_text("of-a-file\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="accessible to other accounts"):
        opened(server, token_file=file)
    file.chmod(0o600)
    assert opened(server, token_file=file).supports_v3


def test_a_server_that_asks_for_a_token_says_so_by_name(server):
    server.guarded = True
    with pytest.raises(AuthenticationError, match=TOKEN):
        opened(server)


@pytest.mark.parametrize(
    "uri", ["http://catalog.example/", "https://me:secret@host/", "s3://bucket"]
)
def test_an_address_that_would_show_a_secret_is_refused(uri):
    with pytest.raises(UsageError) as caught:
        RestCatalog.opened(RestOptions(uri), ("shop",))
    assert "secret" not in str(caught.value)


def test_credentials_of_the_table_are_handed_on_and_not_shown(catalog):
    there = catalog.load(ORDERS)
    assert there.config == {"s3.region": "here", **VENDED}
    assert VENDED["s3.access-key-id"] not in repr(there)


def test_a_server_that_does_not_answer_is_unavailable(server):
    catalog = opened(server)
    catalog._client._options = replace(catalog._client._options, uri="http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match="does not answer"):
        catalog.load(ORDERS)


def test_an_answer_that_never_ends_is_given_up(server):
    options = server.options(answer=0.5)
    catalog = RestCatalog.opened(options, ("shop",))
    answer = server.answer

    def slow(*request):
        time.sleep(2)
        return answer(*request)

    server.answer = slow
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="does not answer"):
        catalog.load(ORDERS)
    assert time.monotonic() - began < 2


def test_a_slow_answer_is_told_for_a_minute_and_logged_once(server, monkeypatch):
    warnings = []
    monkeypatch.setattr(rest_http.log, "warning", lambda *what, **more: warnings.append(more))
    catalog = RestCatalog.opened(server.options(slow=0.2), ("shop",))
    assert catalog.trouble() is None
    server.delay = lambda _: 0.3
    catalog.create(ORDERS, SCHEMA, {})
    catalog.load(ORDERS)
    found = catalog.trouble()
    assert found is not None
    path = f"/namespaces/shop%1Fpublic/tables/{quote(own_name(ORDERS), safe='')}"
    assert found.what == f"the catalog answers slowly: GET /catalog/v1/lakes{path} took 0 s"
    assert found.where == server.uri
    (warned,) = warnings
    assert 0.3 <= warned["seconds"] < 5
    monkeypatch.setattr(rest_http, "_TOLD", 0.0)
    assert catalog.trouble() is None


def late_answers(monkeypatch, server, *kinds):
    """Each request is carried out, and then its answer waits; those of these methods are too late the first time."""
    late = [*kinds]

    def delay(method):
        if method in late:
            late.remove(method)
            return 0.9
        return 0.05

    monkeypatch.setattr(server, "delay", delay)


def test_what_is_answered_too_late_is_made_once(server, monkeypatch):
    catalog = opened(server, answer=0.6)
    late_answers(monkeypatch, server, "POST")
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.WON
    assert catalog.create(LINES, SCHEMA, {}) is Outcome.WON
    for kinds in (["POST"], ["POST", "GET"]):
        commit, snapshot = write(ORDERS, catalog.load(ORDERS))
        late_answers(monkeypatch, server, *kinds)
        assert catalog.commit(commit) is Outcome.WON
        assert snapshots(catalog.load(ORDERS)).count(snapshot) == 1
    commits, made = both(catalog)
    late_answers(monkeypatch, server, "POST", "GET")
    assert catalog.commit_all(commits) is Outcome.WON
    assert mains(catalog) == made
    assert [len(snapshots(catalog.load(table))) for table in (ORDERS, LINES)] == [3, 1]


def test_no_request_is_waited_for_without_a_limit(server):
    catalog = opened(server, answer=0.3, outcome=0.5)
    catalog.create(ORDERS, SCHEMA, {})
    commit, _ = write(ORDERS, catalog.load(ORDERS))
    server.delay = lambda _: 20.0
    began = time.monotonic()
    assert catalog.commit(commit) is Outcome.UNKNOWN
    with pytest.raises(UnavailableError, match="the catalog does not answer"):
        catalog.load(ORDERS)
    # The outcome is looked for, with pauses in between, and one more request is under way at its end.
    assert time.monotonic() - began < 0.5 + 4 * 0.3 + 2
    # The requests that were given up are carried out all the same.
    server.delay = lambda _: 0.0
    wait_for(lambda: len(snapshots(catalog.load(ORDERS))) == 1, 5, "the commit")
