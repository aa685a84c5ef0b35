"""The configured safekeepers: whether each answers, and whether its WAL is this server's.

`reach` sends each a proposer's greeting, which changes nothing there. `evaluate` knows no connection. What
only the proposer can detect (another history, or other bytes at the same position: a clone) comes from its status.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause, TusklineError
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.quorum.proposer import election
from walsender_bridge.quorum.proposer.effects import Primary
from walsender_bridge.quorum.proposer.handshake import ask_each
from walsender_bridge.quorum.proposer.status_record import ENDED, ProposerStatus
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import newest
from walsender_bridge.runtime.tls_files import TlsFiles

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
    """The answer of a safekeeper, or why there is none."""

    address: str
    message: m.SafekeeperGreeting | m.Refused | None
    silence: str = ""


def reach(
    addresses: Sequence[str], server: m.ServerInfo, tls: TlsFiles | None = None
) -> list[SafekeeperAnswer]:
    """Greet all of them in parallel: several that hang take no longer than one."""
    places = [
        (host.strip("[]"), int(port))
        for host, _, port in (each.rpartition(":") for each in addresses)
    ]
    answers = dict(ask_each(places, server, _ANSWER_SECONDS, tls))
    return [_answer(address, answers[index]) for index, address in enumerate(addresses)]


def _answer(
    address: str, message: m.SafekeeperGreeting | m.Refused | TusklineError
) -> SafekeeperAnswer:
    if isinstance(message, TusklineError):
        return SafekeeperAnswer(address, None, message.what)
    return SafekeeperAnswer(address, message)


def evaluate(
    answers: Sequence[SafekeeperAnswer], server: m.ServerInfo, primary: Primary, where: str
) -> Iterator[Finding]:
    """A finding for each safekeeper, and one for all of them."""
    usable = []
    greetings = [a.message for a in answers if isinstance(a.message, m.SafekeeperGreeting)]
    far = election.too_far(greetings, newest([each.configuration for each in greetings]))
    for answer in answers:
        found = _one(answer, server, primary, where) or _too_far(answer, far)
        if found is None:
            usable.append(answer)
            found = Finding(_CHECK, answer.address, "answers")
        yield found
    counted = [a.message.safekeeper for a in usable if isinstance(a.message, m.SafekeeperGreeting)]
    if len(set(counted)) < len(counted):
        yield _finding(
            where,
            "two addresses reach the same safekeeper, which would count twice",
            "configure each safekeeper with one address",
            Cause.CONFIG,
        )
    if len(set(counted)) * 2 <= len(answers):
        yield _finding(
            where,
            f"{len(set(counted))} of {len(answers)} safekeepers are usable: there is no quorum, and commits that "
            "wait for it hang",
            "start the others; if they cannot return, see docs/quorum-lost.md",
            Cause.UNAVAILABLE,
        )


def _one(
    answer: SafekeeperAnswer, server: m.ServerInfo, primary: Primary, where: str
) -> Finding | None:
    """The problem of this safekeeper; None if it has none."""
    message = answer.message
    if message is None:
        return _finding(
            answer.address,
            f"does not answer: {answer.silence}",
            "start it, or correct the address",
            Cause.UNAVAILABLE,
            WARNING,
        )
    if isinstance(message, m.Refused):
        if message.reason == m.Refusal.NOT_ALLOWED:
            return _finding(answer.address, message.detail, _ROLE, Cause.PRIVILEGE)
        field = _FIELDS.get(message.reason)
        what = (
            f"it stores the WAL of another server: {field} {message.detail}"
            if field
            else message.detail
        )
        return _finding(answer.address, what, _OTHER_SERVER, Cause.DIVERGED)
    if message.server.system_id and message.server != server:
        what = f"it stores the WAL of {message.server}, but {where} is {server}"
        return _finding(answer.address, what, _OTHER_SERVER, Cause.DIVERGED)
    if message.timeline == primary.lineage.timeline and message.commit_lsn > primary.flush_lsn:
        return _finding(
            answer.address,
            f"a quorum has WAL up to {format_lsn(message.commit_lsn)}, but the WAL of {where} ends at "
            f"{format_lsn(primary.flush_lsn)}: it was restored from an older state",
            "rebuild this server from a base backup and the safekeepers' WAL",
            Cause.DIVERGED,
        )
    return None


def _too_far(answer: SafekeeperAnswer, far: Container[int]) -> Finding | None:
    """Whether its term is too high for any proposer to campaign for its vote."""
    message = answer.message
    if not isinstance(message, m.SafekeeperGreeting) or message.safekeeper not in far:
        return None
    return _finding(
        answer.address,
        f"it voted in term {message.node_id.term}, which no election of the others reaches: it no longer follows any proposer",
        f"move its data directory away, start it, and run tuskline safekeeper replace {answer.address} {answer.address}",
        Cause.DIVERGED,
    )


_ROLE: Final = "issue this machine's certificate with --role proposer (docs/certificates.md)"
_OTHER_SERVER: Final = "give each cluster its own safekeepers"


def _finding(
    where: str, what: str, repair: str, cause: Cause, severity: Severity = ERROR
) -> Finding:
    return Finding(_CHECK, where, what, severity, repair=repair, cause=cause, prevents=False)


def proposer(status: ProposerStatus | None, where: str) -> Iterator[Finding]:
    """The error with which the proposer ended; nothing while it runs."""
    if status is not None and status.phase == ENDED and status.error is not None:
        error = status.error.error()
        yield Finding(
            "proposer",
            where,
            error.what,
            ERROR,
            repair=error.repair,
            cause=error.cause,
            prevents=False,
        )
