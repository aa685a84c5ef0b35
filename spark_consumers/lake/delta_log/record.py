"""What the Delta logs of a lake show: `<lake>/_tuskline/delta.json`, replaced by the writer when it changes; for `status` and `doctor`."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from spark_consumers.lake.store.lake_store import STATE
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import json_model, logs

if TYPE_CHECKING:
    from spark_consumers.lake.store.lake_store import LakeStore

_FILE: Final = f"{STATE}/delta.json"

log = logs.logger()


@dataclass(frozen=True, slots=True)
class Behind:
    """A table whose Delta log does not show its newest epoch, and why.

    `shown`: the epoch that the log shows; None if there is no log, or that is not known. `newest`: the last one that has changed the table.
    """

    shown: int | None
    newest: int
    reason: str


@dataclass(frozen=True, slots=True)
class DeltaRecord:
    """The logs of a lake after an epoch. `tables`: how many there are to be; `behind`: those that are behind, by the tables' names."""

    tables: int = 0
    behind: Mapping[str, Behind] = field(default_factory=dict)


def read_record(store: "LakeStore") -> DeltaRecord | None:
    """The last one; None without one. It is a report, so a damaged one counts as none."""
    with contextlib.suppress(OSError, TusklineError, ValueError):
        return json_model.decode(DeltaRecord, store.read(_FILE))
    return None


def write_record(store: "LakeStore", record: DeltaRecord) -> bool:
    """Replace it; False, and a line in the log, if that fails: the epoch does not fail with it."""
    try:
        store.replace(_FILE, json_model.encode(record), durable=False)
    except (OSError, TusklineError) as error:
        log.warning("Delta logs' state is not recorded", error=str(error)[:500])
        return False
    return True
