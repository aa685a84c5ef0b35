"""The configured safekeepers, as doctor finds them: whether each answers, and whether its WAL is this server's.

`reach` asks each one who it is, as a proposer greets it, which changes nothing there. `evaluate` knows no connection. What
only the proposer can find out (another history, other bytes at the same position: a clone), is told in its words.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.quorum.proposer import election
from walsender_bridge.quorum.proposer.effects import Primary
from walsender_bridge.quorum.proposer.handshake import ask_each
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import newest

ERROR, WARNING = Severity.ERROR, Severity.WARNING
#: Seconds for the safekeepers' answers.
_ANSWER_SECONDS: Final = 3.0
_CHECK: Final = "safekeeper"
_FIELDS: Final = {
    m.Refusal.OTHER_SYSTEM: "system identifier",
    m.Refusal.OTHER_MAJOR: "major version",
    m.Refusal.OTHER_SEGMENT_SIZE: "WAL segment size",
}


@dataclass(frozen=True, slots=True)
class SafekeeperAnswer:
    """What a safekeeper said, or why it said nothing."""

    address: str
    message: m.SafekeeperGreeting | m.Refused | None
    silence: str = ""


def reach(addresses: Sequence[str], server: m.ServerInfo) -> list[SafekeeperAnswer]:
    """Ask each of them, side by side: those that hang cost no more than one."""
    places = [
        (host.strip("[]"), int(port))
        for host, _, port in (each.rpartition(":") for each in addresses)
    ]
    said = dict(ask_each(places, server, _ANSWER_SECONDS))
    return [_answer(address, said[index]) for index, address in enumerate(addresses)]


def _answer(
    address: str, said: m.SafekeeperGreeting | m.Refused | TusklineError
) -> SafekeeperAnswer:
    if isinstance(said, TusklineError):
        return SafekeeperAnswer(address, None, said.what)
    return SafekeeperAnswer(address, said)


def evaluate(
    answers: Sequence[SafekeeperAnswer], server: m.ServerInfo, primary: Primary, where: str
) -> Iterator[Finding]:
    """A finding for each safekeeper, and one for all of them."""
    there = []
    greetings = [a.message for a in answers if isinstance(a.message, m.SafekeeperGreeting)]
    far = election.too_far(greetings, newest([each.configuration for each in greetings]))
    for answer in answers:
        found = _one(answer, server, primary, where) or _too_far(answer, far)
        if found is None:
            there.append(answer)
            found = Finding(_CHECK, answer.address, "answers")
        yield found
    counted = [a.message.safekeeper for a in there if isinstance(a.message, m.SafekeeperGreeting)]
    if len(set(counted)) < len(counted):
        yield _finding(
            where,
            "two addresses lead to the same safekeeper: it would be counted twice",
            "give each address its own",
            Cause.CONFIG,
        )
    if len(set(counted)) * 2 <= len(answers):
        yield _finding(
            where,
            f"{len(set(counted))} of {len(answers)} safekeepers are fit: no quorum, and commits that are to "
            "wait for it hang",
            "start them; docs/quorum-lost.md when they do not come back",
            Cause.UNAVAILABLE,
        )


def _one(
    answer: SafekeeperAnswer, server: m.ServerInfo, primary: Primary, where: str
) -> Finding | None:
    """What is wrong with this one; None: nothing."""
    said = answer.message
    if said is None:
        return _finding(
            answer.address,
            f"does not answer: {answer.silence}",
            "start it, or correct the address",
            Cause.UNAVAILABLE,
            WARNING,
        )
    if isinstance(said, m.Refused):
        field = _FIELDS.get(said.reason)
        what = (
            f"it keeps the WAL of another server: {field} {said.detail}" if field else said.detail
        )
        return _finding(answer.address, what, _OTHER_SERVER, Cause.DIVERGED)
    if said.server.system_id and said.server != server:
        what = f"it keeps the WAL of {said.server}, and {where} is {server}"
        return _finding(answer.address, what, _OTHER_SERVER, Cause.DIVERGED)
    if said.timeline == primary.lineage.timeline and said.commit_lsn > primary.flush_lsn:
        return _finding(
            answer.address,
            f"a quorum has WAL up to {format_lsn(said.commit_lsn)}, and {where} ends at "
            f"{format_lsn(primary.flush_lsn)}: it was restored from an older state",
            "rebuild this server from a base backup and the safekeepers' WAL",
            Cause.DIVERGED,
        )
    return None


def _too_far(answer: SafekeeperAnswer, far: Container[int]) -> Finding | None:
    """Whether no proposer campaigns for its vote any more."""
    said = answer.message
    if not isinstance(said, m.SafekeeperGreeting) or said.safekeeper not in far:
        return None
    return _finding(
        answer.address,
        f"it voted in term {said.node_id.term}, which no election of the others reaches: it follows no proposer any more",
        f"move its data directory away, start it, and run tuskline safekeeper replace {answer.address} {answer.address}",
        Cause.DIVERGED,
    )


_OTHER_SERVER: Final = "give each cluster safekeepers of its own"


def _finding(
    where: str, what: str, repair: str, cause: Cause, severity: Severity = ERROR
) -> Finding:
    return Finding(_CHECK, where, what, severity, repair=repair, cause=cause, prevents=False)


def proposer(told: Mapping[str, Any], where: str) -> Iterator[Finding]:
    """Why the proposer has ended, in its own words; nothing while it goes on."""
    error = told.get("error")
    if told.get("phase") == "ended" and error:
        cause = Cause.__members__.get(error.get("code", ""), Cause.INTERNAL)
        yield Finding(
            "proposer",
            where,
            error.get("what", ""),
            ERROR,
            repair=error.get("repair", ""),
            cause=cause,
            prevents=False,
        )
