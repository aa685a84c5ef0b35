"""`python -m walsender_bridge.quorum.proposer`: the WAL proposer of one primary; the bridge's supervisor starts it.

The DSN comes in the environment variable TUSKLINE_SOURCE_DSN, since arguments are everybody's to read. A primary
that is away is waited for, and looked at anew: each time by a new session with an election of its own. So is a
vote that went to another proposer while none was elected (`rivals.py`). What another start cannot mend ends the
process; the exit code is the error's cause.
"""

import argparse
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.runtime import gc_control, logs, status_file, supervisor
from walsender_bridge.runtime.commit_page import CommitPage, CommitPageWriter

DSN_VARIABLE = "TUSKLINE_SOURCE_DSN"
#: Seconds between two sessions.
_PAUSE = 0.5
#: Seconds between two words while the quorum gets further: a commit gate waits for them.
_MOVING = 0.05
#: How often the wait of an outvoted session doubles: two that outvote each other meet further and further apart.
_MOST_DOUBLINGS = 5

_log = structlog.get_logger(__name__)


class _Process:
    def __init__(
        self, settings: ProposerSettings, status_file: Path | None, page: Path | None
    ) -> None:
        self._settings = settings
        self._status_file = status_file
        #: What the commit gates go by; the status is for people and monitoring.
        self._page = None if page is None else CommitPageWriter(page)
        self._session: ProposerSession | None = None
        self._stopped = threading.Event()
        self._told = ("", 0, 0.0)
        #: Whether a membership was looked at and found to be what is configured.
        self._served = False
        #: The greatest term that a session has heard of, and how many in turn were outvoted.
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
                others, configured = changes.look(), settings.safekeepers
                membership = find_membership(configured, server, others, known=known)
                if not self._served:
                    refuse_smaller(membership, configured, changes.request)
                    self._served = True
                quorum = membership.quorum or draw(settings.quorum_file)
                self._run_session(membership, quorum, formed=known.formed)
            except (ConnectionFailedError, UnavailableError, DeadlineError) as error:
                _log.warning("session ended", reason=error.what, where=error.where)
                self._session = None
                self._say(without_session(Phase.GREETING), error)
                time.sleep(_PAUSE)
            except TusklineError as error:
                # Another start cannot mend it, and would be in the way of whoever is right.
                self._say(without_session("ended"), error)
                raise
        self._say(without_session(Phase.STOPPED))

    def _run_session(self, membership: Configuration, quorum: int, *, formed: bool) -> None:
        """Raises what ends it, or returns when it was told to stop."""
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
        if self._stopped.is_set():  # while there was no session to tell
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
        """Say how it is: at each change of phase, a few times a second, and more often while the quorum gets further."""
        now = time.monotonic()
        if self._session is None:
            return
        before, lsn, at = self._told
        if phase == before and now - at < (_PAUSE if commit_lsn == lsn else _MOVING):
            return
        self._told = phase, commit_lsn, now
        self._say(self._session.status())

    def _say(self, record: dict[str, Any], error: TusklineError | None = None) -> None:
        if self._page is not None:
            self._page.write(self._committed(record, error))
            record = {**record, "commit_page_fault": self._page.fault}
        if self._status_file is not None:
            told = None if error is None else error.to_wire()
            status_file.write(self._status_file, {**record, "error": told})

    def _committed(self, record: dict[str, Any], error: TusklineError | None) -> CommitPage:
        """What a quorum has, for the commit gates."""
        if error is not None:
            return CommitPage(why=f"the safekeepers' proposer: {error.what}")
        if self._session is None or record["phase"] == Phase.STOPPED:
            return CommitPage(why="the safekeepers' proposer has stopped")
        return commit_page(self._session.core, has_quorum=record["quorum"])


def main(arguments: list[str]) -> int:
    """Run until a signal; the exit code."""
    supervisor.exit_with_parent()
    logs.configure()
    parser = argparse.ArgumentParser(prog="python -m walsender_bridge.quorum.proposer")
    parser.add_argument("--safekeeper", action="append", required=True, help="host:port, repeated")
    parser.add_argument("--application-name", default="tuskline_quorum")
    parser.add_argument("--slot", default="tuskline_safekeepers", help="keeps WAL for laggards")
    parser.add_argument("--status-file", type=Path, help="where to say how far it is (JSON)")
    parser.add_argument("--commit-page", type=Path, help="where the commit gates read")
    parser.add_argument("--members-file", type=Path, help="where a change of members is asked for")
    parser.add_argument("--quorum-file", type=Path, help="where the quorum's id is recorded")
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
        # What has been made by now lives as long as the process.
        gc_control.disable_automatic()
        process.run()
    except TusklineError as error:
        logs.say_error(error)
        return error.cause
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
