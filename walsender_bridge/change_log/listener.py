"""Where the change log's services listen: on loopback for their own account, or with TLS for the holders of certificates.

With TLS, a client is known by its certificate, which the handshake has verified before a call gets here, and by what the
certificate says of its holder (`authorization`). That is checked before a call reads or changes anything. Without TLS, the port
is on loopback, and only clients of the service's own account and of root are answered (`peer_accounts`).

Certificates are replaced without a restart. Flight takes its certificates when it begins to listen, and two servers cannot
listen on one port. So the one with the earlier certificates stops to listen, which is immediate, the next one takes the port,
and calls in progress end where they began (docs/decisions/tls.md). If an authority has been removed, they are ended after a few seconds:
an append lasts as long as its writer stays connected, and the writer's certificate may be the reason for the removal.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from walsender_bridge.change_log import actions, authorization
from walsender_bridge.change_log.actions import Handler
from walsender_bridge.change_log.calls import Call, Calls
from walsender_bridge.change_log.connection import quiet
from walsender_bridge.change_log.connection_watch import ConnectionWatch
from walsender_bridge.change_log.peer_accounts import PeerAccounts
from walsender_bridge.errors import ConfigError, NotSupportedError, TusklineError
from walsender_bridge.runtime import (
    certificate_holder,
    listening,
    logs,
    tcp_connections,
    tls_files,
)
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.tls_files import TlsBytes, TlsFiles

#: Seconds between two looks at the files of the certificates.
POLL: Final = 5.0
#: Seconds between two attempts to listen, at first and at most; and until that is an error in the log.
_FIRST_PAUSE, _LONGEST_PAUSE, _LONG = 0.001, 1.0, 5.0
#: Seconds for which calls in progress may go on when an authority has been removed.
_LAST_CALLS: Final = 2.0

_log = logs.logger()


class Service(flight.FlightServerBase):  # type: ignore[misc]  # Flight carries no types
    """A Flight service of these actions, which listens as soon as it is created. `tls`: None: without TLS.

    `calls`: where it counts its calls, each of which is within `call`.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], listen: str, tls: TlsBytes | None, calls: Calls
    ) -> None:
        self._handlers = handlers
        self._calls = calls
        self._guarded = tls is not None
        #: Of the peers without certificates.
        self.accounts = PeerAccounts() if tls is None else None
        if tls is None:
            super().__init__(f"{tls_files.PLAIN}{listen}")
            return
        quiet()
        super().__init__(
            f"{tls_files.TLS}{listen}",
            tls_certificates=[(tls.certificate, tls.key)],
            verify_client=True,
            root_certificates=tls.ca,
        )

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        """The names of the actions."""
        with self.call(context):
            pass
        return [(name, "see the change log's README") for name in self._handlers]

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        """One action."""
        with self.call(context) as call:
            call.took(len(action.body))
            return actions.answer(
                self.handlers(context, call),
                action,
                lambda name, streams: self.allow(context, name, streams),
            )

    def _unsupported(self, *arguments: Any, **options: Any) -> Any:
        """A call that this service does not have; Flight's own answer is a traceback."""
        del arguments, options
        with actions.faults():
            raise NotSupportedError("this service does not have calls of this kind")

    do_get = do_put = do_exchange = get_flight_info = list_flights = _unsupported

    def get_schema(self, *arguments: Any, **options: Any) -> flight.SchemaResult:
        """No columns. pyarrow answers every error of this call with its traceback."""
        del arguments, options
        return flight.SchemaResult(pa.schema([]))

    def handlers(self, context: flight.ServerCallContext, call: Call) -> Mapping[str, Handler]:
        """The handlers of the actions, for a call."""
        del context, call
        return self._handlers

    @contextlib.contextmanager
    def call(self, context: flight.ServerCallContext) -> Iterator[Call]:
        """A block that serves a call; its errors are sent over the wire."""
        with actions.faults():
            call = self.begin(context)
            try:
                yield call
            finally:
                call.end()

    def begin(self, context: flight.ServerCallContext) -> Call:
        """A call, which the caller ends. Raises `UnavailableError` if there are too many, `PrivilegeError` to another account."""
        call = self._calls.begin(context.peer(), context.peer_identity())
        try:
            if self.accounts is not None:
                self.accounts.check(self.port, call.peer)
        except TusklineError:
            call.end()
            raise
        return call

    def allow(
        self, context: flight.ServerCallContext, action: str, streams: Iterable[str] | None
    ) -> None:
        """Raise `PrivilegeError` unless the client may do this. `streams`: None: they are not known yet."""
        holder = self.holder(context)
        if holder is None:
            return
        if streams is None:
            authorization.check_role(holder, action)
        else:
            authorization.check(holder, action, streams)

    def holder(self, context: flight.ServerCallContext) -> certificate_holder.Identity | None:
        """The holder of the client's certificate; None without TLS. Raises `PrivilegeError`."""
        return certificate_holder.parse(context.peer_identity()) if self._guarded else None


class Listener:
    """Has a service listen on `listen` (`host:port`, port 0: any), and again with each replacement of its certificates.

    `serve` creates the service, for an address, the content of the files, and the calls in progress of all that were created.
    `role`: of the service, which its certificate has to have. Raises `ConfigError`.
    """

    def __init__(
        self,
        serve: Callable[[str, TlsBytes | None, Calls], Service],
        listen: str,
        tls: TlsFiles | None,
        role: Role,
    ) -> None:
        self._serve = serve
        self._calls = Calls()
        self._tls = tls
        self._role = role
        self._stopping = threading.Event()
        self._stamp = tls and tls.stamp()
        #: The end of the certificate that was warned of, and whether it was over.
        self._warned = (0.0, False)
        listening.check_strangers(listen, tls=tls is not None)
        self._host = listen.rpartition(":")[0].strip("[]")
        self._used = None if tls is None else _load(tls, role, self._host)
        try:
            listening.check(listen)
            self._service = serve(listen, self._used, self._calls)
        except (OSError, pa.ArrowException, ConfigError) as error:
            raise listening.refused(listen, error) from None
        self._place = f"{listen.rsplit(':', 1)[0]}:{self._service.port}"
        self.address = f"{tls_files.TLS if tls else tls_files.PLAIN}{self._place}"
        self._watch = threading.Thread(target=self._watch_files, name="certificates", daemon=True)
        self._connections = ConnectionWatch(self._service.port, self._calls, self._service.accounts)
        self._connections.start()
        if tls is not None:
            self._watch.start()

    def stop(self, within: float | None = None) -> None:
        """Stop to listen, and wait for calls in progress, at most `within` seconds."""
        self._stopping.set()
        if self._tls is not None:
            self._watch.join()
        _end(self._service).join(within)
        self._connections.stop()

    # -- replaced certificates ----------------------------------------------------------------------

    def _watch_files(self) -> None:
        assert self._tls is not None
        failed = said = ""
        while not self._stopping.wait(POLL):
            self._warn_of_end(time.time())
            stamp = self._tls.stamp()
            if stamp == self._stamp:
                continue
            try:
                found = _load(self._tls, self._role, self._host)
            except ConfigError as error:
                # A replacement may be halfway through: it is an error if it remains so.
                if failed == error.what != said:
                    said = error.what
                    self._log_refused(error)
                failed = error.what
                continue
            self._stamp, failed, said = stamp, "", ""
            former = self._used
            if former is not None and found != former:
                self._used = found
                self._replace(found, drops=tls_files.drops_authority(former, found))

    def _warn_of_end(self, now: float) -> None:
        """Log, once for each certificate, that it ends soon, and that it has ended: no client then gets through."""
        used = self._used
        if used is None or not tls_files.ends_soon(used.begins, used.ends, now):
            return
        over = now > used.ends
        if (used.ends, over) != self._warned:
            self._warned = (used.ends, over)
            _log.warning(
                "the certificate has expired" if over else "the certificate expires soon",
                address=self.address,
                ends=datetime.fromtimestamp(used.ends, UTC).isoformat(),
                repair="replace its files (docs/certificates.md)",
            )

    def _log_refused(self, error: ConfigError) -> None:
        _log.error(
            "new certificate refused; the earlier one remains in use",
            address=self.address,
            file=error.where,
            error=error.what,
            repair=error.repair,
        )

    def _replace(self, new: TlsBytes, *, drops: bool) -> None:
        """Listen with the new certificates, as soon as the service with the earlier ones has left the port.

        `drops`: an authority has been removed.
        """
        _end(self._service)
        began, pause, said = time.monotonic(), _FIRST_PAUSE, False
        while not self._stopping.is_set():
            try:
                listening.check(self._place, bind_only=True)
                earlier = tcp_connections.accepted(self._service.port)
                self._service = self._serve(self._place, new, self._calls)
            except (OSError, pa.ArrowException, ConfigError) as error:
                if not said and time.monotonic() - began > _LONG:
                    said = True
                    _log.error("cannot listen again", address=self.address, error=str(error))
                self._stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                _log.info("certificate replaced", address=self.address)
                if drops:
                    self._end_connections({each.inode for each in earlier})
                return

    def _end_connections(self, inodes: set[int]) -> None:
        """End the connections with these sockets, as far as they do not end by themselves."""
        self._stopping.wait(_LAST_CALLS)
        left = [x for x in tcp_connections.accepted(self._service.port) if x.inode in inodes]
        for each in left:
            tcp_connections.shut_down(each)
        if left:
            _log.info(
                "ended connections", count=len(left), reason="an authority was removed from ca.pem"
            )


def _load(files: TlsFiles, role: Role, host: str) -> TlsBytes:
    """The content of the files of a service's certificate. Raises `ConfigError` also for one without its role, or its name there."""
    found = files.load(server=True)
    at = [host] if files.names(host) else []
    if what := certificate_holder.lacks(found.names, [role], host=True, at=at):
        raise ConfigError(
            what,
            where=str(files.certificate),
            repair=f"issue one with `tuskline certs issue --role {role} --host {host}`, and copy its files over these",
        )
    return found


def _end(service: Service) -> threading.Thread:
    """Shut the service down: the port is free at once, the thread ends with the last call in progress."""
    thread = threading.Thread(target=service.shutdown, name="shutdown", daemon=True)
    thread.start()
    return thread
