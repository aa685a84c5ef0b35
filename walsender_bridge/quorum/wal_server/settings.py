"""The settings of a WAL server's process."""

from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.quorum.wal_server.stream import TIMEOUT
from walsender_bridge.quorum.wal_server.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class WalServerSettings:
    """Settings: files, addresses and access.

    `positions`: the page that the hot loop writes; `slots`: the file of the slots; `tls_client_ca`: the CA of required client
    certificates. `timeout`: seconds that a reader may be silent. Without a certificate the server listens on loopback only,
    unless `tls_required` is False.
    """

    wal_dir: Path
    positions: Path
    slots: Path
    users: Path
    host: str
    port: int
    tls: TlsFiles | None = None
    tls_required: bool | None = None
    timeout: float = TIMEOUT
    #: The status file (`WalServer.status`); None: none.
    status_file: Path | None = None
    #: The most WAL that the hot loop keeps for slots; None: no limit.
    max_slot_wal_keep_size: int | None = None
