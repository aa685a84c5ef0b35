"""The hot loop's end of the shared page: publishes positions to the WAL server, and reads its readers' needs."""

from pathlib import Path

from walsender_bridge.quorum.protocol.history import History
from walsender_bridge.quorum.protocol.positions import Positions, Readers
from walsender_bridge.quorum.protocol.shared_page import PositionWriter
from walsender_bridge.quorum.protocol.timelines import server_history
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.runtime.closing import Closing


class ReaderPage(Closing):
    """See the module; `protocol/shared_page.py` is the page itself."""

    def __init__(self, path: Path) -> None:
        """Raises `CorruptError` if the file is not such a page."""
        self._writer = PositionWriter(path)
        #: The last published history, and its form for readers: it is published at every commit, and seldom changes.
        self._told = History(), server_history(History())

    def tell(self, control: ControlState, flush_lsn: int, commit_lsn: int) -> None:
        """Publish the positions. Both LSNs are durable. An empty log is not published."""
        if not control.history:
            return
        if control.history is not self._told[0]:
            self._told = control.history, server_history(control.history)
        self._writer.publish(
            Positions(
                system_id=control.server.system_id,
                major=control.server.major,
                segment_bytes=control.server.segment_size,
                history=self._told[1],
                flush_lsn=flush_lsn,
                commit_lsn=commit_lsn,
            )
        )

    def readers(self) -> Readers | None:
        """What the readers need; None until the WAL server has run once: until then no WAL may be removed."""
        return self._writer.readers()

    def close(self) -> None:
        """Unmap the page; its content stays."""
        self._writer.close()
