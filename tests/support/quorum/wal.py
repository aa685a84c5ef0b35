"""WAL in which every byte is identifiable: a cell is (record, offset), 0 is a zeroed byte.

A record is a run of cells. A scan accepts any complete record at the end of the previous one, even one that another
proposer left there: that is what makes truncation necessary.
"""

import random

from walsender_bridge.postgres.protocol.lsn import WalPosition

BYTES = 64


class Records:
    """The lengths of all records ever written, by number."""

    def __init__(self) -> None:
        self.lengths = [0]

    def new(self, length: int) -> list[int]:
        """The cells of a new record."""
        self.lengths.append(length)
        number = len(self.lengths) - 1
        return [number * BYTES + offset for offset in range(length)]

    def aborted(self, cell: int) -> int:
        """The record of this cell was truncated behind it by a crash: one more byte marks that, and ends it."""
        number, offset = divmod(cell, BYTES)
        self.lengths[number] = offset + 2
        return cell + 1

    def is_last(self, cell: int) -> bool:
        number, offset = divmod(cell, BYTES)
        return offset + 1 == self.lengths[number]

    def aligned(self, cells: dict[int, int], base: int, lsn: int) -> int:
        """The end of the last complete record at or below `lsn`, in valid WAL from `base`."""
        if lsn <= base:
            return base
        cell = cells[lsn - 1]
        return lsn if self.is_last(cell) else max(base, lsn - 1 - cell % BYTES)

    def scan(self, cells: dict[int, int], base: int) -> int:
        """The end of valid WAL: the first record may begin before `base`."""
        end = at = base
        while (cell := cells.get(at, 0)) and (at == base or cell % BYTES == 0):
            while not self.is_last(cell):
                at += 1
                if cells.get(at, 0) != cell + 1:
                    return end
                cell += 1
            at += 1
            end = at
        return end


class Disk:
    """The WAL of a safekeeper. A crash keeps any part of what was not synced, byte by byte."""

    def __init__(self, records: Records, choose: random.Random) -> None:
        self.records = records
        self.choose = choose
        self.base = 0
        self.cells: dict[int, int] = {}
        self.durable: dict[int, int] = {}
        self.unsynced: dict[int, int] = {}
        #: A segment below `base` that is being received; it does not survive a crash.
        self.catch_up: list[int] = []
        #: Damaged segments, of which nothing is sent to others.
        self.damaged: set[int] = set()

    def write(self, lsn: int, cells: list[int]) -> None:
        for at, cell in enumerate(cells, lsn):
            self.cells[at] = self.unsynced[at] = cell

    def sync(self) -> None:
        self.durable.update(self.unsynced)
        self.unsynced.clear()

    def keep(self, lsn: int) -> None:
        """The disk is full: what was written up to `lsn` is made durable, the rest is dropped."""
        self.unsynced = {at: cell for at, cell in self.unsynced.items() if at < lsn}
        self.sync()
        self.cells = dict(self.durable)

    def truncate(self, lsn: int) -> None:
        self.damaged = {segment for segment in self.damaged if segment < lsn}
        self.cells = {at: cell for at, cell in self.cells.items() if at < lsn}
        self.durable = {at: cell for at, cell in self.durable.items() if at < lsn}
        self.unsynced = {at: cell for at, cell in self.unsynced.items() if at < lsn}

    def tear_truncation(self, lsn: int) -> None:
        """Power fails during a truncation: some bytes are zeroed."""
        for at in [at for at in self.durable if at >= lsn]:
            if self.choose.random() < 0.5:
                del self.durable[at]

    def remove_below(self, lsn: int) -> None:
        """Remove old WAL, durably."""
        if lsn > self.base:
            self.base = lsn
            self.catch_up = []
            self.damaged = {segment for segment in self.damaged if segment >= lsn}
            for held in (self.cells, self.durable, self.unsynced):
                for at in [at for at in held if at < lsn]:
                    del held[at]

    def take_catch_up(self, cells: list[int], segment: int) -> None:
        """Receive part of a segment; when it is complete, the log begins with it."""
        self.catch_up += cells
        if len(self.catch_up) == segment:
            self.base -= segment
            held = dict(enumerate(self.catch_up, self.base))
            self.cells.update(held)
            self.durable.update(held)
            self.catch_up = []

    def reset(self, lsn: int) -> None:
        self.base = lsn
        self.catch_up = []
        self.damaged = set()
        self.cells, self.durable, self.unsynced = {}, {}, {}

    def crash(self) -> None:
        for at, cell in self.unsynced.items():
            if self.choose.random() < 0.5:
                self.durable[at] = cell
        self.unsynced.clear()
        self.catch_up = []
        self.cells = dict(self.durable)

    def scan(self) -> int:
        return self.records.scan(self.cells, self.base)

    def read(self, begin: int, end: int) -> list[int]:
        return [self.cells[at] for at in range(begin, end)]

    def lend(self, begin: int, end: int, segment: int) -> list[int]:
        """As `read`, up to the first damaged segment."""
        bad = [at for at in self.damaged if begin < at + segment and at < end]
        return self.read(begin, max(begin, min([end, *bad])))


class Server:
    """A PostgreSQL primary: it writes records, flushes at any byte, crashes, and is promoted."""

    def __init__(
        self,
        records: Records,
        choose: random.Random,
        start: int,
        timeline: int = 1,
        switches: tuple[WalPosition, ...] = (),
        cells: dict[int, int] | None = None,
    ) -> None:
        self.records = records
        self.choose = choose
        self.timeline = timeline
        self.switches = switches
        self.cells = dict(cells or {})
        self.begin = min(self.cells, default=start)
        self.end = self.flush_lsn = max(self.cells, default=start - 1) + 1
        #: The oldest WAL that its slot keeps.
        self.keeps = self.begin

    def work(self) -> None:
        for _ in range(self.choose.randint(0, 3)):
            for cell in self.records.new(self.choose.randint(1, 6)):
                self.cells[self.end] = cell
                self.end += 1
        if self.end > self.flush_lsn:
            self.flush_lsn = self.choose.randint(self.flush_lsn + 1, self.end)

    def switch_segment(self, size: int) -> None:
        """One record fills the rest of the segment, and all is flushed."""
        rest = -self.end % size
        self.cells.update(enumerate(self.records.new(rest) if rest else [], self.end))
        self.end += rest
        self.flush_lsn = self.end

    def checkpoint(self, size: int) -> None:
        """Behind a segment switch (a base backup begins with both): WAL that no slot keeps is removed."""
        self.switch_segment(size)
        self.keeps = self.flush_lsn
        self.work()

    def crash(self) -> None:
        """Unflushed WAL is lost; a truncated record is marked as such and never completed."""
        self.cells = {at: cell for at, cell in self.cells.items() if at < self.flush_lsn}
        self.end = self.flush_lsn
        if self.end > self.begin and not self.records.is_last(self.cells[self.end - 1]):
            self.cells[self.end] = self.records.aborted(self.cells[self.end - 1])
            self.end += 1
            self.flush_lsn = self.end

    def aligned(self, lsn: int) -> int:
        return self.records.aligned(self.cells, self.begin, lsn)

    def promoted(self, cells: dict[int, int], end: int, timeline: int) -> "Server":
        """A standby that holds `cells` becomes a primary at the end of its last complete record."""
        switch = self.records.aligned(cells, min(cells, default=end), end)
        kept = {at: cell for at, cell in cells.items() if at < switch}
        switches = (*self.switches, WalPosition(self.timeline, switch))
        return Server(self.records, self.choose, switch, timeline, switches, kept)
