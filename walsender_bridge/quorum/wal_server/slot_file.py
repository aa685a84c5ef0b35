"""The file of the replication slots: JSON with a format version and a checksum (`runtime.checksummed_json`).

It is replaced by rename, durably. A damaged file, or one of a newer version, is refused with its name and left as it is:
continuing without it would release WAL that a standby still needs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.quorum.wal_server.slots import WalServerSlot
from walsender_bridge.runtime import checksummed_json, json_model

#: Format 1 had the checksum in a line of its own.
FORMAT: Final = 2


@dataclass(frozen=True, slots=True)
class _StoredSlot:
    """A slot that is not temporary (`WalServerSlot`)."""

    name: str
    restart_lsn: Lsn | None
    feedback: HotStandbyFeedback
    #: Missing in files of earlier releases.
    lost: bool = False


@dataclass(frozen=True, slots=True)
class _Content:
    format: int
    slots: tuple[_StoredSlot, ...]


class SlotFile:
    """The slots on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> list[WalServerSlot]:
        """The slots; [] if there is no file. Raises `CorruptError`, `NotSupportedError`."""
        try:
            record = checksummed_json.load(self.path)
            version = record["format"]
        except FileNotFoundError:
            return []
        except (ValueError, KeyError, TypeError) as error:
            raise self._corrupt(str(error)) from None
        if version != FORMAT:
            raise NotSupportedError(
                f"unsupported format {version} of the replication slots (this version has {FORMAT})",
                where=str(self.path),
                repair="use the version of Tuskline that wrote them, or a newer one",
            )
        try:
            found = json_model.from_plain(_Content, record, strict=True)
        except ValueError as error:
            raise self._corrupt(str(error)) from None
        return [
            WalServerSlot(each.name, each.restart_lsn, each.feedback, lost=each.lost)
            for each in found.slots
        ]

    def save(self, slots: dict[str, WalServerSlot]) -> None:
        """Replace the file, durably. Raises `OSError`."""
        stored = tuple(
            _StoredSlot(each.name, each.restart_lsn, each.feedback, each.lost)
            for each in slots.values()
        )
        record = json_model.plain(_Content(FORMAT, stored))
        checksummed_json.save(self.path, record, mode=0o600)

    def _corrupt(self, why: str) -> CorruptError:
        return CorruptError(
            f"could not read the replication slots: {why}",
            where=str(self.path),
            repair="rename the file; readers then create their slots again",
        )
