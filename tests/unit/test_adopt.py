"""A lake goes on with another log: when somebody asks for exactly that one, and with every table copied again."""

import itertools
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from spark_consumers.lake.manifest import sealed_json
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion, open_chain
from spark_consumers.lake.manifest.table_version import (
    ANOTHER_LOG,
    COPIED,
    HELD,
    LEFT,
    LIVE,
    PAUSED,
    RESUMING,
    STALE,
)
from spark_consumers.lake.tables import states
from spark_consumers.lake.writer import adopt, requests
from spark_consumers.lake.writer.log_access import LogAccess
from spark_consumers.lake.writer.requests import Request
from walsender_bridge.change_log.client import LogStatus, StreamCut
from walsender_bridge.errors import LakeError, UnavailableError

STATES = (LIVE, PAUSED, RESUMING, HELD, STALE, LEFT)
ASKED = Request("7", requests.ADOPT, (), log_id="new")


@pytest.fixture
def chain(tmp_path):
    chain = open_chain(tmp_path / "lake")
    chain.initialise("old", "iceberg")
    return chain


def table(state: str = LIVE, **values: Any) -> TableVersion:
    place = ("path", "iceberg", 7, "", ("id",), (), 100, 50, 9, 1)
    return TableVersion(*place, state=state, timeline=1, **values)


def head(**values: Any) -> Manifest:
    tables = {f"a.public.{state}": table(state) for state in STATES}
    streams = {"a": StreamPosition(1, 1000, 5, 60)}
    return Manifest("lake", 9, 40, 39, 2, 0.0, 100.0, streams=streams, tables=tables, **values)


def log(log_id: str = "new", version: int = 40, streams: str = "a") -> LogStatus:
    cuts = {s: StreamCut(s, ("",), 3, 3, 20, 8, 2, 1, 90) for s in streams}
    return LogStatus(log_id, version, 0, cuts)


def adopted(before: Manifest, status: LogStatus, *asked: Request, holds: bool = True) -> Manifest:
    return adopt.adopted(before, status, ("a",), asked or (ASKED,), holds=holds)


# -- whether it goes on -----------------------------------------------------------------------------


def test_a_lake_of_another_log_waits_for_a_request_that_names_that_log(chain):
    newest = head()
    assert adopt.wanted(chain, newest, "old") == []
    with pytest.raises(LakeError, match=r"the log is new, but this lake belongs to old\n") as found:
        adopt.wanted(chain, newest, "new")
    assert found.value.repair.startswith("tuskline reattach")
    assert found.value.where == str(chain.root)
    adopt.request(chain, "a third one")
    with pytest.raises(LakeError, match="a request to continue with a third one is pending"):
        adopt.wanted(chain, newest, "new")
    made = adopt.request(chain, "new")
    assert made in adopt.wanted(chain, newest, "new")
    # The log that the lake is of still is its log.
    assert adopt.wanted(chain, newest, "old") == []


def test_a_request_of_another_kind_names_no_log(chain):
    requests.ask(chain, requests.RESYNC, ["a.public.live"])
    with pytest.raises(LakeError, match=r"this lake belongs to old\n"):
        adopt.wanted(chain, head(), "new")


def test_a_request_that_has_its_answer_is_not_carried_out_again(chain):
    made = requests.ask(chain, requests.ADOPT, (), log_id="new")
    # The driver died before it removed the file; then the old log was put back, and asked for.
    newest = head(log_id="old", answered={made.id: {"at": 0.0, "kind": "adopt", "tables": {}}})
    with pytest.raises(LakeError, match=r"this lake belongs to old\n"):
        adopt.wanted(chain, newest, "new")


def test_the_newest_link_says_of_which_log_the_lake_is(chain):
    old = head()
    assert adopt.log_of(chain, None) == adopt.log_of(chain, old) == "old"
    chain.publish(replace(old, link=1), None)
    chain.publish(replace(old, link=2, log_id="new"), replace(old, link=1))
    newest = chain.head()
    assert adopt.log_of(chain, newest) == "new"
    assert adopt.log_of(chain, newest.next(101.0, term=3)) == "new"
    with pytest.raises(LakeError, match="the log is old, but this lake belongs to new"):
        adopt.wanted(chain, newest, "old")
    assert adopt.request(chain, "new") is None
    assert adopt.request(chain, "old") is not None
    assert adopt.wanted(chain, newest, "old")


def test_what_doctor_says(chain, tmp_path):
    assert adopt.trouble(open_chain(tmp_path / "nowhere"), "new") is None
    # Also of a lake that nothing was published in.
    for links in (0, 1):
        if links:
            chain.publish(replace(head(), link=1), None)
        found = adopt.trouble(chain, "new")
        assert found is not None
        assert found.what == "the log is new, but this lake belongs to old"
    assert adopt.trouble(chain, "old") is None
    adopt.request(chain, "new")
    assert adopt.trouble(chain, "new") is None


def test_a_request_needs_a_lake(tmp_path):
    with pytest.raises(LakeError, match="no lake"):
        adopt.request(open_chain(tmp_path), "new")


def test_links_of_format_4_name_no_log(chain):
    chain.publish(replace(head(), link=1), None)
    (path,) = (chain.root / "_tuskline" / "epochs").glob("0*.json")
    record = sealed_json.parse(path.read_bytes(), str(path))
    del record["log_id"]
    path.write_bytes(sealed_json.dump({**record, "format_version": 4}))
    assert adopt.log_of(chain, chain.head()) == "old"


# -- what becomes of the tables ---------------------------------------------------------------------


@pytest.mark.parametrize("holds", [True, False])
def test_every_table_that_is_to_follow_is_copied_anew(holds):
    copies = {f"a.public.{name}": table(COPIED) for name in (LIVE, LEFT, "new")}
    before = head(copies=copies, not_copied={"a.public.stale": "permission denied"})
    made = adopted(before, log(), holds=holds)
    found = {name.rpartition(".")[2]: table for name, table in made.tables.items()}
    assert {name: table.state for name, table in found.items()} == {
        LIVE: HELD if holds else STALE,
        PAUSED: PAUSED,
        RESUMING: STALE,
        HELD: HELD if holds else STALE,
        STALE: STALE,
        LEFT: LEFT,
    }
    assert {name for name, table in found.items() if table.resync != ANOTHER_LOG} == {LEFT}
    assert not made.copies
    assert not made.not_copied
    # All of them have the rows that they had, of the epoch that there is.
    assert (made.epoch, found[LIVE].as_of) == (40, 40)
    assert made.streams == {"a": StreamPosition(2, 20, 8, 3)}
    assert made.log_id == "new"
    wanted = {name.rpartition(".")[2] for name in states.wanted_copies(made, made.tables)}
    assert wanted == {LIVE, RESUMING, HELD, STALE, LEFT}
    # A paused one is when it is resumed, wherever the new log begins.
    resumed = states.resume(made, "a.public.paused", 0)
    assert resumed.tables["a.public.paused"].state == STALE
    assert "a.public.paused" in states.wanted_copies(resumed, resumed.tables)


def test_whatever_is_asked_for_no_table_follows_before_it_was_copied():
    kinds = (requests.ADD, requests.PAUSE, requests.RESUME, requests.RESYNC, requests.RETRY)
    after = adopted(head(), log())
    names = tuple(after.tables)
    for asked in itertools.product(kinds, repeat=3):
        made = after
        for number, kind in enumerate(asked):
            one = Request(str(number), kind, names)
            made = requests.carry_out(made, one, names, {"a": 1}, 0.0, {})
        assert not {table.state for table in made.tables.values()} & {LIVE, RESUMING}, asked


def test_the_answer_says_what_is_copied_and_is_done_when_that_follows():
    made = adopted(head(), log())
    told = made.answered["7"]["tables"]
    assert {name.rpartition(".")[2] for name in told} == {LIVE, RESUMING, HELD, STALE}
    assert requests.finished(made, ASKED) is None
    shown = {name: table() for name in told}
    assert requests.finished(replace(made, tables={**made.tables, **shown}), ASKED) == told


def test_a_request_made_twice_is_answered_once_for_both_and_one_for_another_log_refused():
    other = Request("9", requests.ADOPT, (), log_id="a third one")
    made = adopted(head(), log(), ASKED, replace(ASKED, id="8"), other)
    assert set(made.answered) == {"7", "8", "9"}
    assert made.answered["7"]["tables"] == made.answered["8"]["tables"]
    with pytest.raises(LakeError, match="log new answers"):
        requests.finished(made, other)


def test_what_is_asked_for_while_the_lakes_own_log_answers():
    again = adopt.answered(head(), ASKED, "new", 5.0, {})
    assert again.tables == head().tables
    assert requests.finished(again, ASKED) == {}
    refused = adopt.answered(head(), ASKED, "old", 5.0, {})
    assert refused.tables == head().tables
    with pytest.raises(LakeError, match="log old answers, and the lake belongs to it"):
        requests.finished(refused, ASKED)


def test_a_stream_that_the_log_does_not_have_yet_is_waited_for():
    with pytest.raises(UnavailableError, match=r"log new.*has no stream a yet") as found:
        adopted(head(), log(streams="b"))
    assert found.value.where == "a"


def test_tables_whose_source_is_gone_leave_and_hold_nothing_back():
    before = head()
    tables = {**before.tables, "gone.public.t": table()}
    streams = {**before.streams, "gone": StreamPosition(1, 10, 10, 5)}
    made = adopted(replace(before, tables=tables, streams=streams), log())
    assert made.tables["gone.public.t"].state == LEFT
    assert set(made.streams) == {"a"}


def test_a_log_that_no_request_names_is_not_taken_on():
    with pytest.raises(UnavailableError, match="log a third one answers now"):
        adopted(head(), log("a third one"))


# -- the log ----------------------------------------------------------------------------------------


def access(*statuses: LogStatus) -> tuple[LogAccess, Mock]:
    found, client = LogAccess("grpc://127.0.0.1:1", ("a",)), Mock()
    client.status.side_effect = statuses
    found._client = client
    return found, client


def test_the_log_skips_the_versions_that_the_lake_has_used():
    found, client = access(log(version=3), log(version=40, streams="ab"))
    assert found.raised(40) == log(version=40)
    client.raise_version.assert_called_once_with(40)
    found, client = access(log(version=41))
    assert found.raised(40).version == 41
    client.raise_version.assert_not_called()
    found, client = access(log(version=3), log(version=39))
    with pytest.raises(UnavailableError, match="up to 39"):
        found.raised(40)


def test_an_epoch_that_was_read_while_the_log_was_replaced_is_not_published():
    found, _ = access(log("old"), log("new"))
    found.unchanged(log("old", version=9))
    with pytest.raises(UnavailableError, match=r"the log is new, but .* from old"):
        found.unchanged(log("old", version=9))
