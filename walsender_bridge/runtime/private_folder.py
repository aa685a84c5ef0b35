"""Data folders accessible to their owner only: they contain rows, sockets, and records that decisions depend on.

Invariant: the data folders of a running part have mode 0700, whatever the umask was when they were created; their
contents can be reached only through them. The lake is not one of them: it is for readers, and its modes are the
user's.
"""

import os
import stat
from pathlib import Path

from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime import disk_full, logs

_OTHERS = 0o077


def is_ours(its: os.stat_result, denied: int) -> bool:
    """Whether it belongs to this account, and none of the permissions `denied` is granted."""
    return its.st_uid == os.geteuid() and not its.st_mode & denied


def private_folder(folder: Path) -> None:
    """Create the folder, or restrict the mode of an existing one.

    Raises `ConfigError` for a folder of another account, a shared one, or a file, and the errors of
    `disk_full`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(
            "it is not a folder",
            where=str(folder),
            repair="name a folder, new or empty, as data_dir",
        ) from None
    except OSError as error:
        raise disk_full.of(error, folder) from None
    its = folder.stat()
    mode = stat.S_IMODE(its.st_mode)
    if is_ours(its, _OTHERS):
        return
    if mode & stat.S_ISVTX or its.st_uid != os.geteuid():
        whose = "is shared by all accounts" if mode & stat.S_ISVTX else "belongs to another account"
        raise ConfigError(
            f"the folder {whose} (mode {mode:04o}), but data folders must be private",
            where=str(folder),
            repair="choose a folder that belongs to this account alone, mode 0700",
        )
    folder.chmod(mode & ~_OTHERS)

    logs.logger().warning(
        "data folder was accessible to other accounts; its mode has been corrected",
        folder=str(folder),
        mode=f"{mode:04o}",
    )


def private_file(path: Path) -> None:
    """Create the file, empty and accessible to its owner only, or restrict the mode of an existing one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(descriptor).st_mode & _OTHERS:
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
