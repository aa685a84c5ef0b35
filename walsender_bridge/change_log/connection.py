"""A connection to one of the change log's services, with a certificate if the service asks for one.

Before the first call the roles of the service's own certificate are looked at (`service_certificate`). A call `_LOOK` seconds
later has them looked at again, in the background: gRPC's connection needs neither that nor a name server, so no call waits for it. A
certificate that is not accepted then ends the use of the service; a look that fails otherwise says nothing, and gRPC itself reports
a service that does not answer.

Certificates may be replaced while a process runs: before a call, the connection is made again if their files differ from
those that it was made with. Calls in progress end on the earlier one. Three files are not replaced in one step: meanwhile, and
for as long as they do not fit together, a process that has used them goes on with what it had.
"""

import json
import math
import os
import threading
import time
from collections.abc import Collection
from typing import Any, Final

from pyarrow import flight

from walsender_bridge.change_log import actions, authorization, protocol, service_certificate
from walsender_bridge.errors import ConfigError, TusklineError, UntrustedServiceError
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


#: Seconds for the look at a service's certificate, and after which it is looked at again.
_ANSWER: Final = 5.0
_LOOK: Final = 30.0
#: Seconds for which a certificate that was not accepted is not looked at again.
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
    if tls is not None:
        its = service_certificate.holder(address, tls, within=_ANSWER)
        why = authorization.not_its_service(its, role, streams)
        service_certificate.refuse(why, address, streams)
    return _client(address, tls)


def _client(address: str, tls: TlsFiles | None) -> flight.FlightClient:
    """A client of the service at this address, which contains no paths. With `tls`, it uses TLS whatever the scheme is.

    Raises `ConfigError`, Flight's errors, and `PrivilegeError` if another account listens there without TLS.
    """
    options: dict[str, Any] = {}
    channel: list[tuple[str, Any]] = [*protocol.CHANNEL_OPTIONS]
    if tls is not None:
        quiet()
        # Another process may have chosen the address, as in an order to synchronize.
        address = tls_files.with_scheme(address)
        channel += protocol.REMOTE_CHANNEL_OPTIONS
        own = _load(tls)
        options = {
            "tls_root_certs": own.ca,
            "cert_chain": own.certificate,
            "private_key": own.key,
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
        #: The look in progress, or the last one. In a forked process it is not alive.
        self._looking: threading.Thread | None = None
        self._closed = False
        #: Of what is above and of the client; it is held for no look.
        self._lock = threading.Lock()
        self._stamp = self.tls and self.tls.stamp()
        with actions.at(self.address):
            self._client: flight.FlightClient | None = _client(self.address, self.tls)

    def client(self, streams: Collection[str] = ()) -> flight.FlightClient:
        """The client for the next call, about these streams. Before the first call it waits for a look, `within` seconds at most.

        Raises `UntrustedServiceError` if the service's certificate lacks its role, or a stream; before the first call also
        `UnreachableError` and `SilentError`.
        """
        if self.tls is None:
            assert self._client is not None
            return self._client
        with self._lock:
            stamp = self.tls.stamp()
            if stamp != self._stamp:
                # The earlier client closes after its last call.
                self._stamp, self._client, self._looked_at = stamp, None, -math.inf
            look = self._look_if_due(self.tls)
            holder = self._holder
        if holder is None and look is not None:
            look.join(self._within)
        with self._lock:
            if self._holder is None:
                raise self._failure or service_certificate.silent(self.address)
            if self._client is None:
                self._client = _client(self.address, self.tls)
            client = self._client
        self.check(streams)
        return client

    def _look_if_due(self, tls: TlsFiles) -> threading.Thread | None:
        """Begin to look at the service's certificate, unless that was done a moment ago; returns the look in progress."""
        if self._looking is not None and self._looking.is_alive():
            return self._looking
        refused = isinstance(self._failure, UntrustedServiceError)
        pause = _LOOK if self._holder is not None else _REFUSED if refused else 0.0
        if self._closed or time.monotonic() - self._looked_at < pause:
            return None
        # gRPC's connection outlasts the certificate, and refuses one whose days are over when it connects again.
        args = (tls, self._holder is not None)
        self._looking = threading.Thread(target=self._look, args=args, name="look", daemon=True)
        self._looking.start()
        return self._looking

    def _look(self, tls: TlsFiles, ended: bool) -> None:
        its, failure = None, None
        try:
            its = service_certificate.holder(self.address, tls, within=self._within, ended=ended)
            why = authorization.not_its_service(its, self._role)
            service_certificate.refuse(why, self.address)
        except TusklineError as error:
            failure = error
        with self._lock:
            self._looked_at = time.monotonic()
            self._failure = failure
            if failure is None:
                self._holder = its
            elif isinstance(failure, UntrustedServiceError):
                self._holder = self._client = None

    def check(self, streams: Collection[str]) -> None:
        """Raise `UntrustedServiceError` unless the certificate last looked at names these streams."""
        holder = self._holder
        if holder is not None:
            why = authorization.not_its_service(holder, self._role, streams)
            service_certificate.refuse(why, self.address, streams)

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
