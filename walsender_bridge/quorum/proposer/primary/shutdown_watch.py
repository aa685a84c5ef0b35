"""Whether the primary is shutting down and waits for WAL that no quorum acknowledges: then its wait must be ended.

A walsender whose server shuts down sends everything, and ends when its standby has reported all of it as flushed
(WalSndDone). Until then it requests a reply after each one that it gets. With a quorum that takes a moment, and the last
WAL, the shutdown checkpoint, is on the quorum. Without one the server would never end: the proposer replies, so no
timeout of the server's expires.

Closing the connection then is safe: no backend waits for a COMMIT any more (a shutdown ends the backends first, and
those that waited issue a warning that the commit may not be replicated), and closing acknowledges nothing.

A shutdown is recognized by the rate of reply requests alone: a running server sends one every half `wal_sender_timeout`,
one that shuts down hundreds per second. A false detection only starts a new session, with an election.
"""

from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.postgres.protocol.lsn import Lsn

#: Seconds within which commit_lsn must advance while the server requests replies.
PATIENCE = 3.0
#: Reply requests in that time that only a shutdown sends.
QUESTIONS = 100
#: Seconds without a reply request after which the count restarts.
_GAP = 0.25


class ShutdownWatch:
    """See the module. Times are seconds of any clock."""

    __slots__ = ("_asked_at", "_commit_lsn", "_questions", "_since")

    def __init__(self) -> None:
        self._commit_lsn = -1
        self._since = self._asked_at = 0.0
        self._questions = 0

    def asked(self, now: float, commit_lsn: Lsn, where: str) -> None:
        """The server at `where` requests a reply, which reports `commit_lsn`. Raises `ConnectionFailedError` if in vain."""
        if commit_lsn != self._commit_lsn or now - self._asked_at > _GAP:
            self._commit_lsn, self._since, self._questions = commit_lsn, now, 0
        self._asked_at = now
        self._questions += 1
        if self._questions >= QUESTIONS and now - self._since >= PATIENCE:
            raise ConnectionFailedError(
                "the primary is shutting down, and no quorum acknowledges its last WAL", where=where
            )
