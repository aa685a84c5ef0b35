"""WAL that no server wrote, byte for byte as one would: for tests that need it small, odd, or very large."""

import random
import struct
from dataclasses import dataclass, field

import google_crc32c

from walsender_bridge.postgres.protocol import wal_page
from walsender_bridge.postgres.protocol.wal_page import PAGE_BYTES, WalFormat, align

MIB = 1 << 20
#: The smallest segments that PostgreSQL makes.
SMALL = WalFormat(major=16, system_id=7_000_000_000_000_000_001, segment_bytes=MIB)
_NOOP, _SWITCH = 0x20, 0x40


@dataclass
class Wal:
    """A growing WAL from `origin` (a page boundary) on. `data[0]` is the byte at `origin`.

    `ends`: the ends of its records, as PostgreSQL counts them; `starts`: where they begin. `switches`: where the own
    bytes of those end that end their segment early.
    """

    format: WalFormat = SMALL
    origin: int = MIB
    timeline: int = 1
    data: bytearray = field(default_factory=bytearray)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    switches: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.origin + len(self.data)

    def _page_header(self, remaining: int, flags: int = 0) -> None:
        lsn = self.end
        assert lsn % PAGE_BYTES == 0
        first = lsn % self.format.segment_bytes == 0
        info = flags | (wal_page.CONTINUES if remaining else 0) | (wal_page.LONG if first else 0)
        self.data += struct.pack("<HHIQI4x", self.format.magic, info, self.timeline, lsn, remaining)
        if first:
            size = self.format.segment_bytes
            self.data += struct.pack("<QII", self.format.system_id, size, PAGE_BYTES)

    def _put(self, record: bytes) -> None:
        """The bytes of a record, over as many pages as it takes, and its padding."""
        left = record
        while left:
            if self.end % PAGE_BYTES == 0:
                self._page_header(len(left))
            room = PAGE_BYTES - self.end % PAGE_BYTES
            self.data += left[:room]
            left = left[room:]
        self.data += bytes(align(self.end) - self.end)

    def record(self, payload: bytes = b"", *, kind: int = _NOOP) -> tuple[int, int]:
        """Add a record that says nothing; its start and end."""
        if self.end % PAGE_BYTES == 0:
            self._page_header(0)
        body = b"\xfe" + struct.pack("<I", len(payload)) + payload if payload else b""
        previous = self.starts[-1] if self.starts else 0
        head = struct.pack("<IIQBB2x", 24 + len(body), 0, previous, kind, 0)
        crc = google_crc32c.extend(google_crc32c.value(body), head)
        start = self.end
        self._put(head + struct.pack("<I", crc) + body)
        self.starts.append(start)
        self.ends.append(self.end)
        return start, self.end

    def switch(self, *, stale: bool = False) -> tuple[int, int]:
        """End the segment early, as pg_switch_wal() does.

        `stale`: its rest is not zeros, but what the segment before has there. A server that crashed before it wrote
        the zeros goes on in the next segment, and sends what its recycled file held.
        """
        start, end = self.record(kind=_SWITCH)
        self.switches.append(end)
        self._pad(stale=stale)
        return start, self.end

    def _pad(self, *, stale: bool = False) -> None:
        """The rest of the segment behind a switch."""
        size = self.format.segment_bytes
        rest = -self.end % size
        older = self.end - size
        padding = self.piece(older, older + rest) if stale and older >= self.origin else b""
        self.data += padding or bytes(rest)
        self.ends[-1] = self.end

    def give_up(self, start: int) -> None:
        """What a server does that crashed within the record at `start`: it goes on at the next page it wrote."""
        assert start == self.starts[-1]
        boundary = -(-start // PAGE_BYTES) * PAGE_BYTES
        del self.data[boundary - self.origin :]
        del self.starts[-1], self.ends[-1]
        self._page_header(0, wal_page.OVERWRITES)

    def fill(self, to: int, rng: random.Random, *, largest: int = 400) -> None:
        """Records of random size until the WAL reaches `to`."""
        while self.end < to:
            self.record(rng.randbytes(rng.randrange(largest)))

    def fill_exactly(self, to: int, rng: random.Random) -> None:
        """The same, with a record that ends exactly there. `to` is aligned, and far enough away."""
        self.fill(to - 3000, rng)
        room = to - self.end
        crossed = (to - 1) // PAGE_BYTES - (self.end - 1) // PAGE_BYTES
        headers = sum(
            wal_page.header_size(lsn, self.format.segment_bytes)
            for lsn in range(-(-self.end // PAGE_BYTES) * PAGE_BYTES, to, PAGE_BYTES)
        )
        assert crossed in {0, 1}
        assert room - headers > 29
        self.record(rng.randbytes(room - headers - 29))
        assert self.end == to

    def piece(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`."""
        assert self.origin <= start <= end <= self.end
        return bytes(self.data[start - self.origin : end - self.origin])

    def page(self, lsn: int) -> bytes:
        """The page at `lsn`, as far as there is one (a `wal_record.Pages`)."""
        if lsn < self.origin:
            return b""
        return bytes(self.data[lsn - self.origin : lsn - self.origin + PAGE_BYTES])

    def last_end(self, position: int) -> int:
        """The end of the last record at or below `position`, computed by looking at them all."""
        ends = (*self.ends, *self.switches)
        return max((end for end in ends if end <= position), default=self.origin)

    def copy(self, to: int, *, timeline: int) -> "Wal":
        """The same WAL up to the record that ends at `to`, going on in another timeline.

        Behind the own bytes of a switch every timeline goes on with its padding.
        """
        kept = [each for each in self.ends if each <= to]
        other = Wal(
            self.format,
            self.origin,
            timeline,
            bytearray(self.data[: to - self.origin]),
            self.starts[: len(kept)],
            kept,
            [each for each in self.switches if each <= to],
        )
        if to in self.switches and to not in kept:
            other.starts.append(self.starts[len(kept)])
            other.ends.append(to)
            other._pad()
        return other
