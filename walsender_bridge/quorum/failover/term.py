"""The leader term of a failover: a proposer's session on a thread of its own, while this thread operates the servers.

Invariant: `check` and `wait` raise the error that ended the session, so the run never continues after its term.
"""

import threading
import time
from collections.abc import Callable

from walsender_bridge.errors import DeadlineError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.proposer.core import Phase
from walsender_bridge.quorum.proposer.driver import ProposerSession

_POLL_SECONDS = 0.02
#: Seconds that a session may take to end once `close` is called: it checks five times a second.
_LEAVE_SECONDS = 10.0

#: Creates the session, given its progress callback; see `ProposerSession`.
MakeSession = Callable[[Callable[[int, Phase], None]], ProposerSession]


class LeaderTerm:
    """See the module. It starts at once. `commit_lsn`: on a quorum's disks, and sent to the safekeepers."""

    def __init__(self, make: MakeSession) -> None:
        self.commit_lsn = 0
        self._error: Exception | None = None
        self._closing = False
        self._session = make(self._told)
        self._thread = threading.Thread(target=self._run, name="leader term", daemon=True)
        self._thread.start()

    def _told(self, commit_lsn: Lsn, _: Phase) -> None:
        self.commit_lsn = commit_lsn
        if self._closing:
            # On the session's own thread: called from another one, it may have ended and its descriptors been reused.
            self._session.stop()

    def _run(self) -> None:
        try:
            self._session.run()
        except Exception as error:  # of any kind: `check` and `wait` must raise it
            self._error = error

    @property
    def established(self) -> bool:
        """A quorum has everything up to VCL, in this term."""
        streaming = self._session.core.streaming
        return streaming is not None and streaming.established

    @property
    def vcl(self) -> Lsn:
        """Start of this term's election epoch: all WAL that may be committed lies below."""
        return self._session.core.vcl

    @property
    def begin_lsn(self) -> Lsn | None:
        """Where the oldest WAL begins that a voter holds; None: none that holds any is connected."""
        # A copy: the session's own thread may add to them.
        peers = list(self._session.core.peers.values())
        return min((p.begin_lsn for p in peers if p.reply and p.begin_lsn), default=None)

    @property
    def timeline(self) -> int:
        """The log's timeline at VCL."""
        return self._session.core.history.timeline_at(self.vcl)

    @property
    def over(self) -> bool:
        """Whether the session has ended with an error."""
        return self._error is not None

    def check(self) -> None:
        """Raises the error that ended the session."""
        if self._error is not None:
            raise self._error

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until `done`. Raises `DeadlineError`, and the error that ended the session."""
        deadline = time.monotonic() + seconds
        while not done():
            self.check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"step took longer than {seconds:g} s: {what}"
                    f" (the proposer: {self._session.core.phase.name.lower()})",
                    repair="start a majority of the safekeepers, and repeat this command",
                )
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """End the session, at its next tick. Raises `DeadlineError` when it does not end."""
        self._closing = True
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            raise DeadlineError(
                f"the proposer has not ended within {_LEAVE_SECONDS:g} s",
                repair="terminate this process, which ends the proposer, and repeat the command: it continues from here",
            )
