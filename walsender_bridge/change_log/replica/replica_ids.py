"""`replicas.json`: which replica is in each stream's folder, so that a segment of another one is not taken for its own.

    {"format": 1, "log_server_id": "...", "replicas": {"STREAM": "..."}, "crc32c": ...}

The id of a replica is drawn when it is created, and is in each of its segments. The file is no more than a second witness: one
that is missing, damaged, of a newer format, or of another log server (`log-server.json` was put back with older streams, say)
says nothing, and the ids are taken from the segments again.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from walsender_bridge.runtime import checksummed_json

FORMAT: Final = 1
NAME: Final = "replicas.json"


class ReplicaIds:
    """The ids of a log server's replicas, by stream."""

    def __init__(self, data_dir: Path, log_server_id: str) -> None:
        self._path = data_dir / NAME
        self._log_server_id = log_server_id
        self._ids = self._load()

    def _load(self) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            record = checksummed_json.load(self._path)
            if record["format"] == FORMAT and record["log_server_id"] == self._log_server_id:
                return {str(stream): str(name) for stream, name in record["replicas"].items()}
        return {}

    def of(self, stream: str) -> str:
        """The replica's id; empty if it is not known."""
        return self._ids.get(stream, "")

    def know(self, ids: Mapping[str, str | None]) -> None:
        """Keep these. That they cannot be written now is no error: they are known again from the segments."""
        known = self._ids | {stream: name for stream, name in ids.items() if name}
        if known != self._ids:
            self._ids = known
            record = {
                "format": FORMAT,
                "log_server_id": self._log_server_id,
                "replicas": known,
            }
            with contextlib.suppress(OSError):
                checksummed_json.save(self._path, record, mode=0o600)
