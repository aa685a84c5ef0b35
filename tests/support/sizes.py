"""Sizes of tests that need a large disk: `TUSKLINE_TEST_SCALE=0.2` runs them with a fifth of the data."""

import os
import shutil
from pathlib import Path

import pytest

#: The factor by which large tests are smaller.
SCALE = float(os.environ.get("TUSKLINE_TEST_SCALE", "1"))


def scaled(megabytes: int) -> int:
    """A test's size on this machine, of at least 100 MB."""
    return max(min(megabytes, 100), round(megabytes * SCALE))


def need_disk(folder: Path, megabytes: float) -> None:
    """Skip the test if the disk has less free space."""
    free = shutil.disk_usage(folder).free >> 20
    if free < megabytes:
        pytest.skip(
            f"{megabytes / 1024:.1f} GB of disk are needed here, {free / 1024:.1f} GB are free;"
            " TUSKLINE_TEST_SCALE makes it smaller"
        )
