"""The record of one standby, in a file that is replaced as a whole: `<folder>/<candidate>.json`.

Invariant: when `save` returns, the new record is on disk; if it fails, the file is unchanged. So a copy is always named
by the record that was saved before it was created, whichever process dies and when.

A file that is unreadable, or fails its checksum (`runtime.checksummed_json`), is renamed and kept, and the record is
empty: no copy is then taken for ours, and none is dropped. The file of a newer version is refused.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from slot_sync.resolver.observed import (
    Confirmed,
    CopyRecord,
    FeedbackEpochKey,
    Incarnation,
    Reserved,
    Settled,
    Sighting,
    SlotPosition,
    StandbyRecord,
)
from walsender_bridge.errors import ConfigError, NotSupportedError
from walsender_bridge.runtime import checksummed_json, logs, record_file
from walsender_bridge.runtime.folder import FolderDisk

#: A file of an older version is renamed and kept, like a damaged one.
VERSION: Final = 6

_log = logs.logger()


class RecordFile:
    """The record of one candidate."""

    def __init__(self, folder: Path, candidate: str) -> None:
        self.path = folder / f"{candidate}.json"

    def load(self) -> StandbyRecord:
        """The last saved record; an empty one if there is none or it is damaged, in which case the file is renamed and kept.

        Raises `NotSupportedError` for a newer version's file, `ConfigError` for one that this user may not read.
        """
        found = self.peek()
        if found is None and self.path.exists():
            aside = record_file.keep_aside(
                FolderDisk(self.path.parent), self.path.name, ".damaged-"
            )
            _log.error(
                "record of slot copies is damaged; starting with an empty one",
                kept_aside=str(self.path.with_name(aside)),
            )
        return found or StandbyRecord()

    def peek(self) -> StandbyRecord | None:
        """The last saved record, without side effects; None if there is no readable one. Raises as `load`."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(
                f"could not read the record of slot copies: {error.strerror}",
                where=str(self.path),
                repair="give this user read permission on the folder [log] data_dir",
            ) from None
        try:
            values = checksummed_json.opened(text, checked=False)
            version = values["version"]
            if version == VERSION:
                return _record(checksummed_json.opened(text)["record"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        if isinstance(version, int) and version > VERSION:
            raise NotSupportedError(
                f"the record of slot copies has version {version}, but this version of Tuskline supports {VERSION}",
                where=str(self.path),
                repair="install the version of Tuskline that wrote it",
            )
        return None

    def save(self, record: StandbyRecord) -> None:
        """Replace the file, durably. Raises `ConfigError` when it cannot be written."""
        try:
            checksummed_json.save(self.path, {"version": VERSION, "record": _values(record)})
        except OSError as error:
            raise ConfigError(
                f"could not write the record of slot copies: {error.strerror}",
                where=str(self.path),
                repair="give this user write permission on the folder [log] data_dir, or free disk space",
            ) from None


def _values(record: StandbyRecord) -> dict[str, Any]:
    return {
        "epoch": None if record.epoch is None else asdict(record.epoch),
        "walreceiver_start": record.walreceiver_start,
        "generation": record.generation,
        "copies": {name: asdict(copy) for name, copy in record.copies.items()},
    }


def _record(values: Mapping[str, Any]) -> StandbyRecord:
    copies = {name: _copy(each) for name, each in values["copies"].items()}
    return StandbyRecord(
        _epoch(values["epoch"]), values["walreceiver_start"], copies, values["generation"]
    )


def _epoch(values: Mapping[str, Any] | None) -> FeedbackEpochKey | None:
    return None if values is None else FeedbackEpochKey(**values)


def _place(values: Mapping[str, Any] | None) -> SlotPosition | None:
    return None if values is None else SlotPosition(**values)


def _copy(values: Mapping[str, Any]) -> CopyRecord:
    seen, reserved, confirmed = values["seen"], values["reserved"], values.get("confirmed")
    settled, incarnation = values.get("settled"), values.get("incarnation")
    return CopyRecord(
        **{
            **values,
            "seen": None if seen is None else Sighting(**seen),
            "reserved": None if reserved is None else Reserved(**reserved),
            "slot_was": _place(values["slot_was"]),
            "passed": _place(values["passed"]),
            "confirmed": None if confirmed is None else Confirmed(**confirmed),
            "incarnation": None if incarnation is None else Incarnation(**incarnation),
            "settled": None if settled is None else Settled(**settled),
            "proven_in": _epoch(values["proven_in"]),
        }
    )
