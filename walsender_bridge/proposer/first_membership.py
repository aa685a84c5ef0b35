"""Whose quorum it is, at the very first start: the safekeepers at the operator's addresses.

A safekeeper draws its identity with its data directory, so a configuration file can name addresses alone. Once
any safekeeper holds a membership, that one is taken (the newest). Before, *all* of them must answer: a membership
that is made of a part could leave out the one that knows better.

They are asked side by side. A membership of which a majority has answered is enough: whoever knows a newer one tells
it in the election, and one that hangs does not delay that. What is no safekeeper, or another cluster's, is none of
the majority, and does not stop it.
"""

from collections.abc import Sequence

from walsender_bridge.errors import DivergedError, TusklineError, UnavailableError
from walsender_bridge.proposer.greeting import ANSWER_SECONDS, ask_each
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration, newest

_Answer = m.SafekeeperGreeting | m.Refused | TusklineError
_OTHER_SERVER = (
    m.Refusal.OTHER_SYSTEM,
    m.Refusal.OTHER_MAJOR,
    m.Refusal.OTHER_SEGMENT_SIZE,
)


def find_membership(
    safekeepers: Sequence[tuple[str, int]],
    server: m.ServerInfo,
    others: Sequence[tuple[str, int]] = (),
    seconds: float = ANSWER_SECONDS,
) -> Configuration:
    """The membership in force, or the first one.

    `others`: addresses where members may be found, too, which found no membership. `seconds`: how long one may take to
    answer. Raises `UnavailableError` when
    too few answer, and `DivergedError` when one of those at `safekeepers` belongs to another server.
    """
    answers: dict[int, _Answer] = {}
    known = _known(safekeepers, server, seconds, answers)
    known = known or _known(others, server, seconds, {})
    if known:
        return known
    found = [answer for answer in answers.values() if isinstance(answer, m.SafekeeperGreeting)]
    for index, (host, port) in enumerate(safekeepers):
        answer = answers[index]
        if isinstance(answer, m.Refused) and answer.reason in _OTHER_SERVER:
            raise DivergedError(
                f"other server: {answer.detail}",
                where=f"{host}:{port}",
                repair="give each cluster safekeepers of its own",
            )
    if len(found) < len(safekeepers):
        silent = [
            f"{host}:{port}" + (f" ({answer.what})" if isinstance(answer, TusklineError) else "")
            for index, (host, port) in enumerate(safekeepers)
            if not isinstance(answer := answers[index], m.SafekeeperGreeting)
        ]
        raise UnavailableError(
            "the first membership needs every safekeeper, and some do not answer",
            where=", ".join(silent),
            repair="start them; later a majority is enough",
        )
    return Configuration(generation=1, members=frozenset(each.safekeeper for each in found))


def _known(
    addresses: Sequence[tuple[str, int]],
    server: m.ServerInfo,
    seconds: float,
    answers: dict[int, _Answer],
) -> Configuration:
    """The newest membership that they hold; no more is waited for than a majority of it. Fills `answers`."""
    known, there = Configuration(), set()
    for index, answer in ask_each(addresses, server, seconds):
        answers[index] = answer
        if isinstance(answer, m.SafekeeperGreeting):
            known = newest((known, answer.configuration))
            there.add(answer.safekeeper)
            if known.has_quorum(there):
                break
    return known
