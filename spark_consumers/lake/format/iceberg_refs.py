"""Which branches and tags of an Iceberg table are Tuskline's. All others are the user's, and left alone.

A writer's branch is `tuskline_t<term>`. The tag of an epoch's snapshot is `tuskline_epoch_<version>`, with a number
after it if a user has a reference of that name, and the snapshot's summary has the name: so a tag is ours if it is on
the snapshot that names it, and no reference of a user is moved, dropped or taken for ours. Earlier versions named the
tag `epoch_<version>` and recorded only the version.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from walsender_bridge.errors import FencedError

_NUMBER = "(0|[1-9][0-9]*)"
_BRANCH = re.compile(f"tuskline_t{_NUMBER}")
#: The members of a snapshot's summary that have the version of the log it was written for, and its tag.
VERSION, TAG = "tuskline.version", "tuskline.tag"


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch or a tag. `version` and `tag` are its snapshot's, if we wrote it."""

    snapshot: int
    is_branch: bool
    version: int | None = None
    tag: str | None = None

    @classmethod
    def of(cls, snapshot: int, summary: Mapping[str, str], *, is_branch: bool) -> "Ref":
        """The reference to a snapshot with this summary."""
        version = summary.get(VERSION)
        if version is None:
            return cls(snapshot, is_branch)
        return cls(snapshot, is_branch, int(version), summary.get(TAG) or f"epoch_{version}")


def branch_of(term: int) -> str:
    """The branch of a writer of that term."""
    return f"tuskline_t{term}"


def free_tag(version: int, find: Callable[[str], Ref | None]) -> str:
    """The tag for the snapshot of that version: its name is free, or ours already. `find`: the reference of a name."""
    for number in count(1):
        name = f"tuskline_epoch_{version}" + (f"_{number}" if number > 1 else "")
        ref = find(name)
        if ref is None or is_epoch(name, ref):
            return name
    raise AssertionError("there are numbers without end")


def term_of(name: str, ref: Ref) -> int | None:
    """The term whose writer has this branch; None if it is not a writer's."""
    match = _BRANCH.fullmatch(name)
    return int(match[1]) if match and ref.is_branch else None


def is_epoch(name: str, ref: Ref) -> bool:
    """Whether this is a tag of ours."""
    return not ref.is_branch and name == ref.tag


def of_users(refs: Mapping[str, Ref]) -> list[str]:
    """The branches and tags that are not ours; `main` is."""
    return sorted(
        name
        for name, ref in refs.items()
        if name != "main" and term_of(name, ref) is None and not is_epoch(name, ref)
    )


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
