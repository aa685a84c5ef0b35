"""A disk that keeps its promises and not one byte more (`walsender_bridge.runtime.folder.Disk`).

A power cut comes at the operation that the test chose, in the middle of it. Of every write that was not synced,
each piece (a sector, or the bytes on either side of a random cut) is then there or not, in no order. Names that were
not synced are there up to some operation: a file system keeps the order of its own journal.
"""

import errno
import itertools
import random
from collections.abc import Callable


class PowerCutError(BaseException):
    """The machine is off. Not an `Exception`: nothing may handle it."""


class _File:
    """Contents: `durable` bytes, and writes that are not yet."""

    def __init__(self, data: bytes = b"") -> None:
        self.durable = bytearray(data)
        self.now = bytearray(data)
        self.pending: list[tuple[int, bytes]] = []


def _put(target: bytearray, offset: int, data: bytes) -> None:
    if len(target) < offset:
        target.extend(bytes(offset - len(target)))
    target[offset : offset + len(data)] = data


class SimulatedDisk:
    """See the module. `cut_at`: the operation, counted from now, in which the power fails; None: never.

    `capacity`: bytes of all files. `log`: names of the operations so far, for a test that wants one of them.
    """

    def __init__(self, rng: random.Random, *, capacity: int = 1 << 40) -> None:
        self.rng = rng
        self.capacity = capacity
        self.cut_at: int | None = None
        self.operations = 0
        self.log: list[str] = []
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._journal: list[Callable[[dict[str, _File]], object]] = []
        self.is_off = False

    # -- the interface ------------------------------------------------------------------------------

    def names(self) -> set[str]:
        return set(self._names)

    def size(self, name: str) -> int:
        return len(self._find(name).now)

    def read(self, name: str, offset: int, length: int) -> bytes:
        return bytes(self._find(name).now[offset : offset + length])

    def create(self, name: str) -> "_Handle":
        file = _File()
        self._rename_step(f"create {name}", lambda names: names.__setitem__(name, file))
        return _Handle(self, name, file, durable=False)

    def open(self, name: str, *, durable: bool) -> "_Handle":
        return _Handle(self, name, self._find(name), durable=durable)

    def rename(self, old: str, new: str) -> None:
        file = self._find(old)

        def change(names: dict[str, _File]) -> None:
            names.pop(old, None)
            names[new] = file

        self._rename_step(f"rename {old} {new}", change)

    def remove(self, name: str) -> None:
        self._find(name)
        self._rename_step(f"remove {name}", lambda names: names.pop(name, None))

    def sync(self) -> None:
        self._step("sync names")
        self._durable_names = dict(self._names)
        self._journal.clear()

    def free_bytes(self) -> int:
        return max(0, self.capacity - sum(len(file.now) for file in self._names.values()))

    # -- power --------------------------------------------------------------------------------------

    def _find(self, name: str) -> _File:
        if name not in self._names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return self._names[name]

    def _rename_step(self, what: str, change: Callable[[dict[str, _File]], object]) -> None:
        # A step that the power cut interrupts may have reached the journal all the same.
        self._journal.append(change)
        self._step(what)
        change(self._names)

    def _step(self, what: str) -> None:
        if self.is_off:
            raise PowerCutError
        self.operations += 1
        self.log.append(what)
        if self.cut_at is not None:
            self.cut_at -= 1
            if self.cut_at < 0:
                self.is_off = True
                raise PowerCutError

    def _write(self, file: _File, data: bytes, offset: int, *, durable: bool, name: str) -> None:
        if offset + len(data) > len(file.now):
            grows = offset + len(data) - len(file.now)
            if grows > self.free_bytes():
                raise OSError(errno.ENOSPC, "no space left on device")
        file.pending.append((offset, data))
        self._step(f"write {name} {offset} {len(data)}")
        _put(file.now, offset, data)
        if durable:
            # Only this write: an earlier one without a sync may still be lost.
            file.pending.pop()
            _put(file.durable, offset, data)

    def _sync_file(self, file: _File, name: str) -> None:
        self._step(f"sync {name}")
        file.durable = bytearray(file.now)
        file.pending.clear()

    def restart(self) -> None:
        """The power is back: what survived is all there is."""
        self.is_off = False
        self.cut_at = None
        kept = self.rng.randrange(len(self._journal) + 1)
        for change in self._journal[:kept]:
            change(self._durable_names)
        self._journal.clear()
        for file in dict.fromkeys(self._durable_names.values()):
            for offset, data in file.pending:
                for at, piece in self._pieces(data):
                    if self.rng.random() < 0.5:
                        _put(file.durable, offset + at, piece)
            file.pending.clear()
            file.now = bytearray(file.durable)
        self._names = dict(self._durable_names)

    def _pieces(self, data: bytes) -> list[tuple[int, bytes]]:
        cuts = {0, len(data), *(self.rng.randrange(len(data) + 1) for _ in range(3))}
        if self.rng.random() < 0.5:
            cuts.update(range(0, len(data), max(512, len(data) // 16)))
        edges = sorted(cuts)
        return [(a, data[a:b]) for a, b in itertools.pairwise(edges)]


class _Handle:
    """An open file of a simulated disk."""

    def __init__(self, disk: SimulatedDisk, name: str, file: _File, *, durable: bool) -> None:
        self._disk = disk
        self._name = name
        self._file = file
        self._durable = durable

    def write(self, data: memoryview | bytes, offset: int) -> None:
        if self._durable:
            assert offset % 4096 == len(data) % 4096 == 0, "whole blocks, or O_DIRECT refuses"
        self._disk._write(self._file, bytes(data), offset, durable=self._durable, name=self._name)

    def sync(self) -> None:
        self._disk._sync_file(self._file, self._name)

    def close(self) -> None:
        pass
