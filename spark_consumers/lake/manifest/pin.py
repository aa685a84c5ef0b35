"""A pin: an epoch that is kept under a name, whatever the retention. The newest link has all of them (`Manifest.pins`).

| state | tags of its name | `read(pin=...)` |
|---|---|---|
| `pinning` | none, or on some tables, all of this epoch | not yet |
| `pinned` | on every table of the epoch | returns the epoch |
| `releasing` | on some tables, or none, all of this epoch | not any more |

A pin is `pinning` before its first tag is made, and it is in the chain until its last tag is removed. Its name stands for no
other epoch meanwhile, so two tables never have a tag of one name at two epochs.
"""

import re
from dataclasses import dataclass
from typing import Any, Self

from walsender_bridge.errors import UsageError

PINNING = "pinning"
PINNED = "pinned"
RELEASING = "releasing"

#: What the tag of each pin begins with, in every table.
_TAG = "tuskline_pin_"
#: Lower case: an engine that ignores case would take two names for one. As long as PostgreSQL's names, with the prefix.
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,49}")


@dataclass(frozen=True, slots=True)
class Pin:
    """An epoch that is kept.

    `link`: the link that is read for it, and `record` the name of that link's copy (`pinned_links`). `at` and `expires_at` are
    in seconds since the Unix epoch, for people; `until` is in the writer's steady seconds, and decides (both 0: until it is
    released on request). `request`: the id of the request that made it.
    """

    epoch: int
    link: int
    record: str
    state: str = PINNING
    at: float = 0.0
    expires_at: float = 0.0
    until: float = 0.0
    request: str = ""

    @property
    def keeps_tags(self) -> bool:
        """Whether its tables are to have its tag."""
        return self.state != RELEASING

    def has_ended(self, now: float) -> bool:
        """Whether its time is over. `now`: steady seconds."""
        return 0 < self.until <= now

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """The pin in a manifest's JSON. Raises `TypeError` for what is none."""
        return cls(**record)


def tag_of(name: str) -> str:
    """The tag that a pin of this name has in each table."""
    return f"{_TAG}{name}"


def checked_name(name: str) -> str:
    """The name, if a pin may have it. Raises `UsageError`."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.60} is not a valid name of a pin",
            repair="use at most 50 lower-case letters, digits, underscores and hyphens, and begin with a letter or digit",
        )
    return name
