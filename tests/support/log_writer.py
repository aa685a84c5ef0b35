"""A change log with content of a test's choice: entries are appended as capture does it, to each replica."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.support import pgoutput_messages as pm
from tests.support.capture_stack import ChangeLog
from tests.support.change_entries import Table
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient, StreamWriter
from walsender_bridge.change_log.entry import build_entry, read_header, schema_hash
from walsender_bridge.errors import UnavailableError


class LogWriter:
    """Appends to one stream; each call waits until what it wrote can be read.

    `began` is the commit time of everything for which no other is given: now, in microseconds. What is
    older than the log's retention (an hour in `ChangeLog`) is soon trimmed.
    """

    def __init__(self, log: ChangeLog, stream: str) -> None:
        self.stream = stream
        self.began = time.time_ns() // 1000
        self._here = log
        self._log = LogClient(log.address)
        self._asks = ThreadPoolExecutor(1)
        _create(self._log, stream)
        self._writer: StreamWriter = self._log.open_writer(stream)
        self._crc = self._writer.status.last_crc
        self._lsn = max(self._writer.status.last_end_lsn, 0x1000)
        self._xid = 700

    def close(self) -> None:
        self._asks.shutdown()
        self._writer.close()
        self._log.close()

    def commit(
        self,
        tables: Iterable[Table],
        *transactions: Sequence[bytes],
        commit_time: int | None = None,
        entries: int = 1,
    ) -> int:
        """Append these transactions as one commit of the log; the version that holds them.

        `entries`: into how many entries the messages are cut.
        """
        messages: list[bytes] = []
        moment = self.began if commit_time is None else commit_time
        for changes in transactions:
            self._lsn += 0x1000
            self._xid += 1
            messages += pm.transaction(self._lsn, self._xid, changes, moment)
        known = list(tables)
        hashes = {table.oid: schema_hash(table.record) for table in known}
        step = -(-len(messages) // entries)
        built = []
        for first in range(0, len(messages), step):
            data = build_entry(
                messages[first : first + step],
                timeline=1,
                previous_crc=self._crc,
                schema_hashes=hashes,
            )
            self._crc = read_header(data).crc
            built.append(data)
        self._lsn += pm.COMMIT_RECORD
        wanted = {self.stream: self._lsn}
        # Whoever asks only after it was sent may be told the version behind it: the log may have committed it by then.
        asked = self._asks.submit(self._log.barrier, wanted, 30.0)
        wait_for(lambda: asked.done() or self._waits_for(wanted), 30, "the barrier waits")
        self._writer.send(built, schemas=[table.record for table in known])
        return asked.result()

    def _waits_for(self, positions: dict[str, int]) -> bool:
        repository = self._here.repository
        assert repository is not None
        return any(each.positions == positions for each in [*repository.barriers.waiting])


def _create(log: LogClient, stream: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            log.create_stream(stream)
            return
        except UnavailableError:
            # The log server is still starting.
            assert time.monotonic() < deadline
            time.sleep(0.05)
