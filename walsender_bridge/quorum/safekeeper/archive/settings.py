"""The settings of an archiver's process."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ArchiverSettings:
    """`data_dir`: the safekeeper's. `archive`: the folder to upload to, any URL that fsspec supports."""

    data_dir: Path
    archive: str
    status_file: Path | None = None
