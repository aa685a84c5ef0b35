"""The fields behind a frame's header: written in sequence, read back in the same order, all bounded.

Big-endian; identities are 16 bytes; a list is u16 count + its elements; a text u16 length + UTF-8. The
control file writes its histories and configurations the same way.
"""

import struct
from enum import IntEnum
from typing import Self, TypeVar

from walsender_bridge.errors import MalformedMessageError, TusklineError
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.quorum.protocol.configuration import MAX_MEMBERS, Configuration
from walsender_bridge.quorum.protocol.history import MAX_ENTRIES, History, HistoryEntry
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback, ServerInfo
from walsender_bridge.quorum.protocol.terms import MAX_TERM

#: Bytes of a refusal's detail.
MAX_TEXT = 1000

#: The most timelines before a server's; a server with more sends none.
MAX_ANCESTORS = 1000

#: What follows the members of a configuration.
_JOINT, _DISTRUSTS = 1, 2
_SERVER = struct.Struct(">QHI")
_ENTRY = struct.Struct(">QQI")
_ANCESTOR = struct.Struct(">IQ")
_FEEDBACK = struct.Struct(">IIII")
_E = TypeVar("_E", bound=IntEnum)


class Writer:
    """Appends fields to `data`."""

    def __init__(self) -> None:
        self.data = b""

    def _add(self, data: bytes) -> Self:
        self.data += data
        return self

    def u8(self, value: int) -> Self:
        """One byte."""
        return self._add(value.to_bytes(1, "big"))

    def u16(self, value: int) -> Self:
        """Two bytes."""
        return self._add(value.to_bytes(2, "big"))

    def u32(self, value: int) -> Self:
        """Four bytes."""
        return self._add(value.to_bytes(4, "big"))

    def u64(self, value: int) -> Self:
        """Eight bytes."""
        return self._add(value.to_bytes(8, "big"))

    def identity(self, value: int) -> Self:
        """A UUID as a number."""
        return self._add(value.to_bytes(16, "big"))

    def text(self, value: str) -> Self:
        """A text, cut at `MAX_TEXT` bytes."""
        data = value.encode()[:MAX_TEXT].decode(errors="ignore").encode()
        self.u16(len(data))
        return self._add(data)

    def server(self, value: ServerInfo) -> Self:
        """Whose WAL it is."""
        return self._add(_SERVER.pack(value.system_id, value.major, value.segment_size))

    def feedback(self, value: HotStandbyFeedback) -> Self:
        """A hot-standby feedback."""
        return self._add(
            _FEEDBACK.pack(
                value.xmin, value.xmin_epoch, value.catalog_xmin, value.catalog_xmin_epoch
            )
        )

    def history(self, value: History) -> Self:
        """An epoch history."""
        self.u16(len(value.entries))
        return self._add(
            b"".join(_ENTRY.pack(e.election_epoch, e.start_lsn, e.timeline) for e in value.entries)
        )

    def ancestors(self, value: tuple[WalPosition, ...]) -> Self:
        """Timelines and their switch points; no bytes at all, if there are none."""
        if not 0 < len(value) <= MAX_ANCESTORS:
            return self
        self.u16(len(value))
        return self._add(b"".join(_ANCESTOR.pack(*each) for each in value))

    def configuration(self, value: Configuration) -> Self:
        """A membership, or two, with its quorum and its distrusted members."""
        self.identity(value.quorum).u64(value.term).u64(value.generation)
        self._members(value.members)
        joint = value.new_members is not None
        self.u8(_JOINT * joint | _DISTRUSTS * bool(value.distrusted))
        for group in (value.new_members, value.distrusted or None):
            if group is not None:
                self._members(group)
        return self

    def _members(self, members: frozenset[int]) -> Self:
        self.u16(len(members))
        for member in sorted(members):
            self.identity(member)
        return self


class Reader:
    """Reads the fields of one body, in order. Anything invalid is a `MalformedMessageError`."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data)
        self._at = 0

    def _take(self, size: int) -> memoryview:
        taken = self._data[self._at : self._at + size]
        if len(taken) < size:
            raise MalformedMessageError(f"{size} bytes are missing at {self._at}")
        self._at += size
        return taken

    def end(self) -> None:
        """Check that no bytes are left."""
        if self._at != len(self._data):
            raise MalformedMessageError(f"{len(self._data) - self._at} bytes too many")

    def u8(self) -> int:
        """One byte."""
        return self._take(1)[0]

    def u16(self) -> int:
        """Two bytes."""
        return int.from_bytes(self._take(2), "big")

    def u32(self) -> int:
        """Four bytes."""
        return int.from_bytes(self._take(4), "big")

    def u64(self) -> int:
        """Eight bytes."""
        return int.from_bytes(self._take(8), "big")

    def identity(self) -> int:
        """A UUID as a number."""
        return int.from_bytes(self._take(16), "big")

    def boolean(self) -> bool:
        """0 or 1."""
        value = self.u8()
        if value > 1:
            raise MalformedMessageError(f"invalid boolean {value}")
        return bool(value)

    def member(self, kind: type[_E]) -> _E:
        """One byte: a member of `kind`."""
        value = self.u8()
        try:
            return kind(value)
        except ValueError:
            raise MalformedMessageError(f"invalid {kind.__name__} {value}") from None

    def text(self) -> str:
        """A text of at most `MAX_TEXT` bytes."""
        size = self._count(MAX_TEXT)
        try:
            return str(self._take(size), "utf-8")
        except UnicodeDecodeError:
            raise MalformedMessageError("invalid UTF-8 in a text") from None

    def server(self) -> ServerInfo:
        """Whose WAL it is."""
        return ServerInfo(*_SERVER.unpack(self._take(_SERVER.size)))

    def feedback(self) -> HotStandbyFeedback:
        """A hot-standby feedback."""
        return HotStandbyFeedback(*_FEEDBACK.unpack(self._take(_FEEDBACK.size)))

    def history(self) -> History:
        """An epoch history."""
        count = self._count(MAX_ENTRIES)
        data = self._take(count * _ENTRY.size)
        try:
            return History(tuple(HistoryEntry(*fields) for fields in _ENTRY.iter_unpack(data)))
        except TusklineError as error:
            raise MalformedMessageError(error.what) from None

    def ancestors(self) -> tuple[WalPosition, ...]:
        """Timelines and their switch points."""
        if self._at == len(self._data):
            return ()
        count = self._count(MAX_ANCESTORS)
        data = self._take(count * _ANCESTOR.size)
        return tuple(WalPosition(*fields) for fields in _ANCESTOR.iter_unpack(data))

    def configuration(self) -> Configuration:
        """A membership, or two, with its quorum and its distrusted members."""
        quorum = self.identity()
        term, generation = self.u64(), self.u64()
        if max(term, generation) > MAX_TERM:
            raise MalformedMessageError(
                f"invalid membership generation {generation} of term {term}"
            )
        members = self._members()
        follows = self.u8()
        if follows > _JOINT | _DISTRUSTS:
            raise MalformedMessageError(f"invalid kind of membership {follows}")
        new_members = self._members() if follows & _JOINT else None
        distrusted = self._members() if follows & _DISTRUSTS else frozenset()
        return Configuration(generation, members, new_members, term, distrusted, quorum)

    def _members(self) -> frozenset[int]:
        listed = [self.identity() for _ in range(self._count(MAX_MEMBERS))]
        if sorted(set(listed)) != listed:
            raise MalformedMessageError("members out of order")
        return frozenset(listed)

    def _count(self, limit: int) -> int:
        count = self.u16()
        if count > limit:
            raise MalformedMessageError(f"count {count} exceeds the limit of {limit}")
        return count
