"""The names of the change log's streams."""

import re
from typing import Final

from walsender_bridge.errors import ConfigError

_STREAM: Final = re.compile(r"[a-z][a-z0-9_]{0,39}")


def check_stream(stream: str) -> str:
    """Return the name if it is a valid stream name. Raises `ConfigError`."""
    if not _STREAM.fullmatch(stream):
        raise ConfigError(
            f"invalid stream name {stream[:60]!r}",
            repair="use a lower-case letter followed by up to 39 lower-case letters, digits and underscores",
        )
    return stream
