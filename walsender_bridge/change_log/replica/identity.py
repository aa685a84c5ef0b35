"""`log-server.json`: the id by which the repository identifies a log server's replicas, with its checksum.

    {"format": 1, "log_server_id": "...", "crc32c": ...}

`crc32c`: see `checksummed_json`. Files of older versions have none, or `crc`, the CRC32C of the id alone; one that was written
by hand has neither.
"""

import uuid
from pathlib import Path
from typing import Final

import google_crc32c

from walsender_bridge.errors import CorruptError, NotSupportedError, UnavailableError
from walsender_bridge.runtime import checksummed_json
from walsender_bridge.runtime.private_folder import private_folder

FORMAT: Final = 1
NAME: Final = "log-server.json"


def make(data_dir: Path) -> None:
    """Create the id of a new log server."""
    record = {"format": FORMAT, "log_server_id": str(uuid.uuid4())}
    checksummed_json.save(data_dir / NAME, record, mode=0o600)


def exists(data_dir: Path) -> bool:
    """Whether a log server has had this data directory."""
    return (data_dir / NAME).exists()


def prepare(data_dir: Path) -> None:
    """Create the data directory and the id of a new log server, unless they exist. Raises as `private_folder`, and `OSError`."""
    private_folder(data_dir)
    if not exists(data_dir):
        make(data_dir)


def lost(data_dir: Path) -> UnavailableError:
    """The error of a log server that runs, and whose data directory is gone or empty."""
    return UnavailableError(
        f"the data directory is gone: there is no {NAME}",
        where=str(data_dir),
        repair="put it back, or mount its disk: the log server then continues automatically; if it is lost, run `tuskline down` and"
        " `tuskline up` here: the log server begins with an empty one, and is synchronized from the others",
    )


def load(data_dir: Path) -> str:
    """Read the log server's id. Raises `CorruptError`, or `NotSupportedError` for a newer format."""
    path = data_dir / NAME
    try:
        record = checksummed_json.load(path, checked=False)
        version, name, crc = record["format"], record["log_server_id"], record.get("crc")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    if version != FORMAT:
        raise NotSupportedError(
            f"unknown format {version} of the data directory (this version supports {FORMAT})",
            where=str(data_dir),
            repair="use the version of Tuskline that wrote it, or a newer one",
        )
    if not isinstance(name, str) or crc not in {None, _crc(name)}:
        raise _damaged(path, f"{name!r:.60} does not match its checksum")
    return name


def _damaged(path: Path, reason: str) -> CorruptError:
    return CorruptError(
        f"could not read the log server's id: {reason}",
        where=str(path),
        repair=f'write {{"format": {FORMAT}, "log_server_id": "ID"}} into the file, with the ID of the log server that'
        " `tuskline status` reports as not answering",
    )


def _crc(name: str) -> int:
    return int(google_crc32c.value(name.encode()))
