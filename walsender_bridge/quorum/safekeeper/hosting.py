"""The safekeepers that a machine hosts: their directories, and the files of their processes.

The first one's data directory is `<data_dir>/safekeeper`, the next one's `<data_dir>/safekeeper-2`, and so on; `data_dir` is
that of `[safekeepers]`, or of the first log server here. A number is a place, while the identity was drawn with the directory. The page between the processes
(`protocol.shared_page`), and their status files, are in memory (`shared_files`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from walsender_bridge.config.sections import SafekeepersSection
from walsender_bridge.errors import Cause, TusklineError, UnavailableError
from walsender_bridge.quorum.safekeeper import data_dir
from walsender_bridge.runtime import shared_files

if TYPE_CHECKING:
    from walsender_bridge.config import Config

#: After these, a restart would fail in the same way: an operator has to act.
FINAL = frozenset({Cause.CONFIG, Cause.CORRUPT, Cause.INVARIANT, Cause.NOT_SUPPORTED, Cause.USAGE})
_EMPTY_USERS = '# Users that may read WAL here, one per line: "name" "SCRAM-SHA-256$..."\n'


@dataclass(frozen=True, slots=True)
class Hosted:
    """One safekeeper of this machine. `number` counts from 1."""

    number: int
    data_dir: Path
    listen: str
    wal_listen: str
    positions: Path
    status: Path
    wal_server_status: Path
    archiver_status: Path

    @property
    def name(self) -> str:
        """Its name, as a process and in status output."""
        return f"safekeeper-{self.number}"

    @property
    def wal_server(self) -> str:
        """The name of its WAL server."""
        return f"wal-server-{self.number}"


def of_machine(settings: "Config") -> list[Hosted]:
    """The safekeepers of this machine; creates nothing."""
    if "safekeepers" not in settings.parts:
        return []
    return hosted(settings.safekeepers, settings.safekeepers_dir, settings.run_dir)


def hosted(section: SafekeepersSection, parent: Path, run_dir: Path) -> list[Hosted]:
    """The safekeepers that `section` describes, with their directories in `parent`; creates nothing."""
    found = []
    for number in range(1, section.local + 1):
        place = parent / ("safekeeper" if number == 1 else f"safekeeper-{number}")
        found.append(
            Hosted(
                number,
                place,
                section.hosted_addresses[number - 1],
                section.wal_addresses[number - 1],
                shared_files.folder(run_dir) / f"positions-{number}",
                shared_files.folder(run_dir) / f"safekeeper-{number}.json",
                shared_files.folder(run_dir) / f"wal-server-{number}.json",
                shared_files.folder(run_dir) / f"archiver-{number}.json",
            )
        )
    return found


def refused(safekeepers: Sequence[Hosted]) -> dict[int, TusklineError]:
    """By number: why a safekeeper cannot use its data directory. Creates nothing.

    `ConfigError` (a foreign directory), `CorruptError`, `NotSupportedError`; `UnavailableError`: not now.
    """
    found = {}
    for each in safekeepers:
        try:
            data_dir.check(each.data_dir)
        except TusklineError as error:
            found[each.number] = error
    return found


def prepare(
    safekeepers: Sequence[Hosted], section: SafekeepersSection, run_dir: Path
) -> dict[int, TusklineError]:
    """Check the data directories, and create new ones. Returns the unusable ones, as `refused`: nothing is created there.

    They do not prevent a start: COMMIT needs a majority, and the others may be one.
    """
    found = refused(safekeepers)
    if safekeepers:
        shared_files.prepare(run_dir)
    for each in safekeepers:
        if each.number in found:
            continue
        try:
            _make(each, section)
        except OSError as error:
            found[each.number] = UnavailableError(
                f"could not create the data directory: {error.strerror}",
                where=str(each.data_dir),
                repair="check the owner, the free space and the mount of its parent folder; the operation is retried",
            )
    return found


def _make(each: Hosted, section: SafekeepersSection) -> None:
    each.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    users = each.data_dir / data_dir.USERS
    if section.users is None and not users.exists():
        descriptor = os.open(users, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(_EMPTY_USERS)


def clear(safekeepers: Sequence[Hosted], run_dir: Path) -> None:
    """Remove the files in memory, after the processes have ended."""
    for each in safekeepers:
        page = each.positions.name
        status_names = (each.status.name, each.wal_server_status.name, each.archiver_status.name)
        shared_files.clear(run_dir, page, f"{page}.wake", *status_names)
