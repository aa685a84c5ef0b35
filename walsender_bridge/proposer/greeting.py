"""Asking a safekeeper who it is, as a proposer greets it: nobody's term changes by being asked."""

import select
import socket
import time

from walsender_bridge.errors import ConnectionFailedError, MalformedMessageError
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.frames import decode
from walsender_bridge.safekeeper.wire_end import WireEnd

#: Seconds for one answer.
ANSWER_SECONDS = 5.0


def ask(
    host: str, port: int, server: m.ServerInfo, seconds: float = ANSWER_SECONDS
) -> m.SafekeeperGreeting | m.Refused:
    """What the safekeeper there answers to a proposer of `server`.

    Raises `ConnectionFailedError` (nobody answers in so many seconds), `MalformedMessageError`, `NotSupportedError`.
    """
    where = f"{host}:{port}"
    deadline = time.monotonic() + seconds
    try:
        connected = socket.create_connection((host, port), timeout=seconds)
    except OSError as error:
        raise ConnectionFailedError(error.strerror or str(error), where=where) from None
    end = WireEnd(connected, where)
    try:
        end.send(m.ProposerGreeting(server, 0))
        end.flush()
        poll = select.poll()
        poll.register(end, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                end.receive()
            for header, body in end.frames():
                message = decode(header, body)
                if isinstance(message, m.SafekeeperGreeting | m.Refused):
                    return message
                raise MalformedMessageError("it does not say who it is", where=where)
    finally:
        end.close()
    raise ConnectionFailedError(f"no answer in {seconds:g} s", where=where)


def greet(host: str, port: int, server: m.ServerInfo) -> m.SafekeeperGreeting | None:
    """The same; None if it does not answer, or refuses."""
    try:
        answer = ask(host, port, server)
    except ConnectionFailedError:
        return None
    return answer if isinstance(answer, m.SafekeeperGreeting) else None
