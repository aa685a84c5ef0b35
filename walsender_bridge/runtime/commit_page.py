"""What a quorum of safekeepers has, as the proposer states it for the commit gates: control, apart from all monitoring.

A gate lets a transaction through by this page alone, so nothing in it is taken on trust. It counts only if it is whole
(CRC-32C), of the session's server and timeline, and renewed: the proposer writes it several times a second, each time
with another `sequence`, and a reader believes a page whose sequence it has seen change within `STALE_SECONDS` of its
own clock. So neither clocks that differ nor a page from before a reboot can pass for a fresh one; the price is that a
session's first page counts from its second sight on.

It lies in memory (`shared_files`) and is replaced whole. It need not outlive a power cut: without one, gates wait.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.runtime import logs, record_file, status_file

#: Seconds without a new page after which what the last one says is no longer taken for true.
STALE_SECONDS: Final = 5.0

_MAGIC: Final = b"tsklgate"
_VERSION: Final = 1

_log = logs.logger(__name__)


@dataclass(frozen=True, slots=True)
class CommitPage:
    """`commit_lsn`: below it, a quorum has every byte of the server's timeline; 0: not known.

    `why`: what keeps it from moving on; empty: nothing.
    """

    system_id: int = 0
    timeline: int = 0
    commit_lsn: int = 0
    why: str = ""


class CommitPageWriter:
    """The proposer's end. `fault`: why the page could not be written when it was last tried; empty: it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer = uuid4().hex
        self._sequence = 0
        self.fault = ""

    def write(self, page: CommitPage) -> None:
        """Replace the page. What it fails with is `fault` then, and a line of the log; gates hold meanwhile."""
        self._sequence += 1
        record = {**asdict(page), "writer": self._writer, "sequence": self._sequence}
        try:
            status_file.replace(self._path, record_file.pack(_MAGIC, _VERSION, record))
        except OSError as error:
            fault = f"{self._path} cannot be written: {error.strerror}"
            if fault != self.fault:
                _log.error("the page of the commit gates cannot be written", reason=fault)
            self.fault = fault
        else:
            self.fault = ""


class CommitPageReader:
    """A commit gate's end. `clock`: monotonic seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        #: Whose page was seen last, its number, and when that was another one than before; None: not once.
        self._seen: tuple[object, object] | None = None
        self._changed_at: float | None = None
        self._began = clock()

    def committed(self, system_id: int, timeline: int) -> tuple[int | None, str]:
        """What a quorum has of this server's timeline, or None; and why it is not more (empty: no reason)."""
        try:
            _, record = record_file.unpack(self._path.read_bytes(), _MAGIC, _VERSION)
            page = _page(record)
        except FileNotFoundError:
            return None, f"the safekeepers' proposer has written no page: {self._path} is missing"
        except OSError as error:
            return None, f"the safekeepers' page {self._path} cannot be read: {error.strerror}"
        except (CorruptError, NotSupportedError) as error:
            return None, f"the safekeepers' page {self._path} is damaged: {error.what}"
        stale = self._stale((record.get("writer"), record.get("sequence")))
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

    def _stale(self, number: tuple[object, object]) -> str:
        """Why a page of this number is not of now; empty: it is."""
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


def _page(record: dict[str, Any]) -> CommitPage:
    """Raises `CorruptError`."""
    try:
        system_id, timeline = int(record["system_id"]), int(record["timeline"])
        return CommitPage(system_id, timeline, int(record["commit_lsn"]), str(record["why"]))
    except (KeyError, TypeError, ValueError):
        raise CorruptError("it is no page of a quorum") from None
