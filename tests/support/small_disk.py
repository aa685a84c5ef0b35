"""A small disk of its own at a folder, for tests that fill it."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A tmpfs there, with options of `mount`; skipped where this user may not mount one."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        # A process that has read a lake there keeps its lease's file open: the disk goes when it ends.
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def fill(file: Path) -> int:
    """Write into `file` until its disk is full; the bytes."""
    with file.open("wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while ballast.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
        return ballast.tell()
