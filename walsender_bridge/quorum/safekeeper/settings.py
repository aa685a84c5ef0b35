"""The settings of a safekeeper's process."""

from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.runtime.tls_files import TlsFiles


@dataclass(frozen=True, slots=True)
class SafekeeperSettings:
    """`data_dir` holds `control/` and `wal/`; `positions` is the page that the WAL server reads.

    `keep_bytes`: how much WAL is kept behind the end even if it is not needed. `archive`: URL of its archiver; old WAL is
    kept for it, and for slots, up to `max_slot_wal_keep_size` (None: without limit). `tls`: proposers need certificates.
    """

    data_dir: Path
    host: str
    port: int
    positions: Path
    limits: StorageLimits = StorageLimits()  # noqa: RUF009  # it is frozen
    keep_bytes: int = 0
    archive: str | None = None
    max_slot_wal_keep_size: int | None = None
    status_file: Path | None = None
    tls: TlsFiles | None = None
