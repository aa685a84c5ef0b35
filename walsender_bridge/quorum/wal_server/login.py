"""The beginning of a connection, as a function of packets: encryption, startup, SCRAM. No I/O, no clock.

packet                  state             result
EncryptionRequest       START             TLS if there is a certificate and no unencrypted data follows; else N
CancelRequest           START             closed without an answer
    Startup                 START             refused, or the offer of mechanisms           -> MECHANISM
    Message p               MECHANISM         the server's first message                    -> PROOF
    Message p               PROOF             welcome, or refused                           -> DONE
    anything else           anywhere          refused

Invariant: before authentication nothing is disclosed, not even whether there is WAL, and no command is read. If TLS is
required, an unencrypted startup packet is refused before a secret could be sent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from walsender_bridge.postgres.protocol import backend
from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.frontend import (
    CancelRequest,
    EncryptionRequest,
    Message,
    Packet,
    Startup,
)
from walsender_bridge.quorum.wal_server.scram import ScramExchange, Verifier

_NO: Final = b"N"
YES: Final = b"S"
_TRUE = {"true", "on", "yes", "1", "t", "y"}


class LoginStep(Enum):
    """The state of a login."""

    START = auto()
    MECHANISM = auto()
    PROOF = auto()
    DONE = auto()


class Then(Enum):
    """What the driver does after it has written the bytes."""

    GO_ON = auto()
    START_TLS = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Reply:
    """Bytes to write, and the next action."""

    data: bytes
    then: Then = Then.GO_ON


class LoginExchange:
    """One connection's login.

    `certificate`: the server's own (PEM) if it has TLS; `tls_required`: refuse connections without TLS; `verifier`: returns
    a user's verifier.
    """

    def __init__(
        self, verifier: Callable[[str], Verifier], certificate: str | None, *, tls_required: bool
    ) -> None:
        self.step = LoginStep.START
        self.user = ""
        self.application = ""
        self.encrypted = False
        self._verifier = verifier
        self._certificate = certificate
        self._tls_required = tls_required
        self._asked: set[bool] = set()

    def take(self, packet: Packet, *, more: bool) -> Reply:
        """The reply to a packet. `more`: bytes follow it. Raises `SqlErrorReply`, always fatal."""
        match self.step, packet:
            case LoginStep.START, EncryptionRequest(gss):
                return self._encryption(gss, more=more)
            case LoginStep.START, CancelRequest():
                return Reply(b"", Then.END)
            case LoginStep.START, Startup() as startup:
                return self._startup(startup)
            case LoginStep.MECHANISM, Message("p", body):
                return self._mechanism(body)
            case LoginStep.PROOF, Message("p", body):
                self.step = LoginStep.DONE
                return Reply(backend.sasl_final(self._exchange.final(_text(body))))
        raise _violation("unexpected message during login")

    def _encryption(self, gss: bool, *, more: bool) -> Reply:
        # Each kind is requested once; a client that repeats requests only occupies the connection.
        if gss in self._asked or self.encrypted:
            raise _violation("encryption was already requested")
        self._asked.add(gss)
        if more:
            # Data behind the request was injected by a man in the middle, or sent by a broken client.
            raise _violation("received unencrypted data after encryption request")
        if gss or self._certificate is None:
            return Reply(_NO)
        self.encrypted = True
        return Reply(YES, Then.START_TLS)

    def _startup(self, startup: Startup) -> Reply:
        if startup.major != 3:
            raise _refused(
                "0A000",
                f"unsupported frontend protocol {startup.major}.{startup.minor}: server supports 3.0",
            )
        given = startup.parameters
        replication = given.get("replication", "").lower()
        if replication not in {"database", *_TRUE}:
            # Checked first, so that a client that requests a database learns what this server is.
            raise _refused(
                "0A000",
                backend.REPLICATION_ONLY,
                hint="It serves pg_receivewal, standbys, and other clients that connect with replication=true.",
            )
        if self._tls_required and not self.encrypted:
            raise _refused(
                "28000", "connections without TLS are refused", hint="Connect with sslmode=require."
            )
        self.user, self.application = given.get("user", ""), given.get("application_name", "")
        if not self.user:
            raise _refused("28000", "no PostgreSQL user name specified in startup packet")
        if replication == "database":
            raise _refused(
                "3D000",
                f'database "{given.get("dbname", given.get("database", self.user))}" does not exist',
                hint="A safekeeper has WAL and no databases: connect with replication=true.",
            )
        self._exchange = ScramExchange(
            self.user, self._verifier(self.user), self._certificate if self.encrypted else None
        )
        self.step = LoginStep.MECHANISM
        unknown = [name for name in given if name.startswith("_pq_.")]
        negotiation = backend.negotiate_protocol(unknown) if startup.minor or unknown else b""
        return Reply(negotiation + backend.sasl(self._exchange.mechanisms))

    def _mechanism(self, body: bytes) -> Reply:
        name, nul, rest = body.partition(b"\0")
        if not nul or len(rest) < 4 or int.from_bytes(rest[:4], "big") != len(rest) - 4:
            raise _violation("malformed SASL message")
        answer = self._exchange.first(_text(name), _text(rest[4:]))
        self.step = LoginStep.PROOF
        return Reply(backend.sasl_continue(answer))


def _text(raw: bytes) -> str:
    try:
        return raw.decode("ascii")
    except UnicodeDecodeError:
        raise _violation("malformed SCRAM message") from None


def _violation(text: str) -> SqlErrorReply:
    return _refused("08P01", text)


def _refused(code: str, text: str, *, hint: str = "") -> SqlErrorReply:
    return SqlErrorReply(code, text, hint=hint, fatal=True)
