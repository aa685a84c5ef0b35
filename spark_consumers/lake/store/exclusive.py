"""A file that is created whole, durable and by one writer only: the lake's compare-and-swap on a local disk."""

import contextlib
import fcntl
import os
import uuid
from pathlib import Path

from walsender_bridge.runtime.durable import sync_folder


def create_exclusively(path: Path, content: bytes) -> bool:
    """Create the file whole and durable, or find that it exists (False).

    The content is synced under a name of its own and then linked: `link` fails if the name is taken, on
    every local file system, where a rename would replace. It is locked until then, so nobody takes it for a dead
    process's (`drafts`).
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.link(temporary, path)
    except FileExistsError:
        return False
    except FileNotFoundError:
        # A takeover removes what it finds half-made under a number that is taken.
        if path.exists():
            return False
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True
