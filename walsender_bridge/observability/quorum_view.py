"""The safekeepers at one moment: the source of `safekeeper status`, `status`, `top` and `/metrics`.

If its bridge runs here, the proposer reports every safekeeper that it reaches. Each safekeeper hosted by the log server
here reports itself, and its WAL server reports readers and slots (`proposer.status`, `safekeeper.status`,
`WalServer.status`). Both reports of a safekeeper are joined by its identity. A file that is old, or whose process is gone,
is stale: the state is then `unknown`, and the other values are still shown.
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

#: Seconds after which the status of a process is stale.
STALE: Final = 5.0
#: The same for an archiver, which waits between two attempts.
ARCHIVER_STALE: Final = 90.0
_NO_STATUS: Final = (
    ", so safekeepers and proposer cannot write their status files there: the status shown is old, and commit gates that"
    " wait for the quorum stay closed; free space there (PostgreSQL's dynamic shared memory may use it, too)"
)
_FOLLOWING: Final = ("streaming", "catching up")


@dataclass(frozen=True, slots=True)
class SafekeeperView:
    """One safekeeper, as `reported` by the proposer, by itself (`own`), and by its processes `server` and `archiver`. Each may be empty.

    `name`: if it is hosted here, otherwise its address.
    """

    name: str
    address: str
    reported: Mapping[str, Any]
    own: Mapping[str, Any]
    server: Mapping[str, Any]
    hosted: bool
    archiver: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """The state that the proposer shows; `full` if its disk is; without a proposer, the state that it reports itself."""
        if self.hosted and not _fresh(self.own):
            return "away"
        if self.own.get("state") == "full":
            return "full"
        state: str = self.reported.get("shown") or self.own.get("state") or "unknown"
        return state

    @property
    def fault(self) -> str:
        """Why it is away, if it or the proposer reported an error."""
        error = self.own.get("error") or {}
        if self.hosted and error and not _fresh(self.own):
            return f"{error['where']}: {error['what']}; {error['repair']}"
        fault: str = self.reported.get("fault") or ""
        return fault

    @property
    def low_on_space(self) -> str:
        """The free space, if it is below the limit although prepared segments still take WAL; otherwise empty."""
        free, limit = self.own.get("free_bytes"), self.own.get("free_limit")
        if not self.hosted or not _fresh(self.own) or free is None or free >= (limit or 0):
            return ""
        return f"{free} bytes are free, less than free_bytes = {limit}"

    @property
    def lost_wal(self) -> list[str]:
        """Slots and archives that have lost WAL, or are about to, because more was needed than is kept for them."""
        lost = [each for each in self.server.get("slots", ()) if each.get("wal_status") == "lost"]
        found = [
            f"replication slot {each['slot']} is lost: WAL from {each['restart_lsn']} on has been removed "
            "(max_slot_wal_keep_size); drop the slot"
            for each in lost
        ]
        archive = self.own.get("archive") or {}
        found += [
            f"WAL from {begin} to {end} was removed before it was archived here, and may be missing in the archive"
            for begin, end in archive.get("missing", ())
        ]
        error = self.archiver.get("error")
        if error and _fresh(self.archiver, ARCHIVER_STALE):
            found.append(
                f"WAL is not archived: {error['what']} ({error['where']}); {error['repair']}"
            )
        if archive.get("unreserved"):
            found.append(
                f"the archive has no WAL from {archive['archived_lsn'] or 'the beginning'} on, and WAL is no longer "
                "kept for it (max_slot_wal_keep_size)"
            )
        return found

    @property
    def begin_lsn(self) -> str | None:
        """The begin of the WAL that it has; on another machine, as it last reported to the proposer."""
        lsn: str | None = self.own.get("begin_lsn") or self.reported.get("begin_lsn")
        return lsn

    @property
    def damaged(self) -> list[str]:
        """Damaged segments, which it does not serve."""
        return [*self.server.get("damaged", ()), *self.own.get("damaged", ())]

    @property
    def catch_up_fault(self) -> str:
        """Why it cannot catch up on older WAL that others have; empty: it can, or lacks none."""
        why = (self.own.get("catch_up") or {}).get("why")
        if not (self.reported.get("stuck") and self.reported.get("catch_up_target_lsn")):
            return ""
        return (
            f"lacks WAL from {self.reported['catch_up_target_lsn']} to {self.begin_lsn}, and could not get it from another: "
            f"{why or 'their WAL is damaged, or cannot be read'}"
        )

    @property
    def catch_up_progress(self) -> str:
        """The progress of its catch-up on older WAL, as the end of a sentence."""
        catch_up = self.own.get("catch_up") or {}
        if catch_up.get("why"):
            return f"; {catch_up['why']}"
        lsn = self.reported.get("catch_up_target_lsn")
        return f" until it has caught up, down to {lsn}" if lsn else ""

    @property
    def catch_up_bytes(self) -> int | None:
        """Bytes of older WAL that it is still to receive from another member; None: unknown."""
        if self.begin_lsn is None or "catch_up_target_lsn" not in self.reported:
            return None
        lsn = self.reported["catch_up_target_lsn"]
        return parse_lsn(self.begin_lsn) - parse_lsn(lsn) if lsn else 0

    @property
    def flush_lsn(self) -> str | None:
        """The last known durable end of its WAL."""
        lsn: str | None = self.own.get("flush_lsn") or self.reported.get("flush_lsn")
        return lsn


@dataclass(frozen=True, slots=True)
class QuorumView:
    """The proposer (empty: it has no status) and the safekeepers. `proposer_here`: its bridge runs here, or did."""

    proposer: Mapping[str, Any]
    proposer_here: bool
    safekeepers: tuple[SafekeeperView, ...]
    #: The configured amount of WAL that each safekeeper retains behind its end.
    keep_bytes: int = 0
    #: Set if there is no space for the status files of the processes here (`shared_files.full`).
    memory_full: str = ""

    @property
    def phase(self) -> str:
        """The proposer's phase; `unknown` if its status is stale."""
        if self.proposer and (_fresh(self.proposer) or self.proposer.get("phase") == "ended"):
            phase: str = self.proposer["phase"]
            return phase
        return "unknown"

    @property
    def quorum(self) -> bool:
        """Whether a majority follows the proposer; otherwise commits wait."""
        return self.phase == "leading" and bool(self.proposer.get("quorum"))

    @property
    def lag_bytes(self) -> int | None:
        """Bytes of WAL that the primary has sent and that are not committed yet; None: unknown."""
        if not self.quorum:
            return None
        return parse_lsn(self.proposer["end_lsn"]) - parse_lsn(self.proposer["commit_lsn"])

    @property
    def problems(self) -> list[str]:
        """The problems as sentences, the worst first."""
        found = []
        if self.memory_full:
            found.append(f"{self.memory_full}{_NO_STATUS}")
        if self.memory_full and self.phase == "unknown":
            found.append("it is unknown whether a quorum follows the proposer")
        elif self.proposer_here and not self.quorum:
            found.append(f"the quorum is lost, commits hang: {self._why()}")
        if fault := self.proposer.get("commit_page_fault"):
            found.append(
                f"commit gates that wait for the quorum stay closed: {fault}; free space there, or give the folder to the bridge's user"
            )
        if unlike := (self.proposer.get("membership") or {}).get("unlike"):
            found.append(f"the membership differs from the configured one: {unlike}")
        spare = self._all_members_heard()
        for each in self.safekeepers:
            if spare and each.reported.get("member") is False:
                continue  # it has left, or has not joined yet: it is not needed
            name = f"safekeeper {each.address}"
            if self.memory_full and each.state == "away" and not each.fault:
                continue  # its state is unknown
            if each.state == "rebuild":
                found.append(
                    f"{name} fell too far behind: the WAL that it needs was removed, and it needs a full resync"
                )
            elif each.state == "full":
                found.append(f"{name} has no space for WAL: {each.own.get('why')}")
            elif each.state not in {*_FOLLOWING, "following"}:
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
            if each.begin_lsn and each.flush_lsn and each.reported.get("member") is not False
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
        membership = self.proposer.get("membership") or {}
        members = {*membership.get("members", ()), *(membership.get("new_members") or ())}
        heard = {each.reported.get("safekeeper") for each in self.safekeepers if each.reported}
        return bool(members) and members <= heard

    def _why(self) -> str:
        error = self.proposer.get("error") or {}
        if error.get("what"):
            return f"{error['what']}" + (f"; {error['repair']}" if error.get("repair") else "")
        if self.phase == "unknown":
            return "the proposer does not report: it is not running, or it hangs"
        if self.phase != "leading":
            return f"the proposer is {self.phase}"
        following = sum(each.state in _FOLLOWING for each in self.safekeepers)
        return f"{following} of {len(self.safekeepers)} safekeepers follow the proposer"


def observe(settings: "Config") -> QuorumView | None:
    """The current state; None: no safekeepers are configured. Reads a few small files."""
    section = settings.safekeepers
    if not section.proposed_to:
        return None
    from walsender_bridge.quorum.safekeeper import hosting

    proposer = status_file.read(settings.proposer_status)
    reported = {each["address"]: each for each in proposer.get("safekeepers", ())}
    by_identity = {each["safekeeper"]: each for each in reported.values() if each.get("safekeeper")}
    found: dict[str, SafekeeperView] = {}
    for each in hosting.hosted(section, settings.log_server[0].data_dir, settings.run_dir):
        own = status_file.read(each.status)
        seen = reported.get(each.listen) or by_identity.get(own.get("safekeeper")) or {}
        server = status_file.read(each.wal_server_status)
        found[seen.get("address", each.listen)] = SafekeeperView(
            *(each.name, each.listen, seen, own, server),
            hosted=True,
            archiver=status_file.read(each.archiver_status),
        )
    for address in (*section.proposed_to, *reported):
        if address not in found:
            found[address] = SafekeeperView(
                address, address, reported.get(address, {}), {}, {}, hosted=False
            )
    here = bool(proposer) or "proposer" in read_states(settings.run_dir, "bridge").get(
        "children", {}
    )
    full = shared_files.full(settings.run_dir)
    return QuorumView(proposer, here, tuple(found.values()), section.keep_bytes, full)


def fresh(path: Path) -> dict[str, Any]:
    """The status in this file, if its process lives and it is not stale; otherwise {}."""
    found = status_file.read(path)
    return found if _fresh(found) else {}


def _fresh(record: Mapping[str, Any], stale: float = STALE) -> bool:
    """Whether the process lives and its status is not stale."""
    at, pid = record.get("updated_at", 0.0), record.get("pid", 0)
    return time.time() - at < stale and processes.alive(pid)
