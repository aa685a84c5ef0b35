"""Which branches and tags of an Iceberg table are Tuskline's. All others are the user's, and left alone.

A writer's branch is `tuskline_t<term>`. A pin's tag (`manifest.pin`) is in the table's property `tuskline.pins`, with its
snapshot, from the commit on that makes it: so a tag of that name which a user has made or moved is the user's.

Earlier versions made a tag for each epoch, `tuskline_epoch_<version>`, and recorded its name in the summary of its snapshot
(before that `epoch_<version>`, and only the version was recorded). These are ours, and are removed with the next expiry.
Snapshots have an empty name there since then, so that a tag of the user's is not taken for one of them.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from walsender_bridge.errors import FencedError, LakeError

_NUMBER = "(0|[1-9][0-9]*)"
_BRANCH = re.compile(f"tuskline_t{_NUMBER}")
#: The members of a snapshot's summary that have the version of the log it was written for, and the tag of its epoch.
VERSION, TAG = "tuskline.version", "tuskline.tag"
#: What the latter is where an epoch has no tag.
NO_TAG = ""
#: The table property that has the tags of pins and their snapshots.
PINS = "tuskline.pins"


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch or a tag. `version` and `tag` are its snapshot's, if we wrote it. `is_pin`: the tag of a pin."""

    snapshot: int
    is_branch: bool
    version: int | None = None
    tag: str | None = None
    is_pin: bool = False

    @classmethod
    def of(cls, snapshot: int, summary: Mapping[str, str], *, is_branch: bool) -> "Ref":
        """The reference to a snapshot with this summary."""
        version = summary.get(VERSION)
        if version is None:
            return cls(snapshot, is_branch)
        tag = summary.get(TAG)
        return cls(snapshot, is_branch, int(version), f"epoch_{version}" if tag is None else tag)


def branch_of(term: int) -> str:
    """The branch of a writer of that term."""
    return f"tuskline_t{term}"


def term_of(name: str, ref: Ref) -> int | None:
    """The term whose writer has this branch; None if it is not a writer's."""
    match = _BRANCH.fullmatch(name)
    return int(match[1]) if match and ref.is_branch else None


def is_epoch(name: str, ref: Ref) -> bool:
    """Whether this is a tag that an earlier version made for an epoch."""
    return not ref.is_branch and name == ref.tag


def of_users(refs: Mapping[str, Ref]) -> list[str]:
    """The branches and tags that are not ours; `main` is."""
    return sorted(
        name
        for name, ref in refs.items()
        if name != "main"
        and not ref.is_pin
        and term_of(name, ref) is None
        and not is_epoch(name, ref)
    )


def with_pins(refs: Mapping[str, Ref], recorded: str | None) -> dict[str, Ref]:
    """The references, with those marked that the property `PINS` has as tags of pins."""
    pins: dict[str, int] = json.loads(recorded) if recorded else {}
    return {
        name: replace(ref, is_pin=not ref.is_branch and pins.get(name) == ref.snapshot)
        for name, ref in refs.items()
    }


@dataclass(frozen=True, slots=True)
class PinChanges:
    """What gives a table the tags of its pins, in one commit: references to remove, tags to set.

    `needs_branch`: the writer's branch is to be made, at the snapshot of `main`, which fences writers of lower terms.
    """

    remove: tuple[str, ...]
    tags: dict[str, int]
    needs_branch: bool


def pin_changes(
    refs: Mapping[str, Ref], wanted: Mapping[str, int], term: int, path: str, *, take: bool = False
) -> PinChanges | None:
    """What a writer of this term has to change for the table to have exactly the `wanted` tags of pins; None: nothing.

    A table that the takeover did not take (an earlier copy, or one that has left) is taken with the change: a suspended
    writer of a lower term finds the branch. If `take`, it is taken also where no tag changes: that writer may be about to set
    one of a pin that has ended since. Raises `FencedError`, and `LakeError` if a user has a reference of a wanted name.
    """
    older = [name for name in fenced_by(refs, term, path) if name != branch_of(term)]
    there = {name: ref.snapshot for name, ref in refs.items() if ref.is_pin}
    for name in wanted.keys() & refs.keys() - there.keys():
        raise LakeError(
            f"a {'branch' if refs[name].is_branch else 'tag'} {name!r} exists that no pin created",
            where=path,
            repair="drop it, or choose another name for the pin",
        )
    # Without `main` there is no snapshot to take it from.
    is_taken = branch_of(term) in refs or "main" not in refs
    if there == wanted and (is_taken or not take):
        return None
    gone = [name for name in there if name not in wanted]
    tags = {name: at for name, at in wanted.items() if there.get(name) != at}
    return PinChanges((*older, *gone), tags, needs_branch=not is_taken)


def fenced_by(refs: Mapping[str, Ref], term: int, path: str) -> list[str]:
    """The writers' branches that a takeover by `term` drops. Raises `FencedError` if one is of a higher term."""
    terms = {name: found for name, ref in refs.items() if (found := term_of(name, ref)) is not None}
    if any(found > term for found in terms.values()):
        raise fenced(path, term)
    return list(terms)


def unpublished(refs: Mapping[str, Ref], epoch: int) -> list[str]:
    """Our tags of versions after `epoch`, which no manifest came to name."""
    return [
        name
        for name, ref in refs.items()
        if is_epoch(name, ref) and ref.version is not None and ref.version > epoch
    ]


def fenced(path: str, term: int) -> FencedError:
    """The error of a writer whose term is over at a table."""
    return FencedError(
        f"term {term} may no longer write this table",
        where=path,
        repair="no action is needed: the newer writer continues",
    )
