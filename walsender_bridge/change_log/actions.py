"""Actions of the change log's services: requests and answers over Flight, and their errors.

Request and answer are frozen dataclasses (`repository_messages.py`, `log_server_messages.py`), sent as JSON
(`runtime/json_model.py`) with the protocol version `v`. The version is raised with every change of a message or of its
meaning, so both sides know the same fields: one that is missing, unknown or of another type is refused, as is an integer longer than 64 bits, and
a negative one in a request. In an answer it can be a commit time before 1970, which PostgreSQL sends as a client set it
(`pg_replication_origin_xact_setup`). What the values mean is checked by the handlers and the cores. Errors are sent with
their cause, and raised again at the other side as the same class (`fault`, `raised`).
"""

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Generic, TypeVar

import pyarrow as pa
from pyarrow import flight

from walsender_bridge.errors import (
    MalformedMessageError,
    NotSupportedError,
    SilentError,
    TusklineError,
    UnavailableError,
    UnreachableError,
    UntrustedServiceError,
)
from walsender_bridge.runtime import json_model
from walsender_bridge.runtime.certificate_holder import ALL_STREAMS
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.tls_files import TLS

#: 7: a read names relations by OID, too. A log server of version 6 would take an OID for a name, and leave out what only that matches.
VERSION: Final = 7
#: Bytes of a request, which contains names, numbers and hashes only.
MAX_REQUEST_BYTES: Final = 4 << 20
#: Characters of the longest integer in a message.
_MOST_DIGITS: Final = len(str(2**64 - 1))

#: gRPC's words for a certificate that lacks the service's name.
_OTHER_CERTIFICATE: Final = "is not in peer certificate"

_R = TypeVar("_R")
_A = TypeVar("_A")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Handler:
    """The function with which a service performs an action. Made by `Action.handled_by`, which checks its types."""

    action: "Action[Any, Any]"
    handle: Callable[[Any], Any]


def _stream_of(request: Any) -> Collection[str]:
    return (getattr(request, "stream", ALL_STREAMS),)


@dataclass(frozen=True, slots=True)
class Action(Generic[_R, _A]):
    """An action of a service, with the classes of its request and its answer.

    `streams`: those that a request concerns, for the check of its sender (`authorization.check`); by default the one in its
    field `stream`, or all streams if it has none.
    """

    name: str
    request: type[_R]
    answer: type[_A]
    streams: Callable[[_R], Collection[str]] = _stream_of

    def handled_by(self, handle: Callable[[_R], _A]) -> Handler:
        """The handler of this action."""
        return Handler(self, handle)


@dataclass(frozen=True, slots=True)
class Empty:
    """A request or an answer without fields."""


# -- messages ---------------------------------------------------------------------------------------


def encode(message: Any) -> bytes:
    """The JSON of a message, with the protocol version."""
    values = {each.name: getattr(message, each.name) for each in fields(message)}
    return json_model.encode({"v": VERSION, **values})


def decode(kind: type[_T], body: bytes | memoryview) -> _T:
    """The message of this kind in a body. Raises `MalformedMessageError` or `NotSupportedError`."""
    return _decode(kind, body, _integer)


def _decode(kind: type[_T], body: bytes | memoryview, integer: Callable[[str], int]) -> _T:
    try:
        record = json.loads(bytes(body), parse_int=integer)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise MalformedMessageError(f"{kind.__name__} is not a JSON object")
    version = record.pop("v", None)
    if version != VERSION:
        raise NotSupportedError(
            f"unsupported version {version!r:.20} of the change log's protocol (this is version {VERSION})",
            repair="run the same version of Tuskline on all machines",
        )
    try:
        return json_model.from_plain(kind, record, strict=True)
    except ValueError as error:
        raise MalformedMessageError(f"{kind.__name__}: {error}"[:200]) from None


def decode_request(kind: type[_T], body: bytes | memoryview) -> _T:
    """For servers: as `decode`, of limited size, and without negative integers."""
    if len(body) > MAX_REQUEST_BYTES:
        raise MalformedMessageError(f"request of {len(body)} bytes exceeds the limit")
    return _decode(kind, body, _natural)


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS or not -(2**63) <= (value := int(digits)) < 2**64:
        raise MalformedMessageError(
            f"{digits[:_MOST_DIGITS]} in a message is not between -2^63 and 2^64 - 1"
        )
    return value


def _natural(digits: str) -> int:
    value = _integer(digits)
    if value < 0:
        raise MalformedMessageError(f"{digits} in a request is negative")
    return value


def unhex(text: str) -> bytes:
    """The bytes that a message contains in hexadecimal. Raises `MalformedMessageError`."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise MalformedMessageError(f"{text[:40]!r} is not hexadecimal") from None


# -- calls ------------------------------------------------------------------------------------------


def call(
    client: flight.FlightClient, where: str, action: Action[_R, _A], request: _R, timeout: float
) -> _A:
    """Perform an action and return its answer. `timeout` in seconds. Raises the error that the service raised."""
    try:
        with at(where):
            options = flight.FlightCallOptions(timeout=timeout)
            results = list(client.do_action(flight.Action(action.name, encode(request)), options))
    except NotSupportedError as error:
        if error.what != _unknown(action.name):
            raise
        raise NotSupportedError(
            f"{error.what}: the service there is of another kind, or of another version",
            where=where,
            repair="correct the address: [log] listen and repositories name repositories, [[log_server]] listen a log server;"
            " run the same version of Tuskline on all machines",
        ) from None
    return decode(action.answer, results[0].body.to_pybytes() if results else b"")


def _unknown(name: str) -> str:
    return f"unknown action {name!r:.60}"


def by_name(*handlers: Handler) -> dict[str, Handler]:
    """The handlers of a service by the names of their actions."""
    return {each.action.name: each for each in handlers}


def answer(
    handlers: Mapping[str, Handler],
    action: flight.Action,
    allow: Callable[[str, Collection[str] | None], None],
) -> list[bytes]:
    """For servers: dispatch an action to its handler and return the answer.

    `allow` raises what refuses an action: before its request is parsed (None in place of its streams), and after.
    """
    with faults():
        allow(action.type, None)
        found = handlers.get(action.type)
        if found is None:
            raise NotSupportedError(_unknown(action.type))
        request = decode_request(found.action.request, memoryview(action.body))
        allow(action.type, found.action.streams(request))
        return [encode(found.handle(request))]


# -- errors -----------------------------------------------------------------------------------------


def fault(error: Exception) -> flight.FlightServerError:
    """Convert an error into the form that a Flight server raises."""
    if not isinstance(error, TusklineError):
        error = TusklineError(f"{type(error).__name__}: {error}")
    return flight.FlightServerError(error.what, json_model.encode(ErrorRecord.of(error)))


@contextlib.contextmanager
def faults() -> Iterator[None]:
    """For servers: send errors raised in the block over the wire with their cause."""
    try:
        yield
    except flight.FlightError:
        raise
    except Exception as error:
        raise fault(error) from error


def raised(error: Exception, where: str) -> TusklineError:
    """Convert a Flight error at the client; `where` is the service's address."""
    extra = getattr(error, "extra_info", b"")
    if extra:
        with contextlib.suppress(ValueError):
            return json_model.decode(ErrorRecord, extra).error()
    # A handshake that fails looks like a service that is not there, at both ends.
    both = ", and that both certificates are valid and of one authority" * where.startswith(TLS)
    if isinstance(error, flight.FlightTimedOutError):
        return SilentError(
            "service did not answer in time", where=where, repair=f"check whether it hangs{both}"
        )
    if isinstance(error, flight.FlightUnavailableError | flight.FlightCancelledError):
        if where.startswith(TLS) and _OTHER_CERTIFICATE in str(error):
            return UntrustedServiceError(
                "the certificate there is not the one that the service showed before",
                where=where,
                repair="if it was replaced by one of other roles, streams or another name, try again;"
                " otherwise find out which process answers there",
            )
        return UnreachableError(
            "service does not answer", where=where, repair=f"check that it runs there{both}"
        )
    return UnavailableError(f"the connection broke: {error}"[:500], where=where, repair="try again")


@contextlib.contextmanager
def at(where: str) -> Iterator[None]:
    """For clients: convert Flight's errors raised in the block."""
    try:
        yield
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        raise raised(error, where) from error
