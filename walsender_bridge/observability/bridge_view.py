"""Whether the bridge of this machine is the active one of several (`[machine] elect_bridge`), as it reports."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from walsender_bridge.runtime import processes, status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.status_file import Status

if TYPE_CHECKING:
    from walsender_bridge.config import Config


#: See `cli/bridge_election.py`.
BridgeState = Literal["active", "unsure", "standing by"]
ACTIVE: Final = "active"
UNSURE: Final = "unsure"
STANDING_BY: Final = "standing by"


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeStatus(Status):
    """`active_at`: where the active one is, empty if that is not known, for the reason in `error`."""

    state: BridgeState
    active_at: str = ""
    error: ErrorRecord | None = None

    @property
    def sentence(self) -> str:
        """The state, and where the active one is."""
        elsewhere = f", the one at {self.active_at} is active" if self.active_at else ""
        return self.state + (elsewhere if self.state == STANDING_BY else "")

    @property
    def problem(self) -> str:
        """Why it is not known which bridge is active; empty if it is."""
        if self.error is None:
            return ""
        what = "only the proposer runs" if self.state == UNSURE else "nothing of it runs"
        return f"the bridge is {self.state}, and {what} here: {self.error.sentence}"


def status_path(run_dir: Path) -> Path:
    """The file in which a bridge that is elected reports."""
    return run_dir / "bridge-election.status.json"


def observe(settings: "Config") -> BridgeStatus | None:
    """The state of the bridge here; None if none is elected here, or it does not run."""
    if settings.machine is None or not settings.machine.elect_bridge:
        return None
    found = status_file.read(status_path(settings.run_dir), BridgeStatus)
    return found if found is not None and processes.alive(found.pid) else None


def without_standby(settings: "Config", seen: BridgeStatus | None) -> "Config":
    """The configuration, without the bridge while that stands by: its sources and its quorum are those of another machine then.

    `seen`: what `observe` has found.
    """
    if seen is None or seen.state != STANDING_BY or settings.machine is None:
        return settings
    others = tuple(part for part in settings.machine.parts if part != "bridge")
    machine = settings.machine.model_copy(update={"parts": others})
    return settings.model_copy(update={"machine": machine})
