"""The report of the controller of slot copies, if it runs here: for `status`, `top`, `/readyz` and `/metrics`."""

from dataclasses import dataclass
from typing import Any, Final

from slot_sync.status_record import SlotsStatus
from walsender_bridge.config import Config
from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.json_model import plain
from walsender_bridge.runtime.times import with_iso_times

#: Seconds, in addition to a few polls, after which a report is stale.
STALE: Final = 15.0


@dataclass(frozen=True, slots=True)
class SlotsView:
    """`report`: of the controller; None if it is missing or stale."""

    report: SlotsStatus | None

    @property
    def problems(self) -> list[str]:
        """The problems of the controller and of the copies, as sentences."""
        if self.report is None:
            return ["the controller of slot copies does not report: it is not running, or it hangs"]
        found = list(self.report.problems)
        found += [
            f"{each.standby}: the controller has not probed it for {age:.0f} s"
            for each in self.report.standbys
            if (age := self.report.updated_at - each.at) > STALE * 2
        ]
        found += [
            f"{each.standby}: slot {each.slot} is {each.state}: {each.why}"
            for each in self.report.slots
            if each.expected and not each.safe and not each.repair
        ]
        return found

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for each slot on each candidate; `age`: seconds since it was last proven; None: unknown."""
        return [
            {
                "slot": each.slot,
                "candidate": each.standby,
                "verdict": each.state,
                "reason": each.reason,
                "age": each.age,
                "lag_bytes": each.lag_bytes,
            }
            for each in (self.report.slots if self.report is not None else ())
        ]


def shown(report: SlotsStatus | None) -> dict[str, Any]:
    """A report for `--json`, with times as ISO 8601. Pure."""
    if report is None:
        return {}
    record = with_iso_times(plain(report), "updated_at")
    if not report.updated_at:
        # No controller published it: it was made for this output.
        del record["pid"], record["updated_at"]
    record["standbys"] = [with_iso_times(each, "at") for each in record["standbys"]]
    for each in record["slots"]:
        # The standby's clock counts microseconds.
        each["evidence"] = with_iso_times(each["evidence"], "proven_at", unit=1e-6)
    return record


def observe(settings: Config) -> SlotsView | None:
    """The current report; None: no copies of slots are managed here."""
    if settings.slots is None or "slots" not in settings.parts:
        return None
    found = status_file.read(settings.slots_status, SlotsStatus)
    fresh = found is not None and found.fresh(STALE + 5 * settings.slots.poll)
    return SlotsView(found if fresh else None)
