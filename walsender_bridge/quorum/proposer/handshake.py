"""Queries safekeepers for their identity and state by a proposer's greeting, which changes no term."""

import queue
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence

from walsender_bridge.errors import (
    AuthenticationError,
    ConnectionFailedError,
    MalformedMessageError,
    PrivilegeError,
    TusklineError,
)
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.frames import decode
from walsender_bridge.quorum.protocol.tls_wire import wire
from walsender_bridge.runtime import peer_account
from walsender_bridge.runtime.tls_context import client_context
from walsender_bridge.runtime.tls_files import TlsFiles

#: Seconds for one answer.
ANSWER_SECONDS = 5.0
#: Seconds that a thread may exceed that: name resolution has no timeout.
_SPARE_SECONDS = 0.5


def ask(
    host: str,
    port: int,
    server: m.ServerInfo,
    seconds: float = ANSWER_SECONDS,
    tls: TlsFiles | None = None,
) -> m.SafekeeperGreeting | m.Refused:
    """The safekeeper's answer to a proposer of `server`.

    Raises `ConnectionFailedError` (no answer within `seconds`), `AuthenticationError`, `MalformedMessageError`,
    `NotSupportedError`; `PrivilegeError` if another account listens there without TLS; `ConfigError` for files of `tls` that do not fit.
    """
    context = None if tls is None else client_context(tls)
    where = f"{host}:{port}"
    deadline = time.monotonic() + seconds
    if tls is None:
        peer_account.check_listener(where)
    try:
        connected = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise ConnectionFailedError(error.strerror or str(error), where=where) from None
    end = wire(connected, where, context, host)
    try:
        end.send(m.ProposerGreeting(server, 0))
        end.flush()
        poll = select.poll()
        while (left := deadline - time.monotonic()) > 0:
            poll.register(end, end.events)
            ready = poll.poll(left * 1000)
            if any(events & ~select.POLLOUT for _, events in ready):
                end.receive()
            end.flush()
            for header, body in end.frames():
                message = decode(header, body)
                if isinstance(message, m.SafekeeperGreeting | m.Refused):
                    return message
                raise MalformedMessageError("unexpected handshake reply", where=where)
    finally:
        end.close()
    raise ConnectionFailedError(f"no answer in {seconds:g} s", where=where)


def greet(
    host: str, port: int, server: m.ServerInfo, tls: TlsFiles | None = None
) -> m.SafekeeperGreeting | None:
    """Its greeting; None if it does not answer, or refuses."""
    try:
        answer = ask(host, port, server, tls=tls)
    except (ConnectionFailedError, AuthenticationError, PrivilegeError):
        return None
    return answer if isinstance(answer, m.SafekeeperGreeting) else None


def ask_each(
    addresses: Sequence[tuple[str, int]],
    server: m.ServerInfo,
    seconds: float = ANSWER_SECONDS,
    tls: TlsFiles | None = None,
) -> Iterator[tuple[int, m.SafekeeperGreeting | m.Refused | TusklineError]]:
    """(index, answer or error of `ask`) of all safekeepers, queried in parallel, in the order of their answers.

    Those that hang take `seconds` altogether, a silent name server included; a caller that stops earlier does not wait.
    """
    answers: queue.SimpleQueue[tuple[int, m.SafekeeperGreeting | m.Refused | TusklineError]] = (
        queue.SimpleQueue()
    )

    def one(index: int, host: str, port: int) -> None:
        answer: m.SafekeeperGreeting | m.Refused | TusklineError
        try:
            answer = ask(host, port, server, seconds, tls)
        except TusklineError as error:
            answer = error
        except Exception as error:
            # Of any kind: the caller waits for a result of each.
            answer = TusklineError(f"{type(error).__name__}: {error}", where=f"{host}:{port}")
        answers.put((index, answer))

    for index, (host, port) in enumerate(addresses):
        threading.Thread(target=one, args=(index, host, port), name="greeting", daemon=True).start()
    missing = set(range(len(addresses)))
    deadline = time.monotonic() + seconds + _SPARE_SECONDS
    while missing:
        try:
            index, answer = answers.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            index = min(missing)
            host, port = addresses[index]
            where = f"{host}:{port}"
            answer = ConnectionFailedError(f"no answer in {seconds:g} s", where=where)
        if index in missing:
            missing.remove(index)
            yield index, answer


def ask_all(
    addresses: Sequence[tuple[str, int]],
    server: m.ServerInfo,
    seconds: float = ANSWER_SECONDS,
    tls: TlsFiles | None = None,
) -> Iterator[tuple[int, m.SafekeeperGreeting | m.Refused | None]]:
    """The answers of all; None for one that does not answer as a safekeeper does, which must not stop the others."""
    for index, answer in ask_each(addresses, server, seconds, tls):
        yield index, None if isinstance(answer, TusklineError) else answer
