"""One of several repositories of a log: it serves while it leads, and otherwise answers that it does not.

While another repository leads, it looks every fraction of a lease whether it still does. Once it leads itself, it reads the
records, and serves as a single repository would, until its leadership cannot be renewed or it is stopped.
"""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from pyarrow import flight

from walsender_bridge.change_log.actions import Handler
from walsender_bridge.change_log.calls import Call, Calls
from walsender_bridge.change_log.listener import Listener, Service
from walsender_bridge.change_log.repository.etcd import EtcdSettings
from walsender_bridge.change_log.repository.etcd_store import EtcdStore
from walsender_bridge.change_log.repository.leader_lease import (
    Leader,
    not_leading,
    try_to_lead,
)
from walsender_bridge.change_log.repository.record_store import RecordStore
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime import listening, logs
from walsender_bridge.runtime.certificate_holder import Role
from walsender_bridge.runtime.tls_files import PLAIN, TLS, TlsBytes, TlsFiles

#: Looks at who leads, in the time of a lease.
_LOOKS: Final = 10
#: Seconds until a repository that could not serve as the leader may lead again; another one may be able to.
_AFTER_FAILURE: Final = 2.0
#: Seconds in which the port is free again after a service has stopped.
_FREE: Final = 5.0

_log = logs.logger()


class RepositoryCandidate:
    """See the module. `serve`: creates the repository over a store, listening on `listen` once it is started.

    `reaches`: whether enough log servers answer here. If they do, a hindered leader gives way to this one.
    """

    def __init__(
        self,
        settings: EtcdSettings,
        listen: str,
        serve: Callable[[RecordStore], RepositoryServer],
        tls: TlsFiles | None = None,
        reaches: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._reaches = reaches
        self._listen = listen
        self._serve = serve
        self._tls = tls
        self._stopping = threading.Event()
        self._reason = "none is known to lead"
        self._said = ""
        self._follower: Listener | None = None
        self._thread = threading.Thread(target=self._run, name="candidate", daemon=True)
        #: Set while this repository serves.
        self.serving = threading.Event()
        self.address = f"{PLAIN if tls is None else TLS}{listen}"

    def start(self) -> None:
        """Listen, and try to lead from now on. Raises `ConfigError`."""
        self._follow()
        self._thread.start()

    def stop(self) -> None:
        """Stop, and let another repository lead."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self._unfollow()

    # -- while another one leads --------------------------------------------------------------------

    def _follow(self) -> None:
        self._follower = Listener(
            partial(_Follower, self.reason), self._listen, self._tls, Role.REPOSITORY
        )

    def _unfollow(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    def reason(self) -> str:
        """Why this repository does not lead, as far as known."""
        return self._reason

    def _run(self) -> None:
        pause = self._settings.lease / _LOOKS
        while not self._stopping.is_set():
            wait = pause
            try:
                found = try_to_lead(self._settings, self._listen, able=self._reaches)
                if isinstance(found, Leader):
                    self._lead(found)
                    self._reason = "none is known to lead"
                else:
                    self._reason = f"the one at {found} does"
            except TusklineError as error:
                self._report(error)
                wait = _AFTER_FAILURE
            except Exception as error:
                _log.exception("repository failed", error=str(error))
                wait = _AFTER_FAILURE
            self._stopping.wait(wait)

    def _report(self, error: TusklineError) -> None:
        self._reason = f"{error.where}: {error.what}" if error.where else error.what
        if error.what != self._said:
            _log.warning("this repository cannot lead", error=error.what, where=error.where)
        self._said = error.what

    # -- while it leads -----------------------------------------------------------------------------

    def _lead(self, leader: Leader) -> None:
        try:
            store = EtcdStore(self._settings, leader)
            try:
                server = self._serve(store)
            except BaseException:
                store.close()
                raise
            self._serve_until_lost(server, leader)
        finally:
            leader.resign()

    def _serve_until_lost(self, server: RepositoryServer, leader: Leader) -> None:
        self._unfollow()
        try:
            listening.check(self._listen, seconds=_FREE)
            server.start()
            self._said = ""
            self.serving.set()
            while not self._stopping.is_set() and not leader.lost.wait(0.1):
                leader.hindered = server.is_cut_off()
            if leader.lost.is_set():
                _log.warning("this repository leads no longer", address=self.address)
        finally:
            self.serving.clear()
            server.stop()
            listening.check(self._listen, seconds=_FREE)
            self._follow()


class _Follower(Service):
    """Answers every action with `NotLeaderError`."""

    def __init__(
        self, reason: Callable[[], str], listen: str, tls: TlsBytes | None, calls: Calls
    ) -> None:
        self._reason = reason
        super().__init__({}, listen, tls, calls)

    def handlers(self, context: flight.ServerCallContext, call: Call) -> Mapping[str, Handler]:
        """Refuse the action."""
        del call
        # Who has no certificate of Tuskline is told nothing.
        self.holder(context)
        raise not_leading(self._reason())
