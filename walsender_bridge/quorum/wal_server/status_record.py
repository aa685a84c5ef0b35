"""The status file of a WAL server: its readers and slots. LSNs are as PostgreSQL writes them."""

from dataclasses import dataclass

from walsender_bridge.runtime.status_file import Status


@dataclass(frozen=True, slots=True)
class ReaderRecord:
    """A client that streams WAL."""

    address: str
    user: str
    application_name: str
    timeline: int
    sent_lsn: str
    flush_lsn: str


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A replication slot. `restart_lsn`: None: it keeps no WAL yet.

    `wal_status`: as in PostgreSQL, `reserved`, `unreserved` (past `max_slot_wal_keep_size`) or `lost`; None: without
    a `restart_lsn`.
    """

    slot: str
    restart_lsn: str | None
    active: bool
    temporary: bool
    wal_status: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WalServerStatus(Status):
    """The status of a WAL server. `logins`: clients that have not logged in yet; `damaged`: segments that are not served."""

    damaged: tuple[str, ...]
    logins: int
    readers: tuple[ReaderRecord, ...]
    slots: tuple[SlotRecord, ...]
