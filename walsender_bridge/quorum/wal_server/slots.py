"""Physical replication slots of a safekeeper: the WAL that its readers still need.

As in PostgreSQL a slot retains WAL from the position that its reader last confirmed as flushed, and the reader's oldest
transactions, even while no reader is connected. `TEMPORARY` slots live as long as their connection.

Invariant: the published `pin_lsn` is that of the file, and a slot only moves forward. So after a crash a slot needs
nothing that could have been removed. Advances are saved lazily: when a slot has left a segment (earlier it would retain
the same files), or some seconds later. Creating and dropping are durable before their answer.

A slot whose WAL has been removed nevertheless (the hot loop keeps at most `max_slot_wal_keep_size` for slots, and a full
resync keeps none) is lost, as in PostgreSQL: it holds back neither WAL removal nor VACUUM any longer, and its clients are
refused until it is dropped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.quorum.protocol.positions import NO_FEEDBACK

#: The most slots; more suggest a client that creates one at each start.
MOST_SLOTS: Final = 64


@dataclass(frozen=True, slots=True)
class WalServerSlot:
    """A slot. `restart_lsn` None: it retains nothing until a reader confirms a first position.

    `lost`: WAL from `restart_lsn` on has been removed.
    """

    name: str
    restart_lsn: Lsn | None = None
    feedback: HotStandbyFeedback = NO_FEEDBACK
    temporary: bool = False
    lost: bool = False

    def wal_status(self, reserved_lsn: Lsn) -> str | None:
        """As in PostgreSQL's `pg_replication_slots`; `reserved_lsn`: the oldest WAL that a slot can retain."""
        if self.lost:
            return "lost"
        if self.restart_lsn is None:
            return None
        return "reserved" if self.restart_lsn >= reserved_lsn else "unreserved"


@dataclass(slots=True)
class _State:
    slot: WalServerSlot
    owner: int | None = None  # the number of the connection that uses it
    missed: bool = False  # its WAL was missing at the last poll


@dataclass(slots=True)
class Slots:
    """The slots in memory. Connections are numbers. No I/O: `SlotFile` writes what `durable` returns."""

    segment_bytes: int
    _slots: dict[str, _State] = field(default_factory=dict)
    _saved: dict[str, WalServerSlot] = field(default_factory=dict)

    @classmethod
    def restored(cls, slots: list[WalServerSlot], segment_bytes: int) -> "Slots":
        """The slots from the file."""
        return cls(
            segment_bytes,
            {slot.name: _State(slot) for slot in slots},
            {slot.name: slot for slot in slots},
        )

    def create(self, slot: WalServerSlot, connection: int) -> None:
        """Create a slot; a temporary one is active at once. Raises `SqlErrorReply` 42710, 53400."""
        if slot.name in self._slots:
            raise SqlErrorReply("42710", f'replication slot "{slot.name}" already exists')
        if len(self._slots) >= MOST_SLOTS:
            raise SqlErrorReply(
                "53400",
                "all replication slots are in use",
                hint="Drop a slot that is no longer needed.",
            )
        self._slots[slot.name] = _State(slot, connection if slot.temporary else None)

    def drop(self, name: str, connection: int) -> bool:
        """Drop a slot; returns whether the file must be saved. Raises `SqlErrorReply` 42704, 55006."""
        state = self._unused(name, connection)
        del self._slots[name]
        return not state.slot.temporary

    def find(self, name: str) -> WalServerSlot | None:
        """The slot of that name."""
        state = self._slots.get(name)
        return state.slot if state else None

    def in_use(self, name: str, connection: int) -> bool:
        """Whether another connection uses it."""
        state = self._slots.get(name)
        return state is not None and state.owner not in {None, connection}

    def acquire(self, name: str, connection: int) -> None:
        """Use a slot. Raises `SqlErrorReply` 42704, 55006, 55000."""
        state = self._unused(name, connection)
        self.check(name)
        state.owner = connection

    def check(self, name: str, *, fatal: bool = False) -> None:
        """Raises `SqlErrorReply` 55000 when the slot is lost."""
        state = self._slots.get(name)
        if state is not None and state.slot.lost:
            raise SqlErrorReply(
                "55000",
                f'can no longer access replication slot "{name}"',
                fatal=fatal,
                detail='This replication slot has been invalidated due to "wal_removed".',
                hint="Drop the slot; WAL from its position on may be on another safekeeper, or in the archive.",
            )

    def lose(self, served_lsn: Lsn, holds: Callable[[Lsn], bool]) -> list[WalServerSlot]:
        """Mark slots whose WAL was missing at two successive polls; returns them.

        `holds`: whether the byte at an LSN below `served_lsn` exists.
        """
        found = []
        for state in self._slots.values():
            lsn = state.slot.restart_lsn
            asked = lsn is not None and lsn < served_lsn and not state.slot.lost
            missing = asked and lsn is not None and not holds(lsn)
            if missing and state.missed:
                state.slot = replace(state.slot, lost=True, feedback=NO_FEEDBACK)
                found.append(state.slot)
            state.missed = missing
        return found

    def release(self, name: str) -> None:
        """The stream that used it has ended. A temporary slot stays with its connection."""
        state = self._slots.get(name)
        if state is not None and not state.slot.temporary:
            state.owner = None

    def disconnected(self, connection: int) -> None:
        """A connection is closed: drop its temporary slots."""
        for name, state in list(self._slots.items()):
            if state.owner == connection:
                state.owner = None
                if state.slot.temporary:
                    del self._slots[name]

    def confirm(self, name: str, flush_lsn: Lsn) -> None:
        """The slot's reader has WAL up to `flush_lsn` on disk."""
        state = self._slots.get(name)
        if state is None or state.slot.lost:
            return
        if flush_lsn > (state.slot.restart_lsn or 0):
            state.slot = replace(state.slot, restart_lsn=flush_lsn)

    def heed(self, name: str, feedback: HotStandbyFeedback) -> None:
        """The oldest transactions of the slot's reader."""
        state = self._slots.get(name)
        if state is not None and not state.slot.lost and state.slot.feedback != feedback:
            state.slot = replace(state.slot, feedback=feedback)

    def feedbacks(self) -> Iterator[HotStandbyFeedback]:
        """The hot standby feedback of each slot's reader, connected or not."""
        return (state.slot.feedback for state in self._slots.values())

    def pin_lsn(self) -> Lsn | None:
        """The oldest WAL that the slots retain durably: for permanent ones that in the file; None if none."""
        kept = [*self._saved.values(), *(s.slot for s in self._slots.values() if s.slot.temporary)]
        held = [slot.restart_lsn for slot in kept if not slot.lost]
        return min((lsn for lsn in held if lsn is not None), default=None)

    def all(self) -> list[tuple[WalServerSlot, bool]]:
        """Every slot, by name, and whether it is in use."""
        return [(state.slot, state.owner is not None) for _, state in sorted(self._slots.items())]

    def durable(self) -> dict[str, WalServerSlot]:
        """The permanent slots as they are now, for the file."""
        return {n: s.slot for n, s in self._slots.items() if not s.slot.temporary}

    def saved(self, slots: dict[str, WalServerSlot]) -> None:
        """The file has been saved with these."""
        self._saved = slots

    @property
    def changed(self) -> bool:
        """Whether the file is out of date."""
        return self.durable() != self._saved

    @property
    def frees_a_segment(self) -> bool:
        """Whether saving the file now would release whole segments."""
        return any(
            name in self._saved
            and (slot.restart_lsn or 0) // self.segment_bytes
            > (self._saved[name].restart_lsn or 0) // self.segment_bytes
            for name, slot in self.durable().items()
        )

    def _unused(self, name: str, connection: int) -> _State:
        state = self._slots.get(name)
        if state is None:
            raise SqlErrorReply("42704", f'replication slot "{name}" does not exist')
        if self.in_use(name, connection):
            raise SqlErrorReply(
                "55006", f'replication slot "{name}" is active for connection {state.owner}'
            )
        return state
