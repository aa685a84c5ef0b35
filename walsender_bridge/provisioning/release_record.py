"""The record of quorum releases: `quorum.jsonl` in the data directory, with a line for each decision and who made it.

Invariant: a release is on disk before it is requested from the server, so commits never continue without a quorum
unrecorded; a release that then failed stays recorded, too, until `tuskline quorum require`. Lines are only appended
(`json_lines`). A line torn by a crash is skipped: its decision was not carried out.
"""

import contextlib
import getpass
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import json_lines, json_model

FILE = "quorum.jsonl"


@dataclass(frozen=True, slots=True)
class ReleaseDecision:
    """`lsn`: the end of the server's durable WAL. `quorum_lsn`: the part of it that a quorum had. Both `X/Y` or None.

    `waiting`: commits that hung at that moment. `names`: synchronous_standby_names before. `at`: Unix seconds.
    """

    action: Literal["release", "require", "forget"]
    server: str
    role: str
    lsn: str | None
    quorum_lsn: str | None
    waiting: int
    names: str
    by: str = ""
    at: float = 0.0

    def summary(self) -> str:
        """The decision in one line."""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.at))
        return (
            f"{self.by} released the quorum at {at}: {self.waiting} commits waited, the WAL ended at {self.lsn}, "
            f"a quorum had it up to {self.quorum_lsn or 'an unknown LSN'}"
        )


def write(data_dir: Path, decision: ReleaseDecision) -> ReleaseDecision:
    """Append a decision durably, with user and time; return it. Raises `ConfigError`."""
    signed = replace(decision, by=_operator(), at=time.time())
    path = data_dir / FILE
    try:
        json_lines.append(path, json_model.plain(signed))
    except OSError as error:
        raise ConfigError(
            f"could not record the decision: {error.strerror}",
            where=str(path),
            repair="give this user write permission on its folder, or free disk space",
        ) from None
    return signed


def decisions(data_dir: Path) -> list[ReleaseDecision]:
    """Read all decisions, oldest first."""
    found = []
    for _, values in json_lines.read(data_dir / FILE):
        if values is not None:
            with contextlib.suppress(ValueError):
                found.append(json_model.from_plain(ReleaseDecision, values))
    return found


def in_force(data_dir: Path) -> ReleaseDecision | None:
    """The release in force; None if commits are to wait for the quorum."""
    lasting = [each for each in decisions(data_dir) if each.action != "forget"]
    last = lasting[-1] if lasting else None
    return last if last is not None and last.action == "release" else None


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
