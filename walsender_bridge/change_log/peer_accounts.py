"""Which clients a Flight service without TLS answers: those of its own account, and root (`runtime.peer_account`).

Flight names the peer of a call, and has no socket to ask. So the connection is looked up among this process's own, and the
kernel is asked once for each; for later calls it is enough that the connection is open still.
"""

import threading
from collections.abc import Iterable

from walsender_bridge.errors import PrivilegeError, UnavailableError
from walsender_bridge.runtime import tcp_connections
from walsender_bridge.runtime.tcp_connections import TcpConnection


class PeerAccounts:
    """See the module. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The connections at the last look, by peer.
        self._seen: dict[str, TcpConnection] = {}
        #: The sockets whose peers may call.
        self._trusted: frozenset[int] = frozenset()

    def check(self, port: int, peer: str) -> None:
        """Raise `PrivilegeError` unless the peer, connected to `port`, may call; `UnavailableError` if it has gone."""
        its = self._seen.get(peer)
        if its is None or not tcp_connections.is_open(its):
            with self._lock:
                self._seen = {each.peer: each for each in tcp_connections.accepted(port)}
                its = self._seen.get(peer)
            if its is None:
                raise UnavailableError("the connection has ended")
        self._check(its)

    def foreign(self, found: Iterable[TcpConnection]) -> set[int]:
        """The sockets whose peers are of other accounts. `found`: all connections; what is not among them is forgotten."""
        with self._lock:
            self._seen = {each.peer: each for each in found}
            self._trusted &= {each.inode for each in self._seen.values()}
        foreign = set()
        for each in self._seen.values():
            try:
                self._check(each)
            except PrivilegeError:
                foreign.add(each.inode)
            except UnavailableError:
                continue
        return foreign

    def _check(self, its: TcpConnection) -> None:
        if its.inode not in self._trusted:
            tcp_connections.check_account(its)
            with self._lock:
                self._trusted |= {its.inode}
