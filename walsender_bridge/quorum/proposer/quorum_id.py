"""The quorum that a proposer continues, from the recorded id and the answers of the safekeepers at its addresses. Pure.

A quorum has an id, drawn at random with its first membership (`safekeeper.configuration`). It is recorded at the bridge
and on the primary (`quorum_id_record.py`) once its first proposer leads, before any COMMIT has waited for it.

Invariant: if an id is recorded, only safekeepers with that id determine the members, and no other quorum is formed. If
none is (the bridge's folder is lost, or the quorum predates ids), a membership is used only if the safekeepers at a
majority of the configured addresses hold the same id and are its members. A first membership that no elected proposer
has stamped (term 0) does not count. So safekeepers that came back empty, or were formed into a quorum of their own,
never replace the quorum that has the committed WAL.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from walsender_bridge.errors import DivergedError, TusklineError, UnavailableError
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration, newest

Answer = m.SafekeeperGreeting | m.Refused | TusklineError
_LOST = (
    "restore the safekeepers' data directories, or correct [safekeepers] addresses; if they are lost for good,"
    " see docs/quorum-lost.md"
)
_START = "start the safekeepers; if they are running, check that their ports are reachable from this machine"


@dataclass(frozen=True, slots=True)
class KnownQuorumId:
    """What is known before any safekeeper is queried. `quorum`: the id; 0: none.

    `formed`: a proposer of this quorum has led; otherwise the id was drawn for a first membership, which may never have been
    formed. `required`: the server's commits wait for a quorum.
    """

    quorum: int = 0
    formed: bool = False
    required: bool = False


def in_force(
    greetings: Collection[m.SafekeeperGreeting], asked: int, known: KnownQuorumId
) -> Configuration:
    """The newest membership of the quorum in the answers; without members: none is known. `asked`: number of addresses."""
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
    """Whether the safekeepers at a majority of the addresses are its members, and of its quorum."""
    ids = {configuration.quorum}
    if not configuration.quorum:
        ids.add(known.quorum)  # some may hold that id already
    agree = {
        each.safekeeper
        for each in held
        if each.configuration.quorum in ids and each.safekeeper in configuration.trusted
    }
    return 2 * len(agree) > asked


def first(
    answers: Mapping[int, Answer], addresses: Sequence[tuple[str, int]], known: KnownQuorumId
) -> Configuration:
    """The first membership: all safekeepers that were queried, if there is no trace of an earlier quorum.

    Raises `UnavailableError` while some do not answer (their state is unknown), and `DivergedError` when all do, but a
    quorum is recorded, or required, to which none of them belongs.
    """
    found = [each for each in answers.values() if isinstance(each, m.SafekeeperGreeting)]
    where = "; ".join(
        f"{host}:{port} ({_told(answers.get(index))})"
        for index, (host, port) in enumerate(addresses)
    )
    what = ""
    if known.formed:
        what = f"no safekeeper here belongs to quorum {known.quorum:032x}, which stores this server's commits"
    elif any(each.configuration.term for each in found):
        what = "no majority of the safekeepers here belongs to one quorum"
    elif known.required and not known.quorum:
        what = "this server's commits wait for a quorum, but the safekeepers here are empty"
    if what and all(isinstance(answer, TusklineError) for answer in answers.values()):
        raise UnavailableError("no safekeeper answers", where=where, repair=_START)
    if what:
        kind = DivergedError if len(found) == len(addresses) else UnavailableError
        raise kind(what, where=where, repair=_LOST)
    if len(found) < len(addresses):
        raise UnavailableError(
            "the first membership needs every safekeeper, but some do not answer",
            where=_silent(answers, addresses),
            repair="start them; once the quorum is formed, a majority is enough",
        )
    return Configuration(1, frozenset(each.safekeeper for each in found), quorum=known.quorum)


def _silent(answers: Mapping[int, Answer], addresses: Sequence[tuple[str, int]]) -> str:
    return ", ".join(
        f"{host}:{port}" + (f" ({answer.what})" if isinstance(answer, TusklineError) else "")
        for index, (host, port) in enumerate(addresses)
        if not isinstance(answer := answers.get(index), m.SafekeeperGreeting)
    )


def _told(answer: Answer | None) -> str:
    """A safekeeper's answer, in a few words."""
    if isinstance(answer, TusklineError):
        return answer.what
    if not isinstance(answer, m.SafekeeperGreeting):
        return answer.detail if answer else "does not answer"
    if not answer.configuration:
        return "empty"
    quorum = answer.configuration.quorum
    return f"quorum {quorum:032x}" if quorum else "a quorum without an id"
