"""Whose quorum it is, at the very first start: the safekeepers at the operator's addresses.

A safekeeper draws its identity with its data directory, so a configuration file can name addresses alone. Once
any safekeeper holds a membership, that one is taken (the newest). Before, *all* of them must answer: a membership
that is made of a part could leave out the one that knows better.
"""

import select
import socket
import time
from collections.abc import Sequence

from walsender_bridge.errors import ConnectionFailedError, DivergedError, UnavailableError
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration, newest
from walsender_bridge.safekeeper.frames import decode
from walsender_bridge.safekeeper.wire_end import WireEnd

#: Seconds for all answers.
_ANSWER_SECONDS = 5.0
_OTHER_SERVER = (
    m.Refusal.OTHER_SYSTEM,
    m.Refusal.OTHER_MAJOR,
    m.Refusal.OTHER_SEGMENT_SIZE,
)


def find_membership(
    safekeepers: Sequence[tuple[str, int]],
    server: m.ServerInfo,
    others: Sequence[tuple[str, int]] = (),
) -> Configuration:
    """The membership in force, or the first one.

    `others`: addresses where members may be found, too, which found no membership. Raises `UnavailableError` when
    too few answer, and `DivergedError` when one of those at `safekeepers` belongs to another server.
    """
    answers = [_ask(host, port, server) for host, port in safekeepers]
    found = [answer for answer in answers if isinstance(answer, m.SafekeeperGreeting)]
    known = newest([greeting.configuration for greeting in found])
    if not known and others:
        asked = [greet(host, port, server) for host, port in others]
        known = newest([greeting.configuration for greeting in asked if greeting is not None])
    if known:
        return known
    for (host, port), answer in zip(safekeepers, answers, strict=True):
        if isinstance(answer, m.Refused) and answer.reason in _OTHER_SERVER:
            raise DivergedError(
                f"other server: {answer.detail}",
                where=f"{host}:{port}",
                repair="give each cluster safekeepers of its own",
            )
    if len(found) < len(safekeepers):
        silent = [
            f"{host}:{port}"
            for (host, port), answer in zip(safekeepers, answers, strict=True)
            if not isinstance(answer, m.SafekeeperGreeting)
        ]
        raise UnavailableError(
            "the first membership needs every safekeeper, and some do not answer",
            where=", ".join(silent),
            repair="start them; later a majority is enough",
        )
    return Configuration(generation=1, members=frozenset(each.safekeeper for each in found))


def greet(host: str, port: int, server: m.ServerInfo) -> m.SafekeeperGreeting | None:
    """Ask a safekeeper who it is; None if it does not answer, or refuses."""
    answer = _ask(host, port, server)
    return answer if isinstance(answer, m.SafekeeperGreeting) else None


def _ask(host: str, port: int, server: m.ServerInfo) -> m.SafekeeperGreeting | m.Refused | None:
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        connected = socket.create_connection((host, port), timeout=_ANSWER_SECONDS)
    except OSError:
        return None
    end = WireEnd(connected, f"{host}:{port}")
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
                return message if isinstance(message, m.SafekeeperGreeting | m.Refused) else None
    except ConnectionFailedError:
        return None
    finally:
        end.close()
    return None
