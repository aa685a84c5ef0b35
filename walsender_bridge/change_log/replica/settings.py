"""The settings of a log server's process for replicas."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walsender_bridge.runtime.tls_files import TlsFiles

#: The size of a segment, in bytes.
SEGMENT_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class ReplicaServerSettings:
    """`listen`: `host:port`. `segment_bytes`: see `StreamStore`. `tls`, `create`: see `ReplicaServer`."""

    data_dir: Path
    listen: str
    segment_bytes: int = SEGMENT_BYTES
    tls: TlsFiles | None = None
    create: bool = True
