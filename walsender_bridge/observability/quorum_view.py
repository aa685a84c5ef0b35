"""The safekeepers at one moment: the source of `safekeeper status`, `status`, `top` and `/metrics`.

If its bridge runs here, the proposer reports every safekeeper that it reaches. Each safekeeper hosted by the log server
here reports itself, and its WAL server reports readers and slots (their modules
`status_record`). Both reports of a safekeeper are joined by its identity. A file that is old, or whose process is gone,
is stale: the state is then `unknown`, and the other values are still shown.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.proposer import status_record as proposer_record
from walsender_bridge.quorum.proposer.status_record import (
    ENDED,
    ProposerStatus,
    ReportedSafekeeper,
    SessionStatus,
)
from walsender_bridge.quorum.safekeeper import status_record as safekeeper_record
from walsender_bridge.quorum.safekeeper.status_record import (
    ArchiverStatus,
    EndedSafekeeper,
    SafekeeperStatus,
)
from walsender_bridge.quorum.wal_server.status_record import WalServerStatus
from walsender_bridge.runtime import shared_files, status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.supervisor import read_states

if TYPE_CHECKING:
    from walsender_bridge.config import Config

#: Seconds after which the status of a process is stale.
STALE: Final = 5.0
#: The same for an archiver, which waits between two attempts.
ARCHIVER_STALE: Final = 90.0
_NO_STATUS: Final = (
    ", so safekeepers and proposer cannot write their status files there: the status shown is old, and commit gates that"
    " wait for the quorum stay closed; free space there (PostgreSQL's dynamic shared memory may use it, too)"
)
_UNLIKE: Final = (
    "correct [safekeepers] addresses and restart the bridge, or change the members with"
    " tuskline safekeeper add|remove|replace"
)
_FOLLOWING: Final = ("streaming", "catching up")
#: What a proposer that does not lead yet is doing, by its phase (`core.Phase`).
STARTING: Final = {
    "greeting": "it waits for a majority of the safekeepers to answer",
    "voting": "it waits for the votes of a majority of the safekeepers",
    "comparing": "it compares the server's WAL with that of the safekeepers",
}


@dataclass(frozen=True, slots=True)
class SafekeeperView:
    """One safekeeper, as `reported` by the proposer, by itself (`own`), and by its processes `server` and `archiver`.

    Each is None if there is no such report. `name`: if it is hosted here, otherwise its address. `ended`: the error with
    which its process ended.
    """

    name: str
    address: str
    reported: ReportedSafekeeper | None
    own: SafekeeperStatus | None = None
    server: WalServerStatus | None = None
    hosted: bool = False
    archiver: ArchiverStatus | None = None
    ended: ErrorRecord | None = None

    @property
    def state(self) -> str:
        """The state that the proposer shows; `full` if its disk is; without a proposer, the state that it reports itself."""
        own = self.own
        if self.hosted and (own is None or not own.fresh(STALE)):
            return "away"
        if own is not None and own.state == "full":
            return "full"
        if self.reported is not None:
            return self.reported.shown
        return "unknown" if own is None else own.state

    @property
    def fault(self) -> str:
        """Why it is away, if it or the proposer reported an error."""
        if self.ended is not None:
            place = f"{self.ended.where}: " if self.ended.where else ""
            return f"{place}{self.ended.sentence}"
        return (self.reported and self.reported.fault) or ""

    @property
    def low_on_space(self) -> str:
        """The free space, if it is below the limit although prepared segments still take WAL; otherwise empty."""
        own = self.own
        if own is None or not own.fresh(STALE) or own.free_bytes is None:
            return ""
        if own.free_bytes >= (own.free_limit or 0):
            return ""
        return f"{own.free_bytes} bytes are free, less than free_bytes = {own.free_limit}"

    @property
    def lost_wal(self) -> list[str]:
        """Slots and archives that have lost WAL, or are about to, because more was needed than is kept for them."""
        found = [
            f"replication slot {each.slot} is lost: WAL from {each.restart_lsn} on has been removed "
            "(max_slot_wal_keep_size); drop the slot"
            for each in (self.server.slots if self.server is not None else ())
            if each.wal_status == "lost"
        ]
        archive = None if self.own is None else self.own.archive
        found += [
            f"WAL from {begin} to {end} was removed before it was archived here, and may be missing in the archive"
            for begin, end in (archive.missing if archive is not None else ())
        ]
        error = None if self.archiver is None else self.archiver.error
        if self.archiver is not None and error is not None and self.archiver.fresh(ARCHIVER_STALE):
            found.append(f"WAL is not archived: {error.what} ({error.where}); {error.repair}")
        if archive is not None and archive.unreserved:
            found.append(
                f"the archive has no WAL from {archive.archived_lsn or 'the beginning'} on, and WAL is no longer "
                "kept for it (max_slot_wal_keep_size)"
            )
        return found

    @property
    def _known(self) -> SafekeeperStatus | ReportedSafekeeper | None:
        """What it says of itself here; on another machine, what the proposer says of it."""
        return self.reported if self.own is None else self.own

    @property
    def identity(self) -> str | None:
        """Its identity; None: unknown."""
        known = self._known
        return None if known is None else known.safekeeper

    @property
    def begin_lsn(self) -> str | None:
        """The begin of the WAL that it has; on another machine, as it last reported to the proposer."""
        known = self._known
        return None if known is None else known.begin_lsn

    @property
    def damaged(self) -> list[str]:
        """Damaged segments, which it does not serve."""
        return [name for each in (self.server, self.own) if each for name in each.damaged]

    @property
    def catch_up_fault(self) -> str:
        """Why it cannot catch up on older WAL that others have; empty: it can, or lacks none."""
        reported = self.reported
        if reported is None or not (reported.stuck and reported.catch_up_target_lsn):
            return ""
        return (
            f"lacks WAL from {reported.catch_up_target_lsn} to {self.begin_lsn}, and could not get it from another: "
            f"{self._rejection or 'their WAL is damaged, or cannot be read'}"
        )

    @property
    def catch_up_progress(self) -> str:
        """The progress of its catch-up on older WAL, as the end of a sentence."""
        if self._rejection:
            return f"; {self._rejection}"
        lsn = self.reported and self.reported.catch_up_target_lsn
        return f" until it has caught up, down to {lsn}" if lsn else ""

    @property
    def _rejection(self) -> str:
        """Why it rejected the older WAL that it received last; empty: it did not."""
        catch_up = None if self.own is None else self.own.catch_up
        return "" if catch_up is None else catch_up.why

    @property
    def catch_up_bytes(self) -> int | None:
        """Bytes of older WAL that it is still to receive from another member; None: unknown."""
        if self.begin_lsn is None or self.reported is None:
            return None
        lsn = self.reported.catch_up_target_lsn
        return parse_lsn(self.begin_lsn) - parse_lsn(lsn) if lsn else 0

    @property
    def flush_lsn(self) -> str | None:
        """The last known durable end of its WAL."""
        known = self._known
        return None if known is None else known.flush_lsn

    @property
    def lag_bytes(self) -> int | None:
        """Bytes of the proposer's WAL that it lacks; None: unknown."""
        return None if self.reported is None else self.reported.lag_bytes

    @property
    def has_left(self) -> bool:
        """Whether it is known to be no member: it has left, or has not joined yet."""
        return self.reported is not None and not self.reported.member


@dataclass(frozen=True, slots=True)
class QuorumView:
    """The proposer (None: it has no status) and the safekeepers. `proposer_here`: its bridge runs here, or did."""

    proposer: ProposerStatus | None
    proposer_here: bool
    safekeepers: tuple[SafekeeperView, ...]
    #: The configured amount of WAL that each safekeeper retains behind its end.
    keep_bytes: int = 0
    #: Set if there is no space for the status files of the processes here (`shared_files.full`).
    memory_full: str = ""
    #: Whether the proposer belongs to this machine; otherwise safekeepers here may wait for it.
    bridge_here: bool = True
    #: Whether commits wait for the quorum, according to `synchronous_standby_names`; None: the server was not asked.
    required: bool | None = None

    @property
    def phase(self) -> str:
        """The proposer's phase; `unknown` if its status is stale."""
        status = self.proposer
        if status is not None and (status.phase == ENDED or status.fresh(STALE)):
            return status.phase
        return "unknown"

    @property
    def session(self) -> SessionStatus | None:
        """The proposer's session, as it last reported it; None: it has none, or no status."""
        return self.proposer if isinstance(self.proposer, SessionStatus) else None

    @property
    def quorum(self) -> bool:
        """Whether a majority follows the proposer; otherwise commits hang if they wait for the quorum."""
        return self.phase == "leading" and self.session is not None and self.session.quorum

    @property
    def starts(self) -> bool:
        """Whether the proposer has not led yet, and reports no error."""
        status = self.proposer
        return status is not None and status.error is None and self.phase in STARTING

    @property
    def lag_bytes(self) -> int | None:
        """Bytes of WAL that the primary has sent and that are not committed yet; None: unknown."""
        session = self.session
        if session is None or not self.quorum:
            return None
        return parse_lsn(session.end_lsn) - parse_lsn(session.commit_lsn)

    @property
    def problems(self) -> list[str]:
        """The problems as sentences, the worst first."""
        found = []
        if self.memory_full:
            found.append(f"{self.memory_full}{_NO_STATUS}")
        if self.memory_full and self.phase == "unknown":
            found.append("it is unknown whether a quorum follows the proposer")
        elif self.proposer_here and not self.quorum:
            found.append(f"{self._lost()}: {self._why()}")
        if self.proposer is not None and (fault := self.proposer.commit_page_fault):
            found.append(
                f"commit gates that wait for the quorum stay closed: {fault}; free space there, or give the folder to the bridge's user"
            )
        if self.session is not None and (unlike := self.session.membership.unlike):
            found.append(f"the membership differs from the configured one: {unlike}; {_UNLIKE}")
        spare = self._all_members_heard()
        # That no proposer asks is a problem of its machine, which reports it.
        working = {*_FOLLOWING, "following", *(() if self.bridge_here else ("waiting",))}
        for each in self.safekeepers:
            if spare and each.has_left:
                continue  # it is not needed
            name = f"safekeeper {each.address}"
            if self.memory_full and each.state == "away" and not each.fault:
                continue  # its state is unknown
            if each.state == "rebuild":
                found.append(
                    f"{name} fell too far behind: the WAL that it needs was removed, and it needs a full resync"
                )
            elif each.own is not None and each.state == "full":
                found.append(f"{name} has no space for WAL: {each.own.why}")
            elif each.state not in working:
                found.append(f"{name} is {each.state}" + (f": {each.fault}" if each.fault else ""))
            elif damaged := each.damaged:
                found.append(f"{name} has damaged WAL, which it does not serve: {damaged[0]}")
            elif each.catch_up_fault:
                found.append(f"{name} {each.catch_up_fault}")
            elif each.low_on_space:
                found.append(f"{name} will soon accept no more WAL: {each.low_on_space}")
            found += [f"{name}: {problem}" for problem in each.lost_wal]
        return found

    @property
    def notes(self) -> list[str]:
        """Members that lack WAL, after a full resync, that others retain by `keep_bytes`: no problem, but readers need to know.

        The begin of a log moves up to where `keep_bytes` begins. A begin above that moves down during the catch-up on older
        WAL. So a member that begins above that, and above another member, lacks WAL, or did a moment ago.
        """
        known = [
            (parse_lsn(each.begin_lsn), parse_lsn(each.flush_lsn), each)
            for each in self.safekeepers
            if each.begin_lsn and each.flush_lsn and not each.has_left
            if parse_lsn(each.begin_lsn)  # it has WAL
        ]
        oldest = min(known, key=lambda each: each[0], default=None)
        if oldest is None:
            return []
        return [
            f"safekeeper {each.address} has no WAL before {each.begin_lsn}, but safekeeper {oldest[2].address} "
            f"has it from {oldest[2].begin_lsn} on: readers that need it have to use that one{each.catch_up_progress}"
            for begin, flush, each in known
            if begin > max(oldest[0], flush - self.keep_bytes)
        ]

    def _all_members_heard(self) -> bool:
        """Whether the proposer knows the address of each member, so that other addresses are not of members."""
        if self.session is None:
            return False
        membership = self.session.membership
        members = {*membership.members, *(membership.new_members or ())}
        heard = {each.reported.safekeeper for each in self.safekeepers if each.reported}
        return bool(members) and members <= heard

    def _lost(self) -> str:
        """That no quorum follows the proposer, and what that means for commits."""
        if self.required is False:
            return "no quorum follows the proposer" + (" yet" if self.starts else "")
        lost = "no quorum follows the proposer yet" if self.starts else "the quorum is lost"
        return f"{lost}, {'commits' if self.required else 'commits that wait for it'} hang"

    def _why(self) -> str:
        if self.proposer is not None and self.proposer.error is not None:
            return self.proposer.error.sentence
        if self.phase == "unknown":
            return "the proposer does not report: it is not running, or it hangs"
        if self.phase != "leading":
            return STARTING.get(self.phase, f"the proposer is {self.phase}")
        following = sum(each.state in _FOLLOWING for each in self.safekeepers)
        return f"{following} of {len(self.safekeepers)} safekeepers follow the proposer"


def observe(settings: "Config") -> QuorumView | None:
    """The current state; None: neither safekeepers nor their proposer are on this machine. Reads a few small files."""
    section, here = settings.safekeepers, settings.parts
    # Safekeepers of other machines are seen where their proposer is.
    proposed_to = section.proposed_to if "bridge" in here else ()
    if not proposed_to and "safekeepers" not in here:
        return None
    from walsender_bridge.quorum.safekeeper import hosting

    proposer = proposer_record.read(settings.proposer_status)
    reported = {each.address: each for each in (proposer.safekeepers if proposer else ())}
    by_identity = {each.safekeeper: each for each in reported.values() if each.safekeeper}
    found: dict[str, SafekeeperView] = {}
    for each in hosting.of_machine(settings):
        status = safekeeper_record.read(each.status)
        own = status if isinstance(status, SafekeeperStatus) else None
        seen = reported.get(each.listen) or (by_identity.get(own.safekeeper) if own else None)
        found[seen.address if seen else each.listen] = SafekeeperView(
            *(each.name, each.listen, seen, own),
            server=status_file.read(each.wal_server_status, WalServerStatus),
            hosted=True,
            archiver=status_file.read(each.archiver_status, ArchiverStatus),
            ended=status.error if isinstance(status, EndedSafekeeper) else None,
        )
    for address in (*proposed_to, *reported):
        if address not in found:
            found[address] = SafekeeperView(address, address, reported.get(address))
    children = read_states(settings.run_dir, "bridge").children
    proposer_here = proposer is not None or "proposer" in children
    full = shared_files.full(settings.run_dir)
    views, bridge_here = tuple(found.values()), "bridge" in here
    return QuorumView(proposer, proposer_here, views, section.keep_bytes, full, bridge_here)
