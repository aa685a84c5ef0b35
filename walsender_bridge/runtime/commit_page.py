"""The commit page: the quorum's LSN, published by the proposer for the commit gates, independent of all monitoring.

A gate lets transactions through because of this page alone, so it is verified. It counts only if it is intact
(CRC-32C), of the session's server and timeline, and fresh: the proposer writes it several times a second, each time
with another `sequence`, and a reader accepts a page whose sequence it has seen change within `STALE_SECONDS` of its
own clock. So neither clock differences nor a page from before a reboot can appear fresh; the cost is that a
session accepts its first page only after a change of the sequence.

The page is in memory (`shared_files`) and is replaced atomically. It need not survive a power failure: without it, gates wait.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from uuid import uuid4

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.runtime import json_model, logs, record_file, status_file

#: Seconds without a new page after which the last one is no longer valid.
STALE_SECONDS: Final = 5.0

_MAGIC: Final = b"tsklgate"
_VERSION: Final = 1

_log = logs.logger()


@dataclass(frozen=True, slots=True)
class CommitPage:
    """`commit_lsn`: below it, a quorum has every byte of the server's timeline; 0 if unknown.

    `why`: what prevents it from advancing; empty if nothing.
    """

    system_id: int = 0
    timeline: int = 0
    commit_lsn: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written(CommitPage):
    """The page as it is in the file. `writer`: identifies the process, which counts its pages by `sequence`."""

    writer: str
    sequence: int


class CommitPageWriter:
    """The proposer's side. `fault`: why the page could not be written at the last attempt; empty if it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = uuid4().hex
        self._sequence = 0
        self.fault = ""

    def write(self, page: CommitPage) -> None:
        """Replace the page. A failure is stored in `fault` and logged; gates hold meanwhile."""
        self._sequence += 1
        whole = _Written(**asdict(page), writer=self._writer, sequence=self._sequence)
        content = record_file.pack(_MAGIC, _VERSION, json_model.plain(whole))
        try:
            status_file.replace(self._path, content)
        except OSError as error:
            fault = f"{self._path} cannot be written: {error.strerror}"
            if fault != self.fault:
                _log.error("could not write the commit page", reason=fault)
            self.fault = fault
        else:
            self.fault = ""


class CommitPageReader:
    """A commit gate's side. `clock`: monotonic seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        #: Identity and sequence of the last page, and when the sequence last changed; None if it never has.
        self._seen: tuple[str, int] | None = None
        self._changed_at: float | None = None
        self._began = clock()

    def committed(self, system_id: int, timeline: int) -> tuple[int | None, str]:
        """The LSN that a quorum has of this server's timeline, or None; and why it is not higher (empty: no reason)."""
        try:
            _, record = record_file.unpack(self._path.read_bytes(), _MAGIC, _VERSION)
            page = json_model.from_plain(_Written, record)
        except FileNotFoundError:
            return (
                None,
                f"the safekeepers' proposer has not written its commit page: {self._path} is missing",
            )
        except OSError as error:
            return (
                None,
                f"could not read the safekeepers' commit page {self._path}: {error.strerror}",
            )
        except (CorruptError, NotSupportedError) as error:
            return None, f"the safekeepers' commit page {self._path} is damaged: {error.what}"
        except ValueError as error:
            return None, f"the safekeepers' commit page {self._path} is damaged: {error}"
        stale = self._stale((page.writer, page.sequence))
        if not page.commit_lsn and page.why:
            return None, page.why
        if stale:
            return None, stale
        if not page.commit_lsn:
            return None, "the safekeepers' proposer does not know yet what a quorum has"
        if page.system_id != system_id:
            return None, "the safekeepers have the WAL of another server"
        if page.timeline != timeline:
            return None, f"the safekeepers are on timeline {page.timeline}"
        return page.commit_lsn, page.why

    def _stale(self, number: tuple[str, int]) -> str:
        """Why a page with this sequence is not fresh; empty if it is."""
        now = self._clock()
        if self._seen is None:
            self._seen = number
        elif number != self._seen:
            self._seen, self._changed_at = number, now
        silent = now - (self._began if self._changed_at is None else self._changed_at)
        if silent > STALE_SECONDS:
            return f"the safekeepers' proposer has not renewed {self._path} for {silent:.0f} s: it is stopped, or hangs"
        if self._changed_at is None:
            return "the safekeepers' proposer has not renewed its page yet"
        return ""
