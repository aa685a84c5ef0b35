"""Names and files that outlive a power cut: a file that was made or renamed is there only once its folder is synced, too."""

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
    """Give the file this content: a crash, or a disk that is full, leaves the old one or the new one, whole.

    What its name is then is on disk. `mode`: of a new file, less the process's umask. The folder is made if it is not
    there. Raises `OSError`; what was begun is gone then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of this process alone, so that two that write at once leave one of both and no mixture.
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
