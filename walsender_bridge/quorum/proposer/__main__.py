"""`python -m walsender_bridge.quorum.proposer`: the WAL proposer of one primary; the bridge's supervisor starts it.

When the primary disconnects, or a vote went to another proposer while none was elected (`rivals.py`), a new session with
an election of its own follows. An error that a restart cannot fix ends the process; the exit code is its cause.
"""

import signal
import sys
import threading
import time
from dataclasses import replace

from walsender_bridge.errors import (
    ConnectionFailedError,
    DeadlineError,
    OutvotedError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.proposer.configured_membership import refuse_smaller
from walsender_bridge.quorum.proposer.core import Phase
from walsender_bridge.quorum.proposer.driver import ProposerSession
from walsender_bridge.quorum.proposer.first_membership import find_membership
from walsender_bridge.quorum.proposer.member_changes import MemberChanges
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId
from walsender_bridge.quorum.proposer.quorum_id_record import draw, known_on
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.proposer.status import commit_page, without_session
from walsender_bridge.quorum.proposer.status_record import ENDED, ProposerStatus
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.runtime import child_process, gc_control, logs, status_file
from walsender_bridge.runtime.commit_page import CommitPage, CommitPageWriter
from walsender_bridge.runtime.error_record import ErrorRecord

#: Seconds between two sessions.
_PAUSE = 0.5
#: Seconds between two reports while commit_lsn advances: a commit gate waits for them.
_MOVING = 0.05
#: How often the wait of an outvoted session doubles: two proposers that outvote each other retry ever further apart.
_MOST_DOUBLINGS = 5

_log = logs.logger()


class _Process:
    def __init__(self, settings: ProposerSettings) -> None:
        self._settings = settings
        page = settings.commit_page
        self._page = None if page is None else CommitPageWriter(page)
        self._session: ProposerSession | None = None
        self._stopped = threading.Event()
        self._told = ("", 0, 0.0)
        #: Whether the membership was compared with the configured one and found equal.
        self._served = False
        #: The greatest term known to any session, and the number of consecutive sessions that were outvoted.
        self._heard_term = self._outvoted = 0

    def stop(self) -> None:
        self._stopped.set()
        if self._session is not None:
            self._session.stop()

    def run(self) -> None:
        settings = self._settings
        while not self._stopped.is_set():
            try:
                with PrimaryStream.connect(settings.dsn) as asked:
                    server = asked.server_info()
                    known = known_on(asked, settings.quorum_file, settings.application_name)
                changes = MemberChanges(settings.members_file)
                others, configured = changes.poll(), settings.safekeepers
                membership = find_membership(
                    configured, server, others, known=known, tls=settings.tls
                )
                if not self._served:
                    refuse_smaller(membership, configured, changes.request)
                    self._served = True
                quorum = membership.quorum or draw(settings.quorum_file)
                self._run_session(membership, quorum, known)
            except (ConnectionFailedError, UnavailableError, DeadlineError) as error:
                _log.warning("session ended", reason=error.what, where=error.where)
                self._session = None
                self._say(without_session(Phase.GREETING, ErrorRecord.of(error)))
                time.sleep(_PAUSE)
            except TusklineError as error:
                # A restart cannot fix it, and would get in the way of the rightful proposer.
                self._say(without_session(ENDED, ErrorRecord.of(error)))
                raise
        self._say(without_session(Phase.STOPPED))

    def _run_session(self, membership: Configuration, quorum: int, known: KnownQuorumId) -> None:
        """Raises the error that ends it, or returns after `stop`."""
        patience = self._settings.limits.patience_ticks << min(self._outvoted, _MOST_DOUBLINGS)
        limits = replace(self._settings.limits, patience_ticks=patience)
        session = self._session = ProposerSession(
            replace(self._settings, limits=limits),
            membership,
            self._tell,
            above=self._heard_term,
            quorum=quorum,
            formed=known.formed,
            may_begin=not known.required,
        )
        if self._stopped.is_set():  # while there was no session to stop
            session.stop()
        try:
            session.run()
        except OutvotedError:
            led = session.core.streaming is not None and session.core.streaming.established
            self._outvoted = 0 if led else self._outvoted + 1
            raise
        finally:
            self._heard_term = session.core.heard_term

    def _tell(self, commit_lsn: Lsn, phase: Phase) -> None:
        """Report the status: at each change of phase, a few times a second, and more often while commit_lsn advances."""
        now = time.monotonic()
        if self._session is None:
            return
        before, lsn, at = self._told
        if phase == before and now - at < (_PAUSE if commit_lsn == lsn else _MOVING):
            return
        self._told = phase, commit_lsn, now
        self._say(self._session.status())

    def _say(self, status: ProposerStatus) -> None:
        if self._page is not None:
            self._page.write(self._committed(status))
            status = replace(status, commit_page_fault=self._page.fault)
        if self._settings.status_file is not None:
            status_file.write(self._settings.status_file, status)

    def _committed(self, status: ProposerStatus) -> CommitPage:
        """The commit page: what a quorum has on disk."""
        if status.error is not None:
            return CommitPage(why=f"the safekeepers' proposer: {status.error.what}")
        if self._session is None or status.phase == Phase.STOPPED:
            return CommitPage(why="the safekeepers' proposer has stopped")
        return commit_page(self._session.core, has_quorum=status.quorum)


def propose(settings: ProposerSettings) -> None:
    """Run until a signal."""
    process = _Process(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: process.stop())
    # All objects allocated so far live as long as the process.
    gc_control.disable_automatic()
    process.run()


if __name__ == "__main__":
    sys.exit(child_process.run(ProposerSettings, propose))
