"""Files with a secret: a certificate's key, a token. They are accessible to their account only, as PostgreSQL has it.

0600, or less; of a file that belongs to root, its group may read it (0640). Only the standard library: executors of Spark use it.
"""

import os
import stat
from pathlib import Path

from walsender_bridge.errors import ConfigError


def check(path: Path, its: os.stat_result, what: str, repair: str) -> None:
    """Raise `ConfigError` for a file, of which `its` is the state, that other accounts can read or write. `what` is in it."""
    denied = stat.S_IRWXG | stat.S_IRWXO
    if its.st_uid == 0:
        denied &= ~stat.S_IRGRP
    if its.st_uid not in {0, os.geteuid()} or its.st_mode & denied:
        raise ConfigError(
            f"the {what} is accessible to other accounts (mode {stat.S_IMODE(its.st_mode):04o})",
            where=str(path),
            repair=repair,
        )


def check_key(path: Path) -> None:
    """Raise `ConfigError` for a key that other accounts can read or write. One that cannot be read is its reader's matter."""
    try:
        its = path.stat()
    except OSError:
        return
    check(
        path,
        its,
        "key",
        "issue another certificate, as this key may be known; keep keys in files of mode 0600",
    )
