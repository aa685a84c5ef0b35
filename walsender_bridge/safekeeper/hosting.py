"""The safekeepers that a keeper hosts: where each has its things, and the two processes of each.

The first one's data directory is `<keeper's>/safekeeper`, the next one's `<keeper's>/safekeeper-2`, and so on: a
number is a place, and who the safekeeper is was drawn with its directory. The page between the two processes
lies in memory (`server.shared_page`), in a folder that nobody else may enter; what is in it survives neither a
reboot nor the keeper's orderly end, and need not.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from walsender_bridge.config_sections import SafekeepersSection
from walsender_bridge.errors import Cause, ConfigError
from walsender_bridge.safekeeper import data_dir
from walsender_bridge.supervisor import Child

#: After these, another start would find the same: an operator has to look.
FINAL = frozenset({Cause.CONFIG, Cause.CORRUPT, Cause.NOT_SUPPORTED, Cause.USAGE})
_MEMORY = Path("/dev/shm")  # noqa: S108  # a folder in it is made, and checked, below
_EMPTY_USERS = '# Who may read WAL here. A line for each: "name" "SCRAM-SHA-256$..."\n'


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

    @property
    def name(self) -> str:
        """Its name among the processes, and in what is shown."""
        return f"safekeeper-{self.number}"

    @property
    def wal_server(self) -> str:
        """The name of its WAL server."""
        return f"wal-server-{self.number}"


def hosted(section: SafekeepersSection, keeper_dir: Path, run_dir: Path) -> list[Hosted]:
    """The safekeepers that `section` has a keeper at `keeper_dir` host; nothing is made."""
    found = []
    for number in range(1, section.local + 1):
        place = keeper_dir / ("safekeeper" if number == 1 else f"safekeeper-{number}")
        found.append(
            Hosted(
                number,
                place,
                section.hosted_addresses[number - 1],
                section.wal_addresses[number - 1],
                _page_dir(run_dir) / _page_name(place),
                run_dir / f"safekeeper-{number}.status.json",
                run_dir / f"wal-server-{number}.status.json",
            )
        )
    return found


def _page_name(place: Path) -> str:
    return "positions-" + hashlib.sha256(str(place.resolve()).encode()).hexdigest()[:20]


def _page_dir(run_dir: Path) -> Path:
    return _MEMORY / f"tuskline-{os.getuid()}" if _MEMORY.is_dir() else run_dir


def prepare(safekeepers: Sequence[Hosted], section: SafekeepersSection) -> None:
    """Look at the data directories, and make what is new.

    Raises `ConfigError` (a directory of somebody else), `CorruptError`, `NotSupportedError`.
    """
    for each in safekeepers:
        data_dir.check(each.data_dir)
        each.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        each.positions.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        its = each.positions.parent.stat()
        if each.positions.parent.parent == _MEMORY and (
            its.st_uid != os.getuid() or its.st_mode & 0o077
        ):
            raise ConfigError(
                "others may enter the folder of the safekeepers' positions",
                where=str(each.positions.parent),
                repair="remove it: it is made anew",
            )
        users = each.data_dir / data_dir.USERS
        if section.users is None and not users.exists():
            descriptor = os.open(users, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(_EMPTY_USERS)


def clear(safekeepers: Sequence[Hosted]) -> None:
    """Remove the pages; the processes have ended."""
    for each in safekeepers:
        for path in (each.positions, each.positions.with_name(each.positions.name + ".wake")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if each.positions.parent.parent == _MEMORY:
                each.positions.parent.rmdir()


def children(safekeepers: Sequence[Hosted], section: SafekeepersSection) -> list[Child]:
    """The processes: a hot loop and a WAL server for each, and an archiver if there is an archive."""
    found = []
    for each in safekeepers:
        found.append(Child(each.name, _hot_loop(each, section), final=FINAL))
        found.append(Child(each.wal_server, _wal_server(each, section)))
        if section.archive is not None:
            name = f"archiver-{each.number}"
            found.append(Child(name, _archiver(each, section.archive), final=FINAL))
    return found


def _hot_loop(each: Hosted, section: SafekeepersSection) -> list[str]:
    argv = [sys.executable, "-m", "walsender_bridge.safekeeper"]
    argv += ["--data-dir", str(each.data_dir), "--listen", each.listen]
    argv += ["--positions", str(each.positions), "--status-file", str(each.status)]
    argv += ["--free-bytes", str(section.free_bytes), "--keep-bytes", str(section.keep_bytes)]
    if section.wal_bytes is not None:
        argv += ["--wal-bytes", str(section.wal_bytes)]
    if section.archive is not None:
        argv += ["--archive", section.archive]
    return argv


def _archiver(each: Hosted, archive: str) -> list[str]:
    argv = [sys.executable, "-m", "walsender_bridge.safekeeper.archiver"]
    return [*argv, "--data-dir", str(each.data_dir), "--archive", archive]


def _wal_server(each: Hosted, section: SafekeepersSection) -> list[str]:
    users = section.users or each.data_dir / data_dir.USERS
    argv = [sys.executable, "-m", "walsender_bridge.safekeeper.server"]
    argv += ["--wal-dir", str(each.data_dir / data_dir.WAL), "--positions", str(each.positions)]
    argv += ["--slots", str(each.data_dir / data_dir.SLOTS), "--users", str(users)]
    argv += ["--listen", each.wal_listen, "--status-file", str(each.wal_server_status)]
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        path = getattr(section, name)
        if path is not None:
            argv += [f"--{name.replace('_', '-')}", str(path)]
    return argv
