"""Checks an LMDB file page by page, without LMDB.

LMDB trusts its file: a damaged page can kill the process that meets it, and pages that only a writer meets (the list of
free pages, inner pages) are met by no reader. Here the file is only read, each number in it is compared with what it has
to be, and nothing is followed that lies outside. What is checked of the newest head's state:

    heads      magic, version, page size; the two heads are of consecutive transactions, each at the place of its own
    pages      number, kind, and nodes that fill the used part of the page without gaps
    trees      depth, and how many pages and rows there are; keys in order, and within the bounds of the pages above
    free list  page numbers in order, each of them free: used by no tree, and listed once

Values are not read: `storage.entries` and `storage.records` have checksums of their own. The format is that of LMDB 0.9 on a
64-bit machine with the same byte order.

**How long a file has to be.** Its last page, by the number in the head, may never have been written: a transaction that frees
a page which it has taken itself lists it as free, and LMDB writes a page only if it is used. So a file has to have the pages
that are used, and no others.
"""

import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walsender_bridge.errors import CorruptError

_HEADER: Final = struct.Struct("=QHHHH")
_PAGES: Final = struct.Struct("=I")
_NODE: Final = struct.Struct("=HHHH")
_NUMBER: Final = struct.Struct("=Q")
_TREE: Final = struct.Struct("=IHHQQQQQ")
#: Behind the page's header: magic, version, address and size of the map; the trees follow, then last page and transaction.
_META: Final = struct.Struct("=IIQQ")
_META_END: Final = struct.Struct("=QQ")
_HEAD_BYTES: Final = _HEADER.size + _META.size + 2 * _TREE.size + _META_END.size

_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_BRANCH, _LEAF, _OVERFLOW, _HEAD = 1, 2, 4, 8
_BIG, _SUBTREE = 1, 2
_INTEGER_KEYS: Final = 8
_NO_PAGE: Final = 2**64 - 1
_PAGE_SIZES: Final = tuple(1 << bits for bits in range(9, 17))
#: The most levels that LMDB can follow.
_MAX_DEPTH: Final = 32


@dataclass(frozen=True, slots=True)
class Tree:
    """What a head, or the row of a named database, says of a tree."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    rows: int
    root: int


@dataclass(frozen=True, slots=True)
class Head:
    """The state of the file after a transaction."""

    page_size: int
    free: Tree
    main: Tree
    last_page: int
    transaction: int


def check_heads(file: Path) -> Head:
    """Check both heads, and return the newer one, which LMDB uses. Raises `CorruptError`, `OSError`."""
    with file.open("rb", buffering=0) as opened:
        return _heads(opened.fileno(), str(file))


def check_pages(file: Path) -> None:
    """Check all that the newest head refers to. Raises `CorruptError`, `OSError`. The file must not change meanwhile."""
    with file.open("rb", buffering=0) as opened:
        _Walk(opened.fileno(), str(file)).run()


def check_end(file: Path) -> None:
    """Check that the file has all pages that are used. Raises `CorruptError`, `OSError`. The file must not change meanwhile.

    It reads the two heads, and the free list only if pages are missing at the end.
    """
    with file.open("rb", buffering=0) as opened:
        _Walk(opened.fileno(), str(file)).check_end()


def _heads(descriptor: int, where: str) -> Head:
    first = _head(os.pread(descriptor, _HEAD_BYTES, 0), 0, where)
    second = _head(os.pread(descriptor, _HEAD_BYTES, first.page_size), 1, where)
    if second.page_size != first.page_size:
        raise CorruptError("its two heads have different page sizes", where=where)
    older, newer = sorted((first, second), key=lambda head: head.transaction)
    placed = first.transaction % 2 == 0 and second.transaction % 2 == 1
    created = newer.transaction == 0
    if not created and not (placed and newer.transaction == older.transaction + 1):
        raise CorruptError(
            f"its heads are of transactions {first.transaction} and {second.transaction}",
            where=where,
        )
    return newer


def _head(data: bytes, number: int, where: str) -> Head:
    """The head on the page of that number. Raises `CorruptError`."""

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise CorruptError(f"head {number}: {what}", where=where)

    need(len(data) == _HEAD_BYTES, "it is not there")
    at, _, flags, _, _ = _HEADER.unpack_from(data)
    magic, version, _, _ = _META.unpack_from(data, _HEADER.size)
    trees = _HEADER.size + _META.size
    free, main = (Tree(*_TREE.unpack_from(data, trees + n * _TREE.size)) for n in (0, 1))
    last, transaction = _META_END.unpack_from(data, trees + 2 * _TREE.size)
    need(at == number and flags == _HEAD, "its page is another one")
    need(magic == _MAGIC, "it does not begin as the head of an LMDB file")
    need(version == _VERSION, f"version {version} of LMDB's file format is unknown")
    need(free.pad in _PAGE_SIZES, f"{free.pad} is not a page size")
    # Of the environment's own flags, which LMDB keeps here, too, segments have none.
    need(free.flags == _INTEGER_KEYS and not main.flags, "its flags are unknown")
    need(1 <= last < 1 << 48, f"page {last} cannot be the last one")
    for tree in (free, main):
        need(2 <= tree.root <= last or tree.root == _NO_PAGE, "the root of a tree is not in it")
    return Head(free.pad, free, main, last, transaction)


class _Walk:
    """One check of a file."""

    def __init__(self, descriptor: int, where: str) -> None:
        self._descriptor = descriptor
        self._where = where
        self.head = _heads(descriptor, where)
        self._pages = os.fstat(descriptor).st_size // self.head.page_size
        #: One byte for each page of the file. Pages of the free list may lie behind it.
        self._used = bytearray(self._pages)

    def run(self) -> None:
        """Raises `CorruptError`."""
        named = _TreeWalk(self, self.head.main, keeps=_SUBTREE).run()
        for key, value in named:
            self.need(len(value) == _TREE.size, f"the row of database {key!r:.40}")
            tree = Tree(*_TREE.unpack(value))
            self.need(not tree.flags, f"the flags of database {key!r:.40}")
            _TreeWalk(self, tree).run()
        self._free_pages()

    def check_end(self) -> None:
        """See `check_end`."""
        missing = self.head.last_page + 1 - self._pages
        if missing <= 0:
            return
        free = sum(page >= self._pages for page in self._free_pages())
        if free < missing:
            needed = (self.head.last_page + 1 - free) * self.head.page_size
            found = os.fstat(self._descriptor).st_size
            raise CorruptError(
                f"its data file has {found} bytes, but {needed} were written", where=self._where
            )

    def need(self, holds: bool, what: str, page: int | None = None) -> None:
        """Raises `CorruptError` unless it holds."""
        if not holds:
            place = "" if page is None else f"page {page}: "
            raise CorruptError(f"damaged page: {place}{what}", where=self._where)

    def peek(self, page: int) -> bytes:
        """A page's header."""
        return os.pread(self._descriptor, _HEADER.size, page * self.head.page_size)

    def take(self, page: int, count: int = 1, size: int = 0) -> bytes:
        """So many pages, of which each is used once; `size`: of what is returned, a page if 0."""
        self.need(2 <= page <= page + count - 1 <= self.head.last_page, "it is out of range", page)
        self.need(page + count <= self._pages, "it lies behind the end of the file", page)
        self.need(not any(self._used[page : page + count]), "it is used twice", page)
        self._used[page : page + count] = b"\1" * count
        page_size = self.head.page_size
        return os.pread(self._descriptor, size or page_size, page * page_size)

    def _free_pages(self) -> set[int]:
        """Check the tree of free pages behind all others; the pages."""
        listed: set[int] = set()
        for key, value in _TreeWalk(self, self.head.free, keeps=_BIG).run():
            transaction = int.from_bytes(key)
            what = f"the pages that transaction {transaction} has freed"
            self.need(transaction <= self.head.transaction, f"{what} are of the future")
            count = _NUMBER.unpack_from(value.ljust(_NUMBER.size, b"\xff"))[0]
            self.need((count + 1) * _NUMBER.size <= len(value), f"{what} have no list")
            pages = struct.unpack_from(f"={count}Q", value, _NUMBER.size)
            before = self.head.last_page + 1
            for page in pages:
                self.need(2 <= page < before, f"{what} are out of range or of order")
                used = page < self._pages and self._used[page]
                self.need(not used and page not in listed, f"{what} are in use", page)
                before = page
            listed.update(pages)
        return listed


class _TreeWalk:
    """The check of one tree. `keeps`: the kind of row whose values are returned (`_BIG` stands for all), as few as they are."""

    def __init__(self, file: _Walk, tree: Tree, keeps: int = 0) -> None:
        self._file = file
        self._tree = tree
        self._keeps = keeps
        self._integers = bool(tree.flags & _INTEGER_KEYS)
        self._last: bytes | None = None
        self._pages = {_BRANCH: 0, _LEAF: 0, _OVERFLOW: 0}
        self._rows = 0
        self._kept: list[tuple[bytes, bytes]] = []

    def run(self) -> list[tuple[bytes, bytes]]:
        """The rows that are kept. Raises `CorruptError`."""
        tree, need = self._tree, self._file.need
        if tree.root != _NO_PAGE:
            need(1 <= tree.depth <= _MAX_DEPTH, f"a tree has {tree.depth} levels", tree.root)
            self._visit(tree.root, tree.depth, None)
        found = (self._rows, *self._pages.values())
        said = (tree.rows, tree.branch_pages, tree.leaf_pages, tree.overflow_pages)
        need(found == said, f"a tree has other rows and pages than it says: {found}, not {said}")
        return self._kept

    def _visit(self, page: int, level: int, low: bytes | None) -> None:
        """Check a page and all below it; its first key must not be less than `low`."""
        need = self._file.need
        data = self._file.take(page)
        at, _, kind, lower, upper = _HEADER.unpack_from(data)
        need(at == page, "it has another number", page)
        need(kind == (_LEAF if level == 1 else _BRANCH), "it is of another kind", page)
        in_order = _HEADER.size <= lower <= upper <= len(data) and lower % 2 == 0
        need(in_order, "its bounds are out of range", page)
        count = (lower - _HEADER.size) // 2
        # LMDB may leave one child in the tree of free pages, and only there.
        need(count >= (1 if kind == _LEAF or self._integers else 2), "it has no rows", page)
        self._pages[kind] += 1
        places = struct.unpack_from(f"={count}H", data, _HEADER.size)
        need(min(places) >= upper, "a row is out of range", page)
        need(max(places) <= len(data) - _NODE.size, "a row is out of range", page)
        ends = {}
        for number, place in enumerate(places):
            bound = low if number == 0 else None
            if kind == _LEAF:
                ends[place] = self._row(data, place, page, bound)
            else:
                child, key, ends[place] = self._child(data, place, page, first=number == 0)
                self._visit(child, level - 1, bound if key is None else key)
        for place in sorted(ends):
            need(place == upper, "its rows overlap, or leave a gap", page)
            upper = ends[place]
        need(upper == len(data), "its rows do not end with it", page)

    def _key(self, data: bytes, place: int, size: int, page: int) -> bytes:
        begin = place + _NODE.size
        key = data[begin : begin + size]
        self._file.need(len(key) == size > 0, "a key is out of range", page)
        if not self._integers:
            return key
        self._file.need(size == _NUMBER.size, "a key is no number", page)
        # As bytes that sort as the number does.
        return key if sys.byteorder == "big" else key[::-1]

    def _child(
        self, data: bytes, place: int, page: int, *, first: bool
    ) -> tuple[int, bytes | None, int]:
        """A row of a branch page: the child, its least key, and where the row ends. The first one's key is not used."""
        least, middle, high, size = _NODE.unpack_from(data, place)
        key = None if first else self._key(data, place, size, page)
        if key is not None:
            self._ascends(self._last, key, page)
        return least | middle << 16 | high << 32, key, place + _even(_NODE.size + size)

    def _row(self, data: bytes, place: int, page: int, low: bytes | None) -> int:
        """Check a row, whose key must not be less than `low`; where it ends."""
        need = self._file.need
        least, most, flags, size = _NODE.unpack_from(data, place)
        length = least | most << 16
        key = self._key(data, place, size, page)
        need(low is None or low <= key, "a key is out of order", page)
        self._ascends(self._last, key, page)
        self._last = key
        self._rows += 1
        begin = place + _NODE.size + size
        end = begin + (_NUMBER.size if flags & _BIG else length)
        need(end <= len(data), "a value is out of range", page)
        wanted = (_SUBTREE,) if self._keeps == _SUBTREE else (0, _BIG)
        need(flags in wanted, "a row is of another kind", page)
        value = data[begin:end]
        if flags & _BIG:
            value = self._overflow(_NUMBER.unpack(value)[0], length)
        if self._keeps:
            self._kept.append((key, value))
        return _even(end)

    def _ascends(self, before: bytes | None, key: bytes, page: int) -> None:
        ascends = before is None or before < key
        self._file.need(ascends, "a key is out of order", page)

    def _overflow(self, page: int, length: int) -> bytes:
        """Check the pages of a long value; the value, if it is kept."""
        file = self._file
        file.need(page < file.head.last_page + 1, "it is out of range", page)
        header = file.peek(page).ljust(_HEADER.size, b"\0")
        at, _, kind, _, _ = _HEADER.unpack(header)
        count = _PAGES.unpack_from(header, _HEADER.size - _PAGES.size)[0]
        file.need(at == page and kind == _OVERFLOW, "it is of another kind", page)
        enough = count * file.head.page_size >= _HEADER.size + length
        file.need(enough, f"{count} pages are too few for its value", page)
        self._pages[_OVERFLOW] += count
        size = _HEADER.size + (length if self._keeps else 0)
        return file.take(page, count, size)[_HEADER.size :]


def _even(number: int) -> int:
    return number + number % 2
