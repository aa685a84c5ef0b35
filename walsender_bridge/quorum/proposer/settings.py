"""The settings of a proposer."""

from dataclasses import dataclass, field
from pathlib import Path

from walsender_bridge.quorum.proposer.effects import Limits
from walsender_bridge.quorum.proposer.member_changes import Address
from walsender_bridge.runtime.tls_files import TlsFiles


@dataclass(frozen=True, slots=True)
class ProposerSettings:
    """`safekeepers`: (host, port) of each. `slot`: the idle physical slot that keeps WAL for them.

    `members_file`: an operator's request for another membership (`member_changes.py`). `quorum_file`: the record of the
    quorum's id (`quorum_id_record.py`).
    """

    dsn: str = field(repr=False)
    safekeepers: tuple[Address, ...]
    application_name: str
    slot: str
    limits: Limits = Limits()  # noqa: RUF009  # it is frozen
    members_file: Path | None = None
    quorum_file: Path | None = None
    #: The page that commit gates read; the status file is for operators and monitoring.
    commit_page: Path | None = None
    status_file: Path | None = None
    #: The certificate shown to safekeepers; None: connections to them have no TLS.
    tls: TlsFiles | None = None
