"""A connection to one of the change log's services, with a certificate if the service asks for one.

Before the first call the roles of the service's own certificate are looked at (`service_certificate`), on a connection that ends then.
gRPC makes its connections by itself, and each of them is refused whose certificate is not of that holder: of the same roles, streams
and host. When it has refused one, the service may have got a certificate of other roles, which the next call looks at, as does a call
about a stream that the certificate did not name. When gRPC could not connect, or a deadline hides whether it could, that is done in the
background, since gRPC may be about to connect again and needs no name server for that. A certificate that is not accepted then ends the
use of the service; a look that fails otherwise says nothing.

Certificates may be replaced while a process runs: before a call, the connection is made again if their files differ from
those that it was made with. Calls in progress end on the earlier one. Three files are not replaced in one step: meanwhile, and
for as long as they do not fit together, a process that has used them goes on with what it had.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pyarrow import flight

from walsender_bridge.change_log import actions, authorization, protocol, service_certificate
from walsender_bridge.errors import (
    ConfigError,
    SilentError,
    TusklineError,
    UnreachableError,
    UntrustedServiceError,
)
from walsender_bridge.runtime import peer_account, tls_files
from walsender_bridge.runtime.certificate_holder import Identity, Role
from walsender_bridge.runtime.tls_files import TlsBytes, TlsFiles

#: While a service takes its new certificate, its port is closed for a few milliseconds, and a call may be canceled that has
#: reached it and no handler: it is sent again,
#: for a second or two. What a service refuses has another status.
_ATTEMPTS: Final = json.dumps(
    {
        "methodConfig": [
            {
                "name": [
                    {"service": "arrow.flight.protocol.FlightService", "method": method}
                    for method in ("DoAction", "DoGet")
                ],
                "retryPolicy": {
                    "maxAttempts": 5,
                    "initialBackoff": "0.2s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
                },
            }
        ]
    }
)


def quiet() -> None:
    """Have gRPC not print the handshakes that fail, with a stranger's words in them. Before its first use in a process."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


#: Seconds for the look at a service's certificate.
_ANSWER: Final = 5.0
#: Seconds for which a certificate that was not accepted, or lacked a stream, is not looked at again.
_REFUSED: Final = 1.0


def connect(
    address: str,
    tls: TlsFiles | None,
    role: Role = Role.LOG_SERVER,
    streams: Collection[str] = (),
) -> flight.FlightClient:
    """A client for one call to the service of this role at this address, about these streams.

    Raises as `_client`, and with `tls` `UntrustedServiceError` if the service's certificate lacks the role or a stream.
    """
    if tls is None:
        return _client(address)
    its = service_certificate.holder(address, tls, within=_ANSWER)
    why = authorization.not_its_service(its, role, streams)
    service_certificate.refuse(why, address, streams)
    return _client(address, tls, its)


def _client(
    address: str, tls: TlsFiles | None = None, holder: Identity | None = None
) -> flight.FlightClient:
    """A client of the service at this address, which contains no paths. With `tls`, it uses TLS whatever the scheme is.

    `holder`: of the service's certificate; a connection where another one is shown is refused. Raises `ConfigError`, Flight's errors,
    and `PrivilegeError` if another account listens there without TLS.
    """
    options: dict[str, Any] = {}
    channel: list[tuple[str, Any]] = [*protocol.CHANNEL_OPTIONS]
    if tls is not None:
        assert holder is not None
        quiet()
        # Another process may have chosen the address, as in an order to synchronize.
        address = tls_files.with_scheme(address)
        channel += protocol.REMOTE_CHANNEL_OPTIONS
        own = _load(tls)
        options = {
            "tls_root_certs": own.ca,
            "cert_chain": own.certificate,
            "private_key": own.key,
            # It replaces the host, which it contains.
            "override_hostname": holder.service_name(service_certificate.host_of(address)),
        }
        channel.append(("grpc.service_config", _ATTEMPTS))
    elif address.startswith(tls_files.TLS):
        raise ConfigError(
            "the service asks for a certificate",
            where=address,
            repair=f"name the files of a certificate: in [tls], or as {address}?ca=FILE&certificate=FILE&key=FILE",
        )
    else:
        peer_account.check_listener(address)
    return flight.FlightClient(address, generic_options=channel, **options)


#: What each of the files that this process has used last contained, while they fitted together.
_used: Final[dict[TlsFiles, TlsBytes]] = {}


def _load(files: TlsFiles) -> TlsBytes:
    """The content of the files. Raises `ConfigError` if they do not fit together, and never did in this process."""
    try:
        _used[files] = files.load()
    except ConfigError:
        if files not in _used:
            raise
    return _used[files]


@dataclass(frozen=True, slots=True)
class Service:
    """What a call goes to: a client, and the holder of the certificate without which it does not connect; None: without TLS."""

    client: flight.FlightClient
    address: str
    role: Role
    holder: Identity | None

    def check(self, streams: Collection[str]) -> None:
        """Raise `UntrustedServiceError` unless its certificate names these streams."""
        if self.holder is not None:
            why = authorization.not_its_service(self.holder, self.role, streams)
            service_certificate.refuse(why, self.address, streams)


class Connection:
    """See the module. `address` may contain the paths of the files; without them it is plain, like `grpc://127.0.0.1:7400`.

    `role`: of the service. `within`: seconds for the look at its certificate. Threads may share a connection.
    """

    def __init__(
        self,
        address: str,
        tls: TlsFiles | None = None,
        *,
        role: Role,
        within: float = _ANSWER,
    ) -> None:
        place, files = tls_files.split(address)
        self.tls = tls or files
        self.address = place if self.tls is None else tls_files.with_scheme(place)
        self._role = role
        self._within = within
        #: The holder of the service's certificate, once it was found to be this service's; why the last look failed.
        self._holder: Identity | None = None
        self._failure: TusklineError | None = None
        self._looked_at = -math.inf
        #: How gRPC failed to connect since the last look, or that no answer came in time: a deadline may end before gRPC's
        #: attempts do, whose failure it hides. None: it did not fail.
        self._lost: UnreachableError | SilentError | None = None
        #: The look in progress, or the last one. In a forked process it is not alive.
        self._looking: threading.Thread | None = None
        self._closed = False
        #: Of what is above and of the client; it is held for no look.
        self._lock = threading.Lock()
        self._stamp = self.tls and self.tls.stamp()
        #: Of the holder. None: it is made with the next call.
        self._client: flight.FlightClient | None = None
        with actions.at(self.address):
            if self.tls is None:
                self._client = _client(self.address)
            else:
                _load(self.tls)

    @contextlib.contextmanager
    def use(self, streams: Collection[str] = ()) -> Iterator[Service]:
        """A block with a call about these streams. It waits, `within` seconds at most, for a look that decides whether it may begin.

        Raises `UntrustedServiceError` if the service's certificate lacks its role, or a stream; before the first call also
        `UnreachableError` and `SilentError`. In the block, Flight's errors are converted.
        """
        service = self._service(streams)
        service.check(streams)
        try:
            with actions.at(self.address):
                yield service
        except (UnreachableError, SilentError) as error:
            self._lost = error
            raise

    def _service(self, streams: Collection[str]) -> Service:
        if self.tls is None:
            assert self._client is not None
            return Service(self._client, self.address, self._role, None)
        with self._lock:
            stamp = self.tls.stamp()
            if stamp != self._stamp:
                # The earlier client closes after its last call.
                self._stamp, self._client, self._looked_at = stamp, None, -math.inf
            lacking = self._lacks(streams)
            needed = lacking or isinstance(self._lost, UntrustedServiceError)
            look = self._look_if_due(self.tls, lacking=lacking)
        if needed and look is not None:
            look.join(self._within)
        with self._lock:
            if self._holder is None:
                raise self._failure or service_certificate.silent(self.address)
            if self._client is None:
                self._client = _client(self.address, self.tls, self._holder)
            return Service(self._client, self.address, self._role, self._holder)

    def _lacks(self, streams: Collection[str]) -> bool:
        """Whether the service's certificate is not known, or did not name one of these streams when it was looked at."""
        its = self._holder
        return its is None or bool(authorization.not_its_service(its, self._role, streams))

    def _look_if_due(self, tls: TlsFiles, *, lacking: bool) -> threading.Thread | None:
        """Begin to look at the service's certificate if a call needs another one, or gRPC could not connect; returns the look in progress."""
        if self._looking is not None and self._looking.is_alive():
            return self._looking
        refused = self._holder is not None or isinstance(self._failure, UntrustedServiceError)
        rested = time.monotonic() - self._looked_at >= (_REFUSED if refused else 0.0)
        due = (lacking and rested) or (self._holder is not None and self._lost is not None)
        if self._closed or not due:
            return None
        self._lost = None
        self._looking = threading.Thread(target=self._look, args=(tls,), name="look", daemon=True)
        self._looking.start()
        return self._looking

    def _look(self, tls: TlsFiles) -> None:
        its, failure = None, None
        try:
            its = service_certificate.holder(self.address, tls, within=self._within)
            why = authorization.not_its_service(its, self._role)
            service_certificate.refuse(why, self.address)
        except TusklineError as error:
            failure = error
        with self._lock:
            self._looked_at = time.monotonic()
            self._failure = failure
            if isinstance(failure, UntrustedServiceError):
                its = None
            elif failure is not None:
                its = self._holder
            if its != self._holder:
                self._holder, self._client = its, None

    def with_files(self, address: str) -> str:
        """The address of another service of the same log, to be reached with the same certificate."""
        return tls_files.with_files(address, self.tls)

    def close(self) -> None:
        """Close the connection. A look in progress ends by itself."""
        with self._lock:
            self._closed = True
            client = self._client
        if client is not None:
            client.close()
