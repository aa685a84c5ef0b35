"""What is seen of the safekeepers at one moment: the source of `safekeeper status`, `status`, `top` and `/metrics`.

The proposer, where its bridge runs here, tells of every safekeeper that it reaches; each safekeeper that the
keeper hosts here tells of itself, and its WAL server of readers and slots (`proposer.status`, `safekeeper.status`,
`WalServer.status`). What both tell of one is joined by its identity. A file that is old, or of a process that is
gone, says nothing of now: its state is then `unknown`, and what it holds is still shown.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from walsender_bridge import processes, status_file
from walsender_bridge.config import Config
from walsender_bridge.safekeeper import hosting
from walsender_bridge.supervisor import read_states
from walsender_bridge.wire.lsn import parse_lsn

#: Seconds after which what a process said of itself is no longer taken for now.
STALE: Final = 5.0
_FOLLOWING: Final = ("streaming", "catching up")


@dataclass(frozen=True, slots=True)
class SafekeeperView:
    """One safekeeper. `told`: by the proposer; `own`: by itself; `server`: by its WAL server. Each may be empty.

    `name`: where it is hosted here, else its address.
    """

    name: str
    address: str
    told: Mapping[str, Any]
    own: Mapping[str, Any]
    server: Mapping[str, Any]
    hosted: bool

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
        if archive.get("unreserved"):
            words.append(
                f"the archive has nothing from {archive['archived_lsn'] or 'the beginning'} on, and no more WAL "
                "is kept for it (max_slot_wal_keep_size)"
            )
        return words

    @property
    def begin_lsn(self) -> str | None:
        """The oldest WAL that it holds. Of one on another machine: that it held at the beginning of the term."""
        lsn: str | None = self.own.get("begin_lsn") or self.told.get("begin_lsn")
        return lsn

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
        if self.proposer_here and not self.quorum:
            words.append(f"a quorum is lost, commits hang: {self._why()}")
        if unlike := (self.proposer.get("membership") or {}).get("unlike"):
            words.append(f"the membership differs from the configured one: {unlike}")
        spare = self._all_members_heard()
        for each in self.safekeepers:
            if spare and each.told.get("member") is False:
                continue  # it has left, or is to join: nobody needs it
            name = f"safekeeper {each.address}"
            if each.state == "rebuild":
                words.append(f"{name} stayed too far behind: its WAL was let go, it begins anew")
            elif each.state == "full":
                words.append(f"{name} has no room: {each.own.get('why')}")
            elif each.state not in {*_FOLLOWING, "following"}:
                fault = each.told.get("fault")
                words.append(f"{name} is {each.state}" + (f": {fault}" if fault else ""))
            elif damaged := each.server.get("damaged"):
                words.append(f"{name} holds damaged WAL, which is not served: {damaged[0]}")
            elif each.short_of_room:
                words.append(f"{name} will soon take no more WAL: {each.short_of_room}")
            words += [f"{name}: {word}" for word in each.let_go]
        return words

    @property
    def shorter(self) -> list[str]:
        """Members that began anew and lack WAL that `keep_bytes` has others retain: no fault, but readers need to know.

        A beginning is known exactly, or as that of some time ago, and only moves up: to where `keep_bytes` begins. So
        one above that, and above another member's, is missing WAL whatever has been removed since.
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
            f"has it from {oldest[2].begin_lsn} on: readers that need it have to go there"
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


def look(settings: Config) -> QuorumView | None:
    """What is seen now; None: no safekeepers are configured. Reads a few small files."""
    section = settings.safekeepers
    if not section.proposed_to:
        return None
    proposer = status_file.read(settings.proposer_status)
    told = {each["address"]: each for each in proposer.get("safekeepers", ())}
    by_identity = {each["safekeeper"]: each for each in told.values() if each.get("safekeeper")}
    found: dict[str, SafekeeperView] = {}
    for each in hosting.hosted(section, settings.keeper[0].data_dir, settings.run_dir):
        own = status_file.read(each.status)
        seen = told.get(each.listen) or by_identity.get(own.get("safekeeper")) or {}
        server = status_file.read(each.wal_server_status)
        found[seen.get("address", each.listen)] = SafekeeperView(
            each.name, each.listen, seen, own, server, hosted=True
        )
    for address in (*section.proposed_to, *told):
        if address not in found:
            found[address] = SafekeeperView(
                address, address, told.get(address, {}), {}, {}, hosted=False
            )
    here = bool(proposer) or "proposer" in read_states(settings.run_dir, "bridge").get(
        "children", {}
    )
    return QuorumView(proposer, here, tuple(found.values()), section.keep_bytes)


def fresh(path: Path) -> dict[str, Any]:
    """What a process says there, if it lives and says it now; else {}."""
    found = status_file.read(path)
    return found if _fresh(found) else {}


def _fresh(record: Mapping[str, Any]) -> bool:
    """Whether a process that lives said it just now."""
    at, pid = record.get("updated_at", 0.0), record.get("pid", 0)
    return time.time() - at < STALE and processes.alive(pid)
