"""The order of the files of a run, in which tests that compute and tests that wait run at the same time.

Tests with Spark take all of the processor; those on servers alone wait about half of the time. In the order of their folders, four workers
leave cores idle for minutes, and contend for them later. Simulations and unit tests come last: they are short, so no core is idle at
the end while one worker is in the middle of a long file.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

#: Folders whose files are spread among one another.
SPREAD: Final = ("cluster", "spark")


def places(files: Iterable[Path]) -> dict[Path, float]:
    """Where each file comes: those of a folder of `SPREAD` at even distances from 0 to 1, in their order, and all others at 1."""
    files = list(files)
    found = dict.fromkeys(files, 1.0)
    for folder in SPREAD:
        own = [file for file in files if file.parent.name == folder]
        found |= {file: number / len(own) for number, file in enumerate(own)}
    return found
