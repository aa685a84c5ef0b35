"""The WAL storage's positions besides the WAL itself: its beginning, a lower bound of its end, a pending truncation.

`begin_lsn`: no WAL below it is held. `durable_lsn`: the WAL is durable at least up to here; it is written when the
storage stops or starts, truncates, or removes old WAL, not with each write; `exact`: the WAL ends there. `cutting`: a
truncation at `durable_lsn` has begun; until it is repeated to its end, nothing at or behind that position is WAL.
"""

from dataclasses import dataclass

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.runtime import json_model, record_file
from walsender_bridge.runtime.folder import Disk

NAME = "position"
MAGIC = b"TUSKWALP"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class StoragePosition:
    """See the module. LSNs; all 0: no WAL was ever held."""

    begin_lsn: Lsn = 0
    durable_lsn: Lsn = 0
    cutting: bool = False
    exact: bool = False


def save(disk: Disk, position: StoragePosition) -> None:
    """Replace the file, durably. Raises `OSError`."""
    record_file.replace(disk, NAME, record_file.pack(MAGIC, FORMAT, json_model.plain(position)))


def read(disk: Disk) -> StoragePosition | None:
    """The file's content; None: there is no file. Nothing is written. Raises `CorruptError` and `NotSupportedError`."""
    if NAME not in disk.names():
        return None
    where = f"{disk}/{NAME}"
    try:
        _, record = record_file.unpack(record_file.read_whole(disk, NAME), MAGIC, FORMAT)
        return json_model.from_plain(StoragePosition, record, strict=True)
    except NotSupportedError as error:
        raise NotSupportedError(error.what, where=where, repair=error.repair) from error
    except (CorruptError, ValueError) as error:
        raise CorruptError(
            f"the position file is damaged ({error})",
            where=where,
            repair="rejoin the safekeeper as a new member, and check its disk",
        ) from error


def load(disk: Disk) -> StoragePosition | None:
    """As `read`, for its own safekeeper: a damaged file is renamed."""
    try:
        return read(disk)
    except CorruptError as error:
        aside = record_file.keep_aside(disk, NAME)
        raise CorruptError(
            f"{error.what}, and was renamed to {aside}", where=error.where, repair=error.repair
        ) from error
