"""The file of the replication slots: JSON with a format version and a checksum (`runtime.checksummed_json`).

It is replaced by rename, durably. A damaged file, or one of a newer version, is refused with its name and left as it is:
continuing without it would release WAL that a standby still needs.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.quorum.wal_server.slots import WalServerSlot
from walsender_bridge.runtime import checksummed_json

#: Format 1 had the checksum in a line of its own.
FORMAT: Final = 2


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
            return [_slot(each) for each in record["slots"]]
        except (ValueError, KeyError, TypeError):
            raise self._corrupt("invalid content") from None

    def save(self, slots: dict[str, WalServerSlot]) -> None:
        """Replace the file, durably. Raises `OSError`."""
        record = {"format": FORMAT, "slots": [_record(slot) for slot in slots.values()]}
        checksummed_json.save(self.path, record, mode=0o600)

    def _corrupt(self, why: str) -> CorruptError:
        return CorruptError(
            f"could not read the replication slots: {why}",
            where=str(self.path),
            repair="rename the file; readers then create their slots again",
        )


def _record(slot: WalServerSlot) -> dict[str, Any]:
    record = asdict(slot)
    del record["temporary"]
    return record


def _slot(record: dict[str, Any]) -> WalServerSlot:
    return WalServerSlot(
        str(record["name"]),
        None if record["restart_lsn"] is None else int(record["restart_lsn"]),
        HotStandbyFeedback(**{k: int(v) for k, v in record["feedback"].items()}),
        lost=bool(record.get("lost", False)),
    )
