"""The account that PostgreSQL runs under, and the folders that it can use.

PostgreSQL refuses to run as root. If the caller is root, servers run as `postgres` or else `nobody`, which cannot access
everything that root can: a clone below /root, a folder with mode 700. So access is tested with that account, and its files
are in a place that it can reach.
"""

import os
import pwd
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from walsender_bridge.errors import LocalServerError
from walsender_bridge.runtime import cache as local_cache

_CANDIDATES = ("postgres", "nobody")


@dataclass(frozen=True, slots=True)
class Account:
    """The account that servers run under. `switched`: whether it is another one than the caller's."""

    name: str
    uid: int
    gid: int
    switched: bool

    def options(self) -> dict[str, Any]:
        """Arguments for `subprocess` to start a process as this account, in a folder that it can enter."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PG", "LC_", "LANG"))
        }
        options: dict[str, Any] = {"cwd": "/", "env": environment | {"LC_ALL": "C"}}
        if self.switched:
            options |= {"user": self.uid, "group": self.gid, "extra_groups": []}
            environment["HOME"] = "/"
        return options

    def run(self, command: Sequence[str | Path], *, timeout: float = 120.0) -> str:
        """Run a command as this account, and return its output. Raises `LocalServerError` with the output if it fails."""
        try:
            done: subprocess.CompletedProcess[str] = subprocess.run(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout,
                check=False,
                **self.options(),
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LocalServerError(f"{command[0]}: {error}", where=f"as {self.name}") from error
        if done.returncode != 0:
            raise LocalServerError(
                f"{Path(command[0]).name} ended with {done.returncode}:\n{done.stdout.strip()}",
                where=f"as {self.name}",
            )
        return done.stdout

    def may(self, access: str, path: Path) -> bool:
        """Whether this account has `access` ("r", "w", "x") to `path`, parents included."""
        if not self.switched:
            return os.access(path, {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}[access])
        command = ["/usr/bin/env", "test", f"-{access}", str(path)]
        done: subprocess.CompletedProcess[bytes] = subprocess.run(
            command, check=False, **self.options()
        )
        return done.returncode == 0

    def make_folder(self, path: Path, mode: int = 0o700) -> Path:
        """Create `path` (and its parents, world-readable), and give it to this account."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=mode)
        path.chmod(mode)
        if self.switched:
            os.chown(path, self.uid, self.gid)
        return path


@cache
def server_account() -> Account:
    """The account for servers: the caller's; if that is root, `postgres` or else `nobody`."""
    if os.geteuid() != 0:
        # A container may run under a user id without a name.
        return Account(
            os.environ.get("USER", "this account"), os.geteuid(), os.getegid(), switched=False
        )
    for name in _CANDIDATES:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(name, found.pw_uid, found.pw_gid, switched=True)
    raise LocalServerError(
        "PostgreSQL does not run as root, and there is no other account to run it as",
        where=", ".join(_CANDIDATES),
        repair="run as an ordinary user, or: useradd --system postgres",
    )


def reachable_place(account: Account) -> Path:
    """A private folder that `account` can enter: the cache, or else one in /var/tmp or TMPDIR.

    A folder in a world-writable place is used only if this user owns it and no other account can write to it.
    """
    place = local_cache.folder()
    place.mkdir(parents=True, exist_ok=True)
    if account.may("x", place):
        return place
    # A copy of binaries should survive a restart of the machine, which empties /tmp.
    for parent in (Path("/var/tmp"), Path(tempfile.gettempdir())):  # noqa: S108  # guarded below
        if not account.may("x", parent):
            continue
        place = parent / f"tuskline-{os.geteuid()}"
        place.mkdir(mode=0o755, exist_ok=True)
        found = place.lstat()
        if (
            stat.S_ISDIR(found.st_mode)
            and found.st_uid == os.geteuid()
            and not found.st_mode & 0o022
        ):
            place.chmod(0o755)
            return place
    raise LocalServerError(
        f"no folder is accessible to {account.name}",
        where=str(local_cache.folder()),
        repair="set TUSKLINE_CACHE to a folder that this account can enter (mode 755, and its parents)",
    )
