"""Durable names and files: a file that was created or renamed is durable only once its folder has been synced, too."""

import contextlib
import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Replace the file's content atomically: a crash or a full disk leaves either the old or the new content.

    The name is durable, too. `mode`: of a new file, less the process's umask. The folder is created if necessary.
    Raises `OSError`, after removing the temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique to this process, so that concurrent writers cannot mix their contents.
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    sync_folder(path.parent)
