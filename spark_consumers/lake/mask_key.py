"""The key by which columns are hashed: from a file that only its account can read, or from the environment. It is never shown."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from spark_consumers.decode.masking import SHORTEST_KEY
from walsender_bridge.errors import ConfigError
from walsender_bridge.postgres.column_masks import HASH
from walsender_bridge.postgres.table_layout import LayoutRule
from walsender_bridge.runtime import secret_file

#: The variable with the key, where no file has it.
VARIABLE: Final = "TUSKLINE_MASK_KEY"
_LONGEST: Final = 4096
_WRITE = "write one: (umask 077; openssl rand -hex 32 > FILE), and keep a copy: without it, all tables with hashed columns are copied again"


def mask_key(file: Path | None = None) -> bytes:
    """The key; empty if there is none. Raises `ConfigError` for a file without one, or that others can read."""
    if file is None:
        given = os.environ.get(VARIABLE, "").strip().encode()
        return _long_enough(given, VARIABLE) if given else b""
    try:
        with file.open("rb") as opened:
            its, content = os.fstat(opened.fileno()), opened.read(_LONGEST)
    except OSError as error:
        raise ConfigError(
            f"the key of masked columns cannot be read: {error.strerror}",
            where=str(file),
            repair=_WRITE,
        ) from None
    secret_file.check(
        file, its, "key", "write another key, as this one may be known; chmod 600 the file"
    )
    return _long_enough(content.strip(), str(file))


def check_key(rules: Iterable[LayoutRule], key: bytes) -> None:
    """Raise `ConfigError` if columns are to be hashed, and there is no key."""
    hashed = [(r, m) for r in rules for m in r.masks if m.kind == HASH]
    if hashed and not key:
        rule, mask = hashed[0]
        raise ConfigError(
            f"column {mask.column} of {rule.pattern.text} is to be hashed, but no key is configured",
            where="lake.mask_key_file",
            repair=f"{_WRITE}; name it in [lake] mask_key_file, or put the key into {VARIABLE}",
        )


def _long_enough(key: bytes, where: str) -> bytes:
    if len(key) < SHORTEST_KEY:
        raise ConfigError(
            f"the key of masked columns has fewer than {SHORTEST_KEY} characters",
            where=where,
            repair=_WRITE,
        )
    return key
