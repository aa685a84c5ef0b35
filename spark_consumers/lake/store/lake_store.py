"""The seam between a lake's own records and the place where they are: `LakeStore`.

A record is small, has a name below the lake's root (`_tuskline/epochs/...`), and is read and written as a whole. A name
is never that of a folder, too. `LocalStore` has records as files, `ObjectStore` as objects in a bucket.

What every store promises, and all that the chain of manifests builds on:

- `create` has one winner for each name, and what it created is durable and whole for everybody who reads it;
- after an operation has returned, every other one sees its effect: `names` also.

A record that does not exist is a `FileNotFoundError`. Other failures of a disk are an `OSError`; those of an object
store are a `TusklineError`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

#: The folder of the lake's own records, below its root.
STATE = "_tuskline"


class Created(Enum):
    """The outcome of `LakeStore.create`: the record is this writer's, or another one's."""

    WON = auto()
    LOST = auto()


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a bucket is reached (`[lake]`). None: as the environment says (`AWS_ENDPOINT_URL`, `AWS_REGION`). Never keys.

    `allow_http`: the endpoint may be http. Keys are not sent then either, but contents are readable on the way.
    """

    endpoint: str | None = None
    region: str | None = None
    allow_http: bool = False


FROM_ENVIRONMENT = StoreOptions()


class HeldRecord(Protocol):
    """A record that belongs to a process, which changes it for as long as it lives (`LakeStore.hold`)."""

    def write(self, content: bytes) -> None:
        """Replace the content by one of the same length; not durable."""

    def is_lost(self) -> bool:
        """Whether it is not where others look for it: the lake was replaced in its folder."""

    def close(self) -> None:
        """Remove it."""

    def abandon(self) -> None:
        """Leave it, in a forked child, to the process that holds it."""


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record that a process holds or held. `is_dead`: its lock is free, so its process is gone; only a store with locks knows.

    A process outside of the holder's `LakeStore.lock_domain` may find a lock free that is held.
    """

    name: str
    content: bytes
    is_dead: bool = False


class LakeStore(Protocol):
    """The records of one lake. Names are relative to the lake's root; a `folder` is what they begin with, without a `/`."""

    @property
    def location(self) -> str:
        """The lake's root, as messages and `root.json` name it: a path or a URL."""

    @property
    def folder(self) -> Path | None:
        """The same as a folder of this machine; None in an object store."""

    @property
    def has_locks(self) -> bool:
        """Whether it knows dead processes by their locks. If not, a dead one's record is one that does not change any more."""

    @property
    def lock_domain(self) -> str:
        """The processes of which this one sees the locks have the same; empty without locks."""

    @property
    def pause(self) -> float:
        """Seconds between two looks of a process that waits for a change, at least: a look may cost money."""

    def create(self, name: str, content: bytes) -> Created:
        """Create the record, whole and durable, if there is none of this name.

        The content must be unique to its writer: it may be how the outcome is found out. Raises `UnavailableError` if the
        outcome stays unknown; the caller may repeat it, and must expect that it has happened or happens later.
        """

    def read(self, name: str) -> bytes:
        """The record's content."""

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        """These bytes of it; fewer at its end."""

    def replace(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Give the record this content, whole, whether or not it exists. Of two writers the last one wins."""

    def names(self, folder: str) -> list[str]:
        """The names of the records in the folder, without the folder; none if it does not exist."""

    def remove(self, name: str) -> None:
        """Remove the record, if it exists."""

    def exists(self, name: str) -> bool:
        """Whether there is such a record."""

    def put_aside(self, name: str, to: str) -> None:
        """Give the record another name. It may have both for a moment."""

    def hold(self, name: str, content: bytes, *, locked: bool) -> HeldRecord:
        """Create a record that belongs to this process. `locked`: only where its death will be noticed.

        Raises `OSError` otherwise, and where it cannot be made.
        """

    def held(self, folder: str) -> Iterable[FoundRecord]:
        """The records in the folder that processes hold or held."""

    def where(self, name: str) -> str:
        """The record's full name, for messages."""

    def is_at(self, location: str) -> bool:
        """Whether the lake that belongs at `location` is this one, by whatever name."""

    def check(self) -> None:
        """Raise `NotSupportedError` if `create` has several winners here. Writes, and removes what it wrote."""

    def prepare(self, folder: str) -> None:
        """Have a folder of this user, to create records in."""

    def may_remove(self, folder: str) -> bool:
        """Whether this process may remove records of the folder; True if that is not known."""

    def drafts(self, folder: str) -> Iterable[str]:
        """Names of what crashes left there of records that never came to be."""

    def sweep_drafts(self) -> int:
        """Remove those whose makers are gone, all over the lake's state; how many."""
