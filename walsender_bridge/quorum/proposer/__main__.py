"""`python -m walsender_bridge.quorum.proposer`: the WAL proposer of one primary; the bridge's supervisor starts it.

The DSN is passed in the environment variable TUSKLINE_SOURCE_DSN, since command lines are world-readable. When the
primary disconnects, or a vote went to another proposer while none was elected (`rivals.py`), a new session with an
election of its own follows. An error that a restart cannot fix ends the process; the exit code is its cause.
"""

import argparse
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import structlog

from walsender_bridge.errors import (
    ConnectionFailedError,
    DeadlineError,
    OutvotedError,
    TusklineError,
    UnavailableError,
    UsageError,
)
from walsender_bridge.quorum.proposer.configured_membership import refuse_smaller
from walsender_bridge.quorum.proposer.core import Phase
from walsender_bridge.quorum.proposer.driver import ProposerSession
from walsender_bridge.quorum.proposer.effects import Limits
from walsender_bridge.quorum.proposer.first_membership import find_membership
from walsender_bridge.quorum.proposer.member_changes import MemberChanges, parse_address
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.quorum_id_record import draw, known_on
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.proposer.status import commit_page, without_session
from walsender_bridge.quorum.proposer.status_record import ENDED, ProposerStatus
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.runtime import gc_control, logs, status_file, supervisor
from walsender_bridge.runtime.commit_page import CommitPage, CommitPageWriter
from walsender_bridge.runtime.status_file import ErrorRecord

DSN_VARIABLE = "TUSKLINE_SOURCE_DSN"
#: Seconds between two sessions.
_PAUSE = 0.5
#: Seconds between two reports while commit_lsn advances: a commit gate waits for them.
_MOVING = 0.05
#: How often the wait of an outvoted session doubles: two proposers that outvote each other retry ever further apart.
_MOST_DOUBLINGS = 5

_log = structlog.get_logger(__name__)


class _Process:
    def __init__(
        self, settings: ProposerSettings, status_file: Path | None, page: Path | None
    ) -> None:
        self._settings = settings
        self._status_file = status_file
        #: The page that commit gates read; the status file is for operators and monitoring.
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
                membership = find_membership(configured, server, others, known=known)
                if not self._served:
                    refuse_smaller(membership, configured, changes.request)
                    self._served = True
                quorum = membership.quorum or draw(settings.quorum_file)
                self._run_session(membership, quorum, formed=known.formed)
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

    def _run_session(self, membership: Configuration, quorum: int, *, formed: bool) -> None:
        """Raises the error that ends it, or returns after `stop`."""
        patience = self._settings.limits.patience_ticks << min(self._outvoted, _MOST_DOUBLINGS)
        limits = replace(self._settings.limits, patience_ticks=patience)
        session = self._session = ProposerSession(
            replace(self._settings, limits=limits),
            membership,
            self._tell,
            above=self._heard_term,
            quorum=quorum,
            formed=formed,
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

    def _tell(self, commit_lsn: int, phase: Phase) -> None:
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
        if self._status_file is not None:
            status_file.write(self._status_file, status)

    def _committed(self, status: ProposerStatus) -> CommitPage:
        """The commit page: what a quorum has on disk."""
        if status.error is not None:
            return CommitPage(why=f"the safekeepers' proposer: {status.error.what}")
        if self._session is None or status.phase == Phase.STOPPED:
            return CommitPage(why="the safekeepers' proposer has stopped")
        return commit_page(self._session.core, has_quorum=status.quorum)


def main(arguments: list[str]) -> int:
    """Run until a signal; the exit code."""
    supervisor.exit_with_parent()
    logs.configure()
    parser = argparse.ArgumentParser(prog="python -m walsender_bridge.quorum.proposer")
    parser.add_argument(
        "--safekeeper",
        action="append",
        required=True,
        help="add a safekeeper, host:port; may be repeated",
    )
    parser.add_argument("--application-name", default="tuskline_quorum")
    parser.add_argument(
        "--slot", default="tuskline_safekeepers", help="set the slot that keeps WAL for laggards"
    )
    parser.add_argument("--status-file", type=Path, help="write the status to this file (JSON)")
    parser.add_argument("--commit-page", type=Path, help="write the page that commit gates read")
    parser.add_argument(
        "--members-file", type=Path, help="read requested changes of members from this file"
    )
    parser.add_argument("--quorum-file", type=Path, help="record the quorum's id in this file")
    parser.add_argument("--queue-bytes", type=int, default=Limits().queue_bytes)
    parser.add_argument("--max-laggard-bytes", type=int, default=Limits().max_laggard_bytes)
    parser.add_argument("--full-ticks", type=int, default=Limits().full_ticks)
    given = parser.parse_args(arguments)
    dsn = os.environ.pop(DSN_VARIABLE, None)
    try:
        if dsn is None:
            raise UsageError(f"{DSN_VARIABLE} is not set")
        settings = ProposerSettings(
            dsn=dsn,
            safekeepers=tuple(parse_address(each) for each in given.safekeeper),
            application_name=given.application_name,
            slot=given.slot,
            limits=Limits(
                queue_bytes=given.queue_bytes,
                max_laggard_bytes=given.max_laggard_bytes,
                full_ticks=given.full_ticks,
            ),
            members_file=given.members_file,
            quorum_file=given.quorum_file,
        )
        process = _Process(settings, given.status_file, given.commit_page)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: process.stop())
        # All objects allocated so far live as long as the process.
        gc_control.disable_automatic()
        process.run()
    except TusklineError as error:
        logs.say_error(error)
        return error.cause
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
