"""The record of one standby, in a file that is replaced as a whole: `<folder>/<candidate>.json`.

Invariant: when `save` returns, the new record is on disk; if it fails, the file is unchanged. So a copy is always named
by the record that was saved before it was created, whichever process dies and when.

A file that is unreadable, or fails its checksum (`runtime.checksummed_json`), is renamed and kept, and the record is
empty: no copy is then taken for ours, and none is dropped. The file of a newer version is refused.
"""

from pathlib import Path
from typing import Final

from slot_sync.resolver.observed import StandbyRecord
from walsender_bridge.errors import ConfigError, NotSupportedError
from walsender_bridge.runtime import checksummed_json, json_model, logs, record_file
from walsender_bridge.runtime.folder import FolderDisk

#: Of the fields of `StandbyRecord`. A file of an older version is renamed and kept, like a damaged one.
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
                repair="give this user read permission on the file and its folder",
            ) from None
        try:
            values = checksummed_json.opened(text, checked=False)
            version = values["version"]
            if version == VERSION:
                values = checksummed_json.opened(text)["record"]
                return json_model.from_plain(StandbyRecord, values, strict=True)
        except (ValueError, TypeError, KeyError):
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
            checksummed_json.save(
                self.path, {"version": VERSION, "record": json_model.plain(record)}
            )
        except OSError as error:
            raise ConfigError(
                f"could not write the record of slot copies: {error.strerror}",
                where=str(self.path),
                repair="give this user write permission on its folder, or free disk space",
            ) from None
