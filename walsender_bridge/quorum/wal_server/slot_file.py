"""The file of the replication slots: JSON with a format version, and a CRC32C over the rest.

It is replaced by rename, durably. One that is damaged, or of a newer version, is refused by name and left as it is:
to go on without it would let go of WAL that a standby still needs.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import google_crc32c

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.quorum.wal_server.slots import Slot
from walsender_bridge.runtime.durable import replace_file

FORMAT: Final = 1


class SlotFile:
    """The slots on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> list[Slot]:
        """The slots; [] if there never were any. Raises `CorruptError`, `NotSupportedError`."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return []
        head, _, body = raw.partition(b"\n")
        try:
            version, check = json.loads(head)["format"], json.loads(head)["crc32c"]
        except (ValueError, KeyError, TypeError):
            raise self._corrupt("its first line is not ours") from None
        if version != FORMAT:
            raise NotSupportedError(
                f"the slots have format {version}; known here is {FORMAT}",
                where=str(self.path),
                repair="use the version of Tuskline that wrote them, or a newer one",
            )
        if google_crc32c.value(body) != check:
            raise self._corrupt("its checksum does not fit")
        try:
            return [_slot(record) for record in json.loads(body)]
        except (ValueError, KeyError, TypeError):
            raise self._corrupt("it holds something else than slots") from None

    def save(self, slots: dict[str, Slot]) -> None:
        """Replace the file, durably. Raises `OSError`."""
        body = json.dumps([_record(slot) for slot in slots.values()], indent=1).encode() + b"\n"
        head = json.dumps({"format": FORMAT, "crc32c": google_crc32c.value(body)}).encode() + b"\n"
        replace_file(self.path, head + body, mode=0o600)

    def _corrupt(self, why: str) -> CorruptError:
        return CorruptError(
            f"the replication slots cannot be read: {why}",
            where=str(self.path),
            repair="keep the file aside under another name; readers then make their slots anew",
        )


def _record(slot: Slot) -> dict[str, Any]:
    record = asdict(slot)
    del record["temporary"]
    return record


def _slot(record: dict[str, Any]) -> Slot:
    return Slot(
        str(record["name"]),
        None if record["restart_lsn"] is None else int(record["restart_lsn"]),
        HotStandbyFeedback(**{k: int(v) for k, v in record["feedback"].items()}),
        lost=bool(record.get("lost", False)),
    )
