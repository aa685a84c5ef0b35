"""What a maintainer offers to the writer: data files that may take the place of others, and a map of positions.

    data/compacted-t<term>-<maintainer>-<number>-rewritten-<n>.parquet    the new data files
    index/compacted-t<term>-<maintainer>-<number>.run                     their run of the row index
    <lake>/_tuskline/offers/t<term>-<maintainer>-<number>                 the record of the offer

The record is there before the first of the files, and goes after the last of them, or after the link that has them: so every
file is found that a maintainer leaves which dies. The term is that of the newest link when the work began, and a writer of
another term refuses the offer. Therefore only one writer can ever make the files part of a table, and it may remove them if
it does not.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from pyroaring import BitMap64

from spark_consumers.lake.layout.arrangement import NO_PARTITION
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.store.lake_store import STATE
from spark_consumers.lake.tables.shape import Shape

#: The folder of the offers' records.
OFFERS = f"{STATE}/offers"
#: How the files of an offer begin, below `data` and `index`, before its name.
PREFIX = "compacted-"
_NAME = re.compile(r"t(\d+)-([0-9a-f]+)-(\d+)")


@dataclass(frozen=True, slots=True)
class OfferName:
    """Which offer it is: the term that it was made under, its maintainer, and its number there."""

    term: int
    maintainer: str
    number: int

    def __str__(self) -> str:
        return f"t{self.term}-{self.maintainer}-{self.number}"

    @classmethod
    def of(cls, text: str) -> Self | None:
        """The name in a text; None if it is none."""
        match = _NAME.fullmatch(text)
        return cls(int(match[1]), match[2], int(match[3])) if match else None

    @property
    def prefix(self) -> str:
        """How the names of its data files begin."""
        return f"{PREFIX}{self}-"

    @property
    def run(self) -> str:
        """The path of its run below the table's folder."""
        return f"index/{PREFIX}{self}.run"


@dataclass(frozen=True, slots=True)
class OldFile:
    """A data file that was rewritten.

    `removed`: the positions that were removed from it then, a serialized 64-bit roaring bitmap; `vector`: the Puffin file that
    said so (none: nothing was removed). Its living rows, in their order, are in the offer's file number `new`, from position
    `start` on.
    """

    name: str
    rows: int
    vector: str
    removed: bytes
    new: int
    start: int


@dataclass(frozen=True, slots=True)
class NewFile:
    """A data file that was written: its path below the table's folder, its rows, its bytes, its partition."""

    name: str
    rows: int
    size: int
    partition: str = NO_PARTITION


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer for one table (`table`: its name, `path`: its folder), whose key then was `key`.

    `columns`: the numbers and types of its columns then (`columns_of`).

    `old` are replaced by `files`. `run` is the new files' run of the row index, which also says that the old files are
    gone, and `weight` how much it holds. Or, without any files, `run` takes the place of the table's runs `merges`.
    """

    name: str
    table: str
    path: str
    term: int
    key: tuple[str, ...] = ()
    old: tuple[OldFile, ...] = ()
    files: tuple[NewFile, ...] = ()
    run: str = ""
    weight: int = 0
    merges: tuple[str, ...] = ()
    columns: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The record's members."""
        record = asdict(self)
        for file in record["old"]:
            file["removed"] = base64.b64encode(file["removed"]).decode()
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The offer in a record. Raises `KeyError`, `TypeError`, `ValueError` for what is none."""
        old = (
            OldFile(**{**file, "removed": base64.b64decode(file["removed"])})
            for file in record["old"]
        )
        files = tuple(NewFile(**file) for file in record["files"])
        members = {**record, "key": tuple(record["key"]), "old": tuple(old), "files": files}
        members["columns"] = tuple((int(n), int(kind)) for n, kind in record.get("columns", ()))
        return cls(**{**members, "merges": tuple(record["merges"])})


def columns_of(table: TableVersion) -> tuple[tuple[int, int], ...]:
    """The numbers and types of a table's columns at its source; none where they are not known."""
    if not table.shape:
        return ()
    return tuple((number, kind) for number, _, kind, _ in Shape.load(table.shape).columns)


def bitmap(removed: bytes) -> BitMap64:
    """The positions in a serialized bitmap; none for no bytes."""
    return BitMap64.deserialize(removed) if removed else BitMap64()


def serialized(removed: BitMap64) -> bytes:
    """Positions as `OldFile.removed` has them."""
    if not removed:
        return b""
    removed.run_optimize()
    content: bytes = removed.serialize()
    return content
