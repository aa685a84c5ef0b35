"""The newest link, recorded beside the chain, so that its loss is detected. Pure.

`<lake>/_tuskline/newest.json` has number, epoch and term of a link, and is replaced after each publication
(`newest_record`).

Invariant: the chain's newest link has this number and term, or greater ones. Publications add greater ones only, and
retention removes from the old end, never the newest; so if the chain ends before, its newest links are lost. The record
may be older than the newest link, since its writer may die or be suspended in between: then fewer losses are detected,
but none falsely. For the same reason it must be read *before* the chain.
"""

from dataclasses import dataclass
from typing import Protocol

from walsender_bridge.errors import CorruptError


@dataclass(frozen=True, slots=True)
class PublishedLink:
    """A link that was published."""

    link: int
    epoch: int
    term: int


class ChainLink(Protocol):
    """As `PublishedLink`, in the chain."""

    @property
    def link(self) -> int:
        """Its number."""

    @property
    def epoch(self) -> int:
        """The epoch that it shows."""

    @property
    def term(self) -> int:
        """Its writer's term."""


def is_lost(recorded: PublishedLink | None, newest: ChainLink | None) -> bool:
    """Whether the recorded link, or a later one, is no longer in the chain."""
    if recorded is None:
        return False
    return newest is None or newest.link < recorded.link or newest.term < recorded.term


def lost(recorded: PublishedLink, newest: ChainLink | None, where: str) -> CorruptError:
    """The error; `where` is the file of the recorded link."""
    left = f"link {newest.link} (epoch {newest.epoch})" if newest is not None else "none"
    return CorruptError(
        f"link {recorded.link} (epoch {recorded.epoch}) was published and is lost; the newest remaining one is {left}",
        where=where,
        repair="restore the file from a backup; or, to continue from the remaining links, remove _tuskline/newest.json",
    )
