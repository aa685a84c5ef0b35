"""Whose quorum it is, at the very first start: the safekeepers at the operator's addresses.

A safekeeper draws its identity with its data directory, so a configuration file can name addresses alone. Once
any safekeeper holds a membership, that one is taken (the newest). Before, *all* of them must answer: a membership
that is made of a part could leave out the one that knows better.
"""

from collections.abc import Sequence

from walsender_bridge.errors import ConnectionFailedError, DivergedError, UnavailableError
from walsender_bridge.proposer.greeting import ask, greet
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration, newest

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
    answers = [_answer(host, port, server) for host, port in safekeepers]
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


def _answer(host: str, port: int, server: m.ServerInfo) -> m.SafekeeperGreeting | m.Refused | None:
    try:
        return ask(host, port, server)
    except ConnectionFailedError:
        return None
