"""What is seen of the safekeepers at one moment: the source of `safekeeper status`, `status`, `top` and `/metrics`.

The proposer, where its bridge runs here, tells of every safekeeper that it reaches; each safekeeper that the
log server hosts here tells of itself, and its WAL server of readers and slots (`proposer.status`, `safekeeper.status`,
`WalServer.status`). What both tell of one is joined by its identity. A file that is old, or of a process that is
gone, says nothing of now: its state is then `unknown`, and what it holds is still shown.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.runtime import processes, shared_files, status_file
from walsender_bridge.runtime.supervisor import read_states

if TYPE_CHECKING:
    from walsender_bridge.config import Config

#: Seconds after which what a process said of itself is no longer taken for now.
STALE: Final = 5.0
#: The same of an archiver, which waits between two tries.
ARCHIVER_STALE: Final = 90.0
_UNTOLD: Final = (
    ", and safekeepers and proposer cannot say there how they are: what is shown of them is old, and commit gates that"
    " wait for the quorum stay closed; make room (PostgreSQL's dynamic shared memory may lie there, too)"
)
_FOLLOWING: Final = ("streaming", "catching up")


@dataclass(frozen=True, slots=True)
class SafekeeperView:
    """One safekeeper. `told`: by the proposer; `own`: by itself; `server`, `archiver`: by its processes. Each may be empty.

    `name`: where it is hosted here, else its address.
    """

    name: str
    address: str
    told: Mapping[str, Any]
    own: Mapping[str, Any]
    server: Mapping[str, Any]
    hosted: bool
    archiver: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """As the proposer shows it; `full` (its disk), or without a proposer what it says of itself."""
        if self.hosted and not _fresh(self.own):
            return "away"
        if self.own.get("state") == "full":
            return "full"
        state: str = self.told.get("shown") or self.own.get("state") or "unknown"
        return state

    @property
    def fault(self) -> str:
        """Why it is not there, if it or the proposer said so."""
        error = self.own.get("error") or {}
        if self.hosted and error and not _fresh(self.own):
            return f"{error['where']}: {error['what']}; {error['repair']}"
        fault: str = self.told.get("fault") or ""
        return fault

    @property
    def short_of_room(self) -> str:
        """That less is free than is to stay so, though what it has prepared still takes WAL; empty: there is room."""
        free, limit = self.own.get("free_bytes"), self.own.get("free_limit")
        if not self.hosted or not _fresh(self.own) or free is None or free >= (limit or 0):
            return ""
        return f"{free} bytes are free, less than free_bytes = {limit}"

    @property
    def let_go(self) -> list[str]:
        """What is lost, or about to be, because it needed more old WAL than is kept for it."""
        lost = [each for each in self.server.get("slots", ()) if each.get("wal_status") == "lost"]
        words = [
            f"replication slot {each['slot']} is lost: WAL from {each['restart_lsn']} on has been removed "
            "(max_slot_wal_keep_size); drop it"
            for each in lost
        ]
        archive = self.own.get("archive") or {}
        words += [
            f"WAL from {begin} to {end} was removed before it was archived here, and is not known to be in the archive"
            for begin, end in archive.get("missing", ())
        ]
        error = self.archiver.get("error")
        if error and _fresh(self.archiver, ARCHIVER_STALE):
            words.append(
                f"WAL is not archived: {error['what']} ({error['where']}); {error['repair']}"
            )
        if archive.get("unreserved"):
            words.append(
                f"the archive has nothing from {archive['archived_lsn'] or 'the beginning'} on, and no more WAL "
                "is kept for it (max_slot_wal_keep_size)"
            )
        return words

    @property
    def begin_lsn(self) -> str | None:
        """The oldest WAL that it holds. Of one on another machine: that it told the proposer last."""
        lsn: str | None = self.own.get("begin_lsn") or self.told.get("begin_lsn")
        return lsn

    @property
    def damaged(self) -> list[str]:
        """Segments that it holds and does not give away."""
        return [*self.server.get("damaged", ()), *self.own.get("damaged", ())]

    @property
    def not_brought(self) -> str:
        """Why it cannot be brought older WAL that others have; empty: it can, or lacks none."""
        why = (self.own.get("catch_up") or {}).get("why")
        if not (self.told.get("stuck") and self.told.get("catch_up_target_lsn")):
            return ""
        return (
            f"lacks WAL from {self.told['catch_up_target_lsn']} to {self.begin_lsn}, and no other could bring it: "
            f"{why or 'theirs is damaged, or cannot be read'}"
        )

    @property
    def brought(self) -> str:
        """What is known of the older WAL that it is being brought, as the end of a sentence."""
        older = self.own.get("catch_up") or {}
        if older.get("why"):
            return f"; {older['why']}"
        lsn = self.told.get("catch_up_target_lsn")
        return f" until it has been brought it, down to {lsn}" if lsn else ""

    @property
    def catch_up_bytes(self) -> int | None:
        """How much older WAL another member has and it is still to be brought; None: nothing says."""
        if self.begin_lsn is None or "catch_up_target_lsn" not in self.told:
            return None
        lsn = self.told["catch_up_target_lsn"]
        return parse_lsn(self.begin_lsn) - parse_lsn(lsn) if lsn else 0

    @property
    def flush_lsn(self) -> str | None:
        """The durable end of its WAL, as far as is known."""
        lsn: str | None = self.own.get("flush_lsn") or self.told.get("flush_lsn")
        return lsn


@dataclass(frozen=True, slots=True)
class QuorumView:
    """The proposer (empty: it says nothing) and the safekeepers. `proposer_here`: its bridge runs here, or did."""

    proposer: Mapping[str, Any]
    proposer_here: bool
    safekeepers: tuple[SafekeeperView, ...]
    #: How much WAL each safekeeper retains behind its end, as configured.
    keep_bytes: int = 0
    #: That there is no room for what the processes here say of themselves (`in_memory.full`).
    memory_full: str = ""

    @property
    def phase(self) -> str:
        """The proposer's phase; `unknown` when what it said is old."""
        if self.proposer and (_fresh(self.proposer) or self.proposer.get("phase") == "ended"):
            phase: str = self.proposer["phase"]
            return phase
        return "unknown"

    @property
    def quorum(self) -> bool:
        """Whether a majority follows the proposer: else commits wait."""
        return self.phase == "leading" and bool(self.proposer.get("quorum"))

    @property
    def lag_bytes(self) -> int | None:
        """How much WAL the primary has sent that is not committed yet; None: not known."""
        if not self.quorum:
            return None
        return parse_lsn(self.proposer["end_lsn"]) - parse_lsn(self.proposer["commit_lsn"])

    @property
    def ill(self) -> list[str]:
        """What does not run as it should, the worst first."""
        words = []
        if self.memory_full:
            words.append(f"{self.memory_full}{_UNTOLD}")
        if self.memory_full and self.phase == "unknown":
            words.append("whether a quorum follows is not known")
        elif self.proposer_here and not self.quorum:
            words.append(f"a quorum is lost, commits hang: {self._why()}")
        if fault := self.proposer.get("commit_page_fault"):
            words.append(
                f"commit gates that wait for the quorum stay closed: {fault}; make room there, or give the bridge's user the folder"
            )
        if unlike := (self.proposer.get("membership") or {}).get("unlike"):
            words.append(f"the membership differs from the configured one: {unlike}")
        spare = self._all_members_heard()
        for each in self.safekeepers:
            if spare and each.told.get("member") is False:
                continue  # it has left, or is to join: nobody needs it
            name = f"safekeeper {each.address}"
            if self.memory_full and each.state == "away" and not each.fault:
                continue  # nothing is known of it
            if each.state == "rebuild":
                words.append(f"{name} stayed too far behind: its WAL was let go, it begins anew")
            elif each.state == "full":
                words.append(f"{name} has no room: {each.own.get('why')}")
            elif each.state not in {*_FOLLOWING, "following"}:
                words.append(f"{name} is {each.state}" + (f": {each.fault}" if each.fault else ""))
            elif damaged := each.damaged:
                words.append(f"{name} holds damaged WAL, which is not served: {damaged[0]}")
            elif each.not_brought:
                words.append(f"{name} {each.not_brought}")
            elif each.short_of_room:
                words.append(f"{name} will soon take no more WAL: {each.short_of_room}")
            words += [f"{name}: {word}" for word in each.let_go]
        return words

    @property
    def shorter(self) -> list[str]:
        """Members that began anew and lack WAL that `keep_bytes` has others retain: no fault, but readers need to know.

        A beginning moves up to where `keep_bytes` begins, and one that is above that comes down, while older WAL is
        brought. So who is above that, and above another member, lacks WAL, or did a moment ago.
        """
        known = [
            (parse_lsn(each.begin_lsn), parse_lsn(each.flush_lsn), each)
            for each in self.safekeepers
            if each.begin_lsn and each.flush_lsn and each.told.get("member") is not False
            if parse_lsn(each.begin_lsn)  # it has WAL
        ]
        oldest = min(known, key=lambda each: each[0], default=None)
        if oldest is None:
            return []
        return [
            f"safekeeper {each.address} has no WAL before {each.begin_lsn}, and safekeeper {oldest[2].address} "
            f"has it from {oldest[2].begin_lsn} on: readers that need it have to go there{each.brought}"
            for begin, flush, each in known
            if begin > max(oldest[0], flush - self.keep_bytes)
        ]

    def _all_members_heard(self) -> bool:
        """Whether the proposer knows an address of each member, so that the others are none."""
        membership = self.proposer.get("membership") or {}
        members = {*membership.get("members", ()), *(membership.get("new_members") or ())}
        heard = {each.told.get("safekeeper") for each in self.safekeepers if each.told}
        return bool(members) and members <= heard

    def _why(self) -> str:
        error = self.proposer.get("error") or {}
        if error.get("what"):
            return f"{error['what']}" + (f"; {error['repair']}" if error.get("repair") else "")
        if self.phase == "unknown":
            return "the proposer says nothing: it does not run, or hangs"
        if self.phase != "leading":
            return f"the proposer is {self.phase}"
        following = sum(each.state in _FOLLOWING for each in self.safekeepers)
        return f"{following} of {len(self.safekeepers)} safekeepers follow"


def look(settings: "Config") -> QuorumView | None:
    """What is seen now; None: no safekeepers are configured. Reads a few small files."""
    section = settings.safekeepers
    if not section.proposed_to:
        return None
    from walsender_bridge.quorum.safekeeper import hosting

    proposer = status_file.read(settings.proposer_status)
    told = {each["address"]: each for each in proposer.get("safekeepers", ())}
    by_identity = {each["safekeeper"]: each for each in told.values() if each.get("safekeeper")}
    found: dict[str, SafekeeperView] = {}
    for each in hosting.hosted(section, settings.log_server[0].data_dir, settings.run_dir):
        own = status_file.read(each.status)
        seen = told.get(each.listen) or by_identity.get(own.get("safekeeper")) or {}
        server = status_file.read(each.wal_server_status)
        found[seen.get("address", each.listen)] = SafekeeperView(
            *(each.name, each.listen, seen, own, server),
            hosted=True,
            archiver=status_file.read(each.archiver_status),
        )
    for address in (*section.proposed_to, *told):
        if address not in found:
            found[address] = SafekeeperView(
                address, address, told.get(address, {}), {}, {}, hosted=False
            )
    here = bool(proposer) or "proposer" in read_states(settings.run_dir, "bridge").get(
        "children", {}
    )
    full = shared_files.full(settings.run_dir)
    return QuorumView(proposer, here, tuple(found.values()), section.keep_bytes, full)


def fresh(path: Path) -> dict[str, Any]:
    """What a process says there, if it lives and says it now; else {}."""
    found = status_file.read(path)
    return found if _fresh(found) else {}


def _fresh(record: Mapping[str, Any], stale: float = STALE) -> bool:
    """Whether a process that lives said it just now."""
    at, pid = record.get("updated_at", 0.0), record.get("pid", 0)
    return time.time() - at < stale and processes.alive(pid)
