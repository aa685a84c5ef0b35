"""What the controller of slot copies says of itself, where it runs here: for `status`, `top`, `/readyz` and `/metrics`."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from walsender_bridge.config import Config
from walsender_bridge.runtime import processes, status_file
from walsender_bridge.runtime.times import with_iso_times

#: Seconds, besides a few polls, after which what it said is no longer taken for now.
STALE: Final = 15.0


@dataclass(frozen=True, slots=True)
class SlotsView:
    """`told`: its report (`slot_sync.report`), empty when it says nothing, or has not for long."""

    told: Mapping[str, Any]

    @property
    def ill(self) -> list[str]:
        """What is not as it should be."""
        if not self.told:
            return ["the controller of slot copies says nothing: it does not run, or hangs"]
        words: list[str] = list(self.told["problems"])
        words += [
            f"{each['standby']}: the controller has not looked at it for {age:.0f} s"
            for each in self.told["standbys"]
            if (age := self.told["updated_at"] - each["at"]) > STALE * 2
        ]
        words += [
            f"{each['standby']}: slot {each['slot']} is {each['state']}: {each['why']}"
            for each in self.told["slots"]
            if each["expected"] and not each["safe"] and not each["repair"]
        ]
        return words

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each slot on each candidate; `age`: seconds since it was last proven. None: not known."""
        return [
            {
                "slot": each["slot"],
                "candidate": each["standby"],
                "verdict": each["state"],
                "reason": each["reason"],
                "age": each["age"],
                "lag_bytes": each["lag_bytes"],
            }
            for each in self.told.get("slots", ())
        ]


def shown(told: Mapping[str, Any]) -> dict[str, Any]:
    """A report (`slot_sync.report`) for `--json`, with times as ISO 8601. Pure."""
    if not told:
        return {}
    return {
        **with_iso_times(told, "updated_at"),
        "standbys": [with_iso_times(each, "at") for each in told["standbys"]],
        "slots": [
            # The standby's clock counts microseconds.
            {**each, "evidence": with_iso_times(each["evidence"], "proven_at", unit=1e-6)}
            if "evidence" in each
            else each
            for each in told["slots"]
        ],
    }


def look(settings: Config) -> SlotsView | None:
    """What it says now; None: no copies of slots are configured."""
    if settings.slots is None:
        return None
    found = status_file.read(settings.slots_status)
    good_for = STALE + 5 * settings.slots.poll
    fresh = time.time() - found.get("updated_at", 0.0) < good_for
    return SlotsView(found if fresh and processes.alive(found.get("pid", 0)) else {})
