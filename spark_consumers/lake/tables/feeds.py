"""What an epoch does with the change feed of a table. Pure.

**Safety.** Between two epochs at which a feed is `live` and has no row `begin`, its rows of the later one lead from the table's rows of the
earlier one to those of the later one. By induction over the epochs between: the changes that are appended are those that the
epoch reads for the table (`Append`). These begin where the table's rows end, whether it has followed, or was paused and resumed; and each change
before `after` is in the feed already. A table that was copied again, or brought level, has other rows than its changes lead to, and a feed that begins has none of what was
before: both append `begin`, behind all changes of the epoch, so from there on it holds again. A feed's columns are always those
of its table: both get the same ones in the same epoch (`Append.sources`), or the feed begins in a new Iceberg table.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from spark_consumers.lake.manifest.feed_version import FeedVersion
from spark_consumers.lake.manifest.table_version import LIVE, TableVersion


@dataclass(frozen=True, slots=True)
class Keep:
    """The feed stays as it is."""


@dataclass(frozen=True, slots=True)
class Stop:
    """It cannot be kept."""

    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """It begins in a new Iceberg table."""

    why: str


@dataclass(frozen=True, slots=True)
class Append:
    """The epoch's changes are appended, of those that are at the offset `after` or behind it; then `begin`, if the table was copied again.

    `sources`: where the columns change, which one of the feed each of the table's is; None: they stay.
    """

    after: int
    is_copied: bool = False
    sources: Mapping[str, str] | None = None


Action = Keep | Stop | Begin | Append


def decide(
    feed: FeedVersion | None,
    followed: TableVersion,
    after: TableVersion,
    sources: Mapping[str, str] | None,
    done: int | None,
    refused: str,
) -> Action:
    """What becomes of the feed of a table.

    `followed`: the table as it is before the epoch, or the copy that the epoch shows; `after`: with the epoch's columns. `sources`: for those that it
    has before, their names then; None: they stay, or it is not known. `done`: the offset up to which the head's table has changes; None: it is
    not there, or has left. `refused`: why no feed can have these columns, or this name.
    """
    if refused:
        return Stop(refused)
    if after.state != LIVE:
        return Keep()
    if feed is None or feed.table is None:
        return Begin("it is new")
    if done is None:
        # Whoever has taken the lake over meanwhile has not taken over the feed of a table that has left.
        return Begin("its table had left")
    # A table that was brought level is where it was, and begins at another LSN, as a copy does.
    is_copied = (feed.path, feed.start_lsn) != (after.path, after.start_lsn)
    if feed.table.state != LIVE:
        # With the table's copy; until then someone may look at why it has stopped.
        return Begin("it was stale") if is_copied else Stop(feed.reason)
    stays = _columns(followed) == _columns(after)
    is_known = feed.table.masks == after.masks and _columns(feed.table) == _columns(followed)
    if not after.layout or not is_known or not (stays or sources is not None):
        return Begin("the columns of its table have changed")
    return Append(done, is_copied, None if stays else sources)


def _columns(table: TableVersion) -> tuple[object, ...]:
    """What a table's columns are in the lake."""
    return table.layout, frozenset(table.text_columns)


def without_damaged(
    feeds: Mapping[str, FeedVersion], reasons: Mapping[str, str], epoch: int
) -> dict[str, FeedVersion]:
    """The feeds, with those stopped at this epoch whose tables, by path, are damaged."""
    return {
        name: feed.stopped(epoch, reasons[feed.table.path])
        if feed.table is not None and feed.table.path in reasons
        else feed
        for name, feed in feeds.items()
    }
