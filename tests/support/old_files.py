"""A server's files as they were: what a restore from an older copy brings back."""

import shutil
from pathlib import Path

from walsender_bridge.demo.local_server import LocalServer


def keep(server: LocalServer) -> Path:
    """A copy of a stopped server's files."""
    old = server.data_dir.with_name("old")
    shutil.copytree(server.data_dir, old, copy_function=_copy)
    return old


def bring_back(server: LocalServer, old: Path) -> None:
    """Put the copy in the place of a stopped server's files."""
    shutil.rmtree(server.data_dir)
    old.rename(server.data_dir)
    # The copy belongs to the server's account, as the original did.
    owner = server.folder.resolve().stat()
    for path in (server.data_dir, *server.data_dir.rglob("*")):
        shutil.chown(path, owner.st_uid, owner.st_gid)
    server.data_dir.chmod(0o700)


def _copy(source: str, target: str) -> str:
    return str(shutil.copy2(source, target))
