"""Which quorum a proposer goes on with, from what is recorded and what the safekeepers at its addresses say. Pure.

A quorum has an id, drawn at random with its first membership (`safekeeper.configuration`). It is recorded at the bridge
and on the primary (`quorum_id_record.py`) once its first proposer is in leader, before any COMMIT has waited for it.

Invariant: where an id is recorded, only safekeepers of that id say who the members are, and no other quorum is formed.
Where none is (the bridge's folder is lost, or the quorum is older than ids), a membership is taken only if the
safekeepers of a majority of the configured addresses hold the same id and are its members. A first one that no elected
proposer has stamped (term 0) is none yet. So safekeepers that came back
empty, or were made a quorum of their own by somebody else, never stand in for the one that has what was committed.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from walsender_bridge.errors import DivergedError, TusklineError, UnavailableError
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration, newest

Answer = m.SafekeeperGreeting | m.Refused | TusklineError
_LOST = (
    "put the safekeepers' data directories back, or correct [safekeepers] addresses; if they are lost for good,"
    " docs/quorum-lost.md says how to begin again"
)
_START = "start the safekeepers; if they run, see that their ports can be reached from here, and by whom else"


@dataclass(frozen=True, slots=True)
class KnownQuorumId:
    """What is known before a safekeeper is asked. `quorum`: the id; 0: none.

    `formed`: it has been in office; otherwise the id was drawn for a first membership, which may never have come about.
    `required`: the server's commits wait for a quorum.
    """

    quorum: int = 0
    formed: bool = False
    required: bool = False


def in_force(
    greetings: Collection[m.SafekeeperGreeting], asked: int, known: KnownQuorumId
) -> Configuration:
    """The newest membership of the quorum among them; one without members: none is known. `asked`: addresses."""
    own = [e for e in greetings if e.configuration.quorum == known.quorum != 0]
    held = [] if known.formed else [e for e in greetings if e.configuration.term]
    others = [each for each in held if _majority(each.configuration, held, asked, known)]
    return newest([each.configuration for each in (*own, *others)])


def _majority(
    configuration: Configuration,
    held: Collection[m.SafekeeperGreeting],
    asked: int,
    known: KnownQuorumId,
) -> bool:
    """Whether those at most of the addresses are its members, and of its quorum."""
    ids = {configuration.quorum}
    if not configuration.quorum:
        ids.add(known.quorum)  # perhaps some have been given that id
    agree = {
        each.safekeeper
        for each in held
        if each.configuration.quorum in ids and each.safekeeper in configuration.trusted
    }
    return 2 * len(agree) > asked


def first(
    answers: Mapping[int, Answer], addresses: Sequence[tuple[str, int]], known: KnownQuorumId
) -> Configuration:
    """The first membership: of all that were asked, if nothing says that there was a quorum before.

    Raises `UnavailableError` while some do not answer (of those that say nothing nothing is known), and `DivergedError` when they do, and a quorum is recorded, or
    required, that none of them belongs to.
    """
    found = [each for each in answers.values() if isinstance(each, m.SafekeeperGreeting)]
    where = "; ".join(
        f"{host}:{port} ({_told(answers.get(index))})"
        for index, (host, port) in enumerate(addresses)
    )
    what = ""
    if known.formed:
        what = f"no safekeeper here belongs to quorum {known.quorum:032x}, which this server's commits were on"
    elif any(each.configuration.term for each in found):
        what = "the safekeepers here belong to no quorum that a majority of them is in"
    elif known.required and not known.quorum:
        what = "this server's commits wait for a quorum, and the safekeepers here are empty"
    if what and all(isinstance(answer, TusklineError) for answer in answers.values()):
        raise UnavailableError("no safekeeper answers", where=where, repair=_START)
    if what:
        kind = DivergedError if len(found) == len(addresses) else UnavailableError
        raise kind(what, where=where, repair=_LOST)
    if len(found) < len(addresses):
        raise UnavailableError(
            "the first membership needs every safekeeper, and some do not answer",
            where=_silent(answers, addresses),
            repair="start them; later a majority is enough",
        )
    return Configuration(1, frozenset(each.safekeeper for each in found), quorum=known.quorum)


def _silent(answers: Mapping[int, Answer], addresses: Sequence[tuple[str, int]]) -> str:
    return ", ".join(
        f"{host}:{port}" + (f" ({answer.what})" if isinstance(answer, TusklineError) else "")
        for index, (host, port) in enumerate(addresses)
        if not isinstance(answer := answers.get(index), m.SafekeeperGreeting)
    )


def _told(answer: Answer | None) -> str:
    """What a safekeeper is, in a few words."""
    if isinstance(answer, TusklineError):
        return answer.what
    if not isinstance(answer, m.SafekeeperGreeting):
        return answer.detail if answer else "does not answer"
    if not answer.configuration:
        return "empty"
    quorum = answer.configuration.quorum
    return f"quorum {quorum:032x}" if quorum else "a quorum without an id"
