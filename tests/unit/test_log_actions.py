"""Requests and answers of the change log's services: what is sent arrives, and anything else is refused."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import flight

from walsender_bridge.change_log import actions, log_server_messages, repository_messages
from walsender_bridge.change_log.actions import Action, Empty
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.protocol import (
    START,
    Ack,
    CommitContext,
    CutPoint,
    IssuedCommit,
    ReplicaReport,
    ReplicaStatus,
    StreamCut,
)
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.errors import (
    DivergedError,
    MalformedMessageError,
    NotSupportedError,
    TusklineError,
)
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition
from walsender_bridge.runtime.error_record import ErrorRecord

m, r = log_server_messages, repository_messages
ALL = [each for module in (m, r) for each in vars(module).values() if isinstance(each, Action)]
FAULT = ErrorRecord.of(DivergedError("it does not fit", where="stream a", repair="mend it"))
REPORT = ReplicaReport("k", "shop", "log", 1, 2, 3, 4, START, 1)
STATUS = ReplicaStatus(
    "shop", "log", "APPENDABLE", 1, 2, 3, 4, 5, 6, 7, 8, 9, MAX_LSN, WalPosition(1, 5), 6, None
)
MESSAGES = (
    Empty(),
    Ack(3, 4, 5, 6, WalPosition(1, 2)),
    STATUS,
    m.AppendRequest(None, MAX_LSN, None),
    m.AppendRequest(WalPosition(1, 2), MAX_LSN, MAX_LSN),
    m.CommitAnswer((REPORT,), {"b": FAULT}),
    m.CommitRequest({"shop": (IssuedCommit(CommitContext(1, 2, 3, 4)),), "b": ()}, 5),
    m.CutAnswer(None),
    m.CutAnswer(CutPoint(1, 2, 3, 4, 5)),
    m.ReadRequest("shop", 1, 2, ("public.a",)),
    m.TransactionsAnswer(((1, 2, 3), (4, 5, 6))),
    r.BarrierRequest({"shop": 7}, 0.5),
    r.RegisterConsumerRequest("lake", None, 60.0),
    r.StatusAnswer("log", 1, 0, {"s": StreamCut("s", ("a",), 4, 4, 1, 1, 1, 1, 9)}, {"s": FAULT}),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert actions.decode(type(message), actions.encode(message)) == message


def performed(action: Action[Any, Any], body: bytes) -> TusklineError | None:
    """The error that a client gets from a service with this one action; None: the request reached its handler."""

    def handle(request: object) -> Empty:
        assert isinstance(request, action.request)
        return Empty()

    try:
        asked = flight.Action(action.name, body)
        actions.answer(actions.by_name(action.handled_by(handle)), asked, lambda *_: None)
    except flight.FlightError as error:
        return actions.raised(error, "here")
    return None


def of(values: dict[str, Any]) -> bytes:
    return json.dumps({"v": actions.VERSION, **values}).encode()


BARRIER = {"positions": {"shop": 1}, "timeout": 5}
CONTEXT = {"version": 1, "local_offset": 1, "global_offset": 1, "length": 1}
COMMIT = {"context": CONTEXT, "crc": 7}


def test_a_request_of_any_client_reaches_its_handler() -> None:
    assert performed(r.BARRIER, of(BARRIER)) is None
    assert performed(m.COMMIT, of({"commits": {"shop": [COMMIT]}, "now": 1})) is None


@pytest.mark.parametrize("action", ALL, ids=lambda each: each.name)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b"[]", b"null", b"7", b"[" * 1_000_000, b'{"v":' * 100_000],
    ids=lambda body: repr(body[:5]),
)
def test_what_is_no_object_is_malformed(action: Action[Any, Any], body: bytes) -> None:
    error = performed(action, body)
    assert isinstance(error, MalformedMessageError)
    assert error.what == f"{action.request.__name__} is not a JSON object"


@pytest.mark.parametrize("action", ALL, ids=lambda each: each.name)
def test_the_version_is_checked_before_all_else(action: Action[Any, Any]) -> None:
    for version in (1, actions.VERSION + 1, None, "x" * 1000, [2]):
        error = performed(action, of({"v": version, "unknown": 1}))
        assert isinstance(error, NotSupportedError)
        assert f"(this is version {actions.VERSION})" in error.what
        assert len(error.what) < 150
    error = performed(action, of({"unknown": 1}))
    assert isinstance(error, MalformedMessageError)
    assert error.what == f"{action.request.__name__}: unknown is unknown"


@pytest.mark.parametrize(
    ("action", "values", "said"),
    [
        (r.BARRIER, {"positions": {}}, "timeout is missing"),
        (r.BARRIER, BARRIER | {"timeout": True}, "timeout is not of type float"),
        (r.BARRIER, BARRIER | {"positions": [1]}, "positions is not of type object"),
        (r.BARRIER, BARRIER | {"positions": {"a": "1"}}, "positions.a is not of type int"),
        (r.BARRIER, BARRIER | {"positions": {"a": -1}}, "-1 in a request is negative"),
        (r.BARRIER, BARRIER | {"positions": {"a": 2**64}}, "18446744073709551616 in a message"),
        (r.BARRIER, BARRIER | {"positions": {"a": 10**4000}}, "10000000000000000000 in a message"),
        (r.WRITER_TERM, {"stream": None}, "stream is not of type str"),
        (r.RAISE_VERSION, {"version": 1.0}, "version is not of type int"),
        (m.COMMIT, {"commits": {"a": COMMIT}, "now": 1}, "commits.a is not of type array"),
        (
            m.COMMIT,
            {"commits": {"a": [{"context": {}}]}, "now": 1},
            "commits.a[0].context.version is missing",
        ),
        (
            m.COMMIT,
            {"commits": {"a": [{"context": CONTEXT | {"length": -1}}]}, "now": 1},
            "-1 in a request is negative",
        ),
        (m.SCHEMA, {"stream": "shop", "hashes": [7]}, "hashes[0] is not of type str"),
        (m.PLAN, {"stream": "shop", "after_offset": "1"}, "is missing"),
    ],
)
def test_a_wrong_field_is_named(
    action: Action[Any, Any], values: dict[str, Any], said: str
) -> None:
    error = performed(action, of(values))
    assert isinstance(error, MalformedMessageError)
    assert said in error.what


@pytest.mark.parametrize("commit_time", [-1, -(2**63)])
def test_a_commit_time_before_1970_arrives(commit_time: int) -> None:
    """A client sets that of a transaction with an origin, and a report that is refused would stop the whole log."""
    position = replace(START, commit_time=commit_time)
    cut = StreamCut("s", ("a",), 4, 4, 1, commit_time, 1, 1, 9)
    for answer in (
        m.CommitAnswer((replace(REPORT, position=position),), {}),
        replace(STATUS, last_commit_time=commit_time),
        r.StatusAnswer("log", 1, 0, {"s": cut}, {}),
        m.CutAnswer(CutPoint(1, 2, 3, 4, commit_time)),
    ):
        assert actions.decode(type(answer), actions.encode(answer)) == answer


def test_what_accompanies_an_append_is_checked_likewise() -> None:
    for confirm_to in ([1], [1, 2, 3], ["1", 2], {"0": 1}, 5):
        with pytest.raises(MalformedMessageError, match="AppendRequest: confirm_to"):
            actions.decode(
                m.AppendRequest, of({"confirm_to": confirm_to, "gate_lsn": 1, "system_id": 1})
            )


def test_a_request_of_any_length_is_refused_within_seconds_and_in_few_words() -> None:
    most = actions.MAX_REQUEST_BYTES
    bodies = [
        of({"stream": "shop", "hashes": []})[:-1] + b', "n": 1' + b"0" * (most - 100) + b"}",
        of({"stream": "shop", "hashes": [""] * (most // 4 - 100) + [1]}),
        of({"stream": "shop", "hashes": [[]] * (most // 4 - 100)}),
        of({"stream": "shop", "hashes": {"h" * (most - 100): 1}}),
        of({"h" * (most - 100): 1}),
        of({"stream": "shop", "hashes": ["x" * most]}),
    ]
    long_name = of(BARRIER | {"positions": {"s" * (most - 100): "1"}})
    start = time.thread_time()
    named = performed(r.BARRIER, long_name)
    assert isinstance(named, MalformedMessageError)
    assert len(named.what) < 300
    said = []
    for body in bodies:
        error = performed(m.SCHEMA, body)
        assert isinstance(error, MalformedMessageError)
        assert len(error.what) < 300
        said.append(error.what)
    assert time.thread_time() - start < 20
    assert "10000000000000000000 in a message is not between" in said[0]
    assert said[-1] == f"request of {len(bodies[-1])} bytes exceeds the limit"


def test_an_action_that_the_service_lacks_is_refused() -> None:
    with pytest.raises(flight.FlightServerError, match="unknown action 'drop_everything'"):
        actions.answer(
            actions.by_name(r.DROP_CONSUMER.handled_by(lambda _: Empty())),
            flight.Action("drop_everything", b""),
            lambda *_: None,
        )


def test_no_two_actions_of_a_service_have_the_same_name() -> None:
    for module in (m, r):
        names = [each.name for each in vars(module).values() if isinstance(each, Action)]
        assert len(names) == len(set(names)) > 5


def test_hexadecimal_that_is_none_is_malformed() -> None:
    assert actions.unhex("00ff") == b"\0\xff"
    with pytest.raises(MalformedMessageError, match="'0x' is not hexadecimal"):
        actions.unhex("0x")


@pytest.mark.parametrize("extra", [b"[" * 100_000, b"{}", b"[]", b'{"code": 1}'])
def test_an_error_that_cannot_be_read_is_still_an_error(extra: bytes) -> None:
    error = actions.raised(flight.FlightServerError("broken", extra), "here")
    assert "the connection broke: broken" in error.what


def test_a_service_of_another_kind_is_named_with_its_address(tmp_path: Path) -> None:
    """`[log] listen` names a log server's port: the error had neither place nor hint."""
    server = ReplicaServer(tmp_path, "127.0.0.1:0")
    try:
        with LogClient(server.address) as log, pytest.raises(NotSupportedError) as caught:
            log.status()
        assert caught.value.where == server.address
        assert "of another kind" in caught.value.what
        assert "[log] listen" in caught.value.repair
    finally:
        server.stop()
