"""What makes rows of the lake equal to those of their source, and when a copy is the better way. Pure.

**Safety.** `lake - gone + wanted == source`, as multisets of rows that are known by their digests: `wanted` has of each digest as many as
the source has more, `gone` as many as the lake has more. A digest has the key's columns, too, so of a table with a key the rows that are
removed are those of the keys that are `extra` or `changed`, and those that are added are of keys that are `missing` or `changed`: after it, no key is
there twice. Which of several equal rows goes does not matter. That the digests have told the truth is checked afterwards: the sums of the
chunks are computed from the lake's files again (`copy.leveling`).

A table is copied instead where the comparison cannot answer for its rows (`TableVersion.unfit`, `misfit`), or would cost more than it saves (`is_too_much`).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from spark_consumers.lake.comparison.sums import RowDifference
from spark_consumers.lake.manifest.table_version import TableVersion
from walsender_bridge.postgres.table_layout import RowRules

#: Rows that are found to differ, up to which a table is never copied for them; and at most: their digests are in the driver's memory.
FEW: Final = 10_000
MOST: Final = 1_000_000


@dataclass(frozen=True)
class Level:
    """The digests of the source's rows that are to be added, and of the lake's that go, with how many of each."""

    wanted: Counter[bytes] = field(default_factory=Counter)
    gone: Counter[bytes] = field(default_factory=Counter)

    @property
    def rows(self) -> int:
        """How many rows are written or removed."""
        return self.wanted.total() + self.gone.total()

    def plus(self, other: "Level") -> "Level":
        """Of both, which are of different chunks."""
        return Level(self.wanted + other.wanted, self.gone + other.gone)


def level(differences: Iterable[RowDifference]) -> Level:
    """What makes the rows with these differences equal."""
    wanted, gone = Counter[bytes](), Counter[bytes]()
    for each in differences:
        here, there = Counter(dict(each.source)), Counter(dict(each.lake))
        wanted += here - there
        gone += there - here
    return Level(wanted, gone)


def twice(differences: Iterable[RowDifference]) -> bool:
    """Whether a key is there more than once on one side, as no source can have it: the lake is damaged, or a digest collides."""
    return any(
        each.key and max(sum(n for _, n in each.source), sum(n for _, n in each.lake)) > 1
        for each in differences
    )


def is_too_much(found: Level, rows: int) -> bool:
    """Whether the table, of so many `rows`, is rather copied: more than half of them differ, or very many."""
    changed = max(found.wanted.total(), found.gone.total())
    return changed > MOST or (changed > FEW and 2 * changed > rows)


def misfit(before: TableVersion, now: TableVersion) -> str | None:
    """Why the rows of the table as it was `before` cannot be compared with the source's, as a copy of them would be `now`."""
    if now.rules != RowRules():
        return (
            "by its masks, mode or row filter, the lake is to have other rows of it than the source"
        )
    if before.layout != now.layout:
        return "its columns have changed"
    if before.key != now.key:
        return "its key has changed"
    return None
