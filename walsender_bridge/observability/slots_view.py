"""The report of the controller of slot copies, if it runs here: for `status`, `top`, `/readyz` and `/metrics`."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from walsender_bridge.config import Config
from walsender_bridge.runtime import processes, status_file
from walsender_bridge.runtime.times import with_iso_times

#: Seconds, in addition to a few polls, after which a report is stale.
STALE: Final = 15.0


@dataclass(frozen=True, slots=True)
class SlotsView:
    """`report`: of the controller (`slot_sync.report`); empty if it is missing or stale."""

    report: Mapping[str, Any]

    @property
    def problems(self) -> list[str]:
        """The problems of the controller and of the copies, as sentences."""
        if not self.report:
            return ["the controller of slot copies does not report: it is not running, or it hangs"]
        found: list[str] = list(self.report["problems"])
        found += [
            f"{each['standby']}: the controller has not probed it for {age:.0f} s"
            for each in self.report["standbys"]
            if (age := self.report["updated_at"] - each["at"]) > STALE * 2
        ]
        found += [
            f"{each['standby']}: slot {each['slot']} is {each['state']}: {each['why']}"
            for each in self.report["slots"]
            if each["expected"] and not each["safe"] and not each["repair"]
        ]
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each slot on each candidate; `age`: seconds since it was last proven; None: unknown."""
        return [
            {
                "slot": each["slot"],
                "candidate": each["standby"],
                "verdict": each["state"],
                "reason": each["reason"],
                "age": each["age"],
                "lag_bytes": each["lag_bytes"],
            }
            for each in self.report.get("slots", ())
        ]


def shown(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report (`slot_sync.report`) for `--json`, with times as ISO 8601. Pure."""
    if not report:
        return {}
    return {
        **with_iso_times(report, "updated_at"),
        "standbys": [with_iso_times(each, "at") for each in report["standbys"]],
        "slots": [
            # The standby's clock counts microseconds.
            {**each, "evidence": with_iso_times(each["evidence"], "proven_at", unit=1e-6)}
            if "evidence" in each
            else each
            for each in report["slots"]
        ],
    }


def observe(settings: Config) -> SlotsView | None:
    """The current report; None: no copies of slots are configured."""
    if settings.slots is None:
        return None
    found = status_file.read(settings.slots_status)
    good_for = STALE + 5 * settings.slots.poll
    fresh = time.time() - found.get("updated_at", 0.0) < good_for
    return SlotsView(found if fresh and processes.alive(found.get("pid", 0)) else {})
