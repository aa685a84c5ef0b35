"""The members of the quorum at the very first start: the safekeepers at the configured addresses.

A safekeeper draws its identity with its data directory, so a configuration file can only name addresses. Once
safekeepers hold a membership of this server's quorum (`quorum_id.py`), the newest one is used. Before, *all* of them
must answer: a membership formed from some of them could leave out one that holds an existing membership.

They are queried in parallel. It is enough that a majority of a membership has answered: a newer one is learned in the
election, and a safekeeper that hangs delays nothing. A process that is no safekeeper, or another cluster's, does not
count toward the majority, and does not prevent it.
"""

from collections.abc import Sequence

from walsender_bridge.errors import DivergedError
from walsender_bridge.quorum.proposer import quorum_id
from walsender_bridge.quorum.proposer.handshake import ANSWER_SECONDS, ask_each
from walsender_bridge.quorum.proposer.quorum_id import Answer, KnownQuorumId, in_force
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.runtime.tls_files import TlsFiles

_NOTHING = KnownQuorumId()
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
    known: KnownQuorumId = _NOTHING,
    tls: TlsFiles | None = None,
) -> Configuration:
    """The membership in force, or the first one.

    `others`: further addresses where members may be found; they do not form a first membership. `seconds`: the timeout of
    one answer. `known`: the recorded id. A membership from before quorums had ids has none. Raises `UnavailableError` when
    too few answer, and `DivergedError` when one of those at `safekeepers` belongs to another server, or all of them to no
    quorum that this server may have (`quorum_id.py`).
    """
    answers: dict[int, Answer] = {}
    held = _ask(safekeepers, server, seconds, known, answers, tls)
    held = held or _ask(others, server, seconds, known, {}, tls)
    if held:
        return held
    for index, (host, port) in enumerate(safekeepers):
        answer = answers[index]
        if isinstance(answer, m.Refused) and answer.reason in _OTHER_SERVER:
            raise DivergedError(
                f"safekeeper belongs to another server: {answer.detail}",
                where=f"{host}:{port}",
                repair="give each cluster its own safekeepers",
            )
    return quorum_id.first(answers, safekeepers, known)


def _ask(
    addresses: Sequence[tuple[str, int]],
    server: m.ServerInfo,
    seconds: float,
    known: KnownQuorumId,
    answers: dict[int, Answer],
    tls: TlsFiles | None,
) -> Configuration:
    """The newest membership that they hold; waits for a majority of it only. Fills `answers`."""
    held, greetings = Configuration(), []
    for index, answer in ask_each(addresses, server, seconds, tls):
        answers[index] = answer
        if isinstance(answer, m.SafekeeperGreeting):
            greetings.append(answer)
            held = in_force(greetings, len(addresses), known)
            if held.has_quorum({each.safekeeper for each in greetings}):
                break
    return held
