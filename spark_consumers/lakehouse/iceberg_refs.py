"""Which branches and tags of an Iceberg table are Tuskline's. All others are the user's, and left alone.

A writer's branch is `tuskline_t<term>`, the tag of an epoch's snapshot `epoch_<version>`, in decimal without
leading zeros. Only a name of exactly this form counts, and only on the right kind of reference; a user may
well have an `epoch_1_backup`. A tag of this form is ours only on a snapshot that was written for that version.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from walsender_bridge.errors import FencedError

_NUMBER = "(0|[1-9][0-9]*)"
_BRANCH = re.compile(f"tuskline_t{_NUMBER}")
_TAG = re.compile(f"epoch_{_NUMBER}")


@dataclass(frozen=True, slots=True)
class Ref:
    """A branch or a tag. `version`: for which version of the log its snapshot was written, if we wrote it."""

    snapshot: int
    is_branch: bool
    version: int | None = None


def branch_of(term: int) -> str:
    """The branch of a writer of that term."""
    return f"tuskline_t{term}"


def tag_of(version: int) -> str:
    """The tag of the snapshot that was written for that version."""
    return f"epoch_{version}"


def term_of(name: str, ref: Ref) -> int | None:
    """The term whose writer has this branch; None if it is not a writer's."""
    match = _BRANCH.fullmatch(name)
    return int(match[1]) if match and ref.is_branch else None


def is_epoch(name: str, ref: Ref) -> bool:
    """Whether this is a tag of ours."""
    match = _TAG.fullmatch(name)
    return bool(match and not ref.is_branch and ref.version == int(match[1]))


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
        f"term {term} may not write this table any more",
        where=path,
        repair="nothing: the newer writer goes on",
    )
