"""The users that may read WAL, with the verifiers of their passwords, and SCRAM-SHA-256 authentication.

The file has a line for each user, `"name" "SCRAM-SHA-256$..."`: the format of PgBouncer's `auth_file`, with the verifier
that PostgreSQL itself keeps in `pg_authid.rolpassword`. A verifier does not reveal the password, but allows its holder to
impersonate this server, so the file must be readable by its owner only. Plain passwords and MD5 are refused with the
user's name. The file is reloaded when it has changed.

Invariant: a name that is not in the file leads to the same exchange, with a salt that stays the same, and to the same
error, so that existing users cannot be enumerated: not by another safekeeper with the same file either, nor after a restart,
as that salt is drawn from the first user's secret. Nothing that a client sends here is ever logged.

Sources: RFC 5802, RFC 7677, RFC 5929 (`tls-server-end-point`); PostgreSQL documentation, "SASL Authentication".
"""

import base64
import binascii
import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from scramp import ScramException, ScramMechanism

from walsender_bridge.errors import ConfigError
from walsender_bridge.postgres.protocol.backend import SqlErrorReply

SCRAM: Final = "SCRAM-SHA-256"
SCRAM_PLUS: Final = "SCRAM-SHA-256-PLUS"
_LINE = re.compile(r'"((?:[^"]|"")+)"\s+"((?:[^"]|"")*)"\s*')
_VERIFIER = re.compile(
    r"SCRAM-SHA-256\$(\d{1,8}):([A-Za-z0-9+/=]+)\$([A-Za-z0-9+/=]+):([A-Za-z0-9+/=]+)"
)
_KEY_BYTES = 32
_SHORTEST_SALT = 12
#: PostgreSQL's present default, for unknown names while there are no users.
_ITERATIONS, _SALT_BYTES = 4096, 16


@dataclass(frozen=True, slots=True, repr=False)
class Verifier:
    """What SCRAM needs to check a password, without the password."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes


def parse_verifier(text: str) -> Verifier:
    """PostgreSQL's text of a verifier. Raises `ConfigError`, which never shows the text."""
    match = _VERIFIER.fullmatch(text)
    try:
        if match is not None:
            salt, stored, server = (base64.b64decode(match[i], validate=True) for i in (2, 3, 4))
            if len(stored) == len(server) == _KEY_BYTES and len(salt) >= _SHORTEST_SALT:
                return Verifier(int(match[1]), salt, stored, server)
    except binascii.Error:
        pass
    raise ConfigError(
        "a user's secret is not a SCRAM-SHA-256 verifier",
        repair="take it from pg_authid.rolpassword of a role whose password was set with"
        " password_encryption = scram-sha-256",
    )


class Users:
    """The users of the file at `path`. The constructor raises `ConfigError` for an invalid file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] = (0, 0, 0)
        self._users: dict[str, Verifier] = {}
        #: What unknown names are shown is drawn from it.
        self._pattern = _verifier_of_nobody()
        self.refresh()

    def refresh(self) -> None:
        """Reload the file if it has changed. Raises `ConfigError`, and then keeps the present users."""
        try:
            found = self._path.stat()
            stamp = (found.st_ino, found.st_mtime_ns, found.st_size)
            if stamp == self._stamp:
                return
            if found.st_mode & 0o077 or found.st_uid not in {0, os.geteuid()}:
                raise ConfigError(
                    "the file of users is readable by others",
                    where=str(self._path),
                    repair=f"chmod 600 {self._path}, and have it belong to the account that runs the safekeeper",
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
            _verifier_of_nobody(),
            iterations=pattern.iterations,
            salt=salt[: len(pattern.salt)],
        )


def _verifier_of_nobody() -> Verifier:
    """One that no password matches."""
    salt, stored, server = map(secrets.token_bytes, (_SALT_BYTES, _KEY_BYTES, _KEY_BYTES))
    return Verifier(_ITERATIONS, salt, stored, server)


class ScramExchange:
    """The server's side of one login: two messages in, two out. `certificate`: the server's, PEM, on TLS."""

    def __init__(self, user: str, verifier: Verifier, certificate: str | None) -> None:
        self._user = user
        self._verifier = verifier
        self._certificate = certificate
        self.mechanisms = (SCRAM_PLUS, SCRAM) if certificate else (SCRAM,)

    def first(self, mechanism: str, data: str) -> str:
        """The client's first message, and the answer. Raises `SqlErrorReply` 28P01, 08P01."""
        if mechanism not in self.mechanisms:
            raise _violation("the client chose a mechanism that was not offered")
        header, found, bare = _split_header(data)
        if not found:
            raise _violation("malformed SCRAM message")
        if header.startswith("p=") != (mechanism == SCRAM_PLUS):
            raise _violation("channel binding does not match the mechanism")
        binding = ("tls-server-end-point", self._certificate) if self._certificate else None
        verifier = self._verifier
        try:
            self._server = ScramMechanism(mechanism).make_server(
                lambda _: (
                    verifier.salt,
                    verifier.stored_key,
                    verifier.server_key,
                    verifier.iterations,
                ),
                channel_binding=binding,
            )
            # The name is the startup packet's. libpq leaves it empty here, which the library does not accept.
            self._server.set_client_first(f"{header}n=user,{bare.partition(',')[2]}")
            # The proof covers the message as received.
            self._server.client_first_bare = bare
            answer: str = self._server.get_server_first()
        except ScramException:
            raise _violation("malformed or unexpected SCRAM message") from None
        return answer

    def final(self, data: str) -> str:
        """The client's proof, and the server's. Raises `SqlErrorReply` 28P01 if the password is wrong."""
        try:
            self._server.set_client_final(data)
            answer: str = self._server.get_server_final()
        except ScramException:
            raise SqlErrorReply(
                "28P01", f'password authentication failed for user "{self._user}"', fatal=True
            ) from None
        return answer


def _split_header(data: str) -> tuple[str, bool, str]:
    """The GS2 header (flag, authorization identity, two commas), whether it is one, and the rest."""
    flag, comma, rest = data.partition(",")
    identity, second, bare = rest.partition(",")
    whole = bool(comma and second and bare.startswith("n=") and flag[:1] in {"n", "y", "p"})
    return f"{flag},{identity},", whole, bare


def _violation(text: str) -> SqlErrorReply:
    return SqlErrorReply("08P01", text, fatal=True)
