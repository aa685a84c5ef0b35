"""What is remembered of one standby, in a file that is replaced as a whole: `<folder>/<candidate>.json`.

Invariant: what `save` was given is on disk when it returns, or the file is what it was before. So a copy that was made
is always known by the record that was saved before it was made, whatever dies when.

A file that cannot be read, or is not what was written (`crc`: CRC32C of the record's JSON, keys sorted), is kept aside under a
name of its own, and nothing is remembered: no copy is then taken for ours, and none is dropped. A newer version's file is
refused by name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import google_crc32c
import structlog

from slot_sync.resolver.observed import (
    Confirmed,
    CopyRecord,
    EpochKey,
    Incarnation,
    Place,
    Record,
    Reserved,
    Settled,
    Sighting,
)
from walsender_bridge.errors import ConfigError, NotSupportedError
from walsender_bridge.runtime.durable import replace_file

#: 1 has no `confirmed`, 2 neither `settled` nor `incarnation`: they are learnt at the next poll, and until then nothing is called ready without
#: the primary. Those before 4 have no `crc`.
VERSION: Final = 4
_READS: Final = frozenset({1, 2, 3, VERSION})

_log = structlog.get_logger(__name__)


class RecordFile:
    """The record of one candidate."""

    def __init__(self, folder: Path, candidate: str) -> None:
        self.path = folder / f"{candidate}.json"

    def load(self) -> Record:
        """What was saved last; an empty record if nothing was, or if it is damaged: then it is kept aside.

        Raises `NotSupportedError` for a newer version's file, `ConfigError` for one that this user may not read.
        """
        found = self.peek()
        if found is None and self.path.exists():
            aside = self._keep_aside()
            _log.error(
                "the record of copies is damaged; nothing is remembered", kept_aside=str(aside)
            )
        return found or Record()

    def peek(self) -> Record | None:
        """What was saved last, for who only looks; None if there is nothing that can be read. Raises as `load`."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(
                f"the record of copies cannot be read: {error.strerror}",
                where=str(self.path),
                repair="give this user the folder of [log] data_dir",
            ) from None
        try:
            values = json.loads(text)
            version = values["version"]
            if version in _READS:
                # Also where the digit that changed is the version's.
                if (version >= 4 or "crc" in values) and values["crc"] != _crc(values["record"]):
                    return None
                return _record(values["record"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
        if isinstance(version, int) and version > VERSION:
            raise NotSupportedError(
                f"the record of copies has version {version}, and this one knows {VERSION}",
                where=str(self.path),
                repair="install the version of Tuskline that wrote it",
            )
        return None

    def save(self, record: Record) -> None:
        """Replace the file, durably. Raises `ConfigError` when it cannot be written."""
        record_values = _values(record)
        values = {"version": VERSION, "crc": _crc(record_values), "record": record_values}
        try:
            replace_file(self.path, json.dumps(values, indent=1).encode() + b"\n")
        except OSError as error:
            raise ConfigError(
                f"the record of copies cannot be written: {error.strerror}",
                where=str(self.path),
                repair="give this user the folder of [log] data_dir, or make room",
            ) from None

    def _keep_aside(self) -> Path:
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside


def _crc(values: Mapping[str, Any]) -> int:
    return int(google_crc32c.value(json.dumps(values, sort_keys=True).encode()))


def _values(record: Record) -> dict[str, Any]:
    return {
        "epoch": None if record.epoch is None else asdict(record.epoch),
        "walreceiver_start": record.walreceiver_start,
        "generation": record.generation,
        "copies": {name: asdict(copy) for name, copy in record.copies.items()},
    }


def _record(values: Mapping[str, Any]) -> Record:
    copies = {name: _copy(each) for name, each in values["copies"].items()}
    return Record(
        _epoch(values["epoch"]), values["walreceiver_start"], copies, values["generation"]
    )


def _epoch(values: Mapping[str, Any] | None) -> EpochKey | None:
    return None if values is None else EpochKey(**values)


def _place(values: Mapping[str, Any] | None) -> Place | None:
    return None if values is None else Place(**values)


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
