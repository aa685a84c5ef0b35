"""The settings of a capture's process."""

from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.capture.core import MAX_UNCOMMITTED_BYTES
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.source import CaptureSource


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """`log`: the repository's address. `gate_record`: the file of the gate's decisions. `commit_page`: see `ServerGate`.

    `spool`: a folder for this source's large transactions, at most `spool_limit` bytes of them; with a limit of 0 the
    server sends no transaction before it has committed. `max_uncommitted_bytes`: see `core.CaptureState`.
    """

    source: CaptureSource
    log: str
    spool: Path
    spool_limit: int
    gate_record: Path
    gate: Rule = Rule()  # noqa: RUF009  # it is frozen
    commit_page: Path | None = None
    max_uncommitted_bytes: int = MAX_UNCOMMITTED_BYTES
    status_file: Path | None = None
