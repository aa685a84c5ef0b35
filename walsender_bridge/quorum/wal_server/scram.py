"""SCRAM-SHA-256 authentication, the server's side, as a function of messages.

Sources: RFC 5802, RFC 7677, RFC 5929 (`tls-server-end-point`); PostgreSQL documentation, "SASL Authentication".
"""

import base64
import binascii
import re
import secrets
from dataclasses import dataclass
from typing import Final

from scramp import ScramException, ScramMechanism

from walsender_bridge.errors import ConfigError
from walsender_bridge.postgres.protocol.backend import SqlErrorReply

SCRAM: Final = "SCRAM-SHA-256"
SCRAM_PLUS: Final = "SCRAM-SHA-256-PLUS"
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


def verifier_of_nobody() -> Verifier:
    """A verifier that no password matches."""
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
