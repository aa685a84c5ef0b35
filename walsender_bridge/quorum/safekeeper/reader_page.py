"""The hot loop's end of the shared page: publishes positions to the WAL server, and reads its readers' needs."""

from pathlib import Path

from walsender_bridge.errors import TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.protocol.history import History
from walsender_bridge.quorum.protocol.positions import Positions, Readers
from walsender_bridge.quorum.protocol.shared_page import PositionWriter
from walsender_bridge.quorum.protocol.timelines import server_history
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.closing import Closing

_log = logs.logger()


class ReaderPage(Closing):
    """See the module; `protocol/shared_page.py` is the page itself."""

    def __init__(self, path: Path) -> None:
        """Raises `CorruptError` for a file that is no such page."""
        self._path = path
        self._writer = PositionWriter(path)
        #: What was published last; None: nothing yet.
        self._positions: Positions | None = None
        #: Why a page that was removed could not be made again; empty: it was.
        self._fault = ""
        #: The last history that was told, and as readers know it: told at every commit, it seldom changes.
        self._told = History(), server_history(History())

    def tell(self, control: ControlState, flush_lsn: Lsn, commit_lsn: Lsn) -> None:
        """Publish the positions. Both LSNs are durable. An empty log is not published."""
        if not control.history:
            return
        if control.history is not self._told[0]:
            self._told = control.history, server_history(control.history)
        self._positions = Positions(
            system_id=control.server.system_id,
            major=control.server.major,
            segment_bytes=control.server.segment_size,
            history=self._told[1],
            flush_lsn=flush_lsn,
            commit_lsn=commit_lsn,
        )
        self._writer.publish(self._positions)

    def readers(self) -> Readers | None:
        """What the readers need; None as long as their process has never run: then no WAL may be removed."""
        if self._writer.is_removed():
            self._make_again()
        return self._writer.readers()

    def _make_again(self) -> None:
        """Make a page that somebody has removed. COMMIT does not depend on it, so what it fails with is only logged."""
        try:
            writer = PositionWriter(self._path)
        except (OSError, TusklineError) as error:
            if str(error) != self._fault:
                self._fault = str(error)
                _log.error("the page for the WAL server was removed", reason=self._fault)
            return
        if self._positions is not None:
            writer.publish(self._positions)
        self._writer.close()
        self._writer, self._fault = writer, ""
        _log.warning(
            "the page for the WAL server was removed, and is recreated", path=str(self._path)
        )

    def close(self) -> None:
        """Unmap the page; its content stays."""
        self._writer.close()
