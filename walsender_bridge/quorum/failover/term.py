"""A proposer's session on a thread of its own, while this one sees to servers: a failover's term in office.

Invariant: `check` and `wait` raise what ended the session, so that nobody goes on in the name of a term that is over.
"""

import threading
import time
from collections.abc import Callable

from walsender_bridge.errors import DeadlineError
from walsender_bridge.quorum.proposer.core import Phase
from walsender_bridge.quorum.proposer.driver import ProposerSession

_LOOK = 0.02
#: Seconds in which a session has to end once it is told to: it looks five times a second.
_LEAVE_SECONDS = 10.0

#: Makes the session that tells how far it is; see `ProposerSession`.
MakeSession = Callable[[Callable[[int, Phase], None]], ProposerSession]


class LeaderTerm:
    """See the module. It begins at once. `commit_lsn`: what a quorum has, and has been told to the safekeepers."""

    def __init__(self, make: MakeSession) -> None:
        self.commit_lsn = 0
        self._error: Exception | None = None
        self._closing = False
        self._session = make(self._told)
        self._thread = threading.Thread(target=self._run, name="in office", daemon=True)
        self._thread.start()

    def _told(self, commit_lsn: int, _: Phase) -> None:
        self.commit_lsn = commit_lsn
        if self._closing:
            # On its own thread: from another one it may have ended, and its descriptors be somebody else's.
            self._session.stop()

    def _run(self) -> None:
        try:
            self._session.run()
        except Exception as error:  # whatever it is: who waits for this session must hear of it
            self._error = error

    @property
    def established(self) -> bool:
        """A quorum has everything up to VCL, in this term."""
        streaming = self._session.core.streaming
        return streaming is not None and streaming.established

    @property
    def vcl(self) -> int:
        """Where this term's epoch begins: all that may be committed lies below."""
        return self._session.core.vcl

    @property
    def begin_lsn(self) -> int | None:
        """Where the oldest WAL begins that a voter holds; None: none that holds any is connected."""
        # A copy: the session's own thread may add to them.
        peers = list(self._session.core.peers.values())
        return min((p.begin_lsn for p in peers if p.reply and p.begin_lsn), default=None)

    @property
    def timeline(self) -> int:
        """Of the log at VCL."""
        return self._session.core.history.timeline_at(self.vcl)

    @property
    def over(self) -> bool:
        """Whether something has ended the session."""
        return self._error is not None

    def check(self) -> None:
        """Raises what ended the session."""
        if self._error is not None:
            raise self._error

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Until `done`. Raises `DeadlineError`, and what ended the session."""
        deadline = time.monotonic() + seconds
        while not done():
            self.check()
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"this took longer than {seconds:g} s: {what}"
                    f" (the proposer: {self._session.core.phase.name.lower()})",
                    repair="see that a majority of the safekeepers runs, and run this again",
                )
            time.sleep(_LOOK)

    def close(self) -> None:
        """Leave the office, with the session's next tick. Raises `DeadlineError` when it does not end."""
        self._closing = True
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            raise DeadlineError(
                f"the proposer has not left its office in {_LEAVE_SECONDS:g} s",
                repair="end this process, which ends it, and run this again: it goes on from here",
            )
