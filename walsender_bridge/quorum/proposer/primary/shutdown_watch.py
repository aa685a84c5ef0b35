"""Whether the primary is shutting down and waits for what no quorum has: then its wait must be ended.

A walsender whose server shuts down sends everything, and ends when its standby has reported all of it as flushed
(WalSndDone). Until then it asks for a report as soon as it has got one. With a quorum that is over in a moment,
and the last WAL, the shutdown's checkpoint, is on the quorum. Without one the server would never end: the proposer
answers, so no timeout of the server's passes.

Closing the connection then is safe: nobody waits for a COMMIT any more (a shutdown ends the backends first, and
those that waited are told that their commit may not be on a standby), and closing acknowledges nothing.

Told by the pace of the questions alone: in its life a server asks once in half a `wal_sender_timeout`; here hundreds
of times a second. Taken for a shutdown by mistake, a session begins anew, with an election: no harm.
"""

from walsender_bridge.errors import ConnectionFailedError

#: Seconds in which the quorum has to get on while the server asks.
PATIENCE = 3.0
#: Questions in that time that only a shutdown brings.
QUESTIONS = 100
#: Seconds without a question after which the count begins anew.
_GAP = 0.25


class ShutdownWatch:
    """See the module. The time is any clock's, in seconds."""

    __slots__ = ("_asked_at", "_commit_lsn", "_questions", "_since")

    def __init__(self) -> None:
        self._commit_lsn = -1
        self._since = self._asked_at = 0.0
        self._questions = 0

    def asked(self, now: float, commit_lsn: int, where: str) -> None:
        """The server at `where` wants a report, and hears `commit_lsn`. Raises `ConnectionFailedError` if in vain."""
        if commit_lsn != self._commit_lsn or now - self._asked_at > _GAP:
            self._commit_lsn, self._since, self._questions = commit_lsn, now, 0
        self._asked_at = now
        self._questions += 1
        if self._questions >= QUESTIONS and now - self._since >= PATIENCE:
            raise ConnectionFailedError(
                "the primary shuts down, and no quorum takes its last WAL", where=where
            )
