"""The users that may read WAL, with the verifiers of their passwords.

The file has a line for each user, `"name" "SCRAM-SHA-256$..."`: the format of PgBouncer's `auth_file`, with the verifier
that PostgreSQL itself keeps in `pg_authid.rolpassword`. A verifier does not reveal the password, but allows its holder to
impersonate this server, so the file must be readable by its owner only. Plain passwords and MD5 are refused with the
user's name. The file is reloaded when it has changed.

Invariant: a name that is not in the file leads to the same exchange and the same error, with a salt that stays the same, so that
existing users cannot be enumerated. The salt is derived from the secret of the file's first user, so other safekeepers with the
same file show the same salt, also after a restart. Nothing that a client sends here is ever logged.

The exchange itself: `scram.py`.
"""

import hashlib
import hmac
import os
import re
from dataclasses import replace
from pathlib import Path

from walsender_bridge.errors import ConfigError
from walsender_bridge.quorum.wal_server.scram import Verifier, parse_verifier, verifier_of_nobody

_LINE = re.compile(r'"((?:[^"]|"")+)"\s+"((?:[^"]|"")*)"\s*')


class Users:
    """The users of the file at `path`. The constructor raises `ConfigError` for an invalid file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] = (0, 0, 0)
        self._users: dict[str, Verifier] = {}
        #: The salts of unknown names are derived from it.
        self._pattern = verifier_of_nobody()
        self.refresh()

    def refresh(self) -> None:
        """Reload the file if it has changed. Raises `ConfigError`, and then keeps the present users."""
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp == self._stamp:
                return
            if found.st_uid not in {0, os.geteuid()}:
                raise ConfigError(
                    "the file of users belongs to another account",
                    where=str(self._path),
                    repair=f"run chown {os.geteuid()} {self._path} as root",
                )
            if found.st_mode & 0o077:
                raise ConfigError(
                    "the file of users is readable by others",
                    where=str(self._path),
                    repair=f"run chmod 600 {self._path}",
                )
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"could not read the users: {type(error).__name__}",
                where=str(self._path),
                repair='write a line for each: "name" "SCRAM-SHA-256$..."',
            ) from None
        users: dict[str, Verifier] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith((";", "#")):
                continue
            where = f"{self._path}:{number}"
            match = _LINE.fullmatch(line.strip())
            if match is None:
                raise ConfigError(
                    "invalid line in the file of users",
                    where=where,
                    repair='write "name" "SCRAM-SHA-256$..."',
                )
            try:
                users[match[1].replace('""', '"')] = parse_verifier(match[2])
            except ConfigError as error:
                raise ConfigError(error.what, where=where, repair=error.repair) from None
        self._users, self._stamp = users, stamp
        self._pattern = next(iter(users.values()), self._pattern)

    def verifier(self, user: str) -> Verifier:
        """The user's verifier; for an unknown name one that no password matches."""
        known = self._users.get(user)
        if known is not None:
            return known
        pattern, salt = self._pattern, b""
        while len(salt) < len(pattern.salt):
            salt += hmac.digest(pattern.server_key, salt + user.encode(), hashlib.sha256)
        return replace(
            verifier_of_nobody(),
            iterations=pattern.iterations,
            salt=salt[: len(pattern.salt)],
        )
